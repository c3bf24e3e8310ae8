"""Which drafted tokens are committed, and the one token after them; exact for both couplings.
It knows distributions and noise, not models; it never changes a tensor that it is given.

    maximal       accept x with probability min(1, p(x)/q(x)); on rejection draw from
                  max(p - q, 0) renormalised (Leviathan et al. 2023, Chen et al. 2023)
    shared noise  draft = argmax(log q + g), target = argmax(log p + g); accept while equal
                  (Daliri et al. 2024); the emitted token is the target's own in any case
    greedy        the limit of both: draft and target are argmaxes; accept while equal
Letters: R requests, K drafted tokens, N = sum of (length + 1) rows of the target: row
`start_r + j` of request r stands after j of its drafted tokens; V and S as in `core`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.noise import RoundNoise, Stream
from dspark.algorithms.row_chunks import row_chunks
from dspark.algorithms.sampling import RowOperators, TokenScores, total_mass
from dspark.core import Coupling, Origin, SamplingParams
from dspark.errors import InputError

# Rounding alone leaves this much of max(p - q, 0) where p equals q.
_NEGLIGIBLE_MASS = 4e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What R requests commit: `num_accepted[r]` drafted tokens, then `next_tokens[r]`."""

    num_accepted: Sequence[int]
    next_tokens: Sequence[int]
    lengths: Sequence[int]
    """Drafted tokens that were verified."""

    def origin(self, request: int) -> Origin:
        """How the token after the accepted ones came to be."""
        if self.lengths[request] == 0:
            return Origin.PLAIN
        is_corrected = self.num_accepted[request] < self.lengths[request]
        return Origin.CORRECTED if is_corrected else Origin.BONUS


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDraft:
    """One drafted token for each of R requests."""

    tokens_R: Tensor  # int64, TARGET ids
    probs_RS: Tensor | None
    """Float32, what the tokens were drawn from; `None` if no request uses maximal coupling,
    which alone asks for it. Rows of other requests hold nothing of use."""


def draw_draft(
    scores: TokenScores,
    *,
    noise: RoundNoise,
    slot: int,
    vocabulary: DraftVocabulary | None = None,
) -> SlotDraft:
    """Draws the token of `slot` for each request from the drafter's processed scores [R, S]."""
    shared = [r for r, row in enumerate(scores.rows) if _draws_shared(row.params)]
    maximal = [r for r, row in enumerate(scores.rows) if _draws_maximal(row.params)]
    token_S = None if vocabulary is None else vocabulary.d2t_S
    columns_R, probs_RS = scores.best_N, None
    if maximal:
        probs_RS = scores.probs()
        uniform_R = noise.pick(maximal).uniforms(Stream.DRAFT, slots=range(slot, slot + 1))[:, 0]
        columns_R = columns_R.clone()
        columns_R[maximal] = scores.operators.draw_categorical(
            _picked(probs_RS, maximal), uniform_R
        )
    tokens_R = columns_R.clone() if token_S is None else token_S[columns_R]
    if shared:
        picked = noise.pick(shared)
        tokens_R[shared] = scores.operators.draw_shared(
            _picked(scores.scores_NV, shared), picked.seed_R, picked.position_R + slot, token_S
        )
    return SlotDraft(tokens_R=tokens_R, probs_RS=probs_RS)


