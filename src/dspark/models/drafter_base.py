"""What drafters of every kind share: the target's embedding and LM head, and how they are packed.

It knows no layer's inside, no request and no file. Shape letters: legend in core.py.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.errors import ModelError
from dspark.kernels.linear import PackedLinear, replace_linears
from dspark.models.drafter_config import DrafterConfig
from dspark.models.rotary import Rotary

Project = Callable[[Tensor], Tensor]
"""Hidden states [N, D] to logits [N, S]."""


class DrafterBase(nn.Module):
    """A drafter over the target's embedding and LM head, which it neither owns nor copies.

    Its device is that of `embed_weight_VD`, its dtype that of its own parameters. A kind builds
    its modules in `_build`, `layers` and the final `norm` among them.
    """

    layers: nn.ModuleList
    norm: nn.Module

    def __init__(
        self,
        config: DrafterConfig,
        *,
        embed_weight_VD: Tensor,
        head_weight_VD: Tensor,
        d2t_S: Tensor | None = None,
        generator: torch.Generator | None = None,
        has_own_embedding: bool = False,
        has_own_head: bool = False,
    ) -> None:
        """A new drafter, its weights N(0, 0.02) from `generator`, float32.

        Without a generator the parameters stay on the meta device until a checkpoint assigns
        them. `head_weight_VD` may hold only the S rows of the draft vocabulary; otherwise they
        are gathered (a prefix of the vocabulary is a view). `d2t_S`: draft id to target id.
        `has_own_*` marks tensors that are not the target's, so that a save writes them.
        """
        super().__init__()
        self.config = config
        self.has_own_embedding = has_own_embedding
        self.has_own_head = has_own_head
        device = embed_weight_VD.device
        self.d2t_S = None if d2t_S is None else d2t_S.to(device=device, dtype=torch.int64)
        check_map(config, self.d2t_S)
        self.embed_weight_VD = embed_weight_VD
        self.head_weight_SD = _draft_rows(config, head_weight_VD, self.d2t_S)
        self._packed_head: Project | None = None
        self.rotary = _rotary_of(config, device=device)
        with torch.device("meta"):
            self._build(config)
        if generator is not None:
            _initialise(self, generator, device)

    @abstractmethod
    def _build(self, config: DrafterConfig) -> None:
        """Make the modules; they are on the meta device meanwhile."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the drafter's parameters; the shared tensors keep the target's."""
        return self.norm.get_parameter("weight").dtype

    def base_logits(self, hidden_ND: Tensor) -> Tensor:
        """U [N, S] over the draft vocabulary, in the dtype of the LM head."""
        hidden_ND = hidden_ND.to(self.head_weight_SD.dtype)
        if self._packed_head is not None:
            return self._packed_head(hidden_ND)
        return functional.linear(hidden_ND, self.head_weight_SD)

    def pack(self, *, quantization: str | None = None, head: Project | None = None) -> None:
        """Swap all matrix products for packed ones: serving on a CPU; it ends training.

        The projection of the taps is never quantized: some channels of hidden states are so large
        that int8 leaves little of the others. `head`: the target's own packed LM head, to share
        where the whole vocabulary is proposed.
        """
        layer: Any  # ModuleList forgets its element type
        for layer in self.layers:
            layer.self_attn.join()
            layer.mlp.join()
        fc = getattr(self, "fc", None)
        replace_linears(self, quantization, exact=() if fc is None else (fc,))
        if head is None or self.config.draft_vocab_size is not None or self.has_own_head:
            head = PackedLinear.pack(self.head_weight_SD, quantization=quantization)
        self._packed_head = head

    @property
    def packed_head(self) -> Project | None:
        """The LM head that `pack` left, if it ran."""
        return self._packed_head

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin, float32 [N, E], of positions."""
        cos_N1E, sin_N1E = self.rotary.angles(positions_N.to(self.embed_weight_VD.device))
        return cos_N1E[:, 0], sin_N1E[:, 0]


def check_map(config: DrafterConfig, d2t_S: Tensor | None) -> None:
    """Refuse a map from draft to target ids that is missing or cannot be one (UC-076)."""
    size = config.draft_vocab_size
    if (size is None) != (d2t_S is None):
        raise ModelError(
            f"The drafter's draft_vocab_size is {size!r} and d2t is "
            f"{'missing' if d2t_S is None else 'present'}, but one needs the other."
        )
    if d2t_S is None or d2t_S.device.type == "meta":
        return
    if d2t_S.shape != (size,):
        raise ModelError(
            f"The drafter's d2t has shape {list(d2t_S.shape)}, but draft_vocab_size is {size}."
        )
    num_distinct = len(torch.unique(d2t_S))
    low, high = int(d2t_S.min()), int(d2t_S.max())
    if num_distinct != size or low < 0 or high >= config.vocab_size:
        raise ModelError(
            f"The drafter's d2t must hold {size} different target ids below {config.vocab_size}, "
            f"but it holds {num_distinct} from {low} to {high}; take the map of these weights."
        )


@torch.no_grad()
def _initialise(module: nn.Module, generator: torch.Generator, device: torch.device) -> None:
    """Fresh weights: N(0, 0.02) for matrices, 1 for norms, 0 for biases."""
    module.to_empty(device=generator.device)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    module.to(device)


def _rotary_of(config: DrafterConfig, *, device: torch.device) -> Rotary:
    """The rotary embedding that the configuration describes."""
    return Rotary(
        head_dim=config.head_dim,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
        max_position_embeddings=config.max_position_embeddings,
        device=device,
    )


def _draft_rows(config: DrafterConfig, head_weight_VD: Tensor, d2t_S: Tensor | None) -> Tensor:
    """Rows of the LM head over the draft vocabulary [S, D]; a view where they are the first."""
    size = config.num_draft_tokens
    if d2t_S is None or len(head_weight_VD) == size or d2t_S.device.type == "meta":
        return head_weight_VD[:size]
    if torch.equal(d2t_S, torch.arange(size, device=d2t_S.device)):
        return head_weight_VD[:size]
    return head_weight_VD[d2t_S]
