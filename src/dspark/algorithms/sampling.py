"""From logits to a token: the request's own processing of each row, probabilities, draws.
It knows rows of mixed requests; it knows neither model nor where randomness is kept.

Order of processing: logit bias, bad words, min_tokens, penalties, grammar (`logit_state`),
temperature, top-k, top-p, min-p (`filters`), softmax. Everything after the model is float32,
draws sum and compare in float64. A greedy row is one-hot: its argmax, equal logits by lowest id.
Letters: N rows, V the target's vocabulary or the drafter's columns, R rows picked out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.filters import Filter, filter_rows_, keep_leading
from dspark.algorithms.logit_state import LogitState
from dspark.algorithms.noise import Stream, gumbel, row_keys
from dspark.algorithms.row_chunks import row_chunks, row_runs
from dspark.core import SamplingParams, TokenLogprobs
from dspark.errors import NumericsError

# Columns that are summed together, and how many sums run side by side.
_BLOCK = 768
_LANES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContext:
    """Where a row stands: after the committed answer of `state` and `drafted` in this round."""

    state: LogitState
    drafted: Sequence[int] = ()

    @property
    def params(self) -> SamplingParams:
        """The request's own options."""
        return self.state.params


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Processed logits of N rows: log-probabilities up to a constant per row.

    `scores_NV` may be the very logits given and is read-only. Sampling rows are float32 with
    maximum 0 and -inf outside the support. Greedy rows are the processed logits (up to that
    constant), for log-probabilities; their distribution is the one-hot at `best_N`.
    `impossible` names rows in which every token is banned; they hold a uniform stand-in, so
    that a draft behind them costs nothing, and `acceptance.accept` refuses to emit from them.
    `operators` are those that made the scores: what is drawn from them uses the same.
    """

    scores_NV: Tensor
    best_N: Tensor  # int64, lowest index of the row's maximum
    rows: Sequence[RowContext]
    impossible: Sequence[int]
    operators: "RowOperators"

    def probs(self, rows: Sequence[int] | None = None) -> Tensor:
        """Float32 distributions [R, V] of `rows` (all by default): one-hot for greedy rows."""
        picked = range(len(self.rows)) if rows is None else rows
        scores_RV = self.scores_NV if rows is None else self.scores_NV[list(rows)]
        greedy = [r for r, n in enumerate(picked) if self.rows[n].params.is_greedy]
        probs_RV = self.operators.softmax(scores_RV)
        if greedy:
            best_G = self.best_N[[picked[r] for r in greedy]]
            probs_RV[greedy] = 0.0
            probs_RV[greedy, best_G] = 1.0
        return probs_RV


def best_columns(scores_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Largest score of each row, NaN if one is NaN, and its lowest column, int64: both [N]."""
    max_N, best_N = scores_NV.max(-1)
    return max_N, best_N


def softmax(scores_NV: Tensor) -> Tensor:
    """Float32 probabilities [N, V] of scores of any float type."""
    return scores_NV.to(torch.float32).softmax(-1)


def process_logits(
    logits_NV: Tensor,
    rows: Sequence[RowContext],
    *,
    vocabulary: DraftVocabulary | None = None,
    operators: "RowOperators | None" = None,
) -> TokenScores:
    """Applies each row's request to its logits; `logits_NV` (any float type) is not changed.

    With `vocabulary` the columns are a drafter's, and q receives the request's options as p
    does. Rows of one request that follow one another are processed together. Raises
    `NumericsError` naming the request whose logits are not finite.
    """
    assert len(logits_NV) == len(rows), "one context per row of logits"
    operators = RowOperators() if operators is None else operators
    is_shaped = any(row.state.shapes_logits for row in rows)
    if not is_shaped and all(row.params.is_greedy for row in rows):
        max_N, best_N = operators.best(logits_NV)
        return TokenScores(
            scores_NV=logits_NV,
            best_N=best_N,
            rows=rows,
            impossible=_check_maxima(max_N, rows),
            operators=operators,
        )
    scores_NV = logits_NV.to(torch.float32, copy=True)
    if is_shaped:
        _shape_(scores_NV, rows, vocabulary)
    max_N, best_N = operators.best(scores_NV)
    impossible = _check_maxima(max_N, rows)
    if impossible:
        scores_NV[impossible] = 0.0
        max_N[impossible] = 0.0
    # Shifted before it is divided: near the maximum the difference of two floats is exact,
    # so that small temperatures do not magnify a rounding.
    scores_NV -= max_N[:, None]
    _divide_by_temperature_(scores_NV, rows)
    filters = [_filter_of(row.params) for row in rows]
    if not all(tokens.keeps_all for tokens in filters):
        operators.filter_rows_(scores_NV, filters)
    return TokenScores(
        scores_NV=scores_NV,
        best_N=best_N,
        rows=rows,
        impossible=impossible,
        operators=operators,
    )


