"""The decoding cycle: admit, draft, plan, verify, accept, commit, over a ragged batch.

It changes requests, pages and steps in flight. It knows no text beyond stop strings, no file and
no clock.
"""

import itertools
import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.algorithms.acceptance import Verdict
from dspark.core import (
    DraftBlock,
    Request,
    RoundResult,
    StepResult,
    VerifyPlan,
)
from dspark.engine.admission import Admission
from dspark.engine.batch import Run, layout_of
from dspark.engine.block_rows import merged
from dspark.engine.draft_source import DraftSource, block_size_of, proposer_of
from dspark.engine.judge import Judgement, can_judge_at_once, early_stops, judge
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import (
    LiveRequest,
    StopText,
    check_request,
    origins_of,
    round_table,
)
from dspark.engine.load import Load
from dspark.engine.planner import FixedPlanner, Outcome, Outlook, Planner
from dspark.engine.prefix_index import extend_names
from dspark.engine.prompt_reading import Chunk, PromptReading
from dspark.engine.proposer import Proposer, StepStates
from dspark.errors import InputError, NumericsError
from dspark.kernels.rounds import RoundTable
from dspark.models.target import Target, TargetOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleConfig:
    """Sizes of the engine; memory for pages is taken when the cycle is built."""

    max_requests: int = 16
    """Requests in flight; others wait."""
    num_positions: int = 16384
    """Positions that the pages hold, all requests together."""
    page_size: int = 64
    """Positions of a page. Words that were read before are known again in whole pages: small pages
    spare readings of short prompts."""
    max_step_tokens: int = 512
    """Tokens of one target pass: verify windows first, prompt chunks in what is left."""
    max_prompt_tokens: int | None = None
    """Prompt tokens of a step in which others decode, at most: what they wait for a newcomer.
    `None` is a quarter of `max_step_tokens`."""
    prefix_cache: bool = True
    """Keep the pages of words that were read, for requests that begin with the same words."""
    reserves_all: bool = False
    """Take pages for a request's whole length when it starts: it is never sent back to wait, but
    fewer run at a time. Otherwise pages are taken as it grows (`engine.admission`)."""
    copies: bool = False
    """Beside a drafter, propose what followed the same words earlier in a request's own text,
    where that promises more (`engine.copying`)."""
    width: int | None = None
    """Drafted tokens verified per request and round, `None` is the drafter's block_size; a cycle
    with a planner of its own does not read it."""
    is_checked: bool = False
    """Check the cache's invariants after every step."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "num_positions", "page_size", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if self.width is not None and self.width < 0:
            raise InputError(f"width is {self.width}, but it must be at least 0.")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise InputError(
                f"max_prompt_tokens is {self.max_prompt_tokens}, but it must be at least 1."
            )

    @property
    def prompt_tokens_beside(self) -> int:
        """`max_prompt_tokens`, the default resolved."""
        if self.max_prompt_tokens is not None:
            return min(self.max_prompt_tokens, self.max_step_tokens)
        return max(self.max_step_tokens // 4, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Who takes part in a step: requests with an anchor, then pieces of prompts."""

    decoding: Sequence[LiveRequest]
    caps: Sequence[int]
    chunks: Sequence[Chunk]
    sampling: Sequence[LiveRequest]
    """The requests that get a token: all that decode, then those whose prompt ends."""


