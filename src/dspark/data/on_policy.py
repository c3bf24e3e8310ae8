"""Rounds as serving sees them: the drafter's own drafts, replayed through the target.

In the plain data a slot follows the true tokens of an answer; in serving it follows what the
drafter drew. Every so many steps this source lets the drafter as it is draft its blocks, runs the
target behind each draft in one packed pass, and teaches every slot the target's distribution
there (after Draft-OPD, arXiv 2605.29343: the target supervises the states that drafts lead to).
Which steps, blocks and draws is a function of (seed, step) and the weights.

Letters: legend in core.py; T context rows of all sequences, A blocks of the batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dspark.core import AttentionLayout
from dspark.data.batches import AnswerBatches, Batch, seeded
from dspark.data.token_mass import draw_tokens, sum_mass
from dspark.errors import InputError
from dspark.models.packed_attention import PackedBlocks
from dspark.models.target import Target

Draft = Callable[[Batch, torch.Generator], Tensor]
"""Drafts [A, K] of a batch's blocks, target ids; each slot follows what was drawn before it."""


class OnPolicyBatches:
    """Batches of answers, a share of the steps with the drafter's own drafts."""

    def __init__(self, inner: AnswerBatches, *, target: Target, share: float) -> None:
        """`share` of the steps, evenly spread."""
        if not 0.0 < share <= 1.0:
            raise InputError(f"on_policy is {share!r}, but it must lie in [0, 1].")
        self._inner = inner
        self._target = target
        self._share = share
        self._draft: Draft | None = None

    def follow(self, draft: Draft) -> None:
        """The drafter whose drafts are replayed."""
        self._draft = draft

    def step(self, step: int) -> Sequence[Batch]:
        """As of the answers, or replayed."""
        batches = self._inner.step(step)
        if int((step + 1) * self._share) == int(step * self._share):
            return batches
        assert self._draft is not None, "follow a drafter first"
        generator = seeded(self._inner.config.seed, 2 * step + 1)
        return [
            replayed(self._target, batch, self._draft(batch, generator), generator=generator)
            for batch in batches
        ]

    def held_out(self) -> Iterator[Batch]:
        """The held-out answers, never replayed: figures stay comparable."""
        return self._inner.held_out()

    def fingerprint(self) -> Mapping[str, str]:
        """The answers', and the share."""
        return {**self._inner.fingerprint(), "on-policy share": repr(self._share)}


def replayed(
    target: Target, batch: Batch, drafts_AK: Tensor, *, generator: torch.Generator
) -> Batch:
    """The batch with drafted tokens before each slot and the target's distribution behind them.

    A slot counts unless an end of text was drafted before it. Its label is drawn from the
    target's distribution.
    """
    is_busy_A = batch.valid_AK[:, 0]
    previous_AK = torch.cat((batch.previous_AK[:, :1], drafts_AK[:, :-1]), dim=1)
    ends_AK = torch.isin(previous_AK, torch.tensor(target.spec.eos_ids, device=drafts_AK.device))
    ends_AK[:, 0] = False
    valid_AK = (ends_AK.long().cumsum(dim=1) == 0) & is_busy_A[:, None]
    last_ND = branch_states(target, batch.ids_T, batch.blocks, previous_AK)
    rows_N = valid_AK.flatten().nonzero().flatten()
    last_ND = last_ND[rows_N]
    labels_AK = batch.labels_AK.clone()
    labels_AK.view(-1)[rows_N] = draw_tokens(target, last_ND, generator=generator)
    return replace(
        batch,
        previous_AK=previous_AK,
        labels_AK=labels_AK,
        valid_AK=valid_AK,
        rows_N=rows_N,
        last_ND=last_ND,
        lse_N=sum_mass(target, last_ND, mass_V=None),
    )


def branch_states(target: Target, ids_T: Tensor, blocks: PackedBlocks, ids_AK: Tensor) -> Tensor:
    """Last hidden states [A * K, D] of K tokens behind each block's context, in one target pass.

    Pages of one position each: the blocks of a sequence share its keys and values and see no
    other block.
    """
    layout, num_pages = _branches(blocks, device=target.device)
    pages = target.allocate_pages(num_pages=num_pages, page_size=1)
    ids_N = torch.cat((ids_T, ids_AK.flatten())).to(target.device)
    output = target.forward(ids_N, layout=layout, pages=pages, tap_layers=())
    return output.hidden_ND[len(ids_T) :]


def _branches(blocks: PackedBlocks, *, device: torch.device) -> tuple[AttentionLayout, int]:
    """Sequences first, then every block as a request of its own."""
    size, lengths = blocks.block_size, list(blocks.context_lengths)
    anchors = blocks.anchors_A.tolist()
    num_context, num_blocks = sum(lengths), len(anchors)
    width = max(max(lengths), max(anchors) + size)
    tables_RP = torch.zeros(len(lengths) + num_blocks, width, dtype=torch.int32)
    first, block = 0, 0
    for row, (length, count) in enumerate(zip(lengths, blocks.num_blocks, strict=True)):
        places = torch.arange(first, first + length, dtype=torch.int32)
        tables_RP[row, :length] = places
        for _ in range(count):
            anchor, own = anchors[block], num_context + block * size
            table_P = tables_RP[len(lengths) + block]
            table_P[:anchor] = places[:anchor]
            table_P[anchor : anchor + size] = torch.arange(own, own + size, dtype=torch.int32)
            block += 1
        first += length
    positions_N = torch.cat((blocks.context_positions_T.cpu(), blocks.positions_N.cpu()))
    starts_R1 = torch.tensor([0, *lengths, *[size] * num_blocks]).cumsum(0).to(torch.int32)
    layout = AttentionLayout(
        block_tables_RP=tables_RP.to(device),
        query_starts_R1=starts_R1.to(device),
        visible_N=(positions_N + 1).to(device, torch.int32),
        positions_N=positions_N.to(device),
        slots_N=torch.arange(len(positions_N), device=device),
        max_visible=width,
    )
    return layout, len(positions_N)
