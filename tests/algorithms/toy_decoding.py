"""The decoding cycle over toy models, without caches: what the engine does, on one screen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.algorithms.acceptance import accept, draw_draft
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.logit_state import LogitState
from dspark.algorithms.noise import RoundNoise
from dspark.algorithms.sampling import RowContext, process_logits
from dspark.core import Origin, SamplingParams

Model = Callable[[Sequence[int]], Tensor]  # prefix -> logits
Plan = Callable[[list[list[int]]], Sequence[int]]  # drafted tokens of each request -> lengths


@dataclass
class ToyRequest:
    params: SamplingParams
    prompt: Sequence[int] = (0,)
    width: int = 3
    seed: int = 0
    answer: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    rounds: list[tuple[int, int]] = field(default_factory=list)  # planned, accepted


def decode(
    requests: Sequence[ToyRequest],
    *,
    target: Model,
    drafter: Model,
    num_tokens: int,
    block_size: int = 8,
    eos_ids: Sequence[int] = (),
    vocabulary: DraftVocabulary | None = None,
    plan: Plan | None = None,
) -> list[list[int]]:
    """Answers of at least `num_tokens` tokens, all requests in one batch, cut to that number.

    Without a `plan`, each request has its own `width` verified.
    """
    vocab_size = len(target(requests[0].prompt))
    states = [
        LogitState(
            request_id=str(r),
            params=request.params,
            prompt_ids=request.prompt,
            eos_ids=eos_ids,
            vocab_size=vocab_size,
        )
        for r, request in enumerate(requests)
    ]
    for _ in range(num_tokens):
        prefixes = [[*request.prompt, *request.answer] for request in requests]
        noise = RoundNoise(
            seed_R=torch.tensor([request.seed for request in requests]),
            position_R=torch.tensor([len(prefix) for prefix in prefixes]),
            round_R=torch.tensor([len(request.rounds) for request in requests]),
        )
        drafted: list[list[int]] = [[] for _ in requests]
        slot_probs = []
        for slot in range(block_size):
            rows = [RowContext(state=s, drafted=d) for s, d in zip(states, drafted, strict=True)]
            logits_RS = torch.stack(
                [drafter([*p, *d]) for p, d in zip(prefixes, drafted, strict=True)]
            )
            scores = process_logits(logits_RS, rows, vocabulary=vocabulary)
            draft = draw_draft(scores, noise=noise, slot=slot, vocabulary=vocabulary)
            slot_probs.append(draft.probs_RS)
            drafted = [[*d, t] for d, t in zip(drafted, draft.tokens_R.tolist(), strict=True)]
        has_probs = bool(slot_probs) and slot_probs[0] is not None
        probs_RKS = torch.stack(slot_probs, 1) if has_probs else None
        if plan is None:
            lengths = [min(request.width, block_size) for request in requests]
        else:
            lengths = list(plan(drafted))
        ends = [(r, j) for r, length in enumerate(lengths) for j in range(length + 1)]
        scores = process_logits(
            torch.stack([target([*prefixes[r], *drafted[r][:j]]) for r, j in ends]),
            [RowContext(state=states[r], drafted=drafted[r][:j]) for r, j in ends],
        )
        verdict = accept(
            scores=scores,
            draft_tokens_RK=torch.tensor(drafted, dtype=torch.int64),
            draft_probs_RKS=probs_RKS,
            lengths=lengths,
            noise=noise,
            vocabulary=vocabulary,
        )
        for r, request in enumerate(requests):
            count = verdict.num_accepted[r]
            committed = [*drafted[r][:count], verdict.next_tokens[r]]
            states[r].commit(committed)
            request.answer += committed
            request.origins += [*[Origin.ACCEPTED] * count, verdict.origin(r)]
            request.rounds.append((lengths[r], count))
        if min(len(request.answer) for request in requests) >= num_tokens:
            break
    return [request.answer[:num_tokens] for request in requests]
