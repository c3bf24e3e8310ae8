"""xgrammar's grammars as the engine asks for them, over a tokenizer of bytes and a few words."""

import builtins
import json
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("xgrammar")

from dspark.core import Grammar
from dspark.errors import InputError
from dspark.text.grammar import GrammarCompiler
from dspark.text.tokenizer import Tokenizer

PADDED = 7  # ids that only the target has


@pytest.fixture(scope="module")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(
        byte_level, vocab_size=byte_level.vocab_size + PADDED, eos_ids=byte_level.eos_ids
    )


def follow(grammar: Grammar, tokens: Sequence[int]) -> list[bool]:
    matcher = grammar.matcher()
    return [not matcher.is_finished and matcher.accept(token) for token in tokens]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id for each byte."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_schema_allows_its_json_and_the_end_only_behind_it(
    compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    grammar = compiler.json_schema(SCHEMA)
    tokens = ids_of(byte_level, '{"name": "J\\u00e9", "age": 3}')
    assert all(follow(grammar, [*tokens, byte_level.eos_ids[0]]))
    assert not all(follow(grammar, [*tokens[:-1], byte_level.eos_ids[0]]))
    assert not all(follow(grammar, ids_of(byte_level, '{"name": 3')))


def test_masks_and_acceptance_agree_on_every_id(
    compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    """Control tokens and ids beyond the tokenizer are never allowed; EOS only at the end."""
    grammar = compiler.regex("a[bc]{1,2}")
    for text in ("", "a", "ab", "abc"):
        matcher = grammar.matcher()
        for token in ids_of(byte_level, text):
            assert matcher.accept(token)
        allowed_V = matcher.allowed()
        assert len(allowed_V) == grammar.vocab_size == byte_level.vocab_size + PADDED
        for token in (-1, *range(grammar.vocab_size), grammar.vocab_size):
            is_accepted = matcher.accept(token)
            if is_accepted:
                matcher.roll_back(1)
            in_mask = 0 <= token < grammar.vocab_size and bool(allowed_V[token])
            assert is_accepted == in_mask
        assert bool(allowed_V[byte_level.eos_ids[0]]) == (len(text) >= 2)
        assert not allowed_V[byte_level.vocab_size :].any()
        others = sorted(byte_level.special_ids - set(byte_level.eos_ids))
        assert not allowed_V[others].any()


def test_a_matcher_ends_with_eos_and_comes_back_by_rolling_back(
    compiler: GrammarCompiler, byte_level: Tokenizer
) -> None:
    matcher = compiler.ebnf('root ::= "ab" | "c"').matcher()
    for token in [*ids_of(byte_level, "ab"), byte_level.eos_ids[0]]:
        assert not matcher.is_finished
        assert matcher.accept(token)
    assert matcher.is_finished
    matcher.roll_back(3)
    assert not matcher.is_finished
    assert matcher.accept(ids_of(byte_level, "c")[0])


def test_any_json_and_a_structural_tag(compiler: GrammarCompiler, byte_level: Tokenizer) -> None:
    assert all(follow(compiler.json_value(), ids_of(byte_level, json.dumps({"a": [1, None]}))))
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
            "end": "</f>",
        },
    }
    tokens = ids_of(byte_level, "<f>12</f>")
    assert all(follow(compiler.structural_tag(tag), tokens))
    assert not all(follow(compiler.structural_tag(tag), ids_of(byte_level, "<f>x")))


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("json_schema", {"type": "foo"}, 'JSON schema of an answer cannot be used: .*"foo"'),
        ("json_schema", "{", "JSON schema of an answer cannot be used: .*JSON"),
        ("regex", "(", "regular expression of an answer cannot be used: .*not closed"),
        ("ebnf", "root ::= foo", 'grammar of an answer cannot be used: .*"foo" is not defined'),
        ("structural_tag", {"type": "none"}, "structural tag of an answer cannot be used: "),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_sentence(
    compiler: GrammarCompiler, method: str, value: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message) as failure:
        getattr(compiler, method)(value)
    text = str(failure.value)
    assert "\n" not in text
    assert ".cc" not in text


def test_without_the_library_one_sentence_says_what_to_install(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "xgrammar":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"need xgrammar; install dspark\[serve\]"):
        GrammarCompiler(byte_level, vocab_size=300, eos_ids=())
