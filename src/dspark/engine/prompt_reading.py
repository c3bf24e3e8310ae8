"""Which pieces of prompts a step reads beside the requests that decode. It runs none of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from dspark.algorithms.prompt_shares import prompt_budget, prompt_shares
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a prompt that this step runs."""

    live: LiveRequest
    start: int
    num_tokens: int

    @property
    def ends_prompt(self) -> bool:
        """Whether a token is drawn behind it; what was read before a restart ends at its anchor."""
        return self.start + self.num_tokens == self.live.num_prompt == len(self.live.tokens)


class PromptReading:
    """Shares a step's tokens out to the requests that read."""

    def __init__(
        self, cache: KVCache, *, max_step_tokens: int, tokens_beside: int, is_shared: bool
    ) -> None:
        """`tokens_beside`: prompt tokens, at most, of a step in which others decode. `is_shared`:
        pages of words that were read are there for all."""
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        self._tokens_beside = tokens_beside
        self._is_shared = is_shared

    def budget(self, num_windows: int) -> int:
        """Prompt tokens beside windows of so many tokens."""
        return prompt_budget(
            num_windows,
            max_step_tokens=self._max_step_tokens,
            tokens_beside=self._tokens_beside,
        )

    def chunks(self, requests: Sequence[LiveRequest], *, num_windows: int) -> list[Chunk]:
        """Pieces of these requests' prompts, older requests first."""
        reading = self._in_turn(requests)
        missing = [live.num_to_read - live.num_computed for live in reading]
        shares = prompt_shares(missing, self.budget(num_windows))
        return [
            Chunk(live=live, start=live.num_computed, num_tokens=share)
            for live, share in zip(reading, shares, strict=True)
            if share > 0
        ]

    def take_over(self, requests: Sequence[LiveRequest]) -> int:
        """What others have read since these started is read; tokens of first readings spared."""
        spared = 0
        for live in requests if self._is_shared else ():
            num_known = self._cache.catch_up(live.slot, live.page_names)
            if live.num_starts == 1:
                live.num_cached += num_known - live.num_computed
                spared += num_known - live.num_computed
            live.num_computed = num_known
        return spared

    def _in_turn(self, requests: Sequence[LiveRequest]) -> list[LiveRequest]:
        """The oldest first, without those whose next page another one reads just now: they take
        it over when it is full."""
        reading, upcoming = [], set[bytes]()
        for live in sorted(requests, key=attrgetter("arrival")):
            if self._is_shared:
                names = live.page_names[live.num_computed // self._cache.page_size :]
                if names and names[0] in upcoming and self._is_at_a_page(live):
                    continue
                upcoming.update(names)
            reading.append(live)
        return reading

    def _is_at_a_page(self, live: LiveRequest) -> bool:
        return live.num_computed % self._cache.page_size == 0