def accept(
    *,
    scores: TokenScores,
    draft_tokens_RK: Tensor,
    draft_probs_RKS: Tensor | None,
    lengths: Sequence[int],
    noise: RoundNoise,
    vocabulary: DraftVocabulary | None = None,
) -> Verdict:
    """Judges one round of R requests: greedy, maximal and shared noise may be mixed.

    `scores` are the target's N rows. Only the first `lengths[r]` tokens of a row of
    `draft_tokens_RK` (target ids) are looked at; ids outside the vocabulary are rejected.
    `draft_probs_RKS` are the distributions the tokens were drawn from; `None` if no drafted
    token of a request with maximal coupling is verified. Raises `InputError` if a request has
    banned every token.
    """
    assert len(scores.rows) == sum(lengths) + len(lengths), "length + 1 rows per request"
    starts = _starts(lengths)
    draft_tokens_RK = _refuse_beyond_impossible(scores, draft_tokens_RK, starts)
    target_tokens_N = _target_tokens(scores, lengths, noise)
    verdict = accept_matching(
        target_tokens_N=target_tokens_N, draft_tokens_RK=draft_tokens_RK, lengths=lengths
    )
    maximal = [r for r, start in enumerate(starts) if _draws_maximal(scores.rows[start].params)]
    if maximal:
        picked_noise = noise.pick(maximal)
        num_slots = max(lengths[r] for r in maximal)
        is_every = len(maximal) == len(lengths)
        probs_NV = scores.probs(None if is_every else _rows_of(maximal, lengths))
        if num_slots == 0:
            draft_probs_RKS = probs_NV.new_zeros((len(lengths), 0, 1))
        assert draft_probs_RKS is not None, "maximal coupling needs the drafter's distributions"
        ratio_verdict = accept_maximal(
            probs_NV=probs_NV,
            draft_tokens_RK=draft_tokens_RK[maximal, :num_slots],
            draft_probs_RKS=draft_probs_RKS[maximal, :num_slots],
            lengths=[lengths[r] for r in maximal],
            accept_uniforms_RK=picked_noise.uniforms(Stream.ACCEPT, slots=range(num_slots)),
            next_uniforms_R=picked_noise.uniforms(Stream.TARGET, slots=range(1))[:, 0],
            vocabulary=vocabulary,
            operators=scores.operators,
        )
        verdict = _replaced(verdict, maximal, ratio_verdict)
    _check_possible(scores, starts, verdict)
    return verdict


def accept_matching(
    *, target_tokens_N: Tensor, draft_tokens_RK: Tensor, lengths: Sequence[int]
) -> Verdict:
    """Greedy and shared noise: accepts while the drafted token is the target's own."""
    row_RK, is_planned_RK, start_R = _verify_rows(draft_tokens_RK, lengths)
    is_equal_RK = (draft_tokens_RK == target_tokens_N[row_RK]) & is_planned_RK
    num_accepted_R = is_equal_RK.to(torch.int64).cumprod(1).sum(1)
    return _verdict(num_accepted_R, target_tokens_N[start_R + num_accepted_R], lengths)


def accept_maximal(
    *,
    probs_NV: Tensor,
    draft_tokens_RK: Tensor,
    draft_probs_RKS: Tensor,
    lengths: Sequence[int],
    accept_uniforms_RK: Tensor,
    next_uniforms_R: Tensor,
    vocabulary: DraftVocabulary | None = None,
    operators: RowOperators | None = None,
) -> Verdict:
    """Maximal coupling of the drafter's distributions with the target's, both float32.

    A token that cannot have been drawn from its q (an invalid id, or q(x) = 0) is rejected,
    and the token in its place is drawn from p itself.
    """
    operators = RowOperators() if operators is None else operators
    vocab_size = probs_NV.shape[1]
    row_RK, is_planned_RK, start_R = _verify_rows(draft_tokens_RK, lengths)
    is_id_RK = (draft_tokens_RK >= 0) & (draft_tokens_RK < vocab_size)
    token_RK = torch.where(is_id_RK, draft_tokens_RK, 0)
    p_RK = probs_NV[row_RK, token_RK]
    q_RK = _gather_drafted(draft_probs_RKS, token_RK, vocabulary) * is_id_RK
    is_accepted_RK = is_planned_RK & (accept_uniforms_RK < accept_probability(p_RK, q_RK))
    num_accepted_R = is_accepted_RK.to(torch.int64).cumprod(1).sum(1)

    # A row is drawn from the residual if its token was rejected, and had come from its q.
    is_drawn = (q_RK > 0).tolist()
    slots = num_accepted_R.tolist()
    tokens_R = torch.empty_like(num_accepted_R)
    for chunk in row_chunks(probs_NV[: len(lengths)]):
        weights_RV = probs_NV[(start_R + num_accepted_R)[chunk]]
        requests = range(len(lengths))[chunk]
        corrected = [r for r in requests if slots[r] < lengths[r] and is_drawn[r][slots[r]]]
        if corrected:
            index = [r - chunk.start for r in corrected]
            q_CS = draft_probs_RKS[corrected, [slots[r] for r in corrected]]
            weights_RV[index] = leftover(weights_RV[index], q_CS, vocabulary)
        tokens_R[chunk] = operators.draw_categorical(weights_RV, next_uniforms_R[chunk])
    return _verdict(num_accepted_R, tokens_R, lengths)


