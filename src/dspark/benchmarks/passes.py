"""A target run in passes of any shape over the positions of some requests.

For measuring and for auditing arithmetic: it knows positions and logits, no request's sampling,
no drafter, no clock.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.core import AttentionLayout
from dspark.kernels import byte_pages
from dspark.models.target import Target, TargetOutput

_PAGE_SIZE = 64


class Passes:
    """Pages for `num_requests` rows of `num_positions` positions each, row r's in order."""

    def __init__(self, target: Target, *, num_requests: int, num_positions: int) -> None:
        self._target = target
        self._pages_per_row = -(-num_positions // _PAGE_SIZE)
        num_pages = num_requests * self._pages_per_row
        self._pages = target.allocate_pages(num_pages=num_pages, page_size=_PAGE_SIZE)
        self._tables_RP = torch.arange(num_pages, dtype=torch.int32).view(num_requests, -1)
        self._layouts: dict[tuple[int, ...], AttentionLayout] = {}

    def fill(self, *, seed: int) -> None:
        """Noise in place of keys and values: a step costs the same whatever they hold."""
        generator = torch.Generator(self._target.device).manual_seed(seed)
        for layer in (*self._pages.keys, *self._pages.values):
            if byte_pages.are_bytes(layer):
                byte_pages.fill_with_noise(layer, generator)
                continue
            layer.copy_(
                torch.randn(layer.shape, generator=generator, device=layer.device).to(layer.dtype)
            )

    def run(self, rows: Sequence[Sequence[int]], *, start: int) -> Tensor:
        """Logits [N, V] of one pass over `rows[r]` at positions `start`.. of row r, flattened."""
        return self.prepare(rows, start=start)()

    def prepare(self, rows: Sequence[Sequence[int]], *, start: int) -> Callable[[], Tensor]:
        """`run` as often as it is called: nothing but the target's pass is left to be timed."""
        layout = self._layout([len(row) for row in rows], start=start)
        ids_N = self._ids(rows)

        def run() -> Tensor:
            logits_NV = self._forward(ids_N, layout, has_logits=True).logits_NV
            assert logits_NV is not None
            return logits_NV

        return run

    def last_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [1, V] behind the last token of one text, run from its first position on."""
        layout = self._layout([len(ids)], start=0)
        output = self._forward(self._ids([ids]), layout, has_logits=False)
        return self._target.logits(output.hidden_ND[-1:])

    def score(self, ids: Sequence[int], *, chunks: Sequence[int]) -> Tensor:
        """Logits [T, V] of one text, run in passes of `chunks` tokens (their sum is T)."""
        assert sum(chunks) == len(ids)
        parts, start = [], 0
        for size in chunks:
            parts.append(self.run([ids[start : start + size]], start=start))
            start += size
        return torch.cat(parts)

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([i for row in rows for i in row], device=self._target.device)

    def _forward(self, ids_N: Tensor, layout: AttentionLayout, *, has_logits: bool) -> TargetOutput:
        return self._target.forward(
            ids_N, layout=layout, pages=self._pages, tap_layers=(), has_logits=has_logits
        )

    def _layout(self, lengths: Sequence[int], *, start: int) -> AttentionLayout:
        """Built once for each shape: passes are timed, layouts are not."""
        key = (start, *lengths)
        if key not in self._layouts:
            self._layouts[key] = self._new_layout(lengths, start=start)
        return self._layouts[key]

    def _new_layout(self, lengths: Sequence[int], *, start: int) -> AttentionLayout:
        num_rows = len(lengths)
        positions_N = torch.cat([torch.arange(start, start + length) for length in lengths])
        rows_N = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(lengths))
        pages_N = self._tables_RP[rows_N, positions_N // _PAGE_SIZE].long()
        device = self._target.device
        return AttentionLayout(
            block_tables_RP=self._tables_RP[:num_rows].to(device),
            query_starts_R1=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
            visible_N=(positions_N + 1).to(device, torch.int32),
            positions_N=positions_N.to(device),
            slots_N=(pages_N * _PAGE_SIZE + positions_N % _PAGE_SIZE).to(device),
            max_visible=start + max(lengths),
        )
