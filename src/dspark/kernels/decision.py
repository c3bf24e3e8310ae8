"""The verdict on a round as one operator over the target's logits.

It is what `sampling.process_logits` and `acceptance.accept` do for requests whose logits nothing
but a temperature and filters touch; those two are its reference. It knows no engine.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.kernels import extension
from dspark.kernels.rounds import RoundTable


def has_fast_path(logits_NV: Tensor) -> bool:
    """Whether `decide` can judge these logits."""
    return (
        extension.IS_LOADED
        and logits_NV.device.type == "cpu"
        and logits_NV.dtype in (torch.float32, torch.bfloat16)
    )


def decide(
    logits_NV: Tensor,
    *,
    rounds: RoundTable,
    starts: Sequence[int],
    lengths: Sequence[int],
    draft_tokens_RK: Tensor | None = None,
    draft_probs_RKS: Tensor | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[list[int], list[int]] | None:
    """Drafted tokens that each request accepts, and the token after them.

    Request r has rows `starts[r] .. + lengths[r]` of the logits; `draft_tokens_RK` are target ids,
    invalid ones are refused; `None` if nothing is drafted. `draft_probs_RKS`: what they were drawn
    from, needed where drafts of a request with maximal coupling are verified. `None` is returned if
    a row that had to be looked at has no finite largest logit: the reference says what is wrong.
    """
    num_accepted, next_tokens = torch.ops.dspark.decide.default(
        logits_NV,
        rounds.counters_CR,
        rounds.options_OR,
        starts,
        lengths,
        None if draft_tokens_RK is None else draft_tokens_RK.contiguous(),
        draft_probs_RKS,
        None if vocabulary is None else vocabulary.column_V,
    ).tolist()
    if min(next_tokens, default=0) < 0:
        return None
    return num_accepted, next_tokens
