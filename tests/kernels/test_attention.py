from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from dspark.kernels import byte_pages
from dspark.kernels.attention import attention
from tests.kernels.conftest import INSTRUCTION_SETS
from tests.kernels.toy_steps import Case, Step, cases, plain_case


@given(case=cases)
def test_the_operator_is_its_reference(instructions: str, case: Case) -> None:
    step = Step(case)
    pages = [step.k_pages.clone() for _ in range(2)], [step.v_pages.clone() for _ in range(2)]
    out = step.run(torch.ops.dspark.attention, pages[0][0], pages[1][0])
    expected = step.run(torch.ops.dspark.attention_reference, pages[0][1], pages[1][1])
    # bfloat16: weights that add up to 1 may be rounded (2^-9) before they meet values below 4.
    # int8: weights are rounded to 1/65535 of the largest.
    least = 5e-4 if case.has_bytes else 1e-5
    tolerance = {torch.float32: (1e-4, least), torch.bfloat16: (2**-7, 2**-7)}[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance[0], atol=tolerance[1])
    for written, wanted in pages:
        assert torch.equal(_numbers(written), _numbers(wanted))


def _numbers(pages: Tensor) -> Tensor:
    return pages if pages.dtype == torch.int8 else pages.nan_to_num(nan=7.0)


@given(case=cases)
def test_a_token_has_the_same_bits_alone_and_in_any_step(instructions: str, case: Case) -> None:
    step = Step(case)
    k_pages, v_pages = step.k_pages, step.v_pages
    out = step.run(torch.ops.dspark.attention, k_pages, v_pages)
    for n in range(len(out)):
        assert torch.equal(step.run_alone(n, k_pages, v_pages), out[n])


@pytest.mark.parametrize("has_bytes", [False, True])
@pytest.mark.parametrize("requests", [[(700, 300), (3, 1)], [(200, 9)], [(510, 4), (0, 1)]])
def test_bits_do_not_depend_on_the_number_of_threads(
    instructions: str, requests: list[tuple[int, int]], has_bytes: bool
) -> None:
    """Few tiles are cut where a thread's share ends."""
    num_threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        step = Step(plain_case(requests=requests, has_bytes=has_bytes))
        results.append(step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages))
    torch.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("has_bytes", [False, True])
def test_a_step_too_large_for_the_partial_sums_has_the_same_bits(
    instructions: str, has_bytes: bool
) -> None:
    """More than 32 MiB of partial sums: the tiles are worked off in groups."""
    case = plain_case(requests=[(3000, 1400)], num_kv_heads=8, head_dim=8, has_bytes=has_bytes)
    step = Step(case)
    out = step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)
    for n in (0, 1, 700, 1399):
        assert torch.equal(step.run_alone(n, step.k_pages, step.v_pages), out[n])


@pytest.mark.parametrize("has_bytes", [False, True])
def test_a_token_that_sees_nothing_gets_zeros(instructions: str, has_bytes: bool) -> None:
    step = Step(plain_case(requests=[(5, 3), (0, 1)], has_bytes=has_bytes))
    step.visible_N = torch.tensor([6, 0, 8, 0], dtype=torch.int32)
    for operator in (torch.ops.dspark.attention, torch.ops.dspark.attention_reference):
        out = step.run(operator, step.k_pages, step.v_pages)
        assert not bool(out[[1, 3]].any())
        assert bool(out[[0, 2]].isfinite().all())
        assert bool(out[[0, 2]].any())


@pytest.mark.parametrize("has_bytes", [False, True])
def test_a_broken_query_shows_and_spoils_no_other(instructions: str, has_bytes: bool) -> None:
    step = Step(plain_case(has_bytes=has_bytes))
    expected = step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)
    step.q_NHE[41] = torch.nan
    out = step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)
    assert bool(out[41].isnan().all())
    others = torch.arange(len(out)) != 41
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize(
    ("name", "value"), [("k_NGE", torch.nan), ("v_NGE", torch.nan), ("v_NGE", torch.inf)]
)
def test_a_broken_key_or_value_in_int8_shows_to_who_sees_it(
    instructions: str, name: str, value: float
) -> None:
    """Token 42 of 40 to 48 breaks: those before it and those of others have their old bits."""
    step = Step(plain_case(has_bytes=True))
    expected = step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)
    getattr(step, name)[42, 1, 5] = value
    out = step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)
    is_hit = torch.zeros(out.shape[:2], dtype=torch.bool)
    is_hit[42:49, 3:6] = True
    assert bool(out[is_hit].isnan().all())
    assert torch.equal(out[~is_hit], expected[~is_hit])


