"""The cycle against plain decoding: same tokens, whatever is drafted, batched or cut short."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.policies import Adaptive, Search
from dspark.core import Coupling, DraftBlock, FinishReason, Origin, Request, SamplingParams
from dspark.data.hidden_states import OnlineStates
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.draft_pass import DraftPass
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest, round_table
from dspark.engine.proposer import StepStates
from dspark.errors import InputError, NumericsError
from dspark.kernels.rounds import RoundTable
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from tests.algorithms.toy_costs import linear_cost
from tests.data.toy_answers import answer as toy_answer
from tests.engine.toy_cycles import PROMPTS, decode_slowly, make_cycle, packed, run
from tests.toys import EOS_ID, VOCAB_SIZE, toy_drafter, toy_target


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return toy_drafter(target)


class OracleDraft:
    """Proposes what the test says: right for `num_right` slots, then a wrong token."""

    def __init__(
        self, answers: dict[str, list[int]], num_right: Sequence[int], block_size: int
    ) -> None:
        self.block_size = block_size
        self.tap_layers: tuple[int, ...] = ()
        self.vocabulary: DraftVocabulary | None = None
        self.num_calls = 0
        self._answers = answers
        self._num_right = num_right

    def feed(self, states: StepStates) -> None:
        pass

    def look(self, _requests: Sequence[LiveRequest]) -> dict[int, list[float]]:
        return {}

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        pass

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, rounds: object
    ) -> DraftBlock:
        rows = []
        for live in requests:
            answer = self._answers[live.request.id]
            right = self._num_right[(self.num_calls + int(live.request.id)) % len(self._num_right)]
            row = []
            for slot in range(self.block_size):
                at = live.num_answer + slot
                truth = answer[at] if at < len(answer) else 0
                row.append(truth if slot < right else (truth + 1) % VOCAB_SIZE)
            rows.append(row)
        self.num_calls += 1
        return DraftBlock(tokens_RK=torch.tensor(rows), probs_RKS=None, confidence_RK=None)


def rounds_of(cycle: Cycle, lives: list[Any]) -> RoundTable:
    return round_table(lives, device=cycle._target.device)


def oracle_cycle(
    target: Target, answers: Sequence[list[int]], num_right: Sequence[int], **changes: Any
) -> tuple[Cycle, OracleDraft]:
    cycle = make_cycle(target, toy_drafter(target, block_size=5), **changes)
    oracle = OracleDraft({str(i): a for i, a in enumerate(answers)}, num_right, 5)
    cycle._proposer = oracle
    return cycle, oracle


@pytest.mark.parametrize("max_step_tokens", [512, 9])
@pytest.mark.parametrize("width", [0, 1, 3, None])
def test_greedy_equals_the_slow_reference(
    target: Target, drafter: Drafter, width: int | None, max_step_tokens: int
) -> None:
    """UC-013, UC-060: every width, prompts in one piece and in chunks."""
    cycle = make_cycle(target, drafter, width=width, max_step_tokens=max_step_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected = [decode_slowly(target, prompt, 24) for prompt in PROMPTS]
    assert run(cycle, PROMPTS, params) == expected


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_sequential_head_decodes_losslessly(target: Target, kind: str) -> None:
    """UC-092: nothing asks for one kind of drafter only."""
    drafter = toy_drafter(target, markov_head_type=kind)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    found = run(make_cycle(target, drafter), PROMPTS, params)
    assert found == [decode_slowly(target, prompt, 16) for prompt in PROMPTS]


@pytest.mark.parametrize("seed", [0, 7])
def test_seeded_text_is_a_function_of_seed_prompt_and_target_alone(
    target: Target, drafter: Drafter, seed: int
) -> None:
    """Widths, batch sizes and drafters change nothing (method section 4)."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20)
    expected = [run(make_cycle(target, None), [prompt], params)[0] for prompt in PROMPTS]
    drafters = [
        drafter,
        toy_drafter(target, seed=99),
        toy_drafter(target, markov_rank=0, enable_confidence_head=False),
        toy_drafter(target, d2t_S=torch.arange(0, VOCAB_SIZE, 3)),
        packed(toy_drafter(target, d2t_S=torch.arange(0, VOCAB_SIZE, 3))),
    ]
    for other in drafters:
        assert run(make_cycle(target, other), PROMPTS, params) == expected
    wide = toy_drafter(target, block_size=7)
    for width in range(8):
        assert run(make_cycle(target, wide, width=width), PROMPTS, params) == expected
    crowd = [*PROMPTS] * 4
    found = run(make_cycle(target, drafter, max_requests=16, num_positions=4096), crowd, params)
    assert found == expected * 4


