"""A drafting round as one call against its parts called one after the other, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.core import Coupling, DraftBlock, SamplingParams
from dspark.engine import backlog
from dspark.engine.batch import Run, layout_of
from dspark.engine.draft_pass import DraftPass
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import round_table
from dspark.engine.proposer import StepStates
from dspark.errors import NumericsError
from dspark.models.drafter import Drafter
from tests.kernels.test_draft import KINDS, assert_same_block, live_requests, packed_drafter

NUM_PAGES, PAGE_SIZE, NUM_POSITIONS = 48, 8, 40
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 64,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 3,
    },
    {"hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 1, "target_layer_ids": (2,)},
    {"layer_windows": (5, None)},
    {"attention_bias": True, "block_size": 1},
    {"block_size": 7},
)


class Served:
    """A drafter, its pages and requests at different lengths, with random context before them."""

    def __init__(
        self, drafter: Drafter, params: Sequence[SamplingParams], lengths: Sequence[int]
    ) -> None:
        vocab_size = drafter.config.vocab_size
        self.proposer = DraftPass(
            drafter, num_pages=NUM_PAGES, page_size=PAGE_SIZE, vocab_size=vocab_size
        )
        generator = torch.Generator().manual_seed(7)
        for pages in (*self.proposer._pages.keys, *self.proposer._pages.values):
            pages.copy_(torch.randn(pages.shape, generator=generator))
        self.cache = KVCache(
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_requests=len(params),
            max_positions=NUM_POSITIONS,
        )
        self.requests = live_requests(params, vocab_size=vocab_size)
        for live, length in zip(self.requests, lengths, strict=True):
            live.slot = self.cache.open()
            self.cache.reserve(live.slot, NUM_POSITIONS)
            live.tokens = [(3 * i + length) % vocab_size for i in range(length)]

    def feed(self, runs: Sequence[tuple[int, int, int]], generator: torch.Generator) -> None:
        """Taps of consecutive positions (request, start, count)."""
        layout = layout_of(
            [Run(self.requests[r].slot, start, count) for r, start, count in runs],
            self.cache,
            device=torch.device("cpu"),
        )
        config = self.proposer.drafter.config
        num_tokens = sum(count for _, _, count in runs)
        taps_NM = torch.randn((num_tokens, config.taps_size), generator=generator)
        self.proposer.feed(
            StepStates(
                ids_N=torch.zeros(num_tokens, dtype=torch.int64),
                hidden_ND=torch.zeros((num_tokens, 0)),
                taps_NM=taps_NM.to(self.proposer.drafter.dtype),
                layout=layout,
            )
        )

    def propose(self, picked: Sequence[int] | None = None) -> DraftBlock:
        requests = self.requests if picked is None else [self.requests[r] for r in picked]
        self.proposer.catch_up(requests, cache=self.cache)
        return self.proposer.propose(
            requests, cache=self.cache, rounds=round_table(requests, device=torch.device("cpu"))
        )

    @property
    def pages(self) -> list[torch.Tensor]:
        return [*self.proposer._pages.keys, *self.proposer._pages.values]


def by_parts(served: Served) -> Served:
    served.proposer._round = None
    return served


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    shape=st.sampled_from(SHAPES),
    is_subset=st.booleans(),
    head=st.sampled_from(["vanilla", "vanilla", "gated", "rnn", "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    quantization=st.sampled_from([None, "int8"]),
    has_confidence=st.booleans(),
    num_threads=st.sampled_from([1, 2, 3]),
    fed=st.lists(st.integers(0, 30), min_size=0, max_size=3),
    seed=st.integers(0, 9999),
)
def test_a_round_is_its_parts_one_after_the_other(
    instructions: str,
    kinds: list[SamplingParams],
    shape: dict[str, Any],
    is_subset: bool,
    head: str,
    dtype: torch.dtype,
    quantization: str | None,
    has_confidence: bool,
    num_threads: int,
    fed: list[int],
    seed: int,
) -> None:
    """Requests of different lengths, of which 0 to 64 tokens wait, rejected ones among them."""
    drafter = packed_drafter(
        seed=seed,
        vocab_size=700,
        num_drafted=560 if is_subset else None,
        dtype=dtype,
        quantization=quantization,
        enable_confidence_head=has_confidence,
        confidence_head_with_markov=head in ("vanilla", "rnn"),
        **{
            "markov_rank": 0 if head == "none" else 6,
            "markov_head_type": head if head in ("gated", "rnn") else "vanilla",
            **shape,
        },
    )
    lengths = [2 + (5 * r + seed) % 25 for r in range(len(kinds))]
    at_once, parts = (Served(drafter, kinds, lengths) for _ in range(2))
    assert at_once.proposer._round is not None
    blocks = []
    before = torch.get_num_threads()
    with torch.inference_mode():
        torch.set_num_threads(num_threads)
        try:
            for served in (at_once, by_parts(parts)):
                generator = torch.Generator().manual_seed(seed)
                for i, count in enumerate(fed):
                    r = (seed + i) % len(kinds)
                    start = max(0, lengths[r] - max(1, count // 2))
                    served.feed([(r, start, min(count, NUM_POSITIONS - start))], generator)
                blocks.append(served.propose())
        finally:
            torch.set_num_threads(before)
    found, expected = blocks
    assert_same_block(found, expected, kinds)
    assert found.confidence_RK is not None
    assert expected.confidence_RK is not None
    assert torch.equal(found.confidence_RK, expected.confidence_RK)
    for mine, other in zip(at_once.pages, parts.pages, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_block_does_not_depend_on_batch_mates(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Nor on how many tokens of others wait; also beyond the rounds whose weights are asked for."""
    drafter = packed_drafter(seed=2, vocab_size=700, dtype=dtype, quantization=quantization)
    kinds = [KINDS[i % len(KINDS)] for i in range(9)]
    lengths = [3 + 2 * r for r in range(9)]
    together, alone = (Served(drafter, kinds, lengths) for _ in range(2))
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)
        together.feed([(r, 0, lengths[r] - 1) for r in range(4)], generator)
        block = together.propose()
        generator = torch.Generator().manual_seed(1)
        for r in range(4):
            alone.feed([(r, 0, lengths[r] - 1)], generator)
        for r, params in enumerate(kinds):
            own = alone.propose([r])
            assert torch.equal(own.tokens_RK[0], block.tokens_RK[r])
            assert own.confidence_RK is not None
            assert block.confidence_RK is not None
            assert torch.equal(own.confidence_RK[0], block.confidence_RK[r])
            if not params.is_greedy and params.effective_coupling is Coupling.MAXIMAL:
                assert own.probs_RKS is not None
                assert block.probs_RKS is not None
                assert torch.equal(own.probs_RKS[0], block.probs_RKS[r])