def draw_categorical(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """One index per row by the inverse of the cumulative distribution: int64 [R].

    Weights, float32, need not sum to 1, but each row needs some mass; weight 0 is never drawn
    for a uniform in [0, 1). Sums are float64 and run block by block (see `_block_sums`), so that
    a row can be cut between threads without a change of one bit.
    """
    indices_R = torch.empty_like(uniform_R, dtype=torch.int64)
    for rows in row_chunks(weights_RV):
        indices_R[rows] = _draw_chunk(weights_RV[rows], uniform_R[rows])
    return indices_R


def total_mass(weights_RV: Tensor) -> Tensor:
    """Sum of each row, float64 [R], in the order in which `draw_categorical` adds."""
    masses = [
        _block_sums(_in_blocks(weights_RV[rows])).cumsum(-1)[:, -1]
        for rows in row_chunks(weights_RV)
    ]
    return torch.cat(masses)


def _draw_chunk(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    blocks_RBW = _in_blocks(weights_RV)
    passed_RB = _block_sums(blocks_RBW).cumsum(-1)
    threshold_R1 = uniform_R[:, None].to(torch.float64) * passed_RB[:, -1:]
    block_R1 = torch.searchsorted(passed_RB, threshold_R1, right=True)
    block_R1.clamp_(max=passed_RB.shape[1] - 1)
    before_R1 = torch.where(block_R1 > 0, passed_RB.gather(1, (block_R1 - 1).clamp(min=0)), 0.0)
    rows_R = torch.arange(len(weights_RV), device=weights_RV.device)
    block_RW = blocks_RBW[rows_R, block_R1[:, 0]]
    running_RW = block_RW.cumsum(-1)
    inside_R1 = torch.searchsorted(running_RW, threshold_R1 - before_R1, right=True)
    # A block's sum may pass the threshold and its running sum miss it by a rounding.
    places_W = torch.arange(_BLOCK, device=weights_RV.device)
    last_R1 = torch.where(block_RW > 0, places_W, 0).amax(-1, keepdim=True)
    inside_R1 = torch.where(inside_R1 < _BLOCK, inside_R1, last_R1)
    return (block_R1 * _BLOCK + inside_R1)[:, 0]


def _in_blocks(weights_RV: Tensor) -> Tensor:
    """Float64 [R, blocks, _BLOCK], zeros behind the last column."""
    num_rows, width = weights_RV.shape
    num_blocks = -(-width // _BLOCK)
    padded = torch.zeros(
        (num_rows, num_blocks * _BLOCK), dtype=torch.float64, device=weights_RV.device
    )
    padded[:, :width] = weights_RV
    return padded.view(num_rows, num_blocks, _BLOCK)


def _block_sums(blocks_RBW: Tensor) -> Tensor:
    """Sum of each block: `_LANES` sums over every such column, then these from first to last."""
    num_rows, num_blocks, _ = blocks_RBW.shape
    lanes_RBL = blocks_RBW.view(num_rows, num_blocks, -1, _LANES).cumsum(-2)[:, :, -1]
    return lanes_RBL.cumsum(-1)[:, :, -1]


def draw_shared(
    scores_RV: Tensor, seed_R: Tensor, position_R: Tensor, token_V: Tensor | None = None
) -> Tensor:
    """argmax(score + g) per row, a draw from softmax(score): token ids int64 [R].

    The noise belongs to (seed, position, token), so that drafter and target meet. `token_V` are
    the target ids of the columns, `None` for the target itself.
    """
    key_R = row_keys(seed_R, position_R, Stream.TOKEN)
    noise_ids_V = token_V
    if noise_ids_V is None:
        noise_ids_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    noise_ids_V = noise_ids_V.to(torch.int32)
    column_R = torch.empty_like(key_R)
    for rows in row_chunks(scores_RV):
        column_R[rows] = gumbel(key_R[rows], noise_ids_V).add_(scores_RV[rows]).max(-1).indices
    return column_R if token_V is None else token_V[column_R]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOperators:
    """Operations over rows of scores; `kernels.selection` has faster twins that give the same."""

    best: Callable[[Tensor], tuple[Tensor, Tensor]] = best_columns
    softmax: Callable[[Tensor], Tensor] = softmax
    draw_categorical: Callable[[Tensor, Tensor], Tensor] = draw_categorical
    draw_shared: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = draw_shared
    filter_rows_: Callable[[Tensor, Sequence[Filter]], None] = filter_rows_


def token_logprobs(
    scores: TokenScores, *, rows: Sequence[int], tokens: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens[i]` and the `num_top` most likely tokens in row `rows[i]`.

    They are those of the processed distribution, filters included, and tokens outside its
    support are left out of `top`. Greedy rows show the processed logits at temperature 1,
    because the one-hot would say nothing.
    """
    logprobs_RV = scores.scores_NV[list(rows)].to(torch.float32).log_softmax(-1)
    num_kept = min(num_top, logprobs_RV.shape[1])
    result = []
    for logprobs_V, token in zip(logprobs_RV, tokens, strict=True):
        top: list[tuple[int, float]] = []
        if num_kept:
            last_1 = logprobs_V.topk(num_kept).values[-1:]
            num_kept_1 = torch.tensor([num_kept], device=last_1.device)
            ids = keep_leading(logprobs_V[None], num_kept_1, last_1)[0].nonzero()[:, 0].tolist()
            ranked = sorted(zip(ids, logprobs_V[ids].tolist(), strict=True), key=lambda it: -it[1])
            top = [(token_id, value) for token_id, value in ranked if value > -math.inf]
        result.append(TokenLogprobs(chosen=float(logprobs_V[token]), top=top))
    return result


def _shape_(
    scores_NV: Tensor, rows: Sequence[RowContext], vocabulary: DraftVocabulary | None
) -> None:
    for places, group in row_runs(rows, lambda row: id(row.state)):
        state = group[0].state
        if state.shapes_logits:
            state.shape_(scores_NV[places], [row.drafted for row in group], vocabulary)


def _check_maxima(max_N: Tensor, rows: Sequence[RowContext]) -> list[int]:
    """Rows without a possible token (maximum -inf); NaN and +inf raise."""
    if bool(max_N.isfinite().all()):
        return []
    impossible = []
    for n, value in enumerate(max_N.tolist()):
        if value == -math.inf:
            impossible.append(n)
        elif not math.isfinite(value):
            raise NumericsError(
                f"Request {rows[n].state.request_id!r} has a logit of {value}, so its next token "
                "is undefined; check the model's weights and dtype.",
                request_id=rows[n].state.request_id,
            )
    return impossible


def _divide_by_temperature_(scores_NV: Tensor, rows: Sequence[RowContext]) -> None:
    temperatures = [1.0 if row.params.is_greedy else row.params.temperature for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scores_NV /= torch.tensor(temperatures, device=scores_NV.device)[:, None]


def _filter_of(params: SamplingParams) -> Filter:
    return Filter() if params.is_greedy else Filter.of(params)
