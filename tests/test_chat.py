"""A conversation at a terminal, with a person made of a list of lines."""

import io
from collections.abc import Callable, Iterator, Sequence

import pytest
from rich.console import Console

from dspark.chat import Conversation, run
from dspark.core import SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM

PARAMS = SamplingParams(seed=3, max_tokens=6)


@pytest.fixture(scope="module")
def llm(toy_llm: LLM) -> LLM:
    return toy_llm.with_policy("fixed")


def talk(llm: LLM, lines: Sequence[str | type[BaseException]]) -> tuple[Conversation, str]:
    """Run a conversation in which the person types `lines` and then leaves."""
    typed: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read() -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    console = Console(file=io.StringIO(), width=200)
    conversation = Conversation(llm, PARAMS, system="Be kind.")
    run(conversation, console=console, read=read, shows_origins=False)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return conversation, shown


def test_each_turn_is_remembered_and_prompts_the_next(llm: LLM) -> None:
    conversation, shown = talk(llm, ["hello", "", "and now?"])
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    for message in conversation.messages[2::2]:
        assert message["content"] in shown
    expected = llm.generate([conversation.messages[:4]], PARAMS)[0].text
    assert conversation.messages[4]["content"] == expected


def test_reset_forgets_all_but_the_system_prompt(llm: LLM) -> None:
    conversation, shown = talk(llm, ["hello", "/reset"])
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]
    assert "starts anew" in shown


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_leaves_without_reading_on(llm: LLM, word: str) -> None:
    conversation, _ = talk(llm, [word, "never said"])
    assert len(conversation.messages) == 1


def test_an_unknown_command_is_not_sent_to_the_model(llm: LLM) -> None:
    conversation, shown = talk(llm, ["/rest", "/help"])
    assert "/rest is no command" in shown
    assert len(conversation.messages) == 1


def test_ctrl_c_at_the_prompt_does_not_end_the_conversation(llm: LLM) -> None:
    conversation, shown = talk(llm, [KeyboardInterrupt, "hello"])
    assert "/exit ends" in shown
    assert len(conversation.messages) == 3


def test_an_answer_that_is_stopped_keeps_what_was_shown(llm: LLM) -> None:
    conversation = Conversation(llm, PARAMS)
    stream = conversation.ask("hello")
    first = next(stream)
    stream.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": first.text}
    assert not llm.cycle(speculation=True).has_work  # the engine was told (UC-056)


def test_ctrl_c_stops_the_answer_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Callable[..., Iterator[object]] = llm.stream

    def interrupted(*arguments: object, **options: object) -> Iterator[object]:
        pieces = stream(*arguments, **options)
        yield next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    conversation, shown = talk(llm, ["hello", "again"])
    assert shown.count("(stopped)") == 2
    assert len(conversation.messages) == 5


def test_a_conversation_that_outgrows_the_context_says_so_and_stays(llm: LLM) -> None:
    conversation, shown = talk(llm, ["hello", "word " * 600])
    assert "/reset" in shown
    assert len(conversation.messages) == 3
    with pytest.raises(InputError, match="1024"):
        next(conversation.ask("word " * 600))


def test_an_answer_never_asks_for_more_than_the_context_has(llm: LLM) -> None:
    conversation = Conversation(llm, SamplingParams(seed=1, max_tokens=5000))
    prompt_ids = llm.tokenizer.chat([{"role": "user", "content": "hello"}])
    assert conversation._fitting(prompt_ids).max_tokens == 1024 - len(prompt_ids)