class Cycle:
    """Target, optional drafter, pages and requests; `step` moves all of them by one round.

    Not safe for several threads: one thread submits and steps.
    """

    def __init__(
        self,
        target: Target,
        *,
        drafter: DraftSource | None,
        config: CycleConfig,
        make_stop_text: Callable[[Sequence[str]], StopText] | None = None,
        planner: Planner | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`planner` `None` verifies `config.width` tokens of every request. `clock` gives seconds;
        without one no step is timed."""
        block_size = block_size_of(drafter)
        num_pages = -(-config.num_positions // config.page_size) + 1
        self.config = config
        self._target = target
        self._cache = KVCache(
            num_pages=num_pages,
            page_size=config.page_size,
            max_requests=config.max_requests,
            max_positions=target.spec.max_positions + block_size,
        )
        self._reading = PromptReading(
            self._cache,
            max_step_tokens=config.max_step_tokens,
            tokens_beside=config.prompt_tokens_beside,
            is_shared=config.prefix_cache,
        )
        self._pages = target.allocate_pages(num_pages=num_pages, page_size=config.page_size)
        self._proposer: Proposer | None = None
        if drafter is not None:
            self._proposer = proposer_of(
                drafter,
                target=target,
                num_pages=num_pages,
                page_size=config.page_size,
                copies=config.copies,
            )
        self._num_ahead = 0 if self._proposer is None else self._proposer.num_ahead
        self.planner = FixedPlanner.of_width(config.width) if planner is None else planner
        self._clock = clock
        self._draft_seconds = self._catch_up_seconds = 0.0
        self.num_broken_drafts = 0
        """Blocks that could not be drawn; after the first one no more are."""
        self._admission = Admission(
            cache=self._cache,
            max_positions=target.spec.max_positions,
            block_size=block_size,
            reserves_all=config.reserves_all,
        )
        self._live: list[LiveRequest] = []
        self._arrivals = itertools.count()
        self._num_prompt_tokens = self._num_cached_tokens = self._num_sent_back = 0
        self._make_stop_text = make_stop_text

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._live) or len(self._admission) > 0

    @property
    def block_size(self) -> int:
        """K of the drafter, 0 without one."""
        return 0 if self._proposer is None else self._proposer.block_size

    def submit(self, request: Request) -> None:
        """Queue a request; it starts with a later step. Its `max_tokens` must be at least 1.

        Raises `InputError` for a prompt or an option that cannot be served.
        """
        check_request(request, self._target.spec, can_stop_at_text=self._make_stop_text is not None)
        if request.id in self._admission or request.id in {r.request.id for r in self._live}:
            raise InputError(f"Request id {request.id!r} is in use; give each request its own.")
        stop, seed = request.params.stop, request.params.seed
        live = LiveRequest(
            request,
            arrival=next(self._arrivals),
            seed=secrets.randbits(62) if seed is None else seed,
            eos_ids=self._target.spec.eos_ids,
            vocab_size=self._target.spec.vocab_size,
            max_positions=self._target.spec.max_positions,
            stop_text=self._make_stop_text(stop) if stop and self._make_stop_text else None,
            device=self._target.device,
        )
        self._name_pages(live)
        self._admission.submit(live)

    def abort(self, request_id: str) -> bool:
        """End a request now, whatever it waits for; whether it was known (UC-056)."""
        for live in self._live:
            if live.request.id == request_id:
                self._close(live)
                return True
        return self._admission.withdraw(request_id)

    @property
    def load(self) -> Load:
        """How busy it is now, and what the cache saved so far."""
        num_decoding = sum(live.is_decoding for live in self._live)
        return Load(
            num_waiting=len(self._admission),
            num_reading=len(self._live) - num_decoding,
            num_decoding=num_decoding,
            max_requests=self.config.max_requests,
            num_pages=self._cache.num_pages - 1,
            num_free_pages=self._cache.num_free_pages - self._cache.num_cached_pages,
            num_cached_pages=self._cache.num_cached_pages,
            page_size=self._cache.page_size,
            total_prompt_tokens=self._num_prompt_tokens,
            total_cached_tokens=self._num_cached_tokens,
            total_sent_back=self._num_sent_back,
            total_broken_drafts=self.num_broken_drafts,
        )

    def check(self) -> None:
        """The invariants of pages and requests."""
        self._cache.check()
        for live in self._live:
            assert self._cache.committed(live.slot) == live.num_computed
            assert live.is_decoding or live.num_computed < live.num_to_read

    @torch.inference_mode()
    def step(self) -> StepResult:
        """One round of every request that can take part."""
        started = self._now()
        self._admit()
        batch = self._compose()
        rounds = round_table(batch.sampling, device=self._target.device)
        block = self._draft(batch, rounds)
        plan = self._plan(batch, block)
        drafts = self._drafts(batch, block, plan)
        judgement = self._judge(batch, rounds, block, drafts)
        result = self._commit(batch, block, drafts, judgement)
        self._observe(batch, result, self._now() - started)
        if self.config.is_checked:
            self.check()
        return result

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock()

    def _admit(self) -> None:
        for live in self._admission.grow(self._live):
            self._live.remove(live)
            self._num_sent_back += 1
        for live in self._admission.admit(self._live):
            self.planner.begin(live.slot, live.params, live.seed)
            self._live.append(live)
            if live.num_starts == 1:
                self._num_prompt_tokens += live.num_prompt
                self._num_cached_tokens += live.num_cached
        self._num_cached_tokens += self._reading.take_over(self._readers())

    def _readers(self) -> list[LiveRequest]:
        return [live for live in self._live if not live.is_decoding]

    def _compose(self) -> _Batch:
        decoding = [live for live in self._live if live.is_decoding]
        caps = self.planner.caps(self._outlook(decoding)) if decoding else []
        chunks: Sequence[Chunk] = ()
        if len(decoding) < len(self._live):
            chunks = self._reading.chunks(self._readers(), num_windows=len(caps) + sum(caps))
        ending = [chunk.live for chunk in chunks if chunk.ends_prompt]
        return _Batch(decoding=decoding, caps=caps, chunks=chunks, sampling=[*decoding, *ending])

    def _outlook(self, decoding: Sequence[LiveRequest]) -> Outlook:
        """Of prompts, as much as fits beside requests that decode plainly."""
        missing = 0
        if len(decoding) < len(self._live):
            missing = sum(live.num_to_read - live.num_computed for live in self._readers())
        return Outlook(
            slots=[live.slot for live in decoding],
            rounds=[live.num_rounds for live in decoding],
            max_widths=[live.max_width(self.block_size) for live in decoding],
            num_prompt_tokens=min(missing, self._reading.budget(len(decoding))),
            num_certain=len(decoding),
            context=sum(live.num_computed for live in decoding),
            copies={} if self._proposer is None else self._proposer.look(decoding),
        )

    def _draft(self, batch: _Batch, rounds: RoundTable) -> DraftBlock | None:
        self._draft_seconds = self._catch_up_seconds = 0.0
        drafting = [r for r, cap in enumerate(batch.caps) if cap > 0]
        if self._proposer is None or not drafting:
            return None  # no drafter call, no cost (UC-142)
        rested = self._now()
        requests = [batch.decoding[r] for r in drafting]
        self._proposer.catch_up(requests, cache=self._cache)
        started = self._now()
        try:
            block = self._proposer.propose(
                requests, cache=self._cache, rounds=rounds.pick(drafting)
            )
        except NumericsError as error:
            self._stop_drafting(error)
            return None
        if len(drafting) < len(batch.sampling):
            block = merged((drafting, block), num_rows=len(batch.sampling))
        self._draft_seconds = self._now() - started
        self._catch_up_seconds = started - rested
        return block

    def _stop_drafting(self, error: NumericsError) -> None:
        """A drafter that overflows, by its dtype say, costs speed and no answer (UC-157)."""
        self.num_broken_drafts += 1
        self._proposer = None
        warnings.warn(
            f"Drafting is off from here on and answers go on by plain decoding, for the drafter "
            f"failed: {error}",
            stacklevel=2,
        )

    def _plan(self, batch: _Batch, block: DraftBlock | None) -> VerifyPlan:
        if block is None:
            return VerifyPlan(lengths=(0,) * len(batch.sampling))
        num_decoding = len(batch.decoding)
        caps, logits_RK = batch.caps, None
        if block.num_offered is not None:
            caps = [min(pair) for pair in zip(caps, block.num_offered, strict=False)]
        if block.confidence_RK is not None:
            logits_RK = block.confidence_RK[:num_decoding].numpy(force=True)
        copied = [r for r, is_copied in enumerate(block.is_copied or ()) if is_copied]
        plan = self.planner.plan(logits_RK, caps, copied)
        new = [0] * (len(batch.sampling) - num_decoding)
        return VerifyPlan(lengths=[*plan.lengths, *new])

    def _drafts(
        self, batch: _Batch, block: DraftBlock | None, plan: VerifyPlan
    ) -> Sequence[Sequence[int]]:
        """The drafted tokens that are verified, for each request that gets a token."""
        if block is None:
            return [()] * len(batch.sampling)
        rows = zip(block.tokens_RK.tolist(), plan.lengths, strict=True)
        drafts = [tokens[:length] for tokens, length in rows]
        for r, live in enumerate(batch.decoding):
            if live.params.grammar is not None:
                # after the plan, which must not see a token; exact, because what is cut had p = 0
                # and its q, masked too, left no mass to tokens that p allows
                drafts[r] = drafts[r][: live.logit_state.num_possible(drafts[r])]
        return drafts

    def _judge(
        self,
        batch: _Batch,
        rounds: RoundTable,
        block: DraftBlock | None,
        drafts: Sequence[Sequence[int]],
    ) -> Judgement:
        """One pass over the step's tokens, and the verdict on it."""
        ids, runs = self._windows(batch, drafts)
        if (
            not batch.chunks
            and self._target.can_decode
            and can_judge_at_once(batch.sampling, block)
        ):
            return self._decode(batch, rounds, block, drafts, ids, runs)
        logits_NV = self._verify(batch, ids, runs)
        return self._accept(batch, rounds, block, drafts, logits_NV)

    def _windows(
        self, batch: _Batch, drafts: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[Run]]:
        """The anchors and their drafts."""
        ids: list[int] = []
        runs: list[Run] = []
        for live, tokens in zip(batch.decoding, drafts, strict=False):
            ids.append(live.tokens[-1])
            ids.extend(tokens)
            runs.append(Run(live.slot, live.num_computed, 1 + len(tokens)))
            self._cache.write(live.slot, live.num_computed + 1 + len(tokens))
        return ids, runs

    def _decode(
        self,
        batch: _Batch,
        rounds: RoundTable,
        block: DraftBlock | None,
        drafts: Sequence[Sequence[int]],
        ids: list[int],
        runs: list[Run],
    ) -> Judgement:
        """Pass and verdict as one call of the target."""
        proposer = self._proposer
        verdict = self._target.decode(
            ids,
            runs,
            table=self._cache.table,
            pages=self._pages,
            tap_layers=() if proposer is None else proposer.tap_layers,
            rounds=rounds,
            has_states=proposer is not None,
            draft_tokens_RK=None if block is None else block.tokens_RK,
            draft_probs_RKS=None if block is None else block.probs_RKS,
            vocabulary=None if proposer is None else proposer.vocabulary,
            forbidden=early_stops(batch.sampling, drafts),
        )
        if proposer is not None and verdict.states is not None:
            proposer.feed(StepStates(**verdict.states._asdict()))
        if verdict.logits_NV is not None:  # not finite: it is said there
            return self._accept(batch, rounds, block, drafts, verdict.logits_NV)
        return Judgement(
            verdict=Verdict(
                num_accepted=verdict.num_accepted,
                next_tokens=verdict.next_tokens,
                lengths=[len(tokens) for tokens in drafts],
            ),
            scores=None,
            first_rows={},
        )

    def _verify(self, batch: _Batch, ids: list[int], runs: list[Run]) -> Tensor:
        """Logits of the windows, then of the prompts that end: [N, V]."""
        wanted = list(range(len(ids)))
        for chunk in batch.chunks:
            ids.extend(chunk.live.tokens[chunk.start : chunk.start + chunk.num_tokens])
            runs.append(Run(chunk.live.slot, chunk.start, chunk.num_tokens))
            self._cache.write(chunk.live.slot, chunk.start + chunk.num_tokens)
            if chunk.ends_prompt:
                wanted.append(len(ids) - 1)
        output = self._pass(ids, runs, has_logits=not batch.chunks)
        if output.logits_NV is not None:
            return output.logits_NV
        return self._target.logits(output.hidden_ND[wanted])

    def _pass(self, ids: Sequence[int], runs: Sequence[Run], *, has_logits: bool) -> TargetOutput:
        device = self._target.device
        layout = layout_of(runs, self._cache, device=device)
        # an id outside the vocabulary is rejected later; it must not index the embedding (UC-009)
        last = self._target.spec.vocab_size - 1
        ids_N = torch.tensor([min(max(i, 0), last) for i in ids], device=device)
        output = self._target.forward(
            ids_N,
            layout=layout,
            pages=self._pages,
            tap_layers=self._proposer.tap_layers if self._proposer is not None else (),
            has_logits=has_logits,
        )
        if self._proposer is not None:
            self._proposer.feed(
                StepStates(
                    ids_N=ids_N,
                    hidden_ND=output.hidden_ND,
                    taps_NM=output.taps_NM,
                    layout=layout,
                )
            )
        return output

    def _accept(
        self,
        batch: _Batch,
        rounds: RoundTable,
        block: DraftBlock | None,
        drafts: Sequence[Sequence[int]],
        logits_NV: Tensor,
    ) -> Judgement:
        vocabulary = None if self._proposer is None else self._proposer.vocabulary
        return judge(
            batch.sampling,
            logits_NV,
            rounds=rounds,
            drafts=drafts,
            block=block,
            vocabulary=vocabulary,
        )

    def _commit(
        self,
        batch: _Batch,
        block: DraftBlock | None,
        drafts: Sequence[Sequence[int]],
        judgement: Judgement,
    ) -> StepResult:
        for chunk in batch.chunks:
            chunk.live.num_computed += chunk.num_tokens
            self._cache.commit(chunk.live.slot, chunk.live.num_computed)
            self._share(chunk.live)
        offered = self._offered(batch, block)
        confidence = None
        if block is not None and block.confidence_RK is not None:
            confidence = block.confidence_RK.tolist()
        drafted = [()] * len(batch.sampling) if block is None else block.tokens_RK.tolist()
        rounds = [
            self._commit_round(
                live,
                r,
                drafts[r],
                judgement,
                offered_ids=drafted[r][: offered[r]],
                is_copied=bool(block is not None and block.is_copied and block.is_copied[r]),
                confidence=confidence[r][: offered[r]] if confidence and offered[r] else None,
            )
            for r, live in enumerate(batch.sampling)
        ]
        num_decoding = len(batch.decoding)
        return StepResult(
            rounds=rounds,
            num_prompt_tokens=sum(chunk.num_tokens for chunk in batch.chunks),
            num_verify_tokens=num_decoding + sum(map(len, drafts[:num_decoding])),
        )

    def _observe(self, batch: _Batch, result: StepResult, seconds: float) -> None:
        if not batch.decoding:
            return
        rounds = result.rounds[: len(batch.decoding)]
        is_timed = self._clock is not None
        apart = self._draft_seconds + self._catch_up_seconds
        self.planner.observe(
            Outcome(
                verified=[item.num_verified for item in rounds],
                accepted=[item.num_accepted for item in rounds],
                num_prompt_tokens=result.num_prompt_tokens,
                draft_seconds=self._draft_seconds if is_timed else None,
                verify_seconds=seconds - apart if is_timed else None,
                catch_up_seconds=self._catch_up_seconds,
            )
        )

    def _offered(self, batch: _Batch, block: DraftBlock | None) -> Sequence[int]:
        """Tokens that were proposed to each request that gets one."""
        if block is None:
            return [0] * len(batch.sampling)
        if block.num_offered is not None:
            return block.num_offered
        num_new = len(batch.sampling) - len(batch.decoding)
        return [*(self.block_size if cap > 0 else 0 for cap in batch.caps), *[0] * num_new]

    def _commit_round(
        self,
        live: LiveRequest,
        row: int,
        drafted: Sequence[int],
        judgement: Judgement,
        *,
        offered_ids: Sequence[int],
        is_copied: bool,
        confidence: Sequence[float] | None,
    ) -> RoundResult:
        is_prefill = not live.is_decoding
        verdict = judgement.verdict
        num_accepted = verdict.num_accepted[row]
        tokens = [*drafted[:num_accepted], verdict.next_tokens[row]]
        taken, reason = live.commit(tokens)
        live.num_rounds += 1
        if not is_prefill:
            live.num_computed += taken
            self._cache.commit(live.slot, live.num_computed)
            self._share(live)
        tokens = tokens[:taken]
        num_top = live.params.num_logprobs
        result = RoundResult(
            request_id=live.request.id,
            token_ids=tokens,
            origins=origins_of(num_accepted, verdict.origin(row), taken=taken, is_copied=is_copied),
            logprobs=None if num_top is None else judgement.logprobs(row, tokens, num_top=num_top),
            num_offered=len(offered_ids),
            num_planned=len(drafted),
            num_accepted=min(num_accepted, taken),
            is_prefill=is_prefill,
            finish_reason=reason,
            confidence_logits=confidence,
            num_cached=live.num_cached if is_prefill else 0,
            offered_ids=offered_ids,
            is_copied=is_copied,
        )
        if reason is not None:
            self._close(live)
        return result

    def _share(self, live: LiveRequest) -> None:
        """Full pages of final words are there for all; the drafter's context of them is written,
        or waits in its pass and is written before anybody's next block."""
        if self.config.prefix_cache and self._cache.can_share(live.slot):
            self._name_pages(live)
            self._cache.share(live.slot, live.page_names)

    def _name_pages(self, live: LiveRequest) -> None:
        if self.config.prefix_cache:
            extend_names(
                live.page_names,
                live.tokens,
                page_size=self.config.page_size,
                num_ahead=self._num_ahead,
            )

    def _close(self, live: LiveRequest) -> None:
        self._cache.close(live.slot)
        self._live.remove(live)
