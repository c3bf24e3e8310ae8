"""Steps over paged keys and values, random and small, for the tests of this folder."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from dspark.kernels import byte_pages


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step: who sits where, and the shapes of one layer."""

    requests: list[tuple[int, int]]  # positions already in the pages, new tokens
    num_kv_heads: int
    num_sharing: int
    head_dim: int
    page_size: int
    window: int | None
    softcap: float | None
    has_sinks: bool
    is_two_way: bool  # every token sees all new tokens of its request
    dtype: torch.dtype
    has_bytes: bool  # keys and values are int8
    seed: int


def _with_whole_blocks(case: Case) -> Case:
    size = max(case.page_size // byte_pages.POSITIONS, 1) * byte_pages.POSITIONS
    return replace(case, page_size=size) if case.has_bytes else case


cases = st.builds(
    Case,
    requests=st.lists(
        st.tuples(st.integers(0, 300) | st.integers(500, 1100), st.integers(0, 20)),
        min_size=1,
        max_size=5,
    ),
    num_kv_heads=st.integers(1, 3),
    num_sharing=st.sampled_from([1, 2, 3, 7]),
    head_dim=st.sampled_from([8, 16, 20, 64, 80, 128]),
    page_size=st.sampled_from([1, 3, 16, 32, 64]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(1.0, 50.0),
    has_sinks=st.booleans(),
    is_two_way=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bytes=st.booleans(),
    seed=st.integers(0, 99),
).map(_with_whole_blocks)


class Step:
    """Tensors of a case; pages hold NaN wherever no position of a request was written."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(case.dtype)

        contexts = torch.tensor([context for context, _ in case.requests])
        counts = torch.tensor([count for _, count in case.requests])
        lengths, num_tokens = contexts + counts, int(counts.sum())
        pages_R = -(-lengths // case.page_size)
        num_pages, widest = int(pages_R.sum()) + 3, max(int(pages_R.max()), 1)
        order = torch.randperm(num_pages, generator=generator)
        tables = torch.full((len(case.requests), widest), 2**30, dtype=torch.int32)
        for request, count in enumerate(pages_R.tolist()):
            tables[request, :count] = order[:count].int()
            order = order[count:]
        self.request_N = torch.repeat_interleave(torch.arange(len(counts)), counts)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.positions_N = torch.arange(num_tokens) - (starts[:-1] - contexts)[self.request_N]
        self.slots_N = self.slots(tables, self.request_N, self.positions_N)
        ends = lengths[self.request_N] if case.is_two_way else self.positions_N + 1
        self.visible_N = ends.int()
        self.query_starts_R1 = starts.int()
        self.block_tables_RP = tables
        self.max_visible = max(int(lengths.max()), 1)

        if case.has_bytes:
            blocks = case.page_size // byte_pages.POSITIONS
            block = byte_pages.block_bytes(case.head_dim)
            shape = (num_pages, case.num_kv_heads, blocks, block)
            self.k_pages = torch.full(shape, -1, dtype=torch.int8)  # as a scale this is NaN
        else:
            shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
            self.k_pages = torch.full(shape, torch.nan, dtype=case.dtype)
        self.v_pages = self.k_pages.clone()
        for request, context in enumerate(contexts.tolist()):
            at = torch.arange(context)
            slots = self.slots(tables, torch.full_like(at, request), at)
            for pages in (self.k_pages, self.v_pages):
                rows = random(context, case.num_kv_heads, case.head_dim)
                if case.has_bytes:
                    byte_pages.write(pages, rows, slots, is_key=pages is self.k_pages)
                else:
                    pages[slots // case.page_size, :, slots % case.page_size] = rows
        num_heads = case.num_kv_heads * case.num_sharing
        self.q_NHE = random(num_heads, num_tokens, case.head_dim).transpose(0, 1)
        kv = random(num_tokens, 2 * case.num_kv_heads, case.head_dim)
        self.k_NGE, self.v_NGE = kv[:, : case.num_kv_heads], kv[:, case.num_kv_heads :]
        self.sinks_H = random(num_heads).float() if case.has_sinks else None

    def slots(self, tables: Tensor, request_N: Tensor, position_N: Tensor) -> Tensor:
        pages_N = tables[request_N, position_N // self.case.page_size].long()
        return pages_N * self.case.page_size + position_N % self.case.page_size

    def options(self) -> tuple[object, ...]:
        case = self.case
        scale = case.head_dim**-0.5
        return (self.max_visible, scale, case.window, case.softcap, self.sinks_H)

    def run(self, operator: object, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out: Tensor = operator(  # type: ignore[operator]
            self.q_NHE,
            self.k_NGE,
            self.v_NGE,
            k_pages,
            v_pages,
            self.block_tables_RP,
            self.query_starts_R1,
            self.visible_N,
            self.positions_N,
            self.slots_N,
            *self.options(),
        )
        return out

    def run_alone(self, n: int, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Token n in a step of its own, over pages that hold the whole step's keys already."""
        only, request = slice(n, n + 1), int(self.request_N[n])
        out: Tensor = torch.ops.dspark.attention(
            self.q_NHE[only],
            self.k_NGE[only],
            self.v_NGE[only],
            k_pages,
            v_pages,
            self.block_tables_RP[request : request + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            self.visible_N[only],
            self.positions_N[only],
            self.slots_N[only],
            *self.options(),
        )
        return out[0]


def plain_case(**changes: object) -> Case:
    values: dict[str, object] = {
        "requests": [(0, 40), (200, 9), (17, 1)],
        "num_kv_heads": 3,
        "num_sharing": 3,
        "head_dim": 64,
        "page_size": 16,
        "window": None,
        "softcap": None,
        "has_sinks": False,
        "is_two_way": False,
        "dtype": torch.bfloat16,
        "has_bytes": False,
        "seed": 0,
    }
    return Case(**(values | changes))  # type: ignore[arg-type]
