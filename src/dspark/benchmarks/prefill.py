"""A prompt's first pass over an empty cache, ours beside the same model in plain PyTorch.

It knows passes and models, no request and no clock: the caller times what it returns.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dspark.benchmarks.passes import Passes
from dspark.models.target import Target


def prefills(target: Target, plain: Target, ids: list[int]) -> dict[str, Callable[[], Tensor]]:
    """Calls that each give the logits [1, V] behind the last of `ids`.

    `ours`: the target as it serves. `pytorch`: the same passes with PyTorch's own products,
    `plain` being the target unpacked. `transformers_*`: transformers' forward pass with one of
    its attention implementations.
    """
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, one in (("ours", target), ("pytorch", plain)):
        passes = Passes(one, num_requests=1, num_positions=len(ids))
        calls[name] = partial(passes.last_logits, ids)
    for implementation in ("eager", "sdpa"):
        calls[f"transformers_{implementation}"] = partial(
            _transformers_logits, plain, implementation, ids
        )
    return calls


@torch.inference_mode()
def _transformers_logits(plain: Target, implementation: str, ids: list[int]) -> Tensor:
    ours = plain.model.config._attn_implementation
    plain.model.set_attn_implementation(implementation)
    try:
        output = plain.model(torch.tensor([ids], device=plain.device), logits_to_keep=1)
    finally:
        plain.model.set_attn_implementation(ours)
    logits_1V: Tensor = output.logits[0]
    return logits_1V
