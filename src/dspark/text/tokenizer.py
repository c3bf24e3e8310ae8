"""A target's own tokenizer: text and chats to ids, ids to bytes.

It knows no model and no request. It is the only module that imports a tokenizer library.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from transformers import AutoTokenizer

from dspark.errors import InputError, ModelError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRule:
    """How a vocabulary entry stands for bytes; read from the tokenizer's decoder."""

    is_byte_level: bool = False
    """Each character of the entry stands for one byte (GPT-2's table)."""
    replacements: tuple[tuple[str, str], ...] = ()
    """Applied to the entry in this order, such as the word mark to a space."""
    has_byte_fallback: bool = False
    """An entry like `<0xE2>` stands for that byte."""
    num_stripped_spaces: int = 0
    """Spaces dropped at the start of a decoded text."""


class Tokenizer:
    """Text and chats to ids and back, by the target's own vocabulary and chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a `transformers` tokenizer; `load` makes one from a path or a name."""
        self._tokenizer = tokenizer
        self._rule = _piece_rule(tokenizer)
        self._byte_of = _byte_level_table()
        added = tokenizer.added_tokens_decoder
        self._added: dict[int, str] = {i: token.content for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Read the tokenizer of a model directory, a GGUF file or a hub name.

        Raises `ModelError` if there is none.
        """
        path = Path(source)
        try:
            if path.suffix == ".gguf":
                raw = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            else:
                raw = AutoTokenizer.from_pretrained(str(source))
        except (OSError, ValueError, KeyError) as error:
            raise _no_tokenizer(source, first_line(error)) from error
        if not raw.encode("a", add_special_tokens=False):  # transformers makes an empty one
            raise _no_tokenizer(source, "what is there has no tokens")
        return cls(raw)

    @property
    def vocab_size(self) -> int:
        """Ids that have a text; the target's own vocabulary may be padded beyond it."""
        return len(self._tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokenizer's end-of-text token, if it has one; a model's own list may be longer."""
        eos_id = self._tokenizer.eos_token_id
        return () if eos_id is None else (int(eos_id),)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens: they steer the model and have no text of their own."""
        return self._special_ids

    @property
    def num_stripped_spaces(self) -> int:
        """Spaces that this tokenizer drops at the start of a decoded text."""
        return 0 if self._rule is None else self._rule.num_stripped_spaces

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return bool(self._tokenizer.chat_template)

    @property
    def template_hash(self) -> str | None:
        """SHA-256 of the chat template, hexadecimal; `None` if there is none."""
        template = self._tokenizer.chat_template
        if not template:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def vocabulary_hash(self) -> str:
        """SHA-256 of all tokens and their ids, hexadecimal."""
        vocabulary = json.dumps(self._tokenizer.get_vocab(), sort_keys=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, the beginning-of-text token exactly once if the model uses one."""
        ids = self._ids(text, add_special_tokens=True)
        return self._without_doubled_bos(ids)

    @property
    def has_thinking_modes(self) -> bool:
        """Whether the template renders a prompt differently with thinking on and off."""
        if not self.has_chat_template:
            return False
        probe = [{"role": "user", "content": "."}]
        return self.render(probe, thinking=True) != self.render(probe, thinking=False)

    def check_thinking(self, thinking: bool | None) -> None:
        """Raises `InputError` for a thinking mode that the chat template does not know."""
        if thinking is not None and not self.has_thinking_modes:
            raise InputError(
                f"thinking is {thinking}, but this target's chat template has no thinking mode; "
                "leave the option out."
            )

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template writes a list of tools."""
        return self.template_says("tools")

    def template_says(self, word: str) -> bool:
        """Whether the chat template holds this word."""
        template = self._tokenizer.chat_template or ""
        return word in (template if isinstance(template, str) else json.dumps(template))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a conversation, ready for the model's answer.

        The target's template decides everything, its default system prompt too; `thinking` is
        handed to it as `enable_thinking`, `None` leaves that to the template; `tools` are handed to
        a template that `knows_tools`. Raises `ModelError`
        if the target has no template, `InputError` if it refuses the messages.
        """
        return self.encode_rendered(self.render(messages, thinking=thinking, tools=tools))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that a template rendered: it carries its special tokens already."""
        return self._without_doubled_bos(self._ids(text, add_special_tokens=False))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        thinking: bool | None = None,
        is_answered: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation with the generation prompt; what `chat` encodes.

        With `is_answered` the last message is the assistant's and no generation prompt follows.
        """
        if not self.has_chat_template:
            raise ModelError(
                "This target has no chat template because it is a base model; "
                "send a plain prompt instead of messages."
            )
        if not messages:
            raise InputError("messages is empty, but a conversation needs at least one message.")
        for message in messages:
            if not isinstance(message.get("role"), str) or not message["role"]:
                raise InputError(f"The message {dict(message)!r} has no role, such as 'user'.")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=not is_answered,
                **({} if thinking is None else {"enable_thinking": thinking}),
                **({} if tools is None else {"tools": [dict(tool) for tool in tools]}),
            )
        except (TemplateError, TypeError) as error:
            raise InputError(
                f"The target's chat template refused these messages: {first_line(error)}."
            ) from error
        return text

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of `ids`, spaces untouched; bytes that are no character become U+FFFD."""
        data = b"".join(self.token_bytes(i, keep_special=keep_special) for i in ids)
        for _ in range(self.num_stripped_spaces):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, keep_special: bool = False) -> bytes:
        """What one id adds to a text, often a part of a character.

        Empty for control tokens (unless `keep_special`) and for ids beyond the vocabulary, which a
        target with a padded vocabulary can produce.
        """
        if token_id in self._special_ids:
            return self._added[token_id].encode() if keep_special else b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._rule is None:
            return self._bytes_in_context(token_id)
        if self._rule.is_byte_level and all(c in self._byte_of for c in piece):
            return bytes(self._byte_of[c] for c in piece)
        if self._rule.has_byte_fallback and _is_byte_piece(piece):
            return bytes([int(piece[3:5], 16)])
        for old, new in self._rule.replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    def _bytes_in_context(self, token_id: int) -> bytes:
        # A decoder we do not know: what the id adds after another one, by the library itself.
        before: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        both: str = self._tokenizer.decode([token_id] * 2, clean_up_tokenization_spaces=False)
        return both.removeprefix(before).encode()

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # the engine says whether a prompt is too long; the library would only warn
        try:
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, verbose=False
            )
        except TypeError as error:  # Python strings can hold what no UTF-8 can
            raise InputError(
                "The text holds half of a surrogate pair, no character; send valid Unicode."
            ) from error
        return list(ids)

    def _without_doubled_bos(self, ids: list[int]) -> list[int]:
        bos_id = self._tokenizer.bos_token_id
        while len(ids) >= 2 and bos_id is not None and ids[0] == ids[1] == bos_id:
            ids = ids[1:]
        return ids


def _piece_rule(tokenizer: Any) -> PieceRule | None:
    """The rule of a fast tokenizer's decoder; `None` for a decoder that we do not know."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str()).get("decoder")
    if decoder is None:
        return None
    stages = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    rules = [_stage_rule(stage) for stage in stages]
    if any(rule is None for rule in rules):
        return None
    known = [rule for rule in rules if rule is not None]
    return PieceRule(
        is_byte_level=any(rule.is_byte_level for rule in known),
        replacements=tuple(pair for rule in known for pair in rule.replacements),
        has_byte_fallback=any(rule.has_byte_fallback for rule in known),
        num_stripped_spaces=sum(rule.num_stripped_spaces for rule in known),
    )


def _stage_rule(stage: Mapping[str, Any]) -> PieceRule | None:
    match stage:
        case {"type": "ByteLevel"}:
            return PieceRule(is_byte_level=True)
        case {"type": "ByteFallback"}:
            return PieceRule(has_byte_fallback=True)
        case {"type": "Fuse"}:
            return PieceRule()
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return PieceRule(replacements=((old, new),))
        case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
            return PieceRule(num_stripped_spaces=start)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return PieceRule(
                replacements=((mark, " "),), num_stripped_spaces=0 if scheme == "never" else 1
            )
        case _:
            return None


def _byte_level_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in own}
    moved = [byte for byte in range(256) if byte not in set(own)]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


def _is_byte_piece(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _no_tokenizer(source: str | Path, reason: str) -> ModelError:
    return ModelError(
        f"No tokenizer could be read from {str(source)!r}; give a model directory with "
        f"tokenizer.json, a GGUF file or a hub name ({reason})."
    )
