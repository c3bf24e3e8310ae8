"""What a step's logits say of each request: which drafted tokens are committed, and what follows.

One operator judges the requests whose logits nothing but a temperature and filters touch; the
functions of `algorithms` judge all others, a row at a time. It commits nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.algorithms.acceptance import Verdict, accept, one_hot
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.sampling import RowContext, TokenScores, process_logits, token_logprobs
from dspark.core import DraftBlock, TokenLogprobs
from dspark.engine.live_request import LiveRequest
from dspark.kernels import selection
from dspark.kernels.decision import decide, has_fast_path
from dspark.kernels.rounds import DrawKind, RoundTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on every request of a step, and the scores that log-probabilities come from.

    `first_rows` names the first row of `scores` of each request that has rows there.
    """

    verdict: Verdict
    scores: TokenScores | None
    first_rows: dict[int, int]

    def logprobs(self, request: int, tokens: Sequence[int], *, num_top: int) -> list[TokenLogprobs]:
        """Of the tokens that this request commits; it must have asked for them."""
        assert self.scores is not None
        first = self.first_rows[request]
        rows = range(first, first + len(tokens))
        return token_logprobs(self.scores, rows=rows, tokens=tokens, num_top=num_top)


def judge(
    requests: Sequence[LiveRequest],
    logits_NV: Tensor,
    *,
    rounds: RoundTable,
    drafts: Sequence[Sequence[int]],
    block: DraftBlock | None,
    vocabulary: DraftVocabulary | None,
) -> Judgement:
    """`drafts[r]` are the drafted tokens of request r that were verified, its rows one more.

    Rows come request by request, `rounds` has a column for each. `block` is what the drafts are
    the beginnings of. Raises `NumericsError` for logits that are not finite, `InputError` if a
    request bans every token.
    """
    if block is not None and block.is_certain and _has_maximal(requests):
        probs_RKS, vocabulary = one_hot(block.tokens_RK, vocab_size=logits_NV.shape[1])
        block = replace(block, probs_RKS=probs_RKS)
    plain = []
    if has_fast_path(logits_NV):
        plain = [r for r, live in enumerate(requests) if _is_plain(live)]
    starts = _starts(drafts)
    outcome = None
    if plain:
        outcome = _judge_at_once(rounds, logits_NV, plain, starts, drafts, block, vocabulary)
    if outcome is None:
        plain, outcome = [], ([], [])
    num_accepted, next_tokens = outcome
    if len(plain) == len(requests):
        lengths = [len(tokens) for tokens in drafts]
        verdict = Verdict(num_accepted=num_accepted, next_tokens=next_tokens, lengths=lengths)
        return Judgement(verdict=verdict, scores=None, first_rows={})
    others = sorted(set(range(len(requests))) - set(plain))
    by_rows = _judge_by_rows(requests, rounds, logits_NV, others, starts, drafts, block, vocabulary)
    return _joined(by_rows, others, plain, num_accepted, next_tokens, drafts)


def can_judge_at_once(requests: Sequence[LiveRequest], block: DraftBlock | None) -> bool:
    """Whether one operator judges all of them, so that the target's own call may do it.

    `early_stops` are to be forbidden there.
    """
    if block is not None and block.is_certain and _has_maximal(requests):
        return False
    return all(live.params.num_logprobs is None and live.is_nearly_plain for live in requests)


def early_stops(requests: Sequence[LiveRequest], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Rows of a step and target ids in turn: stop tokens that come too early (`min_tokens`)."""
    cells: list[int] = []
    start = 0
    for live, tokens in zip(requests, drafts, strict=True):
        for row, token in live.early_stops(len(tokens) + 1):
            cells += (start + row, token)
        start += len(tokens) + 1
    return cells


def _is_plain(live: LiveRequest) -> bool:
    return live.params.num_logprobs is None and live.is_plain


def _has_maximal(requests: Sequence[LiveRequest]) -> bool:
    return any(live.kind == DrawKind.MAXIMAL for live in requests)


def _starts(drafts: Sequence[Sequence[int]]) -> list[int]:
    starts, start = [], 0
    for tokens in drafts:
        starts.append(start)
        start += len(tokens) + 1
    return starts


def _judge_at_once(
    rounds: RoundTable,
    logits_NV: Tensor,
    picked: Sequence[int],
    starts: Sequence[int],
    drafts: Sequence[Sequence[int]],
    block: DraftBlock | None,
    vocabulary: DraftVocabulary | None,
) -> tuple[list[int], list[int]] | None:
    tokens_RK = probs_RKS = None
    if block is not None:
        tokens_RK, probs_RKS = block.tokens_RK, block.probs_RKS
        if len(picked) < len(rounds):
            tokens_RK = tokens_RK[list(picked)]
            probs_RKS = None if probs_RKS is None else probs_RKS[list(picked)]
    return decide(
        logits_NV,
        rounds=rounds.pick(picked),
        starts=[starts[r] for r in picked],
        lengths=[len(drafts[r]) for r in picked],
        draft_tokens_RK=tokens_RK,
        draft_probs_RKS=probs_RKS,
        vocabulary=vocabulary,
    )


def _judge_by_rows(
    requests: Sequence[LiveRequest],
    rounds: RoundTable,
    logits_NV: Tensor,
    picked: Sequence[int],
    starts: Sequence[int],
    drafts: Sequence[Sequence[int]],
    block: DraftBlock | None,
    vocabulary: DraftVocabulary | None,
) -> Judgement:
    contexts: list[RowContext] = []
    rows: list[int] = []
    first_rows: dict[int, int] = {}
    for r in picked:
        state, tokens = requests[r].logit_state, drafts[r]
        first_rows[r] = len(rows)
        rows.extend(range(starts[r], starts[r] + len(tokens) + 1))
        contexts.extend(
            RowContext(state=state, drafted=tuple(tokens[:j])) for j in range(len(tokens) + 1)
        )
    is_every = len(rows) == len(logits_NV)
    scores = process_logits(
        logits_NV if is_every else logits_NV[rows], contexts, operators=selection.operators()
    )
    tokens_RK = torch.zeros((len(picked), 0), dtype=torch.int64, device=logits_NV.device)
    probs_RKS = torch.zeros((len(picked), 0, 1), device=logits_NV.device)
    if block is not None:
        tokens_RK = block.tokens_RK[list(picked)]
        probs_RKS = probs_RKS if block.probs_RKS is None else block.probs_RKS[list(picked)]
    verdict = accept(
        scores=scores,
        draft_tokens_RK=tokens_RK,
        draft_probs_RKS=probs_RKS,
        lengths=[len(drafts[r]) for r in picked],
        noise=rounds.pick(picked).noise,
        vocabulary=vocabulary,
    )
    return Judgement(verdict=verdict, scores=scores, first_rows=first_rows)


def _joined(
    by_rows: Judgement,
    others: Sequence[int],
    plain: Sequence[int],
    num_accepted: Sequence[int],
    next_tokens: Sequence[int],
    drafts: Sequence[Sequence[int]],
) -> Judgement:
    order = [*others, *plain]
    accepted = [*by_rows.verdict.num_accepted, *num_accepted]
    following = [*by_rows.verdict.next_tokens, *next_tokens]
    place = {r: i for i, r in enumerate(order)}
    verdict = Verdict(
        num_accepted=[accepted[place[r]] for r in range(len(order))],
        next_tokens=[following[place[r]] for r in range(len(order))],
        lengths=[len(tokens) for tokens in drafts],
    )
    return Judgement(verdict=verdict, scores=by_rows.scores, first_rows=by_rows.first_rows)
