"""Attention over pages by PyTorch's own, where no operators run: other devices, no compiler.

Requests that ask about alike share a call, short ones padded; which they are and who sees what is
worked out once for a step and kept for its other layers. It computes what the reference in
`attention` does, up to rounding. Letters as in `dspark.core`, and here Q = T C: the tokens of a
request times the query heads that share a key/value head.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from dspark.kernels import byte_pages

_FEW_TOKENS = 16  # requests with so many or fewer are padded to the longest of them
_FEW_POSITIONS = 256  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Requests of a step that attend in one call: who they are, and what they see."""

    tokens_RT: Tensor
    """Token at each place; one that is there for want of others repeats the request's last."""
    tokens_M: Tensor
    places_M: Tensor
    """The places r T + t that hold a token of their own, and that token."""
    is_whole_step: bool
    """Whether these are all tokens of the step in their order."""
    pages_RP: Tensor
    length: int
    """Positions of the longest request, L."""
    unwritten_RL: Tensor | None
    """Positions past a request's own: what lies there may be no number. `None`: all are alike."""
    mask_RQL: Tensor
    """Zero where a query sees a position, minus infinity elsewhere."""
    sees_nothing_RQ: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A step's groups, and where its own keys and values go."""

    pages_N: Tensor
    rows_N: Tensor
    groups: tuple[_Group, ...]


_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By `visible_N` of a step that is not over: its plans by window, heads, page size and type."""


def padded_attention(
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
    """`attention.attention` on any device; the layout's tensors must not change between layers."""
    num_sharing = q_NHE.shape[1] // k_NGE.shape[1]
    is_bytes = byte_pages.are_bytes(k_pages)
    page_size = byte_pages.page_size_of(k_pages)
    mask_dtype = torch.float32 if is_bytes else q_NHE.dtype
    if visible_N not in _plans:
        _plans[visible_N] = {}
    plans = _plans[visible_N]
    key = (window, num_sharing, page_size, mask_dtype)
    if key not in plans:
        groups = _groups(
            block_tables_RP,
            query_starts_R1,
            visible_N.clamp(max=max_visible),
            positions_N,
            num_sharing=num_sharing,
            page_size=page_size,
            window=window,
            dtype=mask_dtype,
        )
        plans[key] = _Plan(
            pages_N=slots_N // page_size, rows_N=slots_N % page_size, groups=tuple(groups)
        )
    plan: _Plan = plans[key]
    if is_bytes:
        byte_pages.write(k_pages, k_NGE, slots_N, is_key=True)
        byte_pages.write(v_pages, v_NGE, slots_N, is_key=False)
        q_NHE, dtype = byte_pages.rounded(q_NHE), q_NHE.dtype
    else:
        k_pages[plan.pages_N, :, plan.rows_N] = k_NGE
        v_pages[plan.pages_N, :, plan.rows_N] = v_NGE
        dtype = q_NHE.dtype
    out_NHE = torch.zeros_like(q_NHE, dtype=dtype, memory_format=torch.contiguous_format)
    for group in plan.groups:
        k_GRLE = _read(k_pages, group, head_dim=q_NHE.shape[2], is_key=True)
        v_GRLE = _read(v_pages, group, head_dim=q_NHE.shape[2], is_key=False)
        out_PHE = _attend(
            q_NHE, k_GRLE, v_GRLE, group, scale=scale, softcap=softcap, sinks_H=sinks_H
        )
        if group.is_whole_step:
            return out_PHE.to(dtype)
        out_NHE[group.tokens_M] = out_PHE[group.places_M].to(dtype)
    return out_NHE


