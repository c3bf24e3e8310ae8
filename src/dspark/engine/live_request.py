"""One request from its submission to its end: its tokens, its limits. It knows no batch mate.

Positions of a live request, with `tokens` = prompt + answer:

    0 .......... num_computed ..... len(tokens) - 1
    |  K/V final  |  to be run  |  the anchor is the last token

It waits, starts with a slot, and may be sent back to wait: then its pages are gone and all that
it has said so far is read again, like a prompt.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from dspark.algorithms.logit_state import LogitState
from dspark.core import FinishReason, Origin, Request
from dspark.errors import InputError
from dspark.kernels.rounds import DrawKind, RoundTable
from dspark.models.target_spec import TargetSpec


class StopText(Protocol):
    """Finds stop strings in a stream of ids (`text.detokenizer.Detokenizer` is one)."""

    @property
    def stopped_at(self) -> int | None:
        """Number of pushed ids that belong to the answer, once a stop string is complete."""

    def push(self, ids: Sequence[int]) -> str:
        """Takes further ids."""


class LiveRequest:
    """State of a request between its submission and its end; changed by the cycle alone."""

    slot: int
    """Its place in the cache while it runs."""

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        seed: int,
        eos_ids: Sequence[int],
        vocab_size: int,
        max_positions: int,
        stop_text: StopText | None,
        device: torch.device,
    ) -> None:
        """`arrival` orders requests by age. Raises `InputError` for an option that names a token
        outside the vocabulary."""
        params = request.params
        self.request = request
        self.params = params
        self.arrival = arrival
        self.seed = seed
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.num_computed = 0
        self.num_rounds = 0
        self.num_starts = 0
        self.num_cached = 0
        """Positions of the prompt that the cache knew when the request first started."""
        self.num_passed = 0
        """Younger requests that started while this one waited for pages."""
        self.page_names: list[bytes] = []
        """Of its full pages, see `prefix_index`; empty where nothing is shared."""
        self.logit_state = LogitState(
            request_id=request.id,
            params=params,
            prompt_ids=request.prompt_ids,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
            device=device,
        )
        self.kind = int(DrawKind.of(params))
        self._max_positions = max_positions
        self._stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= set(eos_ids)
        self._stop_text = stop_text

    def start(self, slot: int, *, num_known: int) -> None:
        """It takes a slot, where K/V of its first `num_known` positions lie already."""
        assert num_known < len(self.tokens)
        if self.num_starts == 0:
            self.num_cached = num_known
        self.slot = slot
        self.num_starts += 1
        self.num_computed = num_known

    def send_back(self) -> None:
        """It waits again; its pages and its slot belong to others."""
        self.num_computed = 0

    @property
    def num_answer(self) -> int:
        """Committed tokens of the answer."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether only the anchor is left to run; otherwise it reads (`num_to_read`)."""
        num_tokens = len(self.tokens)
        return num_tokens > self.num_prompt and self.num_computed == num_tokens - 1

    @property
    def num_to_read(self) -> int:
        """Positions to run before the next round: the prompt, or all of a start that was lost
        but its anchor."""
        return max(self.num_prompt, len(self.tokens) - 1)

    @property
    def was_sent_back(self) -> bool:
        """Whether it waits for another start."""
        return self.num_starts > 0

    @property
    def num_left(self) -> int:
        """Tokens that may still be committed, by `max_tokens` and by the context."""
        return min(self.params.max_tokens - self.num_answer, self._max_positions - len(self.tokens))

    @property
    def is_plain(self) -> bool:
        """Whether nothing but temperature and filters change its logits: operators then draw for
        it."""
        return not self.logit_state.shapes_logits

    @property
    def is_nearly_plain(self) -> bool:
        """The same but for stop tokens that come too early: whoever forbids `early_stops` may use
        operators."""
        return not self.logit_state.has_rules

    def early_stops(self, num_rows: int) -> list[tuple[int, int]]:
        """Row and target id of what is impossible in the next rows: no token of the answer, one
        drafted before it, .."""
        state = self.logit_state
        return [(j, i) for j in range(min(state.num_early, num_rows)) for i in state.stop_ids]

    def max_width(self, block_size: int) -> int:
        """Drafted tokens worth verifying now: a round commits at most one token more."""
        cap = block_size if self.params.max_draft is None else self.params.max_draft
        return max(0, min(block_size, cap, self.num_left - 1))

    def commit(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Append the tokens of a round up to the first that ends the answer.

        Returns how many were taken and why the answer ended, if it did (UC-021, UC-024, UC-025).
        """
        taken, reason = len(token_ids), None
        if taken >= self.num_left:
            taken = self.num_left
            is_length = self.num_answer + taken >= self.params.max_tokens
            reason = FinishReason.LENGTH if is_length else FinishReason.CONTEXT
        if self.params.grammar is not None:
            end = self.logit_state.grammar_end(token_ids[:taken])
            if end is not None:  # what follows was drawn in vain
                taken, reason = end, FinishReason.STOP
        if self._stop_text is not None or not self._stop_ids.isdisjoint(token_ids):
            for index, token in enumerate(token_ids[:taken]):
                if self._stops_at(token):
                    taken, reason = index + 1, FinishReason.STOP
                    break
        kept = token_ids[:taken]
        self.tokens.extend(kept)
        self.logit_state.commit(kept)
        return taken, reason

    def _stops_at(self, token: int) -> bool:
        if token in self._stop_ids:
            return True
        if self._stop_text is None:
            return False
        self._stop_text.push([token])
        return self._stop_text.stopped_at is not None


def check_request(request: Request, spec: TargetSpec, *, can_stop_at_text: bool) -> None:
    """Raises `InputError` for what a target of these sizes cannot serve."""
    prompt = request.prompt_ids
    if not prompt:
        raise InputError(f"Request {request.id!r} has an empty prompt; give at least one token.")
    if len(prompt) >= spec.max_positions:
        raise InputError(
            f"The prompt of request {request.id!r} has {len(prompt)} tokens, but {spec.name} "
            f"takes {spec.max_positions} with the answer; shorten the prompt."
        )
    bad = next((token for token in prompt if not 0 <= token < spec.vocab_size), None)
    if bad is not None:
        raise InputError(
            f"The prompt of request {request.id!r} holds token id {bad}, but {spec.name} knows "
            f"0..{spec.vocab_size - 1}; use the tokenizer of this target."
        )
    if request.params.max_tokens < 1:
        raise InputError(f"Request {request.id!r} asks for 0 tokens; nothing is to be run.")
    if request.params.stop and not can_stop_at_text:
        raise InputError(f"Request {request.id!r} has stop strings, but no tokenizer is loaded.")


def round_table(requests: Sequence[LiveRequest], *, device: torch.device) -> RoundTable:
    """What the next round asks of each of these requests."""
    return RoundTable(
        [
            [r.kind for r in requests],
            [r.seed for r in requests],
            [len(r.tokens) for r in requests],
            [r.num_rounds for r in requests],
            [r.tokens[-1] for r in requests],
            [r.params.top_k or 0 for r in requests],
        ],
        [
            [r.params.temperature for r in requests],
            [r.params.top_p for r in requests],
            [r.params.min_p for r in requests],
        ],
        device=device,
    )


def origins_of(
    num_accepted: int, last: Origin, *, taken: int, is_copied: bool = False
) -> list[Origin]:
    """How each of the `taken` tokens of a round came to be."""
    accepted = Origin.COPIED if is_copied else Origin.ACCEPTED
    return [*[accepted] * num_accepted, last][:taken]
