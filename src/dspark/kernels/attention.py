"""Ragged attention over paged keys and values, one call a layer for any mix of requests.

It does not know why a token sees what it sees: prompt chunks, verify windows, single tokens and
the drafter's two-way block differ only in `visible_N`. Letters: see `dspark.core`.
"""

from itertools import pairwise

import torch
from torch import Tensor

from dspark.kernels import byte_pages, extension
from dspark.kernels.padded_attention import padded_attention


def attention(
    q_NHE: Tensor,
    k_NGE: Tensor,
    v_NGE: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables_RP: Tensor,
    query_starts_R1: Tensor,
    visible_N: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    *,
    max_visible: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Write the step's keys and values into the pages, then attend; returns out_NHE.

    `k_pages`, `v_pages`: [pages, G, page_size, E], changed in place at `slots_N`; or int8 as
    `byte_pages` has it, and then queries are rounded to int8 too, a scale each. Token n sees
    positions [low, visible_n) of its own request, low = max(0, position_n + 1 - window) with a
    window, else 0; one that sees nothing gets zeros. `softcap` bounds scores by
    softcap * tanh(score / softcap); `sinks_H` are logits that take part in the softmax's sum only.
    Scores and sums are float32. On the C++ path the bits of a token's result depend on nothing
    but the token and the positions that it sees.
    """
    operator = (
        torch.ops.dspark.attention
        if extension.IS_LOADED
        and q_NHE.device.type == "cpu"
        and (q_NHE.dtype == k_pages.dtype or byte_pages.are_bytes(k_pages))
        and q_NHE.dtype in (torch.float32, torch.bfloat16)
        else padded_attention
    )
    out: Tensor = operator(
        q_NHE,
        k_NGE,
        v_NGE,
        k_pages,
        v_pages,
        block_tables_RP,
        query_starts_R1,
        visible_N,
        positions_N,
        slots_N,
        max_visible,
        scale,
        window,
        softcap,
        sinks_H,
    )
    return out


@torch.library.custom_op("dspark::attention_reference", mutates_args=("k_pages", "v_pages"))
def _attention_reference(
    q_NHE: Tensor,
    k_NGE: Tensor,
    v_NGE: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables_RP: Tensor,
    query_starts_R1: Tensor,
    visible_N: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    max_visible: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """The same function in plain PyTorch, one request after the other."""
    page_size = byte_pages.page_size_of(k_pages)
    _write(k_pages, k_NGE, slots_N, is_key=True)
    _write(v_pages, v_NGE, slots_N, is_key=False)
    asked_NHE = byte_pages.rounded(q_NHE) if byte_pages.are_bytes(k_pages) else q_NHE

    out_NHE = torch.zeros_like(q_NHE, memory_format=torch.contiguous_format)
    for request, (start, end) in enumerate(pairwise(query_starts_R1.tolist())):
        if start == end:
            continue
        visible_T = visible_N[start:end]
        length = min(int(visible_T.max()), max_visible)
        table_P = block_tables_RP[request, : -(-length // page_size)].long()
        low_T = torch.zeros_like(positions_N[start:end])
        if window is not None:
            low_T = (positions_N[start:end] + 1 - window).clamp(min=0)
        position_L = torch.arange(length, device=q_NHE.device)
        is_seen_TL = (position_L >= low_T[:, None]) & (position_L < visible_T[:, None])
        out_NHE[start:end] = _attend(
            asked_NHE[start:end],
            _gather(k_pages, table_P, length, head_dim=q_NHE.shape[2], is_key=True),
            _gather(v_pages, table_P, length, head_dim=q_NHE.shape[2], is_key=False),
            is_seen_TL,
            scale=scale,
            softcap=softcap,
            sinks_H=sinks_H,
        )
    return out_NHE


def _write(pages: Tensor, x_NGE: Tensor, slots_N: Tensor, *, is_key: bool) -> None:
    if byte_pages.are_bytes(pages):
        byte_pages.write(pages, x_NGE, slots_N, is_key=is_key)
        return
    page_size = pages.shape[2]
    pages[slots_N // page_size, :, slots_N % page_size] = x_NGE.to(pages.dtype)


def _gather(pages: Tensor, table_P: Tensor, length: int, *, head_dim: int, is_key: bool) -> Tensor:
    """The first `length` positions behind a block table, float32 [length, G, E]."""
    found = pages[table_P]
    if byte_pages.are_bytes(pages):
        found = byte_pages.read(found, head_dim=head_dim, is_key=is_key)
    return found.transpose(1, 2).flatten(0, 1)[:length].float()


def _attend(
    q_THE: Tensor,
    k_LGE: Tensor,
    v_LGE: Tensor,
    is_seen_TL: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    num_kv_heads = k_LGE.shape[1]
    num_tokens, num_heads, head_dim = q_THE.shape
    num_sharing = num_heads // num_kv_heads  # C query heads share a key/value head
    q_TGCE = q_THE.float().reshape(num_tokens, num_kv_heads, num_sharing, head_dim)
    scores_TGCL = torch.einsum("tgce,lge->tgcl", q_TGCE, k_LGE) * scale
    if softcap is not None:
        scores_TGCL = softcap * torch.tanh(scores_TGCL / softcap)
    scores_TGCL = scores_TGCL.masked_fill(~is_seen_TL[:, None, None], -torch.inf)
    if sinks_H is not None:
        sinks_TGC1 = sinks_H.float().view(1, num_kv_heads, -1, 1).expand(len(q_THE), -1, -1, 1)
        scores_TGCL = torch.cat([scores_TGCL, sinks_TGC1], dim=-1)
    probs_TGCL = torch.softmax(scores_TGCL, dim=-1)[..., : len(k_LGE)]
    probs_TGCL = probs_TGCL.masked_fill(~is_seen_TL[:, None, None], 0.0)  # also: sees nothing
    return torch.einsum("tgcl,lge->tgce", probs_TGCL, v_LGE).flatten(1, 2).to(q_THE.dtype)


def _fake(q_NHE: Tensor, *_: object) -> Tensor:
    return q_NHE.new_empty(q_NHE.shape)


torch.library.register_fake("dspark::attention_reference", _fake)
if extension.IS_LOADED:
    torch.library.register_fake("dspark::attention", _fake)
