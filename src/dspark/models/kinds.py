"""The drafter modules there are, and which one a configuration means. It knows no file."""

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.models.chain import ChainDrafter
from dspark.models.drafter import Drafter
from dspark.models.drafter_config import DrafterConfig

AnyDrafter = Drafter | ChainDrafter


def drafter_of(
    config: DrafterConfig,
    *,
    embed_weight_VD: Tensor,
    head_weight_VD: Tensor,
    d2t_S: Tensor | None = None,
    generator: torch.Generator | None = None,
    has_own_embedding: bool = False,
    has_own_head: bool = False,
) -> AnyDrafter:
    """A drafter of the configured kind; the arguments are those of `Drafter`."""
    module = ChainDrafter if config.kind.is_chain else Drafter
    return module(
        config,
        embed_weight_VD=embed_weight_VD,
        head_weight_VD=head_weight_VD,
        d2t_S=d2t_S,
        generator=generator,
        has_own_embedding=has_own_embedding,
        has_own_head=has_own_head,
    )


def vocabulary_of(drafter: AnyDrafter, vocab_size: int) -> DraftVocabulary | None:
    """The columns of a drafter's logits; `None` where they are all of the target's ids."""
    if drafter.d2t_S is not None:
        return DraftVocabulary.of(drafter.d2t_S, vocab_size=vocab_size)
    num_columns = drafter.config.num_draft_tokens
    if num_columns == vocab_size:
        return None
    ids_S = torch.arange(num_columns, device=drafter.embed_weight_VD.device)
    return DraftVocabulary.of(ids_S, vocab_size=vocab_size)