@given(case=cases.map(lambda case: replace(case, has_bytes=True, page_size=32)))
def test_int8_attends_with_the_same_bits_on_every_instruction_set(case: Case) -> None:
    results = []
    for number in range(len(INSTRUCTION_SETS)):
        if torch.ops.dspark.use_instructions(number):
            step = Step(case)
            results.append(step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_int8_have_room_for_the_largest_of_a_chunk(instructions: str, sign: int) -> None:
    """All positions of a chunk weigh as much as can be, and all values are as large as can be."""
    step = Step(plain_case(requests=[(511, 1)], has_bytes=True))
    at, request_N = torch.arange(511), torch.zeros(511, dtype=torch.int64)
    rows = torch.full((511, *step.k_NGE.shape[1:]), 2.0 * sign, dtype=step.k_NGE.dtype)
    slots = step.slots(step.block_tables_RP, request_N, at)
    for pages, new in ((step.k_pages, step.k_NGE), (step.v_pages, step.v_NGE)):
        byte_pages.write(pages, rows, slots, is_key=pages is step.k_pages)
        new.fill_(2.0 * sign)
    step.q_NHE.fill_(3.0)
    out = step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)
    torch.testing.assert_close(out, torch.full_like(out, 2.0 * sign), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["slots_N", "block_tables_RP", "query_starts_R1", "visible_N"])
def test_a_layout_that_leaves_the_pages_is_refused(instructions: str, name: str) -> None:
    step = Step(plain_case())
    getattr(step, name)[-1:] = 2**20
    with pytest.raises(RuntimeError):
        step.run(torch.ops.dspark.attention, step.k_pages, step.v_pages)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("is_two_way", [False, True])
def test_the_reference_is_dense_attention(window: int | None, is_two_way: bool) -> None:
    """Against PyTorch's own attention over keys laid out without pages."""
    case = plain_case(requests=[(0, 12)], window=window, is_two_way=is_two_way, dtype=torch.float32)
    step = Step(case)
    out = step.run(torch.ops.dspark.attention_reference, step.k_pages, step.v_pages)
    query, key = torch.arange(12)[:, None], torch.arange(12)[None]
    mask = (key < step.visible_N[:, None]) & (key > query - (window or 99))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (step.q_NHE, step.k_NGE, step.v_NGE)),
        attn_mask=mask,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))


@pytest.mark.parametrize("has_bytes", [False, True])
@pytest.mark.parametrize("name", ["attention", "attention_reference"])
def test_operators_keep_pytorchs_rules(instructions: str, name: str, has_bytes: bool) -> None:
    """Schema, mutation, shapes under `torch.compile` and dispatch, by PyTorch's own checker."""
    case = plain_case(requests=[(3, 2), (0, 1)], has_sinks=True, window=5, has_bytes=has_bytes)
    step = Step(case)
    if not has_bytes:
        step.k_pages.nan_to_num_()
        step.v_pages.nan_to_num_()

    def check(*arguments: object) -> Tensor:
        torch.library.opcheck(getattr(torch.ops.dspark, name).default, arguments)
        return step.q_NHE

    step.run(check, step.k_pages, step.v_pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_model_calls_the_operator_unchanged(dtype: torch.dtype) -> None:
    """`torch.compile` keeps attention as one opaque call, pages changed in place."""
    step = Step(plain_case(dtype=dtype))
    pages = [step.k_pages.clone() for _ in range(2)], [step.v_pages.clone() for _ in range(2)]

    def layer(k_pages: Tensor, v_pages: Tensor) -> Tensor:
        return 2 * attention(
            step.q_NHE * 0.5,
            step.k_NGE,
            step.v_NGE,
            k_pages,
            v_pages,
            step.block_tables_RP,
            step.query_starts_R1,
            step.visible_N,
            step.positions_N,
            step.slots_N,
            max_visible=step.max_visible,
            scale=0.125,
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(pages[0][0], pages[1][0]), layer(pages[0][1], pages[1][1]))
    assert torch.equal(pages[0][0].nan_to_num(), pages[0][1].nan_to_num())
