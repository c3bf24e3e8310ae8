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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import ContextCost, SampledCost, StepCost, VerifyRow
from dspark.core import Coupling, SamplingParams
from dspark.engine.draft_source import DraftSource, block_size_of
from dspark.engine.step_bench import Samples, StepBench
from dspark.errors import InputError
from dspark.models.target import Target

REVISION = 4
"""Of how steps are timed; raised with it, so that tables of before are not found any more."""
_CHUNKS = (16, 32, 64, 128, 256, 511)
"""Tokens of the pieces."""
_FEWEST_TURNS = 2
"""Of numbers of requests, and rounds of sampled ones, however slow the machine is."""
_SHORTEST_CONTEXT = 32
_PACE_TOKENS = 64  # of the prompts that tell how fast they are read
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
    chunkturns: int = 3
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
        return benches + long + self.chunkturns * sum(_CHUNKS)

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
            chunkturns=max(round(share * self.chunkturns), 1),
        )


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
    found = {num_requests: Samples() for num_requests in ladder}
    benches = {n: _bench(target, drafter, n, context, config, clock) for n in ladder}
    chunks: dict[int, list[float]] = {}
    for turn in range(config.min_rounds):
        if turn >= _FEWEST_TURNS and clock() - begun > config.seconds / 2:
            break
        for index, (num_requests, bench) in enumerate(benches.items()):
            if turn == 0:
                bench.warm_up(widths)
            _turn(bench, widths, found[num_requests], config)
            if on_size is not None:
                on_size(turn * len(ladder) + index + 1, config.min_rounds * len(ladder))
        if turn < config.chunkturns:
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
) -> StepBench:
    return StepBench(
        target,
        drafter,
        num_requests=num_requests,
        context=context,
        num_rounds=config.max_rounds,
        max_step_tokens=config.max_step_tokens,
        clock=clock,
        params=params,
    )


def _turn(bench: StepBench, widths: Sequence[int], samples: Samples, config: ProfileConfig) -> None:
    bench.turn(
        widths,
        samples,
        seconds=config.seconds_each / config.min_rounds,
        most_rounds=max(config.max_rounds // config.min_rounds, 1),
    )


def _read_chunks(bench: StepBench, config: ProfileConfig, found: dict[int, list[float]]) -> None:
    """Steps of one request that read a piece of a prompt: seconds by tokens."""
    most = min(config.max_step_tokens - 1, bench.longest_prompt)
    for size in _CHUNKS:
        seconds = bench.chunk(size) if size <= most else None
        if seconds is not None:
            found.setdefault(1 + size, []).append(seconds)


def _rows(found: dict[int, Samples], chunks: dict[int, list[float]]) -> tuple[VerifyRow, ...]:
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
    found: dict[int, Samples],
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
    long = Samples()
    bench.warm_up((0, block_size))
    for _ in range(few.min_rounds):
        _turn(bench, (0, block_size), long, few)
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
) -> tuple[Samples, Samples]:
    """Steps of greedy and of sampled requests side by side: what the machine does besides falls
    on both, and a difference is that of neighbours."""
    widths = sorted({0, 1, block_size_of(drafter)})
    context = min(_SHORT_CONTEXT, config.context)
    greedy, sampled = (
        _bench(target, drafter, num_requests, context, config, clock, params)
        for params in (_GREEDY, _SAMPLED)
    )
    found, rng = (Samples(), Samples()), np.random.default_rng(0)
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
