"""The operators around a drafter's backbone against the drafter's own modules, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.core import AttentionLayout, Coupling, DraftBlock, Request, SamplingParams
from dspark.engine.draft_pass import DraftPass
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest, round_table
from dspark.engine.proposer import StepStates
from dspark.models.drafter import Drafter, DrafterConfig
from dspark.models.drafter_kernels import context_weights, walk_weights

NUM_PAGES, PAGE_SIZE = 6, 8
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.0, seed=4),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, coupling=Coupling.MAXIMAL, seed=5),
    SamplingParams(temperature=0.9, top_p=0.6, seed=6),
    SamplingParams(temperature=1.1, top_k=9, top_p=0.9, min_p=0.02),
)


def packed_drafter(
    *,
    seed: int,
    vocab_size: int = 2000,
    num_drafted: int | None = None,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
    **changes: Any,
) -> Drafter:
    """A drafter with weights large enough that every part of it matters, packed for serving."""
    values: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "num_target_layers": 4,
        "target_layer_ids": (0, 1, 3),
        "block_size": 4,
        "mask_token_id": vocab_size - 1,
        "markov_rank": 6,
        "draft_vocab_size": num_drafted,
    }
    config = DrafterConfig(**{**values, **changes})
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn((2, vocab_size, config.hidden_size), generator=generator).to(dtype)
    drafter = Drafter(
        config,
        embed_weight_VD=tables[0],
        head_weight_VD=0.5 * tables[1],
        d2t_S=None
        if num_drafted is None
        else torch.randperm(vocab_size, generator=generator)[:num_drafted],
        generator=generator,
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    drafter = drafter.to(dtype).requires_grad_(requires_grad=False)
    drafter.pack(quantization=quantization)
    return drafter


def draft_pass(drafter: Drafter) -> DraftPass:
    return DraftPass(
        drafter,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        vocab_size=drafter.config.vocab_size,
    )


def live_requests(params: Sequence[SamplingParams], *, vocab_size: int) -> list[LiveRequest]:
    requests = [
        LiveRequest(
            Request(id=str(i), prompt_ids=[5, 3 + 7 * i], params=p),
            arrival=i,
            seed=11 * i if p.seed is None else p.seed,
            eos_ids=(),
            vocab_size=vocab_size,
            max_positions=64,
            stop_text=None,
            device=torch.device("cpu"),
        )
        for i, p in enumerate(params)
    ]
    for slot, live in enumerate(requests):
        live.start(slot, num_known=0)
    return requests


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    vocab_size=st.sampled_from([40, 2000]),
    is_subset=st.booleans(),
    head=st.sampled_from(["vanilla", "vanilla-odd", "gated", "rnn", "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    quantization=st.sampled_from([None, "int8"]),
    has_confidence=st.booleans(),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 9999),
)
def test_a_walk_is_that_of_the_modules(
    instructions: str,
    kinds: list[SamplingParams],
    vocab_size: int,
    is_subset: bool,
    head: str,
    dtype: torch.dtype,
    quantization: str | None,
    has_confidence: bool,
    num_threads: int,
    seed: int,
) -> None:
    """Kinds may be mixed; a row is cut between any number of threads."""
    drafter = packed_drafter(
        seed=seed,
        vocab_size=vocab_size,
        num_drafted=vocab_size * 4 // 5 if is_subset else None,
        dtype=dtype,
        quantization=quantization,
        markov_rank={"vanilla-odd": 7, "none": 0}.get(head, 6),
        markov_head_type=head if head in ("gated", "rnn") else "vanilla",
        enable_confidence_head=has_confidence,
        confidence_head_with_markov=head in ("vanilla", "rnn"),
    )
    proposer = draft_pass(drafter)
    requests = live_requests(kinds, vocab_size=vocab_size)
    hidden_RKD = torch.randn((len(kinds), 4, 32), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    rounds = round_table(requests, device=proposer.device)
    before = torch.get_num_threads()
    with torch.inference_mode():
        expected = proposer._walk_by_modules(requests, hidden_RKD, rounds.noise)
        torch.set_num_threads(num_threads)
        try:
            found = proposer._walk_at_once(requests, hidden_RKD, rounds)
        finally:
            torch.set_num_threads(before)
    assert found is not None
    # sigmoid and tanh of two libraries may differ in their last bit
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 0.1}[dtype] if head in ("gated", "rnn") else 0
    assert_same_block(found, expected, kinds, tolerance=tolerance)


def assert_same_block(
    found: DraftBlock,
    expected: DraftBlock,
    kinds: Sequence[SamplingParams],
    *,
    tolerance: float = 0.0,
) -> None:
    assert torch.equal(found.tokens_RK, expected.tokens_RK)
    assert (found.probs_RKS is None) == (expected.probs_RKS is None)
    for r, params in enumerate(kinds):
        if not params.is_greedy and params.effective_coupling is Coupling.MAXIMAL:
            assert found.probs_RKS is not None
            assert expected.probs_RKS is not None
            torch.testing.assert_close(
                found.probs_RKS[r], expected.probs_RKS[r], atol=tolerance, rtol=0.0
            )
    assert found.confidence_RK is not None
    assert expected.confidence_RK is not None
    # of a clear choice, the sum of all others is a small part of what is added up
    torch.testing.assert_close(
        found.confidence_RK.exp(), expected.confidence_RK.exp(), atol=1e-4, rtol=1e-2
    )


@given(
    num_tokens=st.sampled_from([1, 2, 5, 17]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    quantization=st.sampled_from([None, "int8"]),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 9999),
)
def test_the_context_is_fed_as_the_modules_feed_it(
    instructions: str,
    num_tokens: int,
    dtype: torch.dtype,
    quantization: str | None,
    has_bias: bool,
    num_threads: int,
    seed: int,
) -> None:
    drafter = packed_drafter(
        seed=seed, vocab_size=40, dtype=dtype, quantization=quantization, attention_bias=has_bias
    )
    generator = torch.Generator().manual_seed(seed)
    states = states_of(drafter, num_tokens, generator)
    at_once, by_modules = draft_pass(drafter), draft_pass(drafter)
    assert at_once._context is not None
    before = torch.get_num_threads()
    with torch.inference_mode():
        by_modules._feed_by_modules(states)
        torch.set_num_threads(num_threads)
        try:
            at_once.feed(states)
            at_once.write_fed()
        finally:
            torch.set_num_threads(before)
    for name in ("keys", "values"):
        for found, expected in zip(
            getattr(at_once._pages, name), getattr(by_modules._pages, name), strict=True
        ):
            assert torch.equal(found, expected)
            assert bool(found.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_layers_in_one_call_have_the_bits_of_the_modules(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    drafter = packed_drafter(seed=4, vocab_size=40, dtype=dtype, quantization=quantization)
    requests = live_requests(KINDS[:2], vocab_size=40)
    cache = KVCache(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_requests=2, max_positions=32)
    for live in requests:
        live.slot = cache.open()
        cache.reserve(live.slot, 8)
    rounds = round_table(requests, device=torch.device("cpu"))
    hidden = []
    for uses_stack in (True, False):
        proposer = draft_pass(drafter)
        assert proposer._stack is not None
        if not uses_stack:
            proposer._stack = None
        for pages in (*proposer._pages.keys, *proposer._pages.values):
            pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(3)))
        with torch.inference_mode():
            hidden.append(proposer._backbone(requests, cache, rounds))
    assert torch.equal(*hidden)


def states_of(drafter: Drafter, num_tokens: int, generator: torch.Generator) -> StepStates:
    places_N = torch.randperm(NUM_PAGES * PAGE_SIZE, generator=generator)[:num_tokens]
    positions_N = torch.randint(0, 600, (num_tokens,), generator=generator)
    empty = torch.zeros(0, dtype=torch.int32)
    taps_NM = torch.randn((num_tokens, drafter.config.taps_size), generator=generator)
    return StepStates(
        ids_N=torch.zeros(num_tokens, dtype=torch.int64),
        hidden_ND=torch.zeros((num_tokens, 0)),
        taps_NM=taps_NM.to(drafter.dtype),
        layout=AttentionLayout(
            block_tables_RP=empty,
            query_starts_R1=empty,
            visible_N=empty,
            positions_N=positions_N,
            slots_N=places_N,
            max_visible=600,
        ),
    )


def test_a_place_in_no_page_and_a_position_beyond_the_tables_are_refused(
    instructions: str,
) -> None:
    drafter = packed_drafter(seed=1, vocab_size=40)
    states = states_of(drafter, 2, torch.Generator().manual_seed(1))
    states.layout.slots_N[1] = NUM_PAGES * PAGE_SIZE
    proposer = draft_pass(drafter)
    proposer.feed(states)
    with pytest.raises(RuntimeError, match="is in no page"):
        proposer.write_fed()
    states.layout.slots_N[1] = 0
    states.layout.positions_N[1] = 5000
    proposer.feed(states)
    with pytest.raises(RuntimeError, match="beyond the tables"):
        proposer.write_fed()


def test_scores_that_are_not_finite_are_left_to_the_modules(instructions: str) -> None:
    proposer = draft_pass(packed_drafter(seed=1, vocab_size=40))
    requests = live_requests(KINDS[:5], vocab_size=40)
    hidden_RKD = torch.zeros((len(requests), 4, 32))
    hidden_RKD[2, 3, 5] = torch.nan
    rounds = round_table(requests, device=proposer.device)
    assert proposer._walk_at_once(requests, hidden_RKD, rounds) is None


def test_a_map_to_no_token_and_an_anchor_that_is_none_are_refused(instructions: str) -> None:
    drafter = packed_drafter(seed=1, vocab_size=40, num_drafted=32)
    requests = live_requests(KINDS[:2], vocab_size=40)
    rounds = round_table(requests, device=torch.device("cpu"))
    proposer = draft_pass(drafter)
    assert proposer.vocabulary is not None
    proposer.vocabulary.d2t_S[:] = 40
    with pytest.raises(RuntimeError, match="d2t names token 40"):
        proposer._walk_at_once(requests, torch.ones((2, 4, 32)), rounds)
    with pytest.raises(RuntimeError, match="anchor 40 is no token"):
        drafter.block_inputs(torch.tensor([39, 40]))


@pytest.mark.parametrize("size", [1, 3])
def test_a_block_begins_with_rows_of_the_embedding(instructions: str, size: int) -> None:
    """Anchors may be a row of a larger table."""
    drafter = packed_drafter(seed=1, vocab_size=40)
    anchors_R = torch.arange(2 * size).view(size, 2).T[1]
    ids_RK = torch.full((size, 4), 39)
    ids_RK[:, 0] = anchors_R
    expected = torch.nn.functional.embedding(ids_RK.flatten(), drafter.embed_weight_VD)
    assert torch.equal(drafter.block_inputs(anchors_R), expected)


def test_the_projection_of_the_taps_is_never_quantized() -> None:
    drafter = packed_drafter(seed=1, vocab_size=40, quantization="int8")
    query: Any = drafter.decoder_layers()[0].self_attn.q_proj
    fc: Any = drafter.fc
    assert query.scales_O is not None
    assert fc.scales_O is None


def test_what_the_operators_do_not_know_is_left_to_the_modules() -> None:
    drafter = packed_drafter(seed=1, vocab_size=40, markov_head_type="gated")
    assert walk_weights(drafter) is not None
    assert context_weights(drafter) is not None
    plain = Drafter(
        drafter.config,
        embed_weight_VD=drafter.embed_weight_VD,
        head_weight_VD=drafter.head_weight_SD,
        generator=torch.Generator().manual_seed(1),
    )
    assert context_weights(plain) is None
    assert walk_weights(plain) is None
