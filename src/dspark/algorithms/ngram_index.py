"""Where the last tokens of a growing text have stood before, and what followed them there.

It knows token ids, no request and no model. Each token costs one entry for each length, each
question one look-up for each length, however long the text is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What followed the latest earlier occurrence of the text's last `match_length` tokens."""

    token_ids: Sequence[int]
    match_length: int


class NgramIndex:
    """All runs of `min_length` to `max_length` tokens of a text, each with its latest place."""

    def __init__(self, *, min_length: int, max_length: int, longest: int = 0) -> None:
        """A match is looked for by `max_length` tokens and fewer; how long it is, is counted up to
        `longest`."""
        if not 1 <= min_length <= max_length:
            raise InputError(
                f"A match of {min_length} to {max_length} tokens was asked for, but the lengths "
                "must be at least 1 and rise."
            )
        self._ids: list[int] = []
        self._longest = longest
        # for each length: a run of tokens to the place right after it
        self._after: dict[int, dict[tuple[int, ...], int]] = {
            length: {} for length in range(max_length, min_length - 1, -1)
        }

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Append tokens. A run is entered when its next token is known, so none finds itself."""
        for token in ids:
            place = len(self._ids)
            for length, after in self._after.items():
                if length <= place:
                    after[tuple(self._ids[place - length :])] = place
            self._ids.append(token)

    def continuation(self, num_tokens: int) -> Continuation | None:
        """The next `num_tokens` tokens if the text repeats itself, by the longest match.

        Where the copy reaches the text's end it goes on with what it has copied, so that a loop
        is continued at any length. `None`: the last tokens are new.
        """
        for length, after in self._after.items():
            place = after.get(tuple(self._ids[-length:])) if length <= len(self._ids) else None
            if place is not None:
                period = len(self._ids) - place
                tail = self._ids[place:]
                copied = [tail[i % period] for i in range(num_tokens)]
                return Continuation(token_ids=copied, match_length=self._counted(place, length))
        return None

    def _counted(self, place: int, length: int) -> int:
        """How many tokens before `place` are the last ones of the text; `length` of them are."""
        ids = self._ids
        while length < min(self._longest, place) and ids[place - length - 1] == ids[-length - 1]:
            length += 1
        return length
