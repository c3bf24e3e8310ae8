"""What steps cost on this machine: real steps of a real cycle, timed by a clock from outside.

Every entry of the table is a step as serving runs it: R requests, of each its anchor and the same
number of drafted tokens, the drafter's part timed apart. Widths take turns, and so do numbers of
requests: what else the machine does falls on all of them alike, and where it changes its speed no
row is that of one state and its neighbour that of the other. The first steps do not count (UC-146),
nor does the first one after a change between drafting and not or of the number of requests, which
finds its weights out of the caches: a service stays with either for many steps. The table is that
of greedy requests; what sampled ones cost more comes from a few sizes, at which both take turns.
Where prompts are read slowly they get shorter, and turns fewer: somebody waits for a first answer
meanwhile. It decides nothing about what a good table is (`cost_faults`) and keeps no file.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.algorithms.calibration import Logits
from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import ContextCost, SampledCost, StepCost, VerifyRow
from dspark.core import Coupling, Request, SamplingParams, VerifyPlan
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.draft_source import DraftSource, block_size_of
from dspark.engine.planner import Outcome, Outlook, PlanRecord
from dspark.errors import InputError
from dspark.models.target import Target

REVISION = 4
"""Of how steps are timed; raised with it, so that tables of before are not found any more."""
_WARMUP = 3
_CHUNKS = (16, 32, 64, 128, 256, 511)
"""Tokens of the pieces."""
_FEWEST_TURNS = 2
"""Of numbers of requests, and rounds of sampled ones, however slow the machine is."""
_SHORTEST_CONTEXT = 32
_PACE_TOKENS = 64  # of the prompts that tell how fast they are read
_PLAIN = 2
"""Plain steps of a round that are timed, one after the other."""
_PAGE = 64
_MOST_FOR_CONTEXT = 8  # requests whose long prompts are read for the cost of context
_MOST_FOR_SAMPLED = 8  # requests that tell what sampled ones take more
_SHORT_CONTEXT = 16  # drawing a token does not depend on what is behind it
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=1.0, coupling=Coupling.MAXIMAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which steps are timed."""

    max_requests: int = 16
    """Requests of the largest step; the others are its halves, down to one."""
    context: int = 128
    """Positions of each request."""
    long_context: int = 448
    """Positions for the cost of context."""
    max_step_tokens: int = 512
    """Tokens of the largest step that reads a prompt."""
    seconds_each: float = 1.0
    """Time for one number of requests, in `min_rounds` turns; in each of them a round of all widths
    runs in any case."""
    min_rounds: int = 4
    """Times that every width runs, at least."""
    max_rounds: int = 15
    """The same, at most."""
    seconds: float = 45.0
    """What a slow machine is given for all of it, about: a third of it for prompts, which become
    shorter so that they fit, and no further turns when the time is up."""
    chunk_turns: int = 3
    """Times that each piece of a prompt is read."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "context", "max_step_tokens", "min_rounds", "max_rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")

    @property
    def ladder(self) -> list[int]:
        """Numbers of requests, rising."""
        sizes = {self.max_requests}
        while min(sizes) > 1:
            sizes.add(min(sizes) // 2)
        return sorted(sizes)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts that are read before and between the timed steps."""
        benches = (sum(self.ladder) + 1) * self.context
        long = min(_MOST_FOR_CONTEXT, self.max_requests) * self.long_context
        return benches + long + self.chunk_turns * sum(_CHUNKS)

    def at_pace(self, seconds_each_token: float) -> "ProfileConfig":
        """The same with prompts so short that reading them takes a third of the time."""
        whole = self.num_prompt_tokens * seconds_each_token
        share = self.seconds / 3 / whole if whole > 0 else 1.0
        if share >= 1:
            return self
        context = max(int(share * self.context), min(_SHORTEST_CONTEXT, self.context))
        return replace(
            self,
            context=context,
            long_context=max(int(share * self.long_context), 3 * context),
            chunk_turns=max(round(share * self.chunk_turns), 1),
        )


@dataclass(slots=True)
class _Samples:
    """Seconds by width, drafting apart."""

    draft: dict[int, list[float]] = field(default_factory=dict)
    verify: dict[int, list[float]] = field(default_factory=dict)

    def drafts(self) -> list[float]:
        """Those of every width that drafts: the drafter's part does not depend on it."""
        return [second for width, found in self.draft.items() if width for second in found]


