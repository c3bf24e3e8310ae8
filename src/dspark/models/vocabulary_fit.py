"""A stored drafter's vocabulary beside the target's: maps, padded rows, own or shared tensors.

It opens no file and builds no drafter. Shape letters: legend in core.py.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dspark.errors import ModelError
from dspark.models.drafter_base import check_map
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_format import VocabularyMap

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_W1 = "markov_head.markov_w1.weight"
_W2 = "markov_head.markov_w2.weight"


def target_ids(d2t_S: Tensor | None, kind: VocabularyMap | None) -> Tensor | None:
    """The file's map as target ids, whichever way it was written (UC-076)."""
    if d2t_S is None:
        return None
    d2t_S = d2t_S.to(torch.int64)
    match kind:
        case VocabularyMap.TARGET_IDS:
            return d2t_S
        case VocabularyMap.OFFSETS if bool(d2t_S.any()):
            return d2t_S + torch.arange(len(d2t_S), device=d2t_S.device)
        case VocabularyMap.OFFSETS:
            raise ModelError(
                "The drafter's d2t is all zeros, which maps its tokens to the first "
                f"{len(d2t_S)} of the target; export it with the map of its training."
            )
    raise ModelError(
        "config.json does not say what d2t holds; add "
        '"dspark": {"vocabulary_map": "target-ids"} or "offsets" (target id minus draft id).'
    )


def fitted(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    d2t_S: Tensor | None,
    vocab_size: int,
    num_tokens: int | None,
) -> tuple[DrafterConfig, Tensor | None]:
    """Padded vocabularies (UC-074, UC-075): rows follow the target, padding cannot be proposed.

    A token that cannot be proposed leaves the draft vocabulary; W1 gets the target's rows, new
    ones zero. Changes `tensors` in place.
    """
    check_map(config, d2t_S)
    limit = vocab_size if num_tokens is None else min(num_tokens, vocab_size)
    device = tensors["norm.weight"].device
    ids_S = torch.arange(config.vocab_size, device=device) if d2t_S is None else d2t_S
    if config.vocab_size == vocab_size and bool((ids_S < limit).all()):
        return config, d2t_S
    kept = ids_S < limit
    for name in (HEAD, _W2):
        if name in tensors:
            tensors[name] = tensors[name][kept]
    if config.markov_rank > 0:
        w1 = tensors[_W1]
        tensors[_W1] = w1.new_zeros(vocab_size, config.markov_rank)
        tensors[_W1][: len(w1)] = w1[:vocab_size]
    ids_S = ids_S[kept]
    if len(ids_S) == vocab_size:
        return replace(config, vocab_size=vocab_size, draft_vocab_size=None), None
    return replace(config, vocab_size=vocab_size, draft_vocab_size=len(ids_S)), ids_S


def own_embedding_of(
    stored_UD: Tensor | None, target_VD: Tensor, *, mask_token_id: int | None
) -> Tensor | None:
    """The stored embedding where it is not a copy of the target's, with at least its rows."""
    rows_UD = target_VD if stored_UD is None else stored_UD
    highest_id = -1 if mask_token_id is None else mask_token_id
    if highest_id >= len(rows_UD):
        raise ModelError(
            f"The drafter's mask_token_id is {mask_token_id}, but the embedding has "
            f"{len(rows_UD)} rows; use a drafter that stores its own {EMBEDDING}."
        )
    if stored_UD is None:
        return None
    count = min(len(stored_UD), len(target_VD))
    is_copy = torch.equal(stored_UD[:count].to(target_VD.dtype), target_VD[:count])
    if is_copy and highest_id < len(target_VD):
        return None
    return torch.cat((stored_UD, target_VD[count:].to(stored_UD.dtype)))


def own_head_of(stored_SD: Tensor | None, target_VD: Tensor, d2t_S: Tensor | None) -> Tensor | None:
    """The stored LM head where it is not a copy of the target's."""
    if stored_SD is None:
        return None
    expected = target_VD[: len(stored_SD)] if d2t_S is None else target_VD[d2t_S]
    return None if torch.equal(stored_SD.to(target_VD.dtype), expected) else stored_SD
