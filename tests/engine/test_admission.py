"""Who runs, who waits, who gives way: pages are overcommitted, and nobody waits for ever."""

from typing import Any

import pytest

from dspark.core import FinishReason, Request, RoundResult, SamplingParams
from dspark.engine.admission import Admission
from dspark.engine.cycle import Cycle
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.errors import InputError
from dspark.models.target import Target
from tests.engine.toy_cycles import (
    PROMPTS,
    assert_same,
    decode_slowly,
    make_cycle,
    packed,
    run,
)
from tests.toys import toy_chain, toy_drafter, toy_target


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("drafter", ["none", "packed", "modules"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_requests_that_give_way_say_what_they_would_have_said(
    target: Target, options: dict[str, Any], drafter: str, prefix_cache: bool
) -> None:
    """Four requests of up to 60 positions in a cache of 96: same text, no token twice (UC-056)."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
    expected = [run(make_cycle(target, None), [prompt], params)[0] for prompt in PROMPTS]
    source = {"none": None, "packed": packed(toy_drafter(target)), "modules": toy_drafter(target)}
    cycle = make_cycle(target, source[drafter], num_positions=76, prefix_cache=prefix_cache)
    assert run(cycle, PROMPTS, params) == expected
    assert cycle.load.total_sent_back > 1
    assert cycle.load.num_free_pages + cycle.load.num_cached_pages == cycle.load.num_pages == 19


@pytest.mark.parametrize("drafter", ["packed", "modules", "eagle3"])
def test_drafts_after_a_restart_are_those_without_one(target: Target, drafter: str) -> None:
    """UC-049: round by round, for the drafter's context is rebuilt with the target's."""
    made: dict[str, Any] = {
        "packed": packed(toy_drafter(target)),
        "modules": toy_drafter(target),
        "eagle3": toy_chain(target),
    }
    runs = []
    for num_positions in (1024, 76):
        cycle = make_cycle(target, made[drafter], num_positions=num_positions, prefix_cache=False)
        for index, prompt in enumerate(PROMPTS):
            cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(24)))
        rounds: dict[str, list[RoundResult]] = {str(i): [] for i in range(4)}
        while cycle.has_work:
            for item in cycle.step().rounds:
                rounds[item.request_id].append(item)
        runs.append(rounds)
    assert cycle.load.total_sent_back > 0
    for request_id, whole in runs[0].items():
        assert_same(runs[1][request_id], whole)


def test_no_request_gives_way_where_all_pages_are_reserved(target: Target) -> None:
    params = greedy(24)
    cycle = make_cycle(target, toy_drafter(target), num_positions=76, reserves_all=True)
    assert run(cycle, PROMPTS, params) == [decode_slowly(target, p, 24) for p in PROMPTS]
    assert cycle.load.total_sent_back == 0


def test_overcommitted_pages_let_more_requests_run(target: Target) -> None:
    """Clients ask for far more tokens than they get: whole lengths would leave slots empty."""
    running = []
    for reserves_all in (True, False):
        cycle = make_cycle(target, None, num_positions=160, reserves_all=reserves_all)
        for index in range(4):
            prompt = [1, 2 + index, 3]
            cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(100)))
        cycle.step()
        running.append(cycle.load.num_running)
    assert running == [1, 4]


def test_the_youngest_gives_way_and_the_oldest_never_does(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target), num_positions=76)
    for index, prompt in enumerate(PROMPTS):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(24)))
    ends, waits = [], set()
    while cycle.has_work:
        running = {live.request.id for live in cycle._live}
        ends += [item.request_id for item in cycle.step().rounds if item.finish_reason]
        gone = running - {live.request.id for live in cycle._live} - set(ends)
        waits |= gone
        alive = [str(i) for i in range(4) if str(i) not in ends]
        if gone and cycle._live:
            assert alive[0] not in gone
    assert waits
    assert "0" not in waits
    assert sorted(ends) == ["0", "1", "2", "3"]


def test_a_request_that_gave_way_starts_again_before_all_younger_ones(target: Target) -> None:
    cycle = make_cycle(target, None, num_positions=64, max_requests=3)
    for index in range(3):
        cycle.submit(Request(id=str(index), prompt_ids=[1, 4, 5 + index], params=greedy(40)))
    while cycle.load.total_sent_back == 0:
        cycle.step()
    cycle.submit(Request(id="new", prompt_ids=[7], params=greedy(2)))
    started: list[str] = []
    while cycle.has_work:
        before = {live.request.id for live in cycle._live}
        cycle.step()
        started += [r.request.id for r in cycle._live if r.request.id not in before]
    assert "2" in started
    assert "new" not in started[: started.index("2")]


def test_a_cap_and_a_floor_hold_after_a_restart(target: Target) -> None:
    """`max_draft` and `min_tokens_per_s` belong to the request, not to its place."""

    cycle = make_cycle(target, toy_drafter(target), num_positions=76)
    begun: list[tuple[int, SamplingParams]] = []
    begin = cycle.planner.begin

    def note(slot: int, params: SamplingParams, seed: int) -> None:
        begun.append((seed, params))
        begin(slot, params, seed)

    cycle.planner.begin = note  # type: ignore[method-assign]
    caps = [3, 2, 1, 0]
    for index, prompt in enumerate(PROMPTS):
        params = greedy(24, max_draft=caps[index], min_tokens_per_s=1.0 + index)
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=params))
    while cycle.has_work:
        for item in cycle.step().rounds:
            assert item.num_planned <= caps[int(item.request_id)]
    assert len(begun) == 4 + cycle.load.total_sent_back > 4
    by_seed: dict[int, set[float]] = {}
    for seed, params in begun:
        by_seed.setdefault(seed, set()).add(params.min_tokens_per_s)
    assert sorted(by_seed.values(), key=min) == [{1.0}, {2.0}, {3.0}, {4.0}]


def test_abort_returns_the_pages_of_a_request_that_waits_again(target: Target) -> None:
    """UC-056, UC-059: and nobody else's tokens change."""
    cycle = make_cycle(target, toy_drafter(target), num_positions=76)
    for index, prompt in enumerate(PROMPTS):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(24)))
    found: dict[str, list[int]] = {str(i): [] for i in range(4)}
    aborted: set[str] = set()
    while cycle.has_work:
        for item in cycle.step().rounds:
            assert item.request_id not in aborted
            found[item.request_id].extend(item.token_ids)
        waiting = [live.request.id for live in cycle._admission._waiting if live.was_sent_back]
        for name in waiting:
            assert cycle.abort(name)
            aborted.add(name)
            cycle.check()
    assert aborted
    for index, prompt in enumerate(PROMPTS):
        expected = decode_slowly(target, prompt, 24)
        name = str(index)
        assert found[name] == (expected[: len(found[name])] if name in aborted else expected)
    load = cycle.load
    assert (load.num_waiting, load.num_running) == (0, 0)
    assert load.num_free_pages + load.num_cached_pages == load.num_pages


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_moment_leaves_no_page_behind(target: Target, num_steps: int) -> None:
    cycle = make_cycle(target, packed(toy_drafter(target)), num_positions=76, max_step_tokens=12)
    for index, prompt in enumerate(PROMPTS):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(24)))
    for _ in range(num_steps):
        cycle.step()
    for index in range(4):
        cycle.abort(str(index))
        cycle.check()
    assert not cycle.has_work
    load = cycle.load
    assert load.num_free_pages + load.num_cached_pages == load.num_pages
    assert run(cycle, PROMPTS[:2], greedy(9)) == [decode_slowly(target, p, 9) for p in PROMPTS[:2]]


