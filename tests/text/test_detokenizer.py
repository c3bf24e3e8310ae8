from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import InputError
from dspark.text.detokenizer import Detokenizer
from dspark.text.tokenizer import Tokenizer

CHUNKS = st.lists(st.integers(0, 7), max_size=40)
STOPS = st.lists(st.sampled_from(["END", "th", "the", " e", "é", "日本", "N", "�"]), max_size=3)


def pushed_in_chunks(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> str:
    parts, start = [], 0
    for size in (*sizes, len(ids)):
        parts.append(detokenizer.push(ids[start : start + size]))
        start += size
    return "".join(parts) + detokenizer.flush()


def cut_at_first_stop(text: str, stop: Sequence[str]) -> str:
    """The slow reference: read one character more until some stop string is complete."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def each_byte(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}


@settings(max_examples=300)
@given(data=st.data(), stop=STOPS, sizes=CHUNKS)
def test_any_partition_of_any_ids_gives_the_whole_decode_cut_at_the_first_stop(
    byte_level: Tokenizer,
    sentencepiece: Tokenizer,
    data: st.DataObject,
    stop: list[str],
    sizes: list[int],
) -> None:
    """UC-024, UC-045, UC-047: arbitrary ids hold half characters and invalid bytes."""
    tokenizer = data.draw(st.sampled_from([byte_level, sentencepiece]))
    text = data.draw(st.text(alphabet="the END é日本a", max_size=12))
    ids = tokenizer.encode(text) + data.draw(
        st.lists(st.integers(0, tokenizer.vocab_size), max_size=20)
    )
    ids = data.draw(st.permutations(ids))
    found = pushed_in_chunks(Detokenizer(tokenizer, stop), ids, sizes)
    assert found == cut_at_first_stop(tokenizer.decode(ids), stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "expected", "stopped_at"),
    [
        ([["a", "END", "b", "c", "d", "e", "f", "h"]], ["END"], "a", 2),
        ([["a", "E"], ["ND", "b"]], ["END"], "a", 3),
        ([["xENDy"]], ["END"], "x", 1),
        ([["a", "STOP", "END"]], ["END", "STOP"], "a", 2),
        ([["a", "E"], ["N"], ["x"]], ["END"], "aENx", None),
        ([["aE"]], ["END"], "aE", None),
        ([["a b"]], ["a", "b"], "", 1),
        ([["aba"], ["bac"]], ["abac"], "ab", 2),
    ],
    ids=[
        "early in a block",
        "split over two rounds",
        "inside one token",
        "two in one block",
        "begun and not finished",
        "unfinished at the end",
        "first match wins",
        "overlapping with itself",
    ],
)
def test_stop_strings_cut_wherever_they_fall(
    byte_level: Tokenizer,
    pieces: list[list[str]],
    stop: list[str],
    expected: str,
    stopped_at: int | None,
) -> None:
    """UC-024: the stream shows no later text and tells which ids belong to the answer."""
    detokenizer = Detokenizer(TextPieces(pieces), stop)
    shown = "".join(detokenizer.push(ids) for ids in TextPieces(pieces).rounds())
    shown += detokenizer.flush()
    assert shown == expected
    assert detokenizer.stopped_at == stopped_at
    if stopped_at is not None:
        assert detokenizer.push([0]) == detokenizer.flush() == ""


class TextPieces(Tokenizer):
    """A vocabulary written by the test: id i is the i-th piece."""

    def __init__(self, pieces: list[list[str]]) -> None:
        self._pieces = pieces
        self._rule = None

    def rounds(self) -> list[list[int]]:
        ids = iter(range(1000))
        return [[next(ids) for _ in chunk] for chunk in self._pieces]

    def token_bytes(self, token_id: int, *, keep_special: bool = False) -> bytes:
        return [piece for chunk in self._pieces for piece in chunk][token_id].encode()


def test_a_partial_stop_is_held_back_and_nothing_else(byte_level: Tokenizer) -> None:
    pieces = TextPieces([["go E", "N", "X"]])
    detokenizer = Detokenizer(pieces, ["END"])
    assert detokenizer.push([0]) == "go "
    assert detokenizer.push([1]) == ""
    assert detokenizer.push([2]) == "ENX"


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    token_of = each_byte(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    first, second, third = (token_of[bytes([byte])] for byte in "語".encode())
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == ""
    assert detokenizer.push([third]) == "語"
    assert detokenizer.flush() == ""


def test_the_end_of_the_stream_flushes_one_replacement_character(tokenizer: Tokenizer) -> None:
    """UC-047: ids that end in half a character at max_tokens."""
    token_of = each_byte(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push([token_of[b"a"], *(token_of[bytes([b])] for b in "🙂".encode()[:3])])
    assert text == "a"
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("byte", [0x80, 0xE3, 0xFF])
def test_an_invalid_byte_is_shown_within_one_further_token(tokenizer: Tokenizer, byte: int) -> None:
    """UC-047: a continuation, a lead and a byte that no character holds, each on its own."""
    token_of = each_byte(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    shown = detokenizer.push([token_of[bytes([byte])]]) + detokenizer.push([token_of[b"a"]])
    assert shown == "\N{REPLACEMENT CHARACTER}a"


def test_a_stop_string_may_need_the_flush(tokenizer: Tokenizer) -> None:
    token_of = each_byte(tokenizer)
    detokenizer = Detokenizer(tokenizer, ["a\N{REPLACEMENT CHARACTER}"])
    assert detokenizer.push([token_of[b"b"], token_of[b"a"], token_of[b"\xe3"]]) == "b"
    assert detokenizer.flush() == ""
    assert detokenizer.stopped_at == 3


def test_an_empty_stop_string_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InputError, match="empty string"):
        Detokenizer(byte_level, ["END", ""])


def test_the_text_before_the_stop_keeps_its_first_space_rule(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode(" the")
    detokenizer = Detokenizer(sentencepiece)
    assert "".join(detokenizer.push([i]) for i in ids) == sentencepiece.decode(ids) == " the"
