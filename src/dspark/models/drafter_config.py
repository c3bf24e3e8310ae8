"""The shape of a drafter: sizes, layers, heads, vocabulary. It knows no tensor and no file."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from dspark.errors import ModelError
from dspark.models.heads import SequentialKind
from dspark.models.rotary import SCALED_TYPES


class DrafterKind(StrEnum):
    """How a drafter turns context into a block."""

    DSPARK = "dspark"  # one parallel pass, then the heads; without heads it is DFlash
    EAGLE3 = "eagle3"  # one layer, token after token, over its own states
    MTP = "mtp"  # the same, over the target's last layer: a multi-token prediction module

    @property
    def is_chain(self) -> bool:
        """Whether each drafted token takes a pass of its own (`models.chain`)."""
        return self is not DrafterKind.DSPARK


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The shape of a drafter, under DeepSpec's key names (reference section 1.9)."""

    vocab_size: int
    """Rows of the target's LM head and of W1."""
    hidden_size: int
    """Of target and drafter alike: they share embedding and LM head."""
    intermediate_size: int
    num_hidden_layers: int
    """Layers of the drafter."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    """The context the drafter was trained for; nothing breaks beyond it."""
    rope_theta: float
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Tapped target layers, strictly increasing: output of decoder layer i; -1 is the embedding.
    mtp reads one, as a rule `num_target_layers`: the last hidden state after the final norm."""
    block_size: int
    kind: DrafterKind = DrafterKind.DSPARK
    mask_token_id: int | None = None
    """Input of the slots 1..K-1: a row of the target's embedding that never occurs in text; a
    chain has no such slots."""
    rope_scaling: Mapping[str, Any] | None = None
    """`None`, or `rope_type` (linear, yarn, llama3) with the parameters of that type."""
    layer_windows: tuple[int | None, ...] | None = None
    """Sliding window of each layer in positions, `None` sees all; absent: no layer has one."""
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    num_anchors: int = 512
    """Blocks per sequence while training; serving ignores it, DeepSpec's loader wants it."""
    markov_rank: int = 256
    """Rank of the sequential head; 0 is a drafter without one (DFlash)."""
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool | None = None
    """Whether the confidence head reads W1[x_{k-1}]; `None`: if there is a sequential head."""
    tap_mixing: bool = False
    """Each layer reads its own learned mix of the taps, instead of one projection for all."""
    draft_vocab_size: int | None = None
    """Tokens that can be proposed, a subset given by `d2t`; `None`: the whole vocabulary."""
    has_head_norms: bool = True
    """Norms of queries and keys, per head; published EAGLE-3 layers of Llama's kind lack them."""
    has_normed_residual: bool = False
    """EAGLE-3: the residual stream starts at the normed state, not at the state."""

    def __post_init__(self) -> None:
        with_markov = self.confidence_head_with_markov
        if with_markov is None:
            with_markov = self.markov_rank > 0
        resolve = object.__setattr__  # the dataclass is frozen to everyone else
        resolve(self, "confidence_head_with_markov", self.enable_confidence_head and with_markov)
        if self.layer_windows is None:
            resolve(self, "layer_windows", (None,) * self.num_hidden_layers)
        self._check_sizes()
        self._check_layers()
        self._check_heads()
        self._check_kind()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """`layer_windows`, resolved: one entry for each layer."""
        assert self.layer_windows is not None
        return self.layer_windows

    @property
    def num_draft_tokens(self) -> int:
        """S: the size of the draft vocabulary, or of the whole one."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def taps_size(self) -> int:
        """M: features of one position that enter `Drafter.context`."""
        return len(self.target_layer_ids) * self.hidden_size

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "num_target_layers",
            "block_size",
            "num_anchors",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "be at least 1")
        groups = self.num_key_value_heads
        _require(
            self.num_attention_heads % groups == 0,
            "num_key_value_heads",
            groups,
            f"divide num_attention_heads {self.num_attention_heads}",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "be even")
        _require(self.rope_theta > 0, "rope_theta", self.rope_theta, "be above 0")
        _require(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "be above 0")
        kept = self.draft_vocab_size
        _require(
            kept is None or 1 <= kept <= self.vocab_size,
            "draft_vocab_size",
            kept,
            f"lie in 1..{self.vocab_size}",
        )

    def _check_layers(self) -> None:
        ids = self.target_layer_ids
        is_rising = all(a < b for a, b in pairwise(ids))
        highest = self.num_target_layers - (self.kind is not DrafterKind.MTP)
        in_range = bool(ids) and ids[0] >= -1 and ids[-1] <= highest
        _require(
            is_rising and in_range,
            "target_layer_ids",
            list(ids),
            f"rise strictly within -1..{highest}",
        )
        windows = self.windows
        _require(
            len(windows) == self.num_hidden_layers
            and all(window is None or window >= 1 for window in windows),
            "layer_windows",
            list(windows),
            f"hold {self.num_hidden_layers} windows of at least 1 position, or null",
        )
        scaling = self.rope_scaling
        _require(
            scaling is None or scaling.get("rope_type") in SCALED_TYPES,
            "rope_type",
            None if scaling is None else scaling.get("rope_type"),
            f"be default or one of {', '.join(SCALED_TYPES)}",
        )

    def _check_heads(self) -> None:
        kinds = [kind.value for kind in SequentialKind]
        _require(self.markov_rank >= 0, "markov_rank", self.markov_rank, "be at least 0")
        _require(
            self.markov_head_type in kinds,
            "markov_head_type",
            self.markov_head_type,
            f"be one of {', '.join(kinds)}",
        )
        _require(
            self.markov_rank > 0 or not self.confidence_head_with_markov,
            "confidence_head_with_markov",
            self.confidence_head_with_markov,
            "be false where markov_rank is 0",
        )

    def _check_kind(self) -> None:
        mask, is_chain = self.mask_token_id, self.kind.is_chain
        _require(
            is_chain or (mask is not None and mask >= 0),
            "mask_token_id",
            mask,
            "be the id of a token that never occurs in text",
        )
        if not is_chain:
            _require(self.has_head_norms, "has_head_norms", False, "be true for dspark")
            return
        wanted = {
            "num_hidden_layers": 1,
            "markov_rank": 0,
            "enable_confidence_head": False,
            "tap_mixing": False,
        }
        for name, value in wanted.items():
            _require(getattr(self, name) == value, name, getattr(self, name), f"be {value}")
        _require(
            self.kind is not DrafterKind.MTP or len(self.target_layer_ids) == 1,
            "target_layer_ids",
            list(self.target_layer_ids),
            "name one layer for mtp",
        )


def default_target_layer_ids(num_target_layers: int, *, num_taps: int = 5) -> tuple[int, ...]:
    """Evenly spread from layer 1 to the third from the end; fewer than asked on a small target.

    36 layers give DeepSpec's (1, 9, 17, 25, 33).
    """
    low = min(1, num_target_layers - 1)
    high = max(num_target_layers - 3, low)
    step = (high - low) / max(num_taps - 1, 1)
    return tuple(sorted({int(low + step * tap + 0.5) for tap in range(num_taps)}))


def _require(is_valid: bool, name: str, value: object, rule: str) -> None:
    if not is_valid:
        raise ModelError(f"The drafter's {name} is {value!r}, but it must {rule}.")