class _Forced:
    """A planner that verifies what the profiler says, and takes down the seconds."""

    def __init__(self) -> None:
        self.records: deque[PlanRecord] = deque(maxlen=1)
        self.width = 0
        self.outcome: Outcome | None = None

    def begin(self, slot: int, params: SamplingParams, seed: int) -> None:
        pass

    def caps(self, outlook: Outlook) -> list[int]:
        return [min(self.width, width) for width in outlook.max_widths]

    def plan(self, _logits_RK: Logits | None, caps: Sequence[int]) -> VerifyPlan:
        return VerifyPlan(lengths=tuple(caps))

    def observe(self, outcome: Outcome) -> None:
        self.outcome = outcome


class _Bench:
    """One number of requests at work."""

    def __init__(
        self,
        target: Target,
        drafter: DraftSource,
        *,
        num_requests: int,
        context: int,
        num_rounds: int,
        max_step_tokens: int,
        clock: Callable[[], float],
        params: SamplingParams = _GREEDY,
    ) -> None:
        self._params = params
        self._block_size = block_size_of(drafter)
        self._num_requests = num_requests
        self._num_ids = target.spec.vocab_size
        self._max_positions = target.spec.max_positions
        steps = num_rounds * (self._block_size + _PLAIN + 2) + _WARMUP + 8
        room = target.spec.max_positions - context - self._block_size
        self._max_tokens = min(steps * (self._block_size + 1), room)
        length = context + self._max_tokens + self._block_size
        self.planner, self._clock = _Forced(), clock
        self.cycle = Cycle(
            target,
            drafter=drafter,
            config=CycleConfig(
                max_requests=num_requests + 1,
                num_positions=(num_requests + 1) * -(-length // _PAGE) * _PAGE
                + max_step_tokens
                + 2 * _PAGE,
                max_step_tokens=max(max_step_tokens, num_requests * (self._block_size + 1)),
                max_prompt_tokens=max_step_tokens,
                prefix_cache=False,
                reserves_all=True,
            ),
            planner=self.planner,
            clock=clock,
        )
        self._num_submitted = 0
        self._rng = np.random.default_rng(0)
        self._is_over = False
        for _ in range(num_requests):
            self._submit(context, max_tokens=self._max_tokens)
        self.planner.width = 0
        while self.planner.outcome is None or self.planner.outcome.num_prompt_tokens:
            self.cycle.step()

    def _submit(self, length: int, *, max_tokens: int) -> None:
        self._num_submitted += 1
        rng = np.random.default_rng(self._num_submitted)
        params = replace(
            self._params, seed=self._num_submitted, ignore_eos=True, max_tokens=max_tokens
        )
        prompt = rng.integers(0, self._num_ids, length).tolist()
        self.cycle.submit(Request(id=str(self._num_submitted), prompt_ids=prompt, params=params))

    def step(self, width: int) -> Outcome | None:
        """One step; `None` if its requests could not take the width any more, from then on."""
        if self._is_over:
            return None
        self.planner.width, self.planner.outcome = width, None
        self.cycle.step()
        found = self.planner.outcome
        self._is_over = found is None or len(found.accepted) != self._num_requests
        return None if self._is_over else found

    def warm_up(self, widths: Sequence[int]) -> None:
        """The first steps, which do not count."""
        for _ in range(_WARMUP):
            self.step(widths[-1])

    def turn(self, widths: Sequence[int], samples: _Samples, config: ProfileConfig) -> None:
        """Every width in turn, once at least, until one of `min_rounds` parts of the time is up."""
        until = self._clock() + config.seconds_each / config.min_rounds
        for index in range(max(config.max_rounds // config.min_rounds, 1)):
            if index and self._clock() >= until:
                return
            if not self.round(self._rng.permutation(widths).tolist(), samples):
                return

    def round(self, widths: Sequence[int], samples: _Samples) -> bool:
        """Every width once, in this order; whether all could be taken."""
        for width, is_timed in _turns(widths):
            found = self.step(width)
            if found is None:
                return False
            if is_timed:
                samples.draft.setdefault(width, []).append(found.draft_seconds or 0.0)
                samples.verify.setdefault(width, []).append(found.verify_seconds or 0.0)
        return True

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that fits beside an answer."""
        return self._max_positions - 2

    def chunk(self, num_tokens: int) -> float | None:
        """Seconds of a step that also reads so many tokens of a prompt."""
        self._submit(num_tokens, max_tokens=1)
        found = self.step(0)
        if found is None or found.num_prompt_tokens != num_tokens:
            return None
        return found.verify_seconds

    def pace(self, num_tokens: int) -> float:
        """Seconds for each token of a prompt; 0 where that cannot be told."""
        self.chunk(num_tokens)  # the first does not count
        plain, whole = self.step(0), self.chunk(num_tokens)
        if plain is None or plain.verify_seconds is None or whole is None:
            return 0.0
        return max(whole - plain.verify_seconds, 0.0) / num_tokens


def profile(
    target: Target,
    drafter: DraftSource,
    *,
    fingerprint: Fingerprint,
    config: ProfileConfig,
    clock: Callable[[], float],
    on_size: Callable[[int, int], None] | None = None,
) -> StepCost:
    """The table of this target and drafter; `on_size(done, total)` after each turn of a number of
    requests.

    Raises `InputError` for a target whose context is too short for it.
    """
    block_size = block_size_of(drafter)
    context = min(config.context, target.spec.max_positions // 4)
    config = replace(config, context=context)
    if target.spec.max_positions < 4 * (block_size + 2):
        raise InputError(
            f"{target.spec.name} takes {target.spec.max_positions} positions, which is too few to "
            "time steps of several widths."
        )
    begun = clock()
    reader = _bench(target, drafter, 1, context, config, clock)
    config = config.at_pace(reader.pace(min(_PACE_TOKENS, context)))
    context = config.context
    widths, ladder = range(block_size + 1), config.ladder
    found = {num_requests: _Samples() for num_requests in ladder}
    benches = {n: _bench(target, drafter, n, context, config, clock) for n in ladder}
    chunks: dict[int, list[float]] = {}
    for turn in range(config.min_rounds):
        if turn >= _FEWEST_TURNS and clock() - begun > config.seconds / 2:
            break
        for index, (num_requests, bench) in enumerate(benches.items()):
            if turn == 0:
                bench.warm_up(widths)
            bench.turn(widths, found[num_requests], config)
            if on_size is not None:
                on_size(turn * len(ladder) + index + 1, config.min_rounds * len(ladder))
        if turn < config.chunk_turns:
            _read_chunks(reader, config, chunks)
    del benches, reader
    draft = CostCurve.of_samples({n: samples.drafts() for n, samples in found.items()})
    return StepCost(
        fingerprint=fingerprint,
        block_size=block_size,
        context=context,
        draft=draft,
        verify=_rows(found, chunks),
        context_cost=_context_cost(target, drafter, found, config, clock),
        sampled=_sampled_cost(target, drafter, config, clock, until=begun + config.seconds),
    )


def _bench(
    target: Target,
    drafter: DraftSource,
    num_requests: int,
    context: int,
    config: ProfileConfig,
    clock: Callable[[], float],
    params: SamplingParams = _GREEDY,
) -> _Bench:
    return _Bench(
        target,
        drafter,
        num_requests=num_requests,
        context=context,
        num_rounds=config.max_rounds,
        max_step_tokens=config.max_step_tokens,
        clock=clock,
        params=params,
    )


def _turns(widths: Sequence[int]) -> list[tuple[int, bool]]:
    """The steps of a round, and which of them are timed: one with each width, plain ones apart."""
    drafted = [width for width in widths if width > 0]
    turns = [(width, True) for width in drafted]
    if drafted:
        turns.insert(0, (drafted[0], False))
    if 0 in widths:
        turns += [(0, False), *[(0, True)] * _PLAIN]
    return turns


def _read_chunks(bench: _Bench, config: ProfileConfig, found: dict[int, list[float]]) -> None:
    """Steps of one request that read a piece of a prompt: seconds by tokens."""
    most = min(config.max_step_tokens - 1, bench.longest_prompt)
    for size in _CHUNKS:
        seconds = bench.chunk(size) if size <= most else None
        if seconds is not None:
            found.setdefault(1 + size, []).append(seconds)


def _rows(found: dict[int, _Samples], chunks: dict[int, list[float]]) -> tuple[VerifyRow, ...]:
    """A curve for each number of requests; beyond a block for each, it goes on as the chunks do."""
    single = {1 + width: list(seconds) for width, seconds in found[1].verify.items()}
    longest = CostCurve.of_samples({**chunks, **single})
    rows = []
    for num_requests, samples in sorted(found.items()):
        decode = CostCurve.of_samples(
            {num_requests * (1 + width): seconds for width, seconds in samples.verify.items()}
        )
        rows.append(VerifyRow(num_requests=num_requests, curve=_continued(decode, longest)))
    return tuple(rows)


def _continued(curve: CostCurve, longest: CostCurve) -> CostCurve:
    """A curve with the larger sizes of another, shifted to meet it."""
    last = curve.sizes[-1]
    more = [i for i, size in enumerate(longest.sizes) if size > last]
    at_last = float(longest.at(np.array([last]))[0])
    shift = curve.seconds[-1] - at_last
    return replace(
        curve,
        sizes=(*curve.sizes, *(longest.sizes[i] for i in more)),
        seconds=(
            *curve.seconds,
            *(max(longest.seconds[i] + shift, curve.seconds[-1]) for i in more),
        ),
        errors=(*curve.errors, *(longest.errors[i] for i in more)),
    )


def _context_cost(
    target: Target,
    drafter: DraftSource,
    found: dict[int, _Samples],
    config: ProfileConfig,
    clock: Callable[[], float],
) -> ContextCost:
    """What positions add, from steps of several requests at a longer context."""
    block_size = block_size_of(drafter)
    long_context = min(config.long_context, target.spec.max_positions // 2)
    if long_context < 2 * config.context:
        return ContextCost()
    few = replace(config, max_rounds=config.min_rounds)
    num_requests = max(size for size in found if size <= _MOST_FOR_CONTEXT)
    short = found[num_requests]
    bench = _bench(target, drafter, num_requests, long_context, few, clock)
    long = _Samples()
    bench.warm_up((0, block_size))
    for _ in range(few.min_rounds):
        bench.turn((0, block_size), long, few)
    if not long.verify.get(block_size):
        return ContextCost()
    more = num_requests * (long_context - config.context)
    plain = _median(long.verify[0]) - _median(short.verify[0])
    whole = _median(long.verify[block_size]) - _median(short.verify[block_size])
    # seconds of a position: held + attended * tokens of its request
    attended = max((whole - plain) / more / block_size, 0.0)
    held = max(plain / more - attended, 0.0)
    draft_held = max((_median(long.drafts()) - _median(short.drafts())) / more, 0.0)
    return ContextCost(held=held, attended=attended, draft_held=draft_held)


def _sampled_cost(
    target: Target,
    drafter: DraftSource,
    config: ProfileConfig,
    clock: Callable[[], float],
    *,
    until: float,
) -> SampledCost:
    """What sampled requests take more, for one and for some; each further one takes the same."""
    some = max(size for size in config.ladder if size <= _MOST_FOR_SAMPLED)
    times = config.ladder[-1] // some
    draft: dict[int, float] = {0: 0.0}
    rows: dict[int, dict[int, float]] = {}
    for count in sorted({1, some}):
        greedy, sampled = _in_turn(target, drafter, count, config, clock, until=until)
        draft[count] = _more(greedy.drafts(), sampled.drafts())
        widths = sorted(greedy.verify.keys() & sampled.verify.keys())
        rows[count] = {0: 0.0} | {
            count * (1 + width): _more(greedy.verify[width], sampled.verify[width])
            for width in widths
        }
    if times > 1:
        draft[times * some] = times * draft[some]
        rows[times * some] = {times * size: times * more for size, more in rows[some].items()}
    return SampledCost(
        draft=_rising(draft),
        verify=tuple(
            VerifyRow(num_requests=count, curve=_rising(row)) for count, row in rows.items()
        ),
    )


def _in_turn(
    target: Target,
    drafter: DraftSource,
    num_requests: int,
    config: ProfileConfig,
    clock: Callable[[], float],
    *,
    until: float,
) -> tuple[_Samples, _Samples]:
    """Steps of greedy and of sampled requests side by side: what the machine does besides falls
    on both, and a difference is that of neighbours."""
    widths = sorted({0, 1, block_size_of(drafter)})
    context = min(_SHORT_CONTEXT, config.context)
    greedy, sampled = (
        _bench(target, drafter, num_requests, context, config, clock, params)
        for params in (_GREEDY, _SAMPLED)
    )
    found, rng = (_Samples(), _Samples()), np.random.default_rng(0)
    for bench in (greedy, sampled):
        bench.warm_up(widths)
    for index in range(config.max_rounds):
        if index >= _FEWEST_TURNS and clock() > until:
            break
        order = rng.permutation(widths).tolist()
        both = [bench.round(order, to) for bench, to in zip((greedy, sampled), found, strict=True)]
        if not all(both):
            break
    return found


def _more(greedy: Sequence[float], sampled: Sequence[float]) -> float:
    """Seconds that the second takes more than the first, neighbour by neighbour."""
    return max(_median([more - less for less, more in zip(greedy, sampled, strict=False)]), 0.0)


def _rising(seconds: Mapping[int, float]) -> CostCurve:
    """A curve of differences, which noise must not make fall."""
    sizes = sorted(seconds)
    rising = np.maximum.accumulate([seconds[size] for size in sizes])
    return CostCurve(sizes=tuple(sizes), seconds=tuple(rising.tolist()), errors=(0.0,) * len(sizes))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