def _groups(
    block_tables_RP: Tensor,
    query_starts_R1: Tensor,
    visible_N: Tensor,
    positions_N: Tensor,
    *,
    num_sharing: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> Iterator[_Group]:
    """Requests by about how many tokens and positions they have; worked out on the host."""
    device = visible_N.device
    starts_R1, visible_N, positions_N = (
        x.cpu().long() for x in (query_starts_R1, visible_N, positions_N)
    )
    num_tokens, counts_R = len(visible_N), starts_R1.diff()
    alike = defaultdict[tuple[int, int], list[int]](list)
    lengths = [0] * len(counts_R)
    for request, count in enumerate(counts_R.tolist()):
        if count:
            start = int(starts_R1[request])
            lengths[request] = max(int(visible_N[start : start + count].max()), 1)
            sizes = (max(count, _FEW_TOKENS), max(lengths[request], _FEW_POSITIONS))
            alike[(sizes[0] - 1).bit_length(), (sizes[1] - 1).bit_length()].append(request)
    for requests in alike.values():
        requests_R = torch.tensor(requests)
        length_R, count_R = torch.tensor(lengths)[requests_R], counts_R[requests_R]
        length = int(length_R.max())
        at_T, position_L = torch.arange(int(count_R.max())), torch.arange(length)
        is_own_RT = at_T < count_R[:, None]
        tokens_RT = starts_R1[requests_R, None] + torch.minimum(at_T, count_R[:, None] - 1)
        sees_RTL = position_L < visible_N[tokens_RT][..., None]
        if window is not None:
            sees_RTL &= position_L >= (positions_N[tokens_RT] + 1 - window)[..., None]
        sees_RQL = sees_RTL.repeat_interleave(num_sharing, dim=1)
        sees_nothing_RQ = ~sees_RQL.any(dim=-1)
        pages_P = torch.arange(-(-length // page_size))
        is_own_RP = pages_P * page_size < length_R[:, None]
        tables_RP = block_tables_RP[requests_R.to(device), : len(pages_P)].long()
        tokens_M = tokens_RT[is_own_RT]
        unwritten_RL = position_L >= length_R[:, None]
        yield _Group(
            tokens_RT=tokens_RT.to(device),
            tokens_M=tokens_M.to(device),
            places_M=is_own_RT.flatten().nonzero()[:, 0].to(device),
            is_whole_step=torch.equal(tokens_RT.flatten(), torch.arange(num_tokens)),
            pages_RP=tables_RP.where(is_own_RP.to(device), 0),
            length=length,
            unwritten_RL=unwritten_RL.to(device) if bool(unwritten_RL.any()) else None,
            mask_RQL=torch.zeros(sees_RQL.shape, dtype=dtype)
            .masked_fill_(~sees_RQL, -torch.inf)
            .to(device),
            sees_nothing_RQ=sees_nothing_RQ.to(device) if bool(sees_nothing_RQ.any()) else None,
        )


def _read(pages: Tensor, group: _Group, *, head_dim: int, is_key: bool) -> Tensor:
    """What a group's requests have in pages, [G, R, L, E]."""
    num_requests = len(group.pages_RP)
    if byte_pages.are_bytes(pages):
        rows = byte_pages.read(pages[group.pages_RP.flatten()], head_dim=head_dim, is_key=is_key)
        found_GRPSE = rows.transpose(0, 1)
    else:
        found_GRPSE = pages.transpose(0, 1)[:, group.pages_RP]
    found_GRLE = found_GRPSE.reshape(pages.shape[1], num_requests, -1, head_dim)
    found_GRLE = found_GRLE[:, :, : group.length]
    if group.unwritten_RL is not None:
        found_GRLE.masked_fill_(group.unwritten_RL[..., None], 0.0)
    return found_GRLE


def _attend(
    q_NHE: Tensor,
    k_GRLE: Tensor,
    v_GRLE: Tensor,
    group: _Group,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Of every place of a group, [R T, H, E]."""
    num_kv_heads, (num_requests, num_places) = len(k_GRLE), group.tokens_RT.shape
    num_heads, head_dim = q_NHE.shape[1:]
    split = (num_requests, num_places, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q_RTGCE = q_NHE[group.tokens_RT].view(split)
    q_GRQE = q_RTGCE.permute(2, 0, 1, 3, 4).flatten(2, 3)
    if softcap is None and sinks_H is None:
        out_GRQE = scaled_dot_product_attention(
            q_GRQE, k_GRLE, v_GRLE, attn_mask=group.mask_RQL[None], scale=scale
        )
    else:
        scores_GRQL = q_GRQE.float() @ k_GRLE.float().mT * scale
        if softcap is not None:
            scores_GRQL = softcap * torch.tanh(scores_GRQL / softcap)
        scores_GRQL = scores_GRQL + group.mask_RQL
        if sinks_H is not None:
            sinks_G1Q1 = (
                sinks_H.float().view(num_kv_heads, 1, -1).repeat(1, 1, num_places)[..., None]
            )
            sinks_GRQ1 = sinks_G1Q1.expand(-1, num_requests, -1, -1)
            scores_GRQL = torch.cat((scores_GRQL, sinks_GRQ1), dim=-1)
        probs_GRQL = torch.softmax(scores_GRQL, dim=-1)[..., : group.length]
        out_GRQE = probs_GRQL @ v_GRLE.float()
    if group.sees_nothing_RQ is not None:
        out_GRQE = out_GRQE.masked_fill(group.sees_nothing_RQ[..., None], 0.0)
    out_GRTCE = out_GRQE.reshape(num_kv_heads, num_requests, num_places, -1, head_dim)
    return out_GRTCE.permute(1, 2, 0, 3, 4).reshape(-1, num_heads, head_dim)
