"""The operator that judges a round against `process_logits` and `accept`, its reference."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.algorithms.acceptance import accept
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.logit_state import LogitState
from dspark.algorithms.sampling import RowContext, process_logits
from dspark.core import Coupling, SamplingParams
from dspark.kernels import selection
from dspark.kernels.decision import decide, has_fast_path
from dspark.kernels.rounds import DrawKind, RoundTable

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.3, coupling=Coupling.SHARED_NOISE),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, coupling=Coupling.MAXIMAL, seed=5),
    SamplingParams(temperature=0.8, top_p=0.7, seed=6),
    SamplingParams(temperature=1.2, top_k=3, min_p=0.05, coupling=Coupling.SHARED_NOISE),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.8),
    SamplingParams(temperature=0.0, top_k=2, top_p=0.5),
)


def table_of(params: Sequence[SamplingParams], *, seed: int) -> RoundTable:
    each = range(len(params))
    return RoundTable(
        [
            [DrawKind.of(p) for p in params],
            [seed + i for i in each],
            [20 + 3 * i for i in each],
            list(each),
            [0] * len(params),
            [p.top_k or 0 for p in params],
        ],
        [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]],
        device=torch.device("cpu"),
    )


def by_reference(
    logits_NV: Tensor, params: Sequence[SamplingParams], lengths: Sequence[int], **rest: object
) -> tuple[list[int], list[int]]:
    rows = [
        RowContext(
            state=LogitState(
                request_id="a", params=p, prompt_ids=[], eos_ids=[], vocab_size=logits_NV.shape[1]
            )
        )
        for p, length in zip(params, lengths, strict=True)
        for _ in range(length + 1)
    ]
    scores = process_logits(logits_NV, rows, operators=selection.operators())
    verdict = accept(scores=scores, lengths=lengths, **rest)  # type: ignore[arg-type]
    return list(verdict.num_accepted), list(verdict.next_tokens)


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    width=st.sampled_from([3, 47, 800, 2311]),
    num_slots=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    share=st.sampled_from([0.4, 1.0]),
    seed=st.integers(0, 9999),
    num_threads=st.sampled_from([1, 2, 3]),
)
def test_a_verdict_is_that_of_the_reference(
    instructions: str,
    kinds: list[SamplingParams],
    width: int,
    num_slots: int,
    dtype: torch.dtype,
    share: float,
    seed: int,
    num_threads: int,
) -> None:
    """UC-037: kinds may be mixed; drafts are right, wrong, impossible or no token at all."""
    generator = torch.Generator().manual_seed(seed)
    count = len(kinds)
    lengths = torch.randint(0, num_slots + 1, (count,), generator=generator)
    starts = (lengths + 1).cumsum(0) - (lengths + 1)
    logits_NV = (3 * torch.randn((int((lengths + 1).sum()), width), generator=generator)).to(dtype)
    vocabulary = None
    if share < 1.0:
        kept = torch.randperm(width, generator=generator)[: max(1, int(share * width))]
        vocabulary = DraftVocabulary.of(kept, vocab_size=width)
    num_columns = width if vocabulary is None else vocabulary.size
    tokens_RK = torch.randint(-1, width + 1, (count, num_slots), generator=generator)
    probs_RKS = torch.randn((count, num_slots, num_columns), generator=generator).softmax(-1)
    table = table_of(kinds, seed=seed)
    for r in range(count):  # most drafts are the target's own choice, and close to it
        for j in range(int(lengths[r])):
            row = logits_NV[starts[r] + j]
            if torch.rand((), generator=generator) < 0.8:
                tokens_RK[r, j] = row.argmax()
                q = row.float() if vocabulary is None else row.float()[vocabulary.d2t_S]
                probs_RKS[r, j] = (q + 0.1 * torch.randn(q.shape, generator=generator)).softmax(-1)
    if not any(DrawKind.of(p) is DrawKind.MAXIMAL for p in kinds):
        probs_RKS = None
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = decide(
            logits_NV,
            rounds=table,
            starts=starts.tolist(),
            lengths=lengths.tolist(),
            draft_tokens_RK=tokens_RK,
            draft_probs_RKS=probs_RKS,
            vocabulary=vocabulary,
        )
    finally:
        torch.set_num_threads(before)
    assert found == by_reference(
        logits_NV,
        kinds,
        lengths.tolist(),
        draft_tokens_RK=tokens_RK,
        draft_probs_RKS=probs_RKS,
        noise=table.noise,
        vocabulary=vocabulary,
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", KINDS)
def test_rows_that_are_not_finite_are_left_to_the_reference(
    instructions: str, params: SamplingParams, value: float
) -> None:
    logits_NV = torch.zeros((2, 40))
    logits_NV[1, 33] = value
    found = decide(
        logits_NV,
        rounds=table_of([params] * 2, seed=1),
        starts=[0, 1],
        lengths=[0, 0],
        draft_tokens_RK=torch.zeros((2, 0), dtype=torch.int64),
    )
    assert found is None


def test_only_what_the_operator_can_read_takes_the_fast_path(instructions: str) -> None:
    assert has_fast_path(torch.zeros(1, 3))
    assert not has_fast_path(torch.zeros(1, 3, dtype=torch.float16))


def test_rows_that_do_not_exist_are_refused(instructions: str) -> None:
    with pytest.raises(RuntimeError, match="has no rows for 2"):
        decide(
            torch.zeros((2, 5)),
            rounds=table_of(KINDS[:1], seed=0),
            starts=[0],
            lengths=[2],
            draft_tokens_RK=torch.zeros((1, 2), dtype=torch.int64),
        )