def test_a_constant_wrong_drafter_costs_acceptance_only(target: Target) -> None:
    """UC-011: the first drafted token is verified too."""
    answers = [decode_slowly(target, prompt, 12) for prompt in PROMPTS]
    cycle, oracle = oracle_cycle(target, answers, [0])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert run(cycle, PROMPTS, params) == answers
    assert oracle.num_calls == 10  # 12 tokens: one from the prompt, the last two need one draft


@pytest.mark.parametrize("num_right", [[5], [0, 1, 3, 5], [2], [4, 0]])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 13])
def test_max_tokens_is_exact_for_any_acceptance(
    target: Target, num_right: list[int], max_tokens: int
) -> None:
    """UC-025, UC-026, UC-061: rows accept 0, 1, 3, K drafts and end at different steps."""
    answers = [decode_slowly(target, prompt, 16) for prompt in PROMPTS]
    cycle, _ = oracle_cycle(target, answers, num_right)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    assert run(cycle, PROMPTS, params) == [answer[:max_tokens] for answer in answers]


@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 5, 6, None])
def test_every_width_copies_names_as_plain_decoding_does(
    target: Target, drafter: Drafter, width: int | None
) -> None:
    """UC-060, UC-090: from none to beyond a block, the default among them; a block is the most."""
    prompt = [1, *[11, 12, 13, 14, 15] * 6, 11]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    cycle = make_cycle(target, drafter, width=width)
    cycle.submit(Request(id="0", prompt_ids=prompt, params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    assert [t for item in rounds for t in item.token_ids] == decode_slowly(target, prompt, 24)
    most = drafter.config.block_size
    assert max(item.num_planned for item in rounds) == min(most if width is None else width, most)


def test_who_shares_a_step_changes_no_row_of_what_is_accepted(target: Target) -> None:
    """UC-061: rows that accept 0, 1, 3 and 5 a round join and leave at different steps."""
    num_right, max_tokens = [0, 1, 3, 5], [9, 16, 12, 16]
    answers = [decode_slowly(target, prompt, 16) for prompt in PROMPTS]

    class Steady(OracleDraft):
        """Each request has its own number of right tokens, whatever the step."""

        def propose(self, requests: Sequence[LiveRequest], **rest: Any) -> DraftBlock:
            self.num_calls = 0
            return super().propose(requests, **rest)

    def traces(names: Sequence[int], *, wait: int) -> dict[str, list[Any]]:
        cycle = make_cycle(target, toy_drafter(target, block_size=5))
        cycle._proposer = Steady({str(i): a for i, a in enumerate(answers)}, num_right, 5)
        found: dict[str, list[Any]] = {str(name): [] for name in names}
        waiting, step = list(names), 0
        while waiting or cycle.has_work:
            if waiting and step % wait == 0:
                name = waiting.pop(0)
                params = SamplingParams(
                    temperature=0.0, max_tokens=max_tokens[name], ignore_eos=True
                )
                cycle.submit(Request(id=str(name), prompt_ids=PROMPTS[name], params=params))
            for item in cycle.step().rounds:
                found[item.request_id].append((list(item.token_ids), item.num_accepted))
            step += 1
        return found

    together = traces(range(4), wait=2)
    for name in range(4):
        assert together[str(name)] == traces([name], wait=1)[str(name)]
    assert [max(n for _, n in together[str(name)]) for name in range(4)] == num_right


def test_a_window_that_wraps_while_drafts_are_rejected_keeps_the_text() -> None:
    """UC-055: 60 tokens through windows of 8, blocks of 5 of which all, some or none are right."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=8,
        pad_token_id=0,
        eos_token_id=EOS_ID,
    )
    model = MistralForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    target = Target.wrap(model)
    assert set(target.spec.layer_windows) == {8}
    answers = [decode_slowly(target, prompt, 60) for prompt in PROMPTS[:2]]
    assert len(set(answers[0])) > 8
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    cycle, _ = oracle_cycle(target, answers, [5, 0, 3, 1, 4, 2])
    assert run(cycle, PROMPTS[:2], params) == answers


class Recorder:
    """A proposer that drafts nothing right and keeps what it was fed, by position."""

    block_size, num_ahead = 4, 0
    vocabulary: DraftVocabulary | None = None

    def __init__(self, tap_layers: Sequence[int]) -> None:
        self.tap_layers = tuple(tap_layers)
        self.taps: dict[int, torch.Tensor] = {}

    def feed(self, states: StepStates) -> None:
        self.taps |= dict(zip(states.layout.positions_N.tolist(), states.taps_NM, strict=True))

    def look(self, _requests: Sequence[LiveRequest]) -> dict[int, list[float]]:
        return {}

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        """Nothing was put off."""

    def propose(self, requests: Sequence[LiveRequest], **_: object) -> DraftBlock:
        tokens_RK = torch.zeros(len(requests), self.block_size, dtype=torch.int64)
        return DraftBlock(tokens_RK=tokens_RK, probs_RKS=None, confidence_RK=None)


@pytest.mark.parametrize("max_step_tokens", [512, 9])
def test_taps_that_serving_feeds_are_those_that_training_reads(max_step_tokens: int) -> None:
    """UC-088: the embedding, the first, a middle and the last layer, and the normed last state."""
    target = toy_target(num_hidden_layers=4)
    layers = (-1, 0, 2, 3, 4)
    cycle = make_cycle(target, toy_drafter(target), max_step_tokens=max_step_tokens)
    recorder = Recorder(layers)
    cycle._proposer = recorder
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (answer,) = run(cycle, [PROMPTS[1]], params)
    source = OnlineStates(target, tap_layers=layers)
    (read,) = source.read([toy_answer(0, prompt=list(PROMPTS[1]), ids=answer[:-1])])
    found = torch.stack([recorder.taps[position] for position in range(len(read.taps_NM))])
    torch.testing.assert_close(found, read.taps_NM, atol=1e-4, rtol=1e-4)
    parts = found.chunk(len(layers), dim=1)
    for one, other in pairwise(parts):
        assert not torch.allclose(one, other, atol=0.1)  # a neighbour's tensor would show


def test_a_perfect_drafter_accepts_everything_and_is_counted_so(target: Target) -> None:
    answers = [decode_slowly(target, PROMPTS[0], 19)]
    cycle, _ = oracle_cycle(target, answers, [5])
    params = SamplingParams(temperature=0.0, max_tokens=19, ignore_eos=True)
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    assert [len(item.token_ids) for item in rounds] == [1, 6, 6, 6]
    assert [item.num_accepted for item in rounds] == [0, 5, 5, 5]
    assert rounds[0].is_prefill
    assert rounds[1].origins == [*[Origin.ACCEPTED] * 5, Origin.BONUS]
    assert rounds[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("index", range(7))
def test_a_stop_token_ends_the_answer_wherever_it_lands_in_a_block(
    target: Target, index: int
) -> None:
    """UC-021, UC-030: nothing after it, and only committed tokens are counted."""
    answer = decode_slowly(target, PROMPTS[0], 12)
    at = next(i for i in range(index, 12) if answer[i] not in answer[:i])
    cycle, oracle = oracle_cycle(target, [answer], [5])
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[answer[at]]
    )
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    assert [t for item in rounds for t in item.token_ids] == answer[: at + 1]
    assert rounds[-1].finish_reason is FinishReason.STOP
    drafted = (at - 1) // 6 if at else -1  # whole rounds of six before the one that ends it
    assert sum(item.num_accepted for item in rounds) == (
        5 * drafted + min((at - 1) % 6 + 1, 5) if at else 0
    )
    assert oracle.num_calls == len(rounds) - 1  # nobody drafts for an answer that has ended
    assert len(rounds[-1].origins) == len(rounds[-1].token_ids)


@pytest.mark.parametrize("width", [1, 5])
def test_a_drafted_end_that_the_target_does_not_want_ends_nothing(
    target: Target, width: int
) -> None:
    """UC-028: only a committed EOS finishes an answer."""
    params = SamplingParams(temperature=0.0, max_tokens=19, logit_bias={EOS_ID: -1000.0})
    expected = run(make_cycle(target, None), [PROMPTS[0]], params)
    cycle, _ = oracle_cycle(target, [[EOS_ID] * 19], [width])
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    assert [[t for item in rounds for t in item.token_ids]] == expected
    assert sum(item.num_accepted for item in rounds) == 0
    assert any(item.num_planned for item in rounds)
    assert rounds[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_no_counter_runs_beyond_a_limit_inside_a_block(target: Target, most: int) -> None:
    """UC-027: what a block holds behind the last token of an answer is counted nowhere."""
    answer = decode_slowly(target, PROMPTS[0], 16)
    cycle, _ = oracle_cycle(target, [answer], [5])
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    assert [t for item in rounds for t in item.token_ids] == answer[:most]
    for item in rounds:
        assert item.num_accepted <= len(item.token_ids) == len(item.origins)


@pytest.mark.parametrize("width", [0, 1, 4])
def test_min_tokens_counts_tokens(target: Target, drafter: Drafter, width: int) -> None:
    """UC-029: a target that always wants EOS gives exactly min_tokens others, then EOS."""
    params = SamplingParams(
        temperature=0.0, max_tokens=20, min_tokens=6, logit_bias={EOS_ID: 1000.0}
    )
    (answer,) = run(make_cycle(target, drafter, width=width), [PROMPTS[0]], params)
    assert len(answer) == 7
    assert answer[-1] == EOS_ID
    assert EOS_ID not in answer[:-1]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.6},
        {"presence_penalty": 0.6},
        {"logit_bias": {7: 3.0, 9: -4.0}},
        {"bad_words": [[7], [17, 34], [8, 9]]},
        {"top_k": 1, "temperature": 1.0},
        {"top_p": 1e-6, "temperature": 1.0},
        {"temperature": 1.0, "seed": 3, "top_k": 4, "repetition_penalty": 1.2},
        {"temperature": 0.7, "seed": 3, "min_p": 0.2, "frequency_penalty": 0.5},
    ],
)
def test_options_act_inside_a_block_as_they_do_token_by_token(
    target: Target, drafter: Drafter, options: dict[str, Any]
) -> None:
    """UC-031, UC-034: penalties, bans and filters look at the drafted prefix."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options})
    expected = run(make_cycle(target, None), PROMPTS, params)
    assert run(make_cycle(target, drafter), PROMPTS, params) == expected
    oracle, _ = oracle_cycle(target, expected, [5, 3, 0])
    if params.is_greedy or params.seed is not None:
        assert run(oracle, PROMPTS, params) == expected


def test_the_context_ends_the_answer_at_its_last_position(target: Target, drafter: Drafter) -> None:
    """The window meets the context limit: every position is used, none beyond."""
    prompt = [1 + i % 40 for i in range(120)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    cycle = make_cycle(target, drafter)
    cycle.submit(Request(id="0", prompt_ids=prompt, params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    tokens = [t for item in rounds for t in item.token_ids]
    assert tokens == decode_slowly(target, prompt, 8)
    assert rounds[-1].finish_reason is FinishReason.CONTEXT


def test_mixed_temperatures_leave_greedy_rows_as_they_are_alone(
    target: Target, drafter: Drafter
) -> None:
    """UC-007, UC-037."""
    each = [
        SamplingParams(temperature=t, max_tokens=16, ignore_eos=True, seed=s)
        for t, s in [(0.0, None), (1.0, 5), (1e-6, None), (0.7, None)]
    ]
    found = run(make_cycle(target, drafter), PROMPTS, each)
    for index in (0, 1, 2):
        alone = run(make_cycle(target, None), [PROMPTS[index]], each[index])[0]
        assert found[index] == alone


def test_requests_that_operators_serve_share_steps_with_those_they_cannot(
    target: Target,
) -> None:
    """UC-007, UC-034: each answer is the one that the request gets alone, without a drafter."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 6, "top_k": 5},
        {"temperature": 0.0, "num_logprobs": 2},
        {"temperature": 0.0, "min_tokens": 4, "ignore_eos": False},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.8},
    ]
    each = [SamplingParams(**{"max_tokens": 16, "ignore_eos": True, **o}) for o in options]
    prompts = [*PROMPTS, *PROMPTS]
    drafter = packed(toy_drafter(target))
    cycle = make_cycle(target, drafter, max_requests=8, num_positions=2048)
    found = run(cycle, prompts, each)
    for index in range(6):
        assert found[index] == run(make_cycle(target, None), [prompts[index]], each[index])[0]
    assert [len(answer) for answer in found[6:]] == [16, 16]


def test_width_zero_calls_no_drafter_and_reads_one_token_of_each_request(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-142: what is off costs neither a draft nor a row of the target's pass."""
    answers = [decode_slowly(target, prompt, 12) for prompt in PROMPTS]
    cycle, oracle = oracle_cycle(target, answers, [5])
    forward, passes = Target.forward, []

    def counted(self: Target, ids_N: torch.Tensor, **rest: Any) -> Any:
        passes.append((len(rest["layout"].query_starts_R1) - 1, len(ids_N)))
        return forward(self, ids_N, **rest)

    monkeypatch.setattr(Target, "forward", counted)
    off = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, max_draft=0)
    assert run(cycle, PROMPTS, off) == answers
    assert oracle.num_calls == 0
    decoding = passes[-11:]  # behind the prompts', which gave the first tokens
    assert decoding == [(len(PROMPTS), len(PROMPTS))] * 11


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_a_narrower_draft_is_the_beginning_of_the_whole_block(
    target: Target, drafter: Drafter, params: dict[str, Any]
) -> None:
    """UC-090: the block is the one that was trained, whatever of it is verified."""

    def first_round(width: int | None) -> Any:
        cycle = make_cycle(target, drafter, width=width)
        options = SamplingParams(max_tokens=20, ignore_eos=True, **params)
        cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=options))
        rounds: list[Any] = []
        while not rounds:
            rounds = [item for item in cycle.step().rounds if not item.is_prefill]
        return rounds[0]

    whole = first_round(None)
    assert whole.num_planned == len(whole.offered_ids) == drafter.config.block_size
    for width in range(1, drafter.config.block_size):
        found = first_round(width)
        assert found.num_planned == width
        assert list(found.offered_ids[:width]) == list(whole.offered_ids[:width])


def test_drafts_of_a_warm_drafter_equal_those_of_a_freshly_primed_one(
    target: Target, drafter: Drafter
) -> None:
    """UC-051: the drafter's context never drifts, after rejects and width 0 alike."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    warm = make_cycle(target, drafter)
    warm.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    for _ in range(12):
        warm.step()
    (live,) = warm._live
    fresh = make_cycle(target, drafter)
    prompt = live.tokens[:-1]
    forced = SamplingParams(
        temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias={live.tokens[-1]: 1e4}
    )
    fresh.submit(Request(id="0", prompt_ids=prompt, params=forced))
    fresh.step()
    (other,) = fresh._live
    assert other.tokens == live.tokens
    with torch.inference_mode():
        assert isinstance(warm._proposer, DraftPass)
        assert isinstance(fresh._proposer, DraftPass)
        hidden = warm._proposer._backbone([live], warm._cache, rounds_of(warm, [live]))
        expected = fresh._proposer._backbone([other], fresh._cache, rounds_of(fresh, [other]))
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


def test_invalid_draft_ids_are_rejected_without_harm(target: Target) -> None:
    """UC-009."""
    answers = [decode_slowly(target, PROMPTS[0], 12)]
    cycle, oracle = oracle_cycle(target, answers, [5])
    propose = oracle.propose

    def with_invalid(requests: Any, **kwargs: Any) -> DraftBlock:
        tokens = propose(requests, **kwargs).tokens_RK
        tokens[:, 1], tokens[:, 3] = -1, VOCAB_SIZE
        return DraftBlock(tokens_RK=tokens, probs_RKS=None, confidence_RK=None)

    oracle.propose = with_invalid  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert run(cycle, [PROMPTS[0]], params) == answers


def test_a_proposer_may_offer_less_than_a_block(target: Target) -> None:
    """Rows that offer two, none or all: no more is verified, and only offers are counted."""
    answers = [decode_slowly(target, prompt, 12) for prompt in PROMPTS]
    cycle, oracle = oracle_cycle(target, answers, [5])
    propose = oracle.propose
    num_offered = {"0": 2, "1": 0, "2": 5, "3": 5}

    def with_few(requests: Sequence[LiveRequest], **kwargs: Any) -> DraftBlock:
        return DraftBlock(
            tokens_RK=propose(requests, **kwargs).tokens_RK,
            probs_RKS=None,
            confidence_RK=None,
            num_offered=[num_offered[live.request.id] for live in requests],
        )

    oracle.propose = with_few  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=params))
    found: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    while cycle.has_work:
        for item in cycle.step().rounds:
            found[item.request_id].extend(item.token_ids)
            assert item.num_planned <= item.num_offered <= num_offered[item.request_id]
            assert item.is_prefill or len(item.token_ids) == 1 + item.num_accepted
    assert list(found.values()) == answers


def test_a_round_carries_the_confidences_of_what_it_offered(target: Target) -> None:
    """Of a head, or of its distributions; not a prompt pass, not a round that drafted nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for has_head in (True, False):
        drafter = toy_drafter(target, enable_confidence_head=has_head)
        cycle = make_cycle(target, drafter)
        cycle.submit(Request(id="drafted", prompt_ids=PROMPTS[0], params=params))
        cycle.submit(
            Request(id="plain", prompt_ids=PROMPTS[1], params=replace(params, max_draft=0))
        )
        rounds = []
        while cycle.has_work:
            rounds.extend(cycle.step().rounds)
        for item in rounds:
            if item.num_offered:
                assert item.confidence_logits is not None
                assert len(item.confidence_logits) == item.num_offered == 4
                assert len(set(item.confidence_logits)) > 1
            else:
                assert item.confidence_logits is None
        assert any(item.num_offered for item in rounds)
        assert any(not item.num_offered and not item.is_prefill for item in rounds)


def test_positions_passed_to_the_target_have_no_gap_and_no_repeat(target: Target) -> None:
    """UC-053, UC-018: and a pass holds the anchor and the planned drafts, nothing more."""
    answers = [decode_slowly(target, PROMPTS[0], 20)]
    cycle, _ = oracle_cycle(target, answers, [0, 2, 5], width=3)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    expected_start = 0
    while cycle.has_work:
        before = [live.num_computed for live in cycle._live]
        result = cycle.step()
        (item,) = result.rounds
        if not item.is_prefill:
            assert before == [expected_start]
            assert result.num_verify_tokens == 1 + item.num_planned
        expected_start += len(item.token_ids) if not item.is_prefill else len(PROMPTS[0])


def test_aborted_requests_give_everything_back(target: Target, drafter: Drafter) -> None:
    """UC-056: waiting, half-read and decoding requests alike."""
    cycle = make_cycle(target, drafter, max_requests=2, max_step_tokens=8)
    free = cycle._cache.num_free_pages
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=params))
    cycle.step()
    cycle.step()
    assert all(cycle.abort(str(index)) for index in range(4))
    assert not cycle.abort("0")
    assert not cycle.has_work
    assert cycle._cache.num_free_pages == free
    cycle.check()
    assert run(cycle, PROMPTS[:1], params) == [decode_slowly(target, PROMPTS[0], 30)]