def one_hot(draft_tokens_RK: Tensor, *, vocab_size: int) -> tuple[Tensor, DraftVocabulary]:
    """The distributions of tokens that were chosen, not drawn, over these tokens alone.

    Ids outside the vocabulary have no column.
    """
    is_id_RK = (draft_tokens_RK >= 0) & (draft_tokens_RK < vocab_size)
    token_RK = torch.where(is_id_RK, draft_tokens_RK, 0)
    ids_S, column_RK = torch.unique(token_RK, return_inverse=True)
    probs_RKS = functional.one_hot(column_RK, len(ids_S)).float() * is_id_RK[:, :, None]
    return probs_RKS, DraftVocabulary.of(ids_S, vocab_size=vocab_size)


def accept_probability(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) elementwise, float64; 0 where q is 0: such a token was not drawn from q."""
    ratio = (p.to(torch.float64) / q.to(torch.float64)).clamp(max=1.0)
    return torch.where(q > 0, ratio, 0.0)


def residual(p_RV: Tensor, q_RS: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
    """The distribution after a rejection, float32 [R, V]: `leftover` renormalised."""
    weights_RV = leftover(p_RV, q_RS, vocabulary)
    return weights_RV / weights_RV.sum(-1, keepdim=True)


def leftover(p_RV: Tensor, q_RS: Tensor, vocabulary: DraftVocabulary | None = None) -> Tensor:
    """max(p - q, 0), float32 [R, V]; q is 0 outside the draft vocabulary.

    Where nothing but rounding is left of the mass, p itself: rejection then has a probability
    of the same size, so that the choice cannot be seen in the output.
    """
    rest_RV = p_RV.clone()
    if vocabulary is None:
        rest_RV -= q_RS
    else:
        rest_RV[:, vocabulary.d2t_S] -= q_RS
    rest_RV.clamp_(min=0.0)
    return torch.where(total_mass(rest_RV)[:, None] > _NEGLIGIBLE_MASS, rest_RV, p_RV)


def acceptance_rate(
    p_RV: Tensor, q_RS: Tensor, vocabulary: DraftVocabulary | None = None
) -> Tensor:
    """Probability that maximal coupling accepts, 1 - TV(p, q) = sum of min(p, q): [R] (Eq. 8)."""
    drafted_p_RS = p_RV if vocabulary is None else p_RV[:, vocabulary.d2t_S]
    return torch.minimum(drafted_p_RS, q_RS).sum(-1)


def shared_noise_bound(acceptance_rate_R: Tensor) -> Tensor:
    """Least probability that shared noise accepts, (1 - TV) / (1 + TV), from 1 - TV: [R]."""
    return acceptance_rate_R / (2.0 - acceptance_rate_R)


def _draws_maximal(params: SamplingParams) -> bool:
    return not params.is_greedy and params.effective_coupling is Coupling.MAXIMAL


def _draws_shared(params: SamplingParams) -> bool:
    return not params.is_greedy and params.effective_coupling is Coupling.SHARED_NOISE


def _starts(lengths: Sequence[int]) -> list[int]:
    """First row of each request."""
    return [0, *accumulate(length + 1 for length in lengths)][:-1]


def _rows_of(requests: Sequence[int], lengths: Sequence[int]) -> list[int]:
    starts = _starts(lengths)
    return [starts[r] + j for r in requests for j in range(lengths[r] + 1)]


def _target_tokens(scores: TokenScores, lengths: Sequence[int], noise: RoundNoise) -> Tensor:
    """The target's own token of each row: int64 [N]. Maximal coupling has no use of its rows."""
    shared = [n for n, row in enumerate(scores.rows) if _draws_shared(row.params)]
    if not shared:
        return scores.best_N
    request_N = [r for r, length in enumerate(lengths) for _ in range(length + 1)]
    slot_N = [j for length in lengths for j in range(length + 1)]
    slot_R = torch.tensor([slot_N[n] for n in shared], device=scores.best_N.device)
    picked = noise.pick([request_N[n] for n in shared])
    tokens_N = scores.best_N.clone()
    tokens_N[shared] = scores.operators.draw_shared(
        _picked(scores.scores_NV, shared), picked.seed_R, picked.position_R + slot_R, None
    )
    return tokens_N


