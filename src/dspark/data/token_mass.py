"""Which tokens the target itself likes: what the draft vocabulary is chosen by.

Letters: legend in core.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.algorithms.row_chunks import row_chunks
from dspark.data.answers import Answer
from dspark.data.hidden_states import OnlineStates, StatesSource, passes
from dspark.models.target import Target


def sum_mass(
    target: Target, last_ND: Tensor, *, mass_V: Tensor | None, chunk_rows: int = 256
) -> Tensor:
    """Log-sum-exp of the full-vocabulary logits, float32 [N]; adds the distributions to `mass_V`.

    Logits exist for `chunk_rows` rows at a time, probabilities for those of a row chunk.
    """
    lse_N = torch.empty(len(last_ND), dtype=torch.float32, device=last_ND.device)
    for start in range(0, len(last_ND), chunk_rows):
        logits_nV = target.logits(last_ND[start : start + chunk_rows])
        chunk_V = torch.zeros(logits_nV.shape[1], device=logits_nV.device)
        for rows in row_chunks(logits_nV):
            odds_nV = logits_nV[rows].float()
            top_n1 = odds_nV.amax(dim=1, keepdim=True)
            total_n = odds_nV.sub_(top_n1).exp_().sum(dim=1)
            lse_N[start + rows.start : start + rows.stop] = top_n1[:, 0] + total_n.log()
            if mass_V is not None:
                chunk_V += total_n.reciprocal() @ odds_nV
        if mass_V is not None:
            mass_V += chunk_V.to(mass_V)
    return lse_N


def draw_tokens(
    target: Target, last_ND: Tensor, *, generator: torch.Generator, chunk_rows: int = 256
) -> Tensor:
    """One token [N] from the target's distribution (temperature 1) behind each state."""
    drawn = [
        torch.multinomial(target.logits(part).float().softmax(dim=1).cpu(), 1, generator=generator)
        for part in torch.split(last_ND, chunk_rows)
    ]
    if not drawn or not len(last_ND):
        return torch.zeros(0, dtype=torch.int64, device=last_ND.device)
    return torch.cat(drawn)[:, 0].to(last_ND.device)


def token_mass(
    target: Target,
    answers: Sequence[Answer],
    *,
    source: StatesSource | None = None,
    num_answers: int = 200,
) -> Tensor:
    """The same mass over the first answers, float64 [V], for a run without a cache.

    Without a `source` the target runs here.
    """
    mass_V = torch.zeros(target.spec.vocab_size, dtype=torch.float64)
    source = OnlineStates(target, tap_layers=()) if source is None else source
    for part in passes(answers[:num_answers], 2560):
        for answer, states in zip(part, source.read(part), strict=True):
            own_ND = states.last_ND[answer.loss_mask().to(states.last_ND.device)]
            sum_mass(target, own_ND, mass_V=mass_V)
    return mass_V


def select_vocabulary(mass_V: Tensor, *, size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` target ids of largest mass (ties: lowest id), `always` among them, ascending."""
    score_V = mass_V.clone()
    for token in always:
        score_V[token] = float("inf")
    order_V = torch.sort(score_V, descending=True, stable=True).indices
    return order_V[:size].sort().values