def test_an_engine_used_again_answers_as_a_fresh_one(target: Target, drafter: Drafter) -> None:
    """UC-050: long, short, long, a single token."""
    cycle = make_cycle(target, drafter)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    for prompt in (PROMPTS[1], PROMPTS[0], PROMPTS[1], [1]):
        assert run(cycle, [prompt], params) == [decode_slowly(target, prompt, 16)]


def test_a_drafter_trained_on_a_shorter_context_still_decodes_losslessly(target: Target) -> None:
    """UC-065."""
    drafter = toy_drafter(target, max_position_embeddings=16)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    found = run(make_cycle(target, drafter), [PROMPTS[1]], params)
    assert found == [decode_slowly(target, PROMPTS[1], 40)]


def test_unseeded_requests_at_temperature_one_differ(target: Target, drafter: Drafter) -> None:
    """UC-040; at temperature 0 they are equal."""
    hot = SamplingParams(temperature=1.0, max_tokens=16)
    assert len({tuple(a) for a in run(make_cycle(target, drafter), [PROMPTS[0]] * 4, hot)}) > 1
    cold = SamplingParams(temperature=0.0, max_tokens=16)
    assert len({tuple(a) for a in run(make_cycle(target, drafter), [PROMPTS[0]] * 4, cold)}) == 1