def make_line(**changes: Any) -> tuple[Admission, KVCache]:
    cache = KVCache(num_pages=17, page_size=4, max_requests=8, max_positions=128)
    values: dict[str, Any] = {"max_positions": 128, "block_size": 3, "reserves_all": False}
    return Admission(cache=cache, **{**values, **changes}), cache


def make_live(target: Target, arrival: int, *, num_prompt: int, max_tokens: int = 4) -> LiveRequest:
    return LiveRequest(
        Request(id=str(arrival), prompt_ids=[1] * num_prompt, params=greedy(max_tokens)),
        arrival=arrival,
        seed=0,
        eos_ids=(),
        vocab_size=48,
        max_positions=128,
        stop_text=None,
        device=target.device,
    )


def test_small_requests_pass_a_huge_one_that_waits_for_pages_but_not_for_ever(
    target: Target,
) -> None:
    line, cache = make_line()
    running = make_live(target, 0, num_prompt=20)
    line.submit(running)
    assert line.admit([]) == [running]
    line.submit(make_live(target, 1, num_prompt=56))  # needs all but one of sixteen pages
    passed = 0
    for arrival in range(2, 30):
        line.submit(make_live(target, arrival, num_prompt=1))
        started = line.admit([running])
        assert len(started) <= 1
        for live in started:
            passed += 1
            cache.close(live.slot)  # done at once
    assert passed == 8
    cache.close(running.slot)
    started = line.admit([])
    assert started[0].request.id == "1"


def test_requests_of_one_size_start_in_order_of_arrival(target: Target) -> None:
    line, _ = make_line()
    for arrival in range(12):
        line.submit(make_live(target, arrival, num_prompt=2))
    assert [live.arrival for live in line.admit([])] == list(range(5))  # each with a page to grow
    assert len(line) == 7


