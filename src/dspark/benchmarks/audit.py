"""Why two decodings of one prompt differ: a near tie within the arithmetic's own noise, or a bug.

bf16 products of different shapes add in different orders, so a pass over one token and a pass over
a window give logits that differ a little. A difference in text is explained if, where it begins,
the best tokens are closer than that noise, measured on this very text (method section 4).
It knows a target and two answers, no engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.algorithms.noise import Stream, gumbel, row_keys
from dspark.benchmarks.passes import Passes
from dspark.core import SamplingParams
from dspark.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two answers part, and how close the choice was. Scores are logits / temperature, plus
    the shared noise of the token for a sampled answer."""

    position: int
    """First answer token that differs, counted from 0."""
    tokens: Sequence[int | None]
    """What either answer has there; `None` where it has ended."""
    top2_gap: float | None
    """Best score minus that of the worse of the two tokens, in passes of one token."""
    noise: float | None
    """Largest change of the gap between the two best tokens that the shape of the passes alone
    makes, over all positions of this answer."""
    explained: bool
    """Whether `top2_gap <= noise`."""

    def sentence(self) -> str:
        """What happened, for a person."""
        if self.top2_gap is None or self.noise is None:
            return f"differs from token {self.position} on: one answer ends there"
        verdict = "explained by" if self.explained else "NOT explained by"
        return (
            f"differs from token {self.position} on: top-2 gap {self.top2_gap:.4f}, {verdict} "
            f"the arithmetic noise {self.noise:.4f}"
        )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ, `None` if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare(
    target: Target,
    *,
    prompt_ids: Sequence[int],
    plain_ids: Sequence[int],
    dspark_ids: Sequence[int],
    params: SamplingParams,
    block_size: int,
) -> Divergence | None:
    """`None` for equal answers, else the divergence with its measured explanation.

    `params` may hold a temperature and a seed; other processing is not repeated here.
    """
    position = first_difference(plain_ids, dspark_ids)
    if position is None:
        return None
    tokens = [ids[position] if position < len(ids) else None for ids in (plain_ids, dspark_ids)]
    if None in tokens:
        return Divergence(
            position=position, tokens=tokens, top2_gap=None, noise=None, explained=False
        )
    prefix = [*prompt_ids, *plain_ids[:position]]
    rivals = torch.tensor(tokens)
    scores = [
        _scores(logits_AV, first=len(prompt_ids), params=params)
        for logits_AV in _answer_logits(target, prefix, len(prompt_ids), block_size)
    ]
    last_V = scores[0][-1]
    gap = float(last_V.max() - last_V[rivals].min())
    noise = _gap_noise(scores)
    return Divergence(
        position=position, tokens=tokens, top2_gap=gap, noise=noise, explained=gap <= noise
    )


def _answer_logits(
    target: Target, prefix: Sequence[int], num_prompt: int, block_size: int
) -> Iterator[Tensor]:
    """Logits [A, V] behind the prompt and each answer token, once for each shape of the passes:
    one token at a time first, then windows of 2..K+1 tokens, then all at once."""
    num_answer = len(prefix) - num_prompt
    passes = Passes(target, num_requests=1, num_positions=len(prefix))
    for window in range(1, block_size + 2):
        full, rest = divmod(num_answer, window)
        chunks = [num_prompt, *[window] * full, *([rest] if rest else [])]
        yield passes.score(prefix, chunks=chunks)[num_prompt - 1 :]
    yield passes.score(prefix, chunks=[len(prefix)])[num_prompt - 1 :]


def _scores(logits_AV: Tensor, *, first: int, params: SamplingParams) -> Tensor:
    """What the choice of a token compares, float64 [A, V]; row 0 chooses position `first`."""
    scores_AV = logits_AV.double()
    if params.is_greedy:
        return scores_AV
    assert params.seed is not None, "without a seed there is nothing to compare"
    num_rows, num_tokens = scores_AV.shape
    keys_A = row_keys(
        torch.full((num_rows,), params.seed, dtype=torch.int64),
        torch.arange(first, first + num_rows),
        Stream.TOKEN,
    )
    noise_AV = gumbel(keys_A, torch.arange(num_tokens))
    return scores_AV / params.temperature + noise_AV.to(scores_AV.device)


def _gap_noise(scores: Sequence[Tensor]) -> float:
    """How far the gap between the two best tokens of `scores[0]` moves in the other shapes."""
    top_A2 = scores[0].topk(2, dim=-1).indices
    gaps = [
        pair_A2[:, 0] - pair_A2[:, 1] for pair_A2 in (each.gather(-1, top_A2) for each in scores)
    ]
    return max(float((gap_A - gaps[0]).abs().max()) for gap_A in gaps)