def test_round_after_round_keeps_its_memory_clean(instructions: str) -> None:
    """Numbers of requests and of waiting tokens go up and down."""
    drafter = packed_drafter(seed=3, vocab_size=700, dtype=torch.bfloat16, quantization="int8")
    lengths = [4 + 5 * r for r in range(len(KINDS))]
    at_once, parts = (Served(drafter, KINDS, lengths) for _ in range(2))
    by_parts(parts)
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    with torch.inference_mode():
        for step, picked in enumerate([[0, 1, 2, 3, 4], [2], [4, 0], [5, 1], [6, 3, 2, 1, 0], [2]]):
            blocks = []
            for served, generator in zip((at_once, parts), generators, strict=True):
                served.feed([(r, lengths[r] - 2, 1 + (step + r) % 4) for r in picked], generator)
                blocks.append(served.propose(picked))
            kinds = [at_once.requests[r].params for r in picked]
            assert_same_block(blocks[0], blocks[1], kinds)


def test_many_waiting_tokens_enter_with_the_next_block(instructions: str) -> None:
    """As many as a long prompt leaves behind, more than any tile or scratch holds."""
    drafter = packed_drafter(seed=3, vocab_size=700, dtype=torch.bfloat16)
    lengths = [NUM_POSITIONS - 8] * len(KINDS)
    at_once, parts = (Served(drafter, KINDS, lengths) for _ in range(2))
    by_parts(parts)
    blocks = []
    with torch.inference_mode():
        for served in (at_once, parts):
            generator = torch.Generator().manual_seed(6)
            served.feed([(r, 0, NUM_POSITIONS - 9) for r in range(len(KINDS))], generator)
            assert served.proposer._pending
            blocks.append(served.propose())
    assert_same_block(blocks[0], blocks[1], [live.params for live in at_once.requests])
    for found, wanted in zip(at_once.pages, parts.pages, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("most_held", [0, 20, 4096])
def test_what_was_put_off_is_fed_when_its_request_drafts(
    monkeypatch: pytest.MonkeyPatch, instructions: str, most_held: int
) -> None:
    """As if each step were fed at once: with tokens that were rejected, and places of requests
    that have gone."""
    drafter = packed_drafter(seed=5, vocab_size=700, dtype=torch.bfloat16)
    lengths = [34, 9, 21, 30, 12]
    late, at_once = (Served(drafter, KINDS[: len(lengths)], lengths) for _ in range(2))
    rng = torch.Generator().manual_seed(8)

    def steps(served: Served, generator: torch.Generator, random: torch.Generator) -> None:
        for r in range(5):  # one prompt after the other, then tokens that may be rejected
            served.feed([(r, 0, lengths[r] - 8)], generator)
        starts = [length - 8 for length in lengths]
        for _ in range(6):
            counts = torch.randint(1, 5, (5,), generator=random).tolist()
            served.feed([(r, starts[r], counts[r]) for r in range(5)], generator)
            starts = [min(s + 1, length - 5) for s, length in zip(starts, lengths, strict=True)]
        served.feed([(r, lengths[r] - 5, 4) for r in range(5)], generator)

    monkeypatch.setattr(backlog, "_MOST_HELD", most_held)
    monkeypatch.setattr(backlog, "_PIECE", 30)
    with torch.inference_mode():
        feed = at_once.proposer.feed
        with patch.object(
            at_once.proposer, "feed", lambda states: (feed(states), at_once.proposer.write_fed())
        ):
            steps(at_once, torch.Generator().manual_seed(6), torch.Generator().manual_seed(8))
        steps(late, torch.Generator().manual_seed(6), rng)
        untouched = [page.clone() for page in late.pages]
        for picked in ([3], [0, 3], [4, 1, 2]):
            blocks = [served.propose(picked) for served in (late, at_once)]
            assert_same_block(blocks[0], blocks[1], [late.requests[r].params for r in picked])
    for found, wanted in zip(late.pages, at_once.pages, strict=True):
        assert torch.equal(found, wanted)
    assert not all(map(torch.equal, late.pages, untouched))


def test_scores_that_are_not_finite_are_left_to_the_modules(instructions: str) -> None:
    drafter = packed_drafter(seed=1, vocab_size=700)
    served = Served(drafter, KINDS[:2], [5, 6])
    with torch.inference_mode():
        served.proposer._pages.values[1].fill_(torch.nan)
        assert served.proposer._round is not None
        with pytest.raises(NumericsError, match="has a logit of nan"):
            served.propose()


def test_a_block_outside_the_pages_and_an_anchor_that_is_none_are_refused(
    instructions: str,
) -> None:
    drafter = packed_drafter(seed=1, vocab_size=700)
    served = Served(drafter, KINDS[:1], [NUM_POSITIONS + PAGE_SIZE])
    with pytest.raises(RuntimeError, match="are not in a table of pages"):
        served.propose()
    served = Served(drafter, KINDS[:1], [5])
    served.requests[0].tokens[-1] = 700
    with pytest.raises(RuntimeError, match="anchor 700 is no token"):
        served.propose()


@pytest.mark.parametrize("num_drafted", [None, 560])
@pytest.mark.parametrize("rank", [0, 6])
def test_stop_tokens_that_come_too_early_are_impossible(
    instructions: str, num_drafted: int | None, rank: int
) -> None:
    """A third of the vocabulary ends an answer, before 2 tokens of it or before none."""
    drafter = packed_drafter(
        seed=6,
        vocab_size=700,
        num_drafted=num_drafted,
        markov_rank=rank,
        confidence_head_with_markov=rank > 0,
        dtype=torch.bfloat16,
        quantization="int8",
    )
    stops = tuple(range(0, 700, 3))
    kinds = [replace(kind, min_tokens=2, stop_token_ids=stops) for kind in KINDS] + [KINDS[0]]
    at_once, parts = (Served(drafter, kinds, range(3, 3 + len(kinds))) for _ in range(2))
    for served in (at_once, parts):  # the parts draw by modules: none of them is plain
        assert [live.is_plain for live in served.requests] == [False] * len(KINDS) + [True]
    with torch.inference_mode():
        block = at_once.propose()
        assert not (block.tokens_RK[: len(KINDS), :2] % 3 == 0).any()
        assert (block.tokens_RK[: len(KINDS), 2:] % 3 == 0).any()
        assert_same_block(block, by_parts(parts).propose(), kinds)


def test_forbidden_cells_out_of_order_or_out_of_place_are_refused(instructions: str) -> None:
    served = Served(packed_drafter(seed=1, vocab_size=700), KINDS[:1], [5])
    for cells in ([1, 0, 0, 0], [0, 700], [4, 0], [-1, 0]):
        with (
            patch.object(served.proposer, "_early_stops", return_value=cells),
            pytest.raises(RuntimeError, match="is not in order or not in"),
        ):
            served.propose()


def test_requests_with_penalties_take_the_other_path(instructions: str) -> None:
    drafter = packed_drafter(seed=1, vocab_size=700)
    params = [KINDS[0], SamplingParams(temperature=0.0, repetition_penalty=1.3)]
    mixed, parts = Served(drafter, params, [5, 6]), by_parts(Served(drafter, params, [5, 6]))
    with torch.inference_mode():
        assert torch.equal(mixed.propose().tokens_RK, parts.propose().tokens_RK)


def test_no_round_of_a_drafter_that_is_not_packed() -> None:
    drafter = packed_drafter(seed=1, vocab_size=700)
    plain = Drafter(
        drafter.config,
        embed_weight_VD=drafter.embed_weight_VD,
        head_weight_VD=drafter.head_weight_SD,
        generator=torch.Generator().manual_seed(1),
    )
    assert Served(plain, KINDS[:1], [5]).proposer._round is None