def _picked(values_NV: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows; the tensor itself, not a copy, if they are all of them in order."""
    return values_NV if len(rows) == len(values_NV) else values_NV[list(rows)]


def _verify_rows(draft_tokens_RK: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Row that judges each drafted token [R, K], whether it is planned [R, K], first rows [R]."""
    num_slots = draft_tokens_RK.shape[1]
    assert max(lengths, default=0) <= num_slots, "no more tokens verified than drafted"
    device = draft_tokens_RK.device
    start_R = torch.tensor(_starts(lengths), dtype=torch.int64, device=device)
    length_R = torch.tensor(lengths, dtype=torch.int64, device=device)
    slot_K = torch.arange(num_slots, device=device)
    is_planned_RK = slot_K < length_R[:, None]
    # Slots that are not planned have no row of their own; they look at the request's first.
    row_RK = start_R[:, None] + torch.where(is_planned_RK, slot_K, 0)
    return row_RK, is_planned_RK, start_R


def _gather_drafted(
    draft_probs_RKS: Tensor, token_RK: Tensor, vocabulary: DraftVocabulary | None
) -> Tensor:
    """q of each drafted token: [R, K]."""
    if vocabulary is None:
        return draft_probs_RKS.gather(2, token_RK[:, :, None])[:, :, 0]
    column_RK = vocabulary.column_V[token_RK]
    is_drafted_RK = column_RK < vocabulary.size
    column_RK = torch.where(is_drafted_RK, column_RK, 0)
    return draft_probs_RKS.gather(2, column_RK[:, :, None])[:, :, 0] * is_drafted_RK


def _verdict(num_accepted_R: Tensor, next_tokens_R: Tensor, lengths: Sequence[int]) -> Verdict:
    num_accepted, next_tokens = torch.stack([num_accepted_R, next_tokens_R]).tolist()
    return Verdict(num_accepted=num_accepted, next_tokens=next_tokens, lengths=tuple(lengths))


def _replaced(verdict: Verdict, requests: Sequence[int], by: Verdict) -> Verdict:
    num_accepted, next_tokens = list(verdict.num_accepted), list(verdict.next_tokens)
    for i, r in enumerate(requests):
        num_accepted[r], next_tokens[r] = by.num_accepted[i], by.next_tokens[i]
    return Verdict(num_accepted=num_accepted, next_tokens=next_tokens, lengths=verdict.lengths)


def _refuse_beyond_impossible(
    scores: TokenScores, draft_tokens_RK: Tensor, starts: Sequence[int]
) -> Tensor:
    """Makes drafted tokens invalid where the request has banned every token of the row."""
    if not scores.impossible:
        return draft_tokens_RK
    refused_RK = draft_tokens_RK.clone()
    for n in scores.impossible:
        r = bisect_right(starts, n) - 1
        refused_RK[r, n - starts[r] : n - starts[r] + 1] = -1
    return refused_RK


def _check_possible(scores: TokenScores, starts: Sequence[int], verdict: Verdict) -> None:
    for start, count in zip(starts, verdict.num_accepted, strict=True):
        if start + count in scores.impossible:
            row = scores.rows[start + count]
            raise InputError(
                f"Request {row.state.request_id!r} bans every token at answer index "
                f"{row.state.num_answer + count}; relax logit_bias, bad_words, min_tokens "
                "or the grammar.",
                request_id=row.state.request_id,
            )