def test_logprobs_of_accepted_tokens_equal_those_of_plain_decoding(
    target: Target, drafter: Drafter
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, num_logprobs=3)

    def logprobs(cycle: Cycle) -> list[Any]:
        cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
        found = []
        while cycle.has_work:
            for item in cycle.step().rounds:
                found.extend(item.logprobs or ())
        return found

    answers = [decode_slowly(target, PROMPTS[0], 14)]
    plain = logprobs(make_cycle(target, None))
    for cycle in (make_cycle(target, drafter), oracle_cycle(target, answers, [5])[0]):
        spec = logprobs(cycle)
        assert len(spec) == len(plain) == 14
        for left, right in zip(spec, plain, strict=True):
            assert left.chosen == pytest.approx(right.chosen, abs=1e-4)
            assert [t for t, _ in left.top] == [t for t, _ in right.top]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty prompt"),
        ([1] * 128, {}, "takes 128 with the answer"),
        ([1, VOCAB_SIZE], {}, "token id 48"),
        ([1, -1], {}, "token id -1"),
        ([1], {"max_tokens": 0}, "0 tokens"),
        ([1], {"stop": ["x"]}, "no tokenizer"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias names token 48"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    target: Target, drafter: Drafter, prompt: list[int], options: dict[str, Any], message: str
) -> None:
    cycle = make_cycle(target, drafter)
    with pytest.raises(InputError, match=message):
        run(cycle, [prompt], SamplingParams(**options))


