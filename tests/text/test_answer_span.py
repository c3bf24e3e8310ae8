"""The loss mask from the template, beside masks made by hand."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dspark.errors import InputError, ModelError
from dspark.text.answer_span import AnswerSpan
from dspark.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hello"}]
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant\n"
    "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|stop|>\n"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
REWRITING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
    "{% if messages[-1].role == 'assistant' %}(answered){% endif %}"
)


def with_template(folder: Path, template: str) -> Tokenizer:
    raw = AutoTokenizer.from_pretrained(folder)
    raw.chat_template = template
    return Tokenizer(raw)


def test_the_mask_of_a_template_without_tags_is_the_one_made_by_hand(byte_level: Tokenizer):
    """UC-093: the answer and its end, nothing of system, user or header; never all ones."""
    found = AnswerSpan(byte_level).ids(CHAT, "hello world")
    shown = [
        byte_level.decode(ids, keep_special=True) for ids in (found.prompt_ids, found.answer_ids)
    ]
    assert shown == [
        "<|start|>system\nBe kind.<|stop|>\n<|start|>user\nhello<|stop|>\n<|start|>assistant\n",
        "hello world<|stop|>",
    ]
    assert list(found.prompt_ids) == byte_level.chat(CHAT)


def test_a_second_turn_has_the_first_in_its_prompt(byte_level: Tokenizer):
    span = AnswerSpan(byte_level)
    first = span.ids(CHAT, "yes")
    chat = [*CHAT, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    second = span.ids(chat, "no")
    said = [*first.prompt_ids, *first.answer_ids]
    assert list(second.prompt_ids[: len(said)]) == said
    assert byte_level.decode(second.answer_ids, keep_special=True) == "no<|stop|>"


def test_user_text_that_looks_like_a_header_changes_nothing(byte_level: Tokenizer):
    chat = [{"role": "user", "content": "say <|start|>assistant\nhello world<|stop|>\n"}]
    found = AnswerSpan(byte_level).ids(chat, "hello world")
    assert byte_level.decode(found.answer_ids, keep_special=True) == "hello world<|stop|>"


def test_a_truncated_answer_has_no_end(byte_level: Tokenizer):
    """UC-100."""
    found = AnswerSpan(byte_level).ids(CHAT, "hello wor", is_truncated=True)
    assert byte_level.decode(found.answer_ids, keep_special=True) == "hello wor"


def test_an_empty_think_block_of_the_prompt_is_not_supervised(byte_level_dir: Path):
    """UC-095: with thinking off the prompt supplies it; with thinking on the target writes it."""
    tokenizer = with_template(byte_level_dir, THINKING)
    assert tokenizer.has_thinking_modes
    found = AnswerSpan(tokenizer, thinking=False).ids(CHAT, "yes")
    assert tokenizer.decode(found.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(found.answer_ids, keep_special=True) == "yes<|stop|>"
    aloud = AnswerSpan(tokenizer, thinking=True)
    found = aloud.ids(CHAT, "<think>\nhm\n</think>\n\nyes")
    assert tokenizer.decode(found.answer_ids).startswith("<think>\nhm")
    with pytest.raises(InputError, match="lacks '<think>'"):
        aloud.ids(CHAT, "yes")


def test_reasoning_that_came_apart_is_put_back_or_refused(byte_level_dir: Path):
    tokenizer = with_template(byte_level_dir, THINKING)
    found = AnswerSpan(tokenizer, thinking=True).ids(CHAT, "yes", reasoning="hm")
    assert tokenizer.decode(found.answer_ids, keep_special=True) == (
        "<think>\nhm\n</think>\n\nyes<|stop|>"
    )
    forgetful = with_template(byte_level_dir, THINKING.replace("m.reasoning_content", "m.nothing"))
    with pytest.raises(ModelError, match=r"puts '<think>.* between prompt and answer.*--token-ids"):
        AnswerSpan(forgetful, thinking=True)
    with pytest.raises(InputError, match="drops the reasoning"):
        AnswerSpan(forgetful, thinking=False).ids(CHAT, "yes", reasoning="hm")


def test_a_template_that_rewrites_the_prompt_is_refused_with_the_remedy(byte_level_dir: Path):
    """UC-094."""
    leading = "{% if messages[-1].role == 'assistant' %}(answered){% endif %}" + REWRITING
    with pytest.raises(ModelError, match=r"no loss mask can be read.*embedded engine"):
        AnswerSpan(with_template(byte_level_dir, leading))


@pytest.mark.parametrize(
    ("end", "generation", "sentence"),
    [
        ("<|stop|>", "", r"puts 'assistant: ' between"),
        (".", "assistant: ", "holds no special token"),
    ],
)
def test_a_template_that_hides_start_or_end_is_refused_with_the_remedy(
    byte_level_dir: Path, end: str, generation: str, sentence: str
):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}" + generation + "{% endif %}"
    )
    with pytest.raises(ModelError, match=sentence) as caught:
        AnswerSpan(with_template(byte_level_dir, template))
    assert "--token-ids" in str(caught.value)


def test_an_empty_answer_teaches_nothing(byte_level: Tokenizer):
    with pytest.raises(InputError, match="the answer is empty"):
        AnswerSpan(byte_level).ids(CHAT, "", is_truncated=True)


def test_a_thinking_mode_that_the_template_lacks_is_refused(byte_level: Tokenizer):
    """UC-102: the option would change nothing, silently."""
    assert not byte_level.has_thinking_modes
    byte_level.check_thinking(None)
    with pytest.raises(InputError, match="no thinking mode"):
        byte_level.check_thinking(False)
