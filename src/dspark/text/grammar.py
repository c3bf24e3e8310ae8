"""Grammars of answers by xgrammar: JSON schemas, regular expressions, EBNF, structural tags.

It knows the tokens' bytes, no model and no logits. It is the only module that imports xgrammar,
which comes with the extra `serve`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.core import GrammarMatcher
from dspark.errors import InputError, first_line
from dspark.text.tokenizer import Tokenizer

_MOST_WHITESPACE = 16
"""Characters of white space in a row: small models would add more until their answer is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGrammar:
    """A `Grammar` of xgrammar's."""

    compiled: Any
    vocab_size: int
    control_ids: frozenset[int]
    """Tokens without a text that do not end an answer either: never allowed."""

    def matcher(self) -> GrammarMatcher:
        """For a new answer."""
        return _Matcher(self)


class GrammarCompiler:
    """Makes grammars for one tokenizer, equal ones once; several threads may ask it."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Sequence[int], threads: int = 1
    ) -> None:
        """`vocab_size`: of the target's logits; `eos_ids`: the tokens that end its answers.

        Raises `InputError` if xgrammar is not installed.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise InputError(
                "Constrained answers need xgrammar; install dspark[serve], or leave "
                "response_format and tools out."
            ) from error
        self._xgrammar = xgrammar
        self._vocab_size = vocab_size
        texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        info = xgrammar.TokenizerInfo(
            texts[:vocab_size],
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(eos_ids),
        )
        self._control_ids = frozenset(info.special_token_ids) - frozenset(eos_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=threads)

    def json_schema(self, schema: Mapping[str, Any] | str) -> CompiledGrammar:
        """JSON that a schema describes. Raises `InputError` for a schema that is none."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return self._compiled(
            "JSON schema",
            lambda: self._compiler.compile_json_schema(text, max_whitespace_cnt=_MOST_WHITESPACE),
        )

    def json_value(self) -> CompiledGrammar:
        """Any JSON object or array."""
        return self._compiled("JSON", self._compiler.compile_builtin_json_grammar)

    def regex(self, pattern: str) -> CompiledGrammar:
        """Texts that a regular expression matches as a whole. Raises `InputError` for a bad one."""
        return self._compiled("regular expression", lambda: self._compiler.compile_regex(pattern))

    def ebnf(self, text: str) -> CompiledGrammar:
        """Texts of a grammar in xgrammar's EBNF, rule `root`. Raises `InputError` for a bad one."""
        return self._compiled("grammar", lambda: self._compiler.compile_grammar(text))

    def structural_tag(self, tag: Mapping[str, Any]) -> CompiledGrammar:
        """Free text with constrained parts (tool calls), as xgrammar describes them in JSON.

        Raises `InputError` for a tag that it does not know.
        """
        return self._compiled(
            "structural tag", lambda: self._compiler.compile_structural_tag(json.dumps(dict(tag)))
        )

    def _compiled(self, what: str, compile_it: Callable[[], Any]) -> CompiledGrammar:
        try:
            compiled = compile_it()
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"The {what} of an answer cannot be used: {_reason(error)}."
            ) from error
        return CompiledGrammar(
            compiled=compiled, vocab_size=self._vocab_size, control_ids=self._control_ids
        )


class _Matcher:
    """xgrammar's matcher as the engine asks for it."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar.compiled)
        self._vocab_size = grammar.vocab_size
        self._control_ids = grammar.control_ids
        self._bits = xgrammar.allocate_token_bitmask(1, grammar.vocab_size)

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_terminated())

    def allowed(self) -> Tensor:
        self._matcher.fill_next_token_bitmask(self._bits)
        bytes_ = self._bits.numpy().view(np.uint8)[0]
        bits = np.unpackbits(bytes_, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def accept(self, token_id: int) -> bool:
        # the library prints a warning for each of these
        if token_id in self._control_ids or not 0 <= token_id < self._vocab_size:
            return False
        return bool(self._matcher.accept_token(token_id))

    def roll_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


def _reason(error: Exception) -> str:
    """The library's sentence without the place in its sources."""
    line = first_line(error)
    head, separator, rest = line.partition(": ")
    return (rest if separator and "/" in head else line).rstrip()