def test_a_line_refuses_what_could_never_start(target: Target) -> None:
    line, _ = make_line()
    with pytest.raises(InputError, match="needs 103 positions, but the cache holds 64"):
        line.submit(make_live(target, 0, num_prompt=60, max_tokens=40))


def long_prompt_beside_three(target: Target, **changes: Any) -> Cycle:
    cycle = make_cycle(target, toy_drafter(target), max_step_tokens=32, **changes)
    for index in range(3):
        cycle.submit(Request(id=str(index), prompt_ids=[1, 2, 3 + index], params=greedy(60)))
    cycle.step()
    cycle.submit(Request(id="long", prompt_ids=[1 + i % 40 for i in range(100)], params=greedy(4)))
    return cycle


@pytest.mark.parametrize(("changes", "share"), [({}, 8), ({"max_prompt_tokens": 5}, 5)])
def test_decoding_goes_on_in_every_step_beside_a_long_prompt(
    target: Target, changes: dict[str, int], share: int
) -> None:
    cycle = long_prompt_beside_three(target, **changes)
    num_steps = 0
    while True:
        result = cycle.step()
        by_request = {item.request_id for item in result.rounds if not item.is_prefill}
        assert by_request == {"0", "1", "2"}
        assert result.num_prompt_tokens <= share
        num_steps += 1
        if any(item.request_id == "long" for item in result.rounds):
            break
    assert num_steps == -(-100 // share)


def test_a_prompt_alone_takes_the_whole_step(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target), max_step_tokens=32)
    cycle.submit(Request(id="long", prompt_ids=[1 + i % 40 for i in range(100)], params=greedy(4)))
    assert [cycle.step().num_prompt_tokens for _ in range(4)] == [32, 32, 32, 4]


def test_a_short_prompt_does_not_wait_for_a_long_one(target: Target) -> None:
    cycle = long_prompt_beside_three(target, max_requests=5)
    cycle.submit(Request(id="short", prompt_ids=[5, 6, 7], params=greedy(2)))
    first = [item.request_id for _ in range(3) for item in cycle.step().rounds if item.is_prefill]
    assert first == ["short"]


def test_prompts_get_on_beside_windows_that_fill_a_step(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target), max_step_tokens=8, max_prompt_tokens=8)
    for index in range(3):
        cycle.submit(Request(id=str(index), prompt_ids=[1, 2, 3 + index], params=greedy(30)))
    while cycle.load.num_decoding < 3:
        cycle.step()
    cycle.submit(Request(id="new", prompt_ids=[9] * 30, params=greedy(2)))
    while cycle.step().num_prompt_tokens == 0:
        pass
    assert cycle.load.num_decoding == 3


def test_the_load_says_who_waits_reads_and_decodes(target: Target) -> None:
    cycle = make_cycle(target, None, max_requests=2, num_positions=1024, max_step_tokens=8)
    for index in range(3):
        prompt = [1 + index, 2, *[9] * (index * 20)]
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(20)))
    assert (cycle.load.num_waiting, cycle.load.num_running) == (3, 0)
    cycle.step()
    load = cycle.load
    assert (load.num_waiting, load.num_reading, load.num_decoding) == (1, 1, 1)
    assert (load.num_running, load.max_requests) == (2, 2)
    assert (load.num_pages, load.page_size) == (256, 4)
    assert load.num_free_pages == 256 - 1 - 6
    assert load.total_prompt_tokens == 2 + 22


def test_an_option_that_cannot_be_served_is_refused_when_it_is_submitted(target: Target) -> None:
    """Not in a later step, where it would be everybody's error."""
    cycle = make_cycle(target, None)
    with pytest.raises(InputError, match="logit_bias names token 99"):
        cycle.submit(Request(id="0", prompt_ids=[1], params=greedy(4, logit_bias={99: 1.0})))
    assert not cycle.has_work


def test_every_answer_ends_as_it_should_under_pressure(target: Target) -> None:
    """A crowd in a small cache: all end by length, in a bounded number of steps."""
    cycle = make_cycle(target, packed(toy_drafter(target)), num_positions=80, max_requests=4)
    prompts = [PROMPTS[i % 4] for i in range(12)]
    for index, prompt in enumerate(prompts):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=greedy(8 + index)))
    reasons: dict[str, Any] = {}
    for _ in range(600):
        if not cycle.has_work:
            break
        for item in cycle.step().rounds:
            if item.finish_reason is not None:
                reasons[item.request_id] = item.finish_reason
    assert reasons == {str(i): FinishReason.LENGTH for i in range(12)}