def test_a_request_larger_than_the_cache_is_refused(target: Target) -> None:
    cycle = make_cycle(target, None, num_positions=32)
    with pytest.raises(InputError, match="the cache holds 32"):
        cycle.submit(Request(id="0", prompt_ids=[1] * 20, params=SamplingParams(max_tokens=40)))


def test_a_request_id_in_use_is_refused(target: Target) -> None:
    cycle = make_cycle(target, None)
    params = SamplingParams(max_tokens=4)
    cycle.submit(Request(id="a", prompt_ids=[1, 2], params=params))
    with pytest.raises(InputError, match="in use"):
        cycle.submit(Request(id="a", prompt_ids=[1, 2], params=params))


def test_nan_logits_name_the_request(drafter: Drafter) -> None:
    broken = toy_target()
    with torch.no_grad():
        broken.model.lm_head.weight[3] = float("nan")
    cycle = make_cycle(broken, None)
    with pytest.raises(NumericsError, match="'0'"):
        run(cycle, [PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=4))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_drafter_that_overflows_costs_no_answer(
    target: Target, is_packed: bool, is_adaptive: bool
) -> None:
    """UC-157: one warning, a count, and the text of plain decoding."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    plain = run(make_cycle(target, None), PROMPTS, params)
    broken = toy_drafter(target)
    with torch.no_grad():
        broken.norm.weight.fill_(float("inf"))
    if is_packed:
        broken.pack()
    cycle = adaptive_cycle(target, broken) if is_adaptive else make_cycle(target, broken)
    with pytest.warns(UserWarning, match="Drafting is off") as warned:
        found = run(cycle, PROMPTS, params)
    assert found == plain
    assert cycle.load.total_broken_drafts == len(warned) == 1
    cycle.check()


@pytest.mark.parametrize(
    ("coupling", "is_packed"),
    [(Coupling.MAXIMAL, False), (Coupling.MAXIMAL, True), (Coupling.SHARED_NOISE, True)],
)
def test_the_distribution_of_three_tokens_is_the_targets(
    coupling: Coupling, is_packed: bool
) -> None:
    """The whole engine: the joint of 3 tokens over 6,000 unseeded answers, chi-square.

    The exact statement is enumerated in tests/algorithms/test_exactness.py; this one finds what
    only the assembly can break. A false alarm has probability 1e-4.
    """
    target = toy_target(vocab_size=6, pad_token_id=0, eos_token_id=None, scale=3.0)
    drafter = toy_drafter(target, vocab_size=6, mask_token_id=5, block_size=3)
    if is_packed:
        drafter.pack()
    cycle = make_cycle(target, drafter, max_requests=64, num_positions=64 * 16, is_checked=False)
    num_answers = 6000
    params = SamplingParams(temperature=1.0, max_tokens=4, coupling=coupling)
    answers = run(cycle, [[1, 2]] * num_answers, params)
    prefix = [[1, 2]]
    probabilities = [1.0]
    for _ in range(3):
        hidden = target.states([torch.tensor(p) for p in prefix], tap_layers=()).hidden_ND
        lasts = torch.tensor([len(p) for p in prefix]).cumsum(0) - 1
        probs = target.logits(hidden[lasts]).double().softmax(-1)
        probabilities = [
            p * float(probs[i, t]) for i, p in enumerate(probabilities) for t in range(6)
        ]
        prefix = [[*p, t] for p in prefix for t in range(6)]
    counts = dict.fromkeys((tuple(p[2:]) for p in prefix), 0)
    for answer in answers:
        counts[tuple(answer[:3])] += 1
    # cells expected fewer than 5 times are pooled
    expected = torch.tensor(probabilities, dtype=torch.float64) * num_answers
    observed = torch.tensor(list(counts.values()), dtype=torch.float64)
    is_rare = expected < 5
    if bool(is_rare.any()):
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
        observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    p_value = float(
        torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2))
    )
    assert freedom > 30
    assert p_value > 1e-4


def adaptive_cycle(
    target: Target, drafter: Drafter, *, search: Search | None = None, **changes: Any
) -> Cycle:
    """A cycle whose planner draws its own conclusions, on a clock of its own."""
    block_size = drafter.config.block_size
    cost = replace(linear_cost(base=2e-3, draft_base=1e-3), block_size=block_size)
    planner = AdaptivePlanner(Adaptive(search=search), block_size=block_size, cost=cost)
    values = {"num_positions": 2048, "page_size": 4, "max_requests": 4, "is_checked": True}
    return Cycle(
        target,
        drafter=drafter,
        config=CycleConfig(**{**values, **changes}),
        planner=planner,
        clock=count(0.0, 1e-3).__next__,
    )


@pytest.mark.parametrize("search", [None, *Search])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_text_is_that_of_plain_decoding_whatever_the_planner_does(
    target: Target, drafter: Drafter, search: Search | None, options: dict[str, Any]
) -> None:
    """UC-016: requests of different lengths that come and go; drafting on, off, and in part."""
    each = [SamplingParams(max_tokens=10 + 9 * i, ignore_eos=True, **options) for i in range(4)] * 2
    prompts = [*PROMPTS] * 2
    expected = run(make_cycle(target, None), prompts, each)
    cycle = adaptive_cycle(target, drafter, search=search)
    assert run(cycle, prompts, each) == expected
    records = list(cycle.planner.records)
    block_size = drafter.config.block_size
    assert any(record.num_drafting == 0 for record in records)
    assert any(0 < record.budget < record.num_drafting * block_size for record in records)
    assert all(record.seconds is not None for record in records)


def test_a_planner_is_told_what_its_plan_brought(target: Target, drafter: Drafter) -> None:
    cycle = adaptive_cycle(target, drafter)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    records = list(cycle.planner.records)
    assert [record.budget for record in records] == [item.num_planned for item in rounds[1:]]
    assert [sum(record.accepted) for record in records] == [i.num_accepted for i in rounds[1:]]


def test_a_cap_of_a_request_binds_the_planner_too(target: Target, drafter: Drafter) -> None:
    cycle = adaptive_cycle(target, drafter)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, max_draft=cap)
        for cap in (0, 1, 2, None)
    ]
    for index, (prompt, options) in enumerate(zip(PROMPTS, params, strict=True)):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=options))
    while cycle.has_work:
        for item in cycle.step().rounds:
            cap = params[int(item.request_id)].max_draft
            assert cap is None or item.num_planned <= cap
