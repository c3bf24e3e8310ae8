"""Recipes: functions that return everything a drafter is made of. They choose values, nothing else.

Derive one from another with `dataclasses.replace`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dspark.algorithms.losses import LossWeights
from dspark.errors import InputError
from dspark.training.objective import ObjectiveConfig
from dspark.training.optimizer import OptimizerConfig

_KINDS = ("dspark", "dflash", "eagle3", "mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The shape of a drafter and how it is trained; what is not given follows from the target."""

    kind: str = "dspark"
    """dspark, dflash (the same without heads), eagle3 or mtp; each sets what follows from it."""
    num_layers: int = 2
    """Layers of the drafter."""
    block_size: int = 5
    """Tokens proposed in a round (K)."""
    num_taps: int = 5
    """Target layers whose hidden states the drafter reads, evenly spaced."""
    tap_layers: Sequence[int] | None = None
    """Tapped target layers by number instead, the first being 0."""
    tap_mixing: bool = False
    """Each layer of the drafter reads its own learned mix of the taps."""
    markov_rank: int = 64
    """Rank of the sequential head; 0 leaves it out."""
    markov_head: str = "vanilla"
    """Kind of the sequential head: vanilla, gated or rnn."""
    pair_start: bool = False
    """The sequential head starts from which token follows which in the answers, not from noise."""
    state_start: bool = False
    """The backbone starts from least squares on the target's states, not from noise."""
    has_confidence_head: bool = True
    """Whether the drafter estimates its own acceptance."""
    draft_vocab_size: int | None = 12288
    """Tokens that can be proposed: the ones that the target itself gives most mass."""
    mask_token_id: int | None = None
    """Input of the slots after the anchor; a token that no text contains is found if not given."""
    answers_per_step: int = 16
    """Answers in one optimiser step."""
    micro_batches: int = 1
    """Parts that a step is computed in, to bound memory; the gradient is the same."""
    tokens_per_anchor: float = 3.5
    """One block for this many positions of an answer, placed anew at each visit."""
    repeats: tuple[tuple[str, int], ...] = ()
    """Domains whose answers come several times an epoch, and how often, such as chat=2."""
    on_policy: float = 0.0
    """Share of the steps that replay the drafter's own drafts through the target."""
    num_held_out: int = 96
    """Prompts kept out of training."""
    validate_every: int = 100
    """Steps between two measurements on held-out answers."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    seed: int = 0
    """Of the first weights, of the order of answers and of the blocks."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InputError(f"kind is {self.kind!r}, but it must be one of {', '.join(_KINDS)}.")
        if self.num_taps < 1 or self.tap_layers == ():
            raise InputError("A drafter needs at least one tapped layer of the target.")
        if self.pair_start and (self.markov_rank == 0 or self.markov_head == "rnn"):
            raise InputError(
                "pair_start is on, but it needs a sequential head that reads the last token alone; "
                "take --markov-head vanilla or gated with a rank above 0, or --no-pair-start."
            )
        if self.state_start and (self.tap_mixing or self.kind not in ("dspark", "dflash")):
            raise InputError(
                "state_start is on, but it needs a drafter of kind dspark or dflash whose layers "
                "read the same projection of the taps; take --no-tap-mixing or --no-state-start."
            )

    def taps(self, num_target_layers: int) -> tuple[int, ...]:
        """The tapped layers of a target of this depth, strictly increasing (UC-089)."""
        if self.tap_layers is not None:
            return tuple(self.tap_layers)
        if self.kind == "mtp":
            return (num_target_layers,)  # the last hidden state, after the final norm
        first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, 0)
        if last <= first or self.num_taps == 1:
            return tuple(range(num_target_layers))[-self.num_taps :]
        step = (last - first) / (self.num_taps - 1)
        return tuple(sorted({int(first + step * i + 0.5) for i in range(self.num_taps)}))


def of_kind(recipe: Recipe, kind: str) -> Recipe:
    """The recipe with what a kind of drafter fixes or its authors train with (method section 7).

    Data, optimiser, decay of the position weights and, where the kind reads several, the tapped
    layers stay, so that kinds are compared on the same budget.
    """
    if kind == "dspark":
        return replace(recipe, kind=kind)
    hard_labels = LossWeights(ce=1.0, l1=0.0, confidence=0.0)
    bare = replace(
        recipe,
        kind=kind,
        markov_rank=0,
        pair_start=False,
        state_start=False,
        has_confidence_head=False,
        tap_mixing=False,
        objective=replace(recipe.objective, weights=hard_labels, base_weight=0.0),
    )
    match kind:
        case "eagle3":
            soft_labels = replace(hard_labels, ce=0.0, kl=1.0)
            objective = replace(bare.objective, weights=soft_labels)
            return replace(bare, num_layers=1, objective=objective)
        case "mtp":
            return replace(bare, num_layers=1, block_size=1, tap_layers=None)
        case _:
            return bare


def smollm2() -> Recipe:
    """Shape of the drafter that is shipped for SmolLM2-135M, and what won since at one budget."""
    return Recipe(tap_layers=(1, 7, 14, 21, 27), mask_token_id=4, pair_start=True, state_start=True)


def qwen3_4b() -> Recipe:
    """The paper's sizes for Qwen3-4B: five layers, blocks of seven, the whole vocabulary."""
    return Recipe(
        num_layers=5,
        block_size=7,
        tap_layers=(1, 9, 17, 25, 33),
        markov_rank=256,
        draft_vocab_size=None,
        mask_token_id=151669,
        answers_per_step=64,
        micro_batches=16,
    )
