"""Attention where no operators run, against the reference, which takes requests one by one."""

import gc

import pytest
import torch
from hypothesis import given

from dspark.kernels.padded_attention import _plans, padded_attention
from tests.kernels.toy_steps import Case, Step, cases, plain_case


@given(case=cases)
def test_it_is_its_reference(case: Case) -> None:
    """Also in pages: unused rows hold NaN, and unused places of the tables lead nowhere."""
    step = Step(case)
    pages = [step.k_pages.clone() for _ in range(2)], [step.v_pages.clone() for _ in range(2)]
    out = step.run(padded_attention, pages[0][0], pages[1][0])
    expected = step.run(torch.ops.dspark.attention_reference, pages[0][1], pages[1][1])
    tolerance = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2**-7, 2**-7)}[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance[0], atol=tolerance[1])
    for written, wanted in pages:
        assert torch.equal(written.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_bytes", [False, True])
def test_a_token_that_sees_nothing_gets_zeros(has_bytes: bool, has_sinks: bool) -> None:
    step = Step(plain_case(requests=[(5, 3), (0, 1)], has_bytes=has_bytes, has_sinks=has_sinks))
    step.visible_N = torch.tensor([6, 0, 8, 0], dtype=torch.int32)
    out = step.run(padded_attention, step.k_pages, step.v_pages)
    assert not bool(out[[1, 3]].any())
    assert bool(out[[0, 2]].isfinite().all())
    assert bool(out[[0, 2]].any())


def test_what_a_step_sees_is_worked_out_once_for_all_layers_and_forgotten_with_it() -> None:
    """A window of its own is another matter."""
    step = Step(plain_case(requests=[(0, 40), (200, 9), (17, 1), (9, 0), (700, 3)]))
    gc.collect()
    before = len(_plans)
    first = step.run(padded_attention, step.k_pages, step.v_pages)
    assert torch.equal(step.run(padded_attention, step.k_pages, step.v_pages), first)
    assert len(_plans) == before + 1
    assert len(_plans[step.visible_N]) == 1
    (plan,) = _plans[step.visible_N].values()
    assert sorted(len(group.tokens_M) for group in plan.groups) == [3, 10, 40]
    narrow = Step(plain_case(requests=[(0, 40), (200, 9), (17, 1), (9, 0), (700, 3)], window=3))
    narrow.visible_N = step.visible_N
    assert not torch.equal(narrow.run(padded_attention, step.k_pages, step.v_pages), first)
    assert len(_plans[step.visible_N]) == 2
    del step, narrow, plan
    gc.collect()
    assert len(_plans) == before
