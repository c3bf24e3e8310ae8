"""Ids to printable increments, cut before the first stop string.

It knows no model and no request; a round may bring any number of ids at once.
"""

import codecs
from collections.abc import Sequence

from dspark.errors import InputError
from dspark.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one answer while its ids arrive.

    The increments of `push` and `flush`, joined, are `tokenizer.decode(ids)` cut before the stop
    string that is complete first (of those complete at once, the longest), however the ids are cut
    into chunks. Held back, and never longer than needed: the first bytes of an unfinished
    character, and a text that may still grow into a stop string. Time is linear in the stream.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise InputError("stop holds an empty string, but a stop string needs a character.")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._spaces_to_strip = tokenizer.num_stripped_spaces
        self._held = ""
        self._num_pushed = 0
        self._stopped_at: int | None = None

    @property
    def stopped_at(self) -> int | None:
        """Pushed ids that belong to the answer once a stop string is complete, counted from the
        start of the stream up to the id that completed it; `None` before that."""
        return self._stopped_at

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further ids make certain; empty once a stop string is complete."""
        parts = []
        for token_id in ids:
            if self._stopped_at is not None:
                break
            self._num_pushed += 1
            data = self._tokenizer.token_bytes(token_id)
            parts.append(self._take(self._utf8.decode(self._strip(data))))
        return "".join(parts)

    def flush(self) -> str:
        """The held-back text at the end of the stream; half a character becomes one U+FFFD."""
        if self._stopped_at is not None:
            return ""
        text = self._take(self._utf8.decode(b"", final=True))
        if self._stopped_at is None:
            text += self._held
            self._held = ""
        return text

    def _strip(self, data: bytes) -> bytes:
        while data and self._spaces_to_strip:
            if not data.startswith(b" "):
                self._spaces_to_strip = 0
                break
            data = data[1:]
            self._spaces_to_strip -= 1
        return data

    def _take(self, text: str) -> str:
        """Append `text` to what is held back; return what can no longer be part of a stop."""
        if not self._stop:
            return text
        if not text:
            return ""
        window = self._held + text
        cut = _first_stop(window, self._stop)
        if cut is not None:
            self._stopped_at = self._num_pushed
            self._held = ""
            return window[:cut]
        keep = _longest_partial_stop(window, self._stop)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins, `None` if none is complete."""
    found = [(start + len(s), start) for s in stop if (start := text.find(s)) >= 0]
    return min(found)[1] if found else None


def _longest_partial_stop(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of `text` that begin some stop string."""
    longest = min(len(text), max(len(s) for s in stop) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(s.startswith(tail) for s in stop):
            return length
    return 0
