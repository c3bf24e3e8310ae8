"""`dspark bench states`: what int8 hidden states cost in accepted length.

The same drafter is trained twice, from bf16 and from int8 states, with the same seeds, steps and
answers; both are then measured on exact states of held-out answers.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.data.answers import Answer
from dspark.data.batches import AnswerBatches
from dspark.data.hidden_states import OnlineStates
from dspark.data.token_mass import sum_mass
from dspark.errors import ModelError
from dspark.models.checkpoint import load_drafter
from dspark.models.target import Target
from dspark.recipes import Recipe
from dspark.text.tokenizer import Tokenizer
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, TargetHead
from dspark.training.validation import validate
from dspark.training_session import (
    RunConfig,
    StatesConfig,
    Watchers,
    batch_config,
    train,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRun:
    """A drafter trained from one kind of cache."""

    tau: float
    """Held out, on exact states."""
    bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLoss:
    """Both, and the share of the accepted length that int8 loses; below 0 it gained."""

    steps: int
    bf16: CachedRun
    int8: CachedRun

    def to_json(self) -> dict[str, Any]:
        """Figures and the loss."""
        return {
            **asdict(self),
            "tau_loss": 1.0 - self.int8.tau / self.bf16.tau,
            "size_ratio": self.int8.bytes_per_token / self.bf16.bytes_per_token,
        }


def measure(
    target: Target,
    tokenizer: Tokenizer,
    answers: Sequence[Answer],
    *,
    recipe: Recipe,
    steps: int,
    is_compiled: bool,
    say: Callable[[str], None],
) -> CacheLoss:
    """Train twice and compare; nothing is kept on the disk."""
    watchers = Watchers(
        say=say,
        on_states=lambda *_: None,
        on_step=lambda _: None,
        on_validation=lambda *_: None,
    )
    with tempfile.TemporaryDirectory() as name:
        found = {
            dtype: _one(
                target,
                tokenizer,
                answers,
                recipe=recipe,
                run=RunConfig(
                    out=Path(name) / dtype,
                    work=Path(name) / f"{dtype}-work",
                    steps=steps,
                    is_compiled=is_compiled,
                    states=StatesConfig(states="cache", cache_dtype=dtype),
                ),
                watchers=watchers,
            )
            for dtype in ("bf16", "int8")
        }
    return CacheLoss(steps=steps, bf16=found["bf16"], int8=found["int8"])


def _one(
    target: Target,
    tokenizer: Tokenizer,
    answers: Sequence[Answer],
    *,
    recipe: Recipe,
    run: RunConfig,
    watchers: Watchers,
) -> CachedRun:
    report = train(target, tokenizer, answers, recipe=recipe, run=run, watchers=watchers)
    drafter = load_drafter(run.out, target, num_tokens=tokenizer.vocab_size).to(target.dtype)
    taps = drafter.config.target_layer_ids
    exact = AnswerBatches(
        answers,
        source=OnlineStates(target, tap_layers=taps),
        config=batch_config(recipe, block_size=drafter.config.block_size),
    )
    objective = Objective(
        slot_pass_of(drafter),
        config=recipe.objective,
        target_head=TargetHead(
            scale=target.head_scale,
            softcap=target.softcap,
            log_sum_exp=lambda last_ND: sum_mass(target, last_ND, mass_V=None),
        ),
    )
    found = validate(objective, exact.held_out(), input_scale_M=None)
    if found is None:
        raise ModelError("Nothing was held out; set num_held_out above 0 to compare.")
    watchers.say(f"{run.states.cache_dtype}: held-out tau {found.tau:.4f} on exact states")
    return CachedRun(tau=found.tau, bytes_per_token=report.state_bytes_per_token)
