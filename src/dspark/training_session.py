"""One run of `dspark train`, from a target and answers to a drafter directory.

It joins target, data, drafter and trainer; the maths of none of them is here.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.data.answers import Answer, conditions_of
from dspark.data.batches import AnswerBatches, BatchConfig, split_held_out, usable
from dspark.data.cache_fill import Filling, fill_cache
from dspark.data.hidden_states import OnlineStates, StatesSource
from dspark.data.on_policy import OnPolicyBatches
from dspark.data.remote_states import RemoteStates, StateSizes
from dspark.data.states_cache import CacheFormat, StatesCache
from dspark.data.token_mass import sum_mass
from dspark.drafter_start import new_drafter, trained_drafter
from dspark.errors import InputError
from dspark.models.checkpoint import Provenance, save_drafter, target_fingerprint
from dspark.models.drafter import Drafter
from dspark.models.kinds import AnyDrafter, drafter_of
from dspark.models.target import Target
from dspark.recipes import Recipe
from dspark.text.tokenizer import Tokenizer
from dspark.training.objective import TargetHead
from dspark.training.ranks import OneProcess, Ranks
from dspark.training.state_start import start_from_states
from dspark.training.trainer import StepReport, TrainConfig, Trainer, TrainSummary
from dspark.training.validation import Validation

_ONLY_FOR = {"cache_gb": "cache", "cache_dtype": "cache", "target_workers": "remote"}
"""Which source of states a setting belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Where the target's hidden states come from."""

    states: str = "online"
    """online: the target runs in each step, no disk; cache: once, kept in the working directory;
    remote: in processes of its own, which send them."""
    cache_gb: float | None = None
    """Largest cache, in 10^9 bytes; a larger one is refused before its first byte."""
    cache_dtype: str = "bf16"
    """Of cached states: bf16, or int8 at about half the size."""
    target_workers: int = 1
    """With remote: how many of the launched processes run the target, and do not train."""

    def __post_init__(self) -> None:
        if self.states not in ("online", "cache", "remote"):
            raise InputError(f"states is {self.states!r}, but it must be online, cache or remote.")
        if self.target_workers < 1:
            raise InputError(
                f"target_workers is {self.target_workers!r}, but it must be at least 1."
            )
        if self.cache_gb is not None and not self.cache_gb > 0:
            raise InputError(f"cache_gb is {self.cache_gb!r}, but it must be above 0.")
        for each in fields(self):
            home, value = _ONLY_FOR.get(each.name, self.states), getattr(self, each.name)
            if home != self.states and value != each.default:
                raise InputError(
                    f"{each.name} is {value!r}, which means nothing where states are "
                    f"{self.states}; add --states {home}, or leave it out."
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What of a run is not the recipe's. Exactly one of `steps` and `minutes` is given."""

    out: Path
    """Directory of the drafter; it appears whole."""
    work: Path
    """What a run needs to go on after a kill: hidden states and checkpoints."""
    steps: int | None = None
    minutes: float | None = None
    init_from: Path | None = None
    """Drafter to start from; its shape and draft vocabulary are kept."""
    parallel: str = "ddp"
    is_compiled: bool = True
    states: StatesConfig = field(default_factory=StatesConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who hears of a run: what is said in words, states computed, steps, held-out figures."""

    say: Callable[[str], None]
    on_states: Callable[[int, int], None]
    on_step: Callable[[StepReport], None]
    on_validation: Callable[[int, Validation], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The last line of `dspark train`."""

    summary: TrainSummary
    states: str
    state_bytes_per_token: int
    cache_bytes: int | None
    """On the disk, `None` without a cache."""

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        values = asdict(self)
        return {**values.pop("summary"), **values}


def train(
    target: Target,
    tokenizer: Tokenizer,
    answers: Sequence[Answer],
    *,
    recipe: Recipe,
    run: RunConfig,
    watchers: Watchers,
    ranks: Ranks | None = None,
    worker: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunReport:
    """Train a drafter for `target` and write it to `run.out`, whole or not at all.

    `worker`: the process that sends hidden states, where they are remote; the target then needs
    no layers here. `should_stop` is asked between two steps, see `Trainer.run`.
    """
    ranks = OneProcess() if ranks is None else ranks
    config = _train_config(recipe, run)
    start = _start(target, tokenizer, run, watchers)
    taps = start.config.target_layer_ids if start is not None else None
    taps = recipe.taps(target.spec.num_layers) if taps is None else taps
    # a mistake in the amounts is told before the target runs for hours
    split_held_out(usable(answers), num_prompts=recipe.num_held_out, seed=recipe.seed)
    format = cache_format(target, tokenizer, taps=taps, dtype=run.states.cache_dtype)
    if worker is not None:
        source: StatesSource = _remote(target, format, worker, watchers)
    else:
        source = _states(target, answers, format, run, watchers, ranks)
    drafter = start
    if drafter is None:
        drafter = new_drafter(target, tokenizer, answers, recipe, run.work, source, ranks)
    plain = AnswerBatches(
        answers,
        source=source,
        config=batch_config(recipe, block_size=drafter.config.block_size),
        rank=ranks.rank,
        num_ranks=ranks.size,
    )
    for line in [_data_line(answers, plain, ranks), *_off_policy_lines(answers, target)]:
        watchers.say(line)
    if recipe.state_start and start is None and not (run.work / "training.pt").exists():
        assert isinstance(drafter, Drafter), "only a block drafter starts from states"
        steps = map(plain.step, count())
        start_from_states(drafter, steps, scale=target.head_scale, ranks=ranks)
    batches = plain if recipe.on_policy == 0 else _on_policy(plain, target, recipe, worker)
    trainer = Trainer(
        drafter,
        batches=batches,
        config=config,
        folder=run.work,
        target_head=TargetHead(
            scale=target.head_scale,
            softcap=target.softcap,
            log_sum_exp=lambda last_ND: sum_mass(target, last_ND, mass_V=None),
        ),
        ranks=ranks,
        on_step=watchers.on_step,
        on_validation=watchers.on_validation,
        should_stop=should_stop,
    )
    if isinstance(batches, OnPolicyBatches):
        batches.follow(trainer.draft)
    summary = trainer.run()
    if isinstance(source, RemoteStates):
        source.close()
    if start is not None and summary.best_step == 0:
        watchers.say("no step was better than the drafter it started from, which is kept")
    if ranks.rank == 0:
        whole = drafter
        if run.parallel == "fsdp2":
            whole = _whole(drafter, target, trainer.best_masters())
        provenance = _provenance(target, tokenizer, recipe, answers, summary)
        save_drafter(whole, run.out, provenance=provenance)
    return RunReport(
        summary=summary,
        states=run.states.states,
        state_bytes_per_token=format.bytes_per_token
        if worker is None
        else _sent_bytes(format, target),
        cache_bytes=source.num_bytes if isinstance(source, StatesCache) else None,
    )


def tap_layers(
    target: Target, tokenizer: Tokenizer, recipe: Recipe, run: RunConfig
) -> tuple[int, ...]:
    """The target's layers whose outputs this run reads."""
    if run.init_from is not None:
        return trained_drafter(run.init_from, target, tokenizer).config.target_layer_ids
    return recipe.taps(target.spec.num_layers)


def _data_line(answers: Sequence[Answer], batches: AnswerBatches, ranks: Ranks) -> str:
    """What is trained on and what is left out (UC-099, UC-100)."""
    num_cut = sum(answer.is_truncated for answer in answers)
    return (
        f"{len(batches.train)} answers to train on, {len(batches.held_out_answers)} held out, "
        f"{batches.num_unusable} too short for a block; {num_cut} were cut at their length limit, "
        f"whose next token is no label; {ranks.size} training "
        f"{'process' if ranks.size == 1 else 'processes'}"
    )


def _off_policy_lines(answers: Sequence[Answer], target: Target) -> Sequence[str]:
    """Answers that another model wrote flatter the held-out figures (UC-101)."""
    writers = sorted({a.settings.target for a in answers if a.settings is not None})
    return [
        f"OFF-POLICY: the answers name {writer} as their author and the target is "
        f"{target.spec.name}; unless that is the same model, held-out tau says nothing of serving"
        for writer in writers
        if writer != target.spec.name
    ]


def _start(
    target: Target, tokenizer: Tokenizer, run: RunConfig, watchers: Watchers
) -> AnyDrafter | None:
    """The drafter to start from, if the run names one."""
    if run.init_from is None:
        return None
    drafter = trained_drafter(run.init_from, target, tokenizer)
    watchers.say(
        f"the shape of {run.init_from} stays, blocks of {drafter.config.block_size} among it, "
        "and its vocabulary; options of shape change nothing"
    )
    return drafter


def _train_config(recipe: Recipe, run: RunConfig) -> TrainConfig:
    return TrainConfig(
        steps=run.steps,
        minutes=run.minutes,
        validate_every=recipe.validate_every,
        checkpoint_every=recipe.checkpoint_every,
        is_continued=run.init_from is not None or recipe.state_start,
        parallel=run.parallel,
        is_compiled=run.is_compiled,
        objective=recipe.objective,
        optimizer=recipe.optimizer,
    )


def batch_config(recipe: Recipe, *, block_size: int) -> BatchConfig:
    """What the recipe says about a step's data."""
    return BatchConfig(
        block_size=block_size,
        answers_per_step=recipe.answers_per_step,
        micro_batches=recipe.micro_batches,
        tokens_per_anchor=recipe.tokens_per_anchor,
        num_held_out=recipe.num_held_out,
        repeats=tuple(recipe.repeats),
        seed=recipe.seed,
    )


def cache_format(
    target: Target, tokenizer: Tokenizer, *, taps: Sequence[int], dtype: str
) -> CacheFormat:
    """What identifies the states of this target, tokenizer and template."""
    return CacheFormat(
        target=target_fingerprint(target.embed_weight_VD),
        target_dtype=str(target.dtype).removeprefix("torch."),
        template=tokenizer.template_hash or "",
        tokenizer=tokenizer.vocabulary_hash,
        tap_layers=tuple(taps),
        tap_size=len(taps) * target.spec.hidden_size,
        hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
        dtype=dtype,
    )


def _states(
    target: Target,
    answers: Sequence[Answer],
    format: CacheFormat,
    run: RunConfig,
    watchers: Watchers,
    ranks: Ranks,
) -> StatesSource:
    """The source that the run asked for; a cache is filled by the first rank."""
    if run.states.states == "online":
        return OnlineStates(target, tap_layers=format.tap_layers)
    folder = run.work / "states"
    if ranks.rank == 0:
        predicted: list[int] = []

        def on_start(filling: Filling) -> None:
            predicted.append(filling.predicted_bytes)
            watchers.say(
                f"cache of hidden states: {filling.predicted_bytes / 1e6:,.1f} MB in all, "
                f"{filling.num_cached} answers there, {filling.num_missing} to compute "
                f"({filling.num_damaged} damaged)"
            )

        cache = fill_cache(
            target,
            answers,
            folder,
            format=format,
            limit_gb=run.states.cache_gb,
            on_start=on_start,
            on_answer=watchers.on_states,
        )
        watchers.say(
            f"cache of hidden states: {cache.num_bytes / 1e6:,.1f} MB on the disk, "
            f"{predicted[0] / 1e6:,.1f} MB predicted"
        )
    ranks.wait()
    return StatesCache(folder)


def _remote(target: Target, format: CacheFormat, worker: int, watchers: Watchers) -> RemoteStates:
    """States from a target worker, and what they cost beside logits."""
    sizes = StateSizes(tap_size=format.tap_size, hidden_size=format.hidden_size, dtype=target.dtype)
    watchers.say(
        f"hidden states from another process: {sizes.bytes_per_token:,} bytes a token; logits "
        f"would have been {format.vocab_size * target.dtype.itemsize:,}"
    )
    return RemoteStates(worker=worker, sizes=sizes, device=target.device)


def _on_policy(
    plain: AnswerBatches, target: Target, recipe: Recipe, worker: int | None
) -> OnPolicyBatches:
    if worker is not None:
        raise InputError(
            "On-policy steps run the target beside the drafter, which remote states leave to "
            "other processes; take states online or cache."
        )
    return OnPolicyBatches(plain, target=target, share=recipe.on_policy)


def _sent_bytes(format: CacheFormat, target: Target) -> int:
    return format.width * target.dtype.itemsize


def _whole(drafter: AnyDrafter, target: Target, masters: dict[str, Tensor]) -> AnyDrafter:
    """A drafter with whole weights, from one whose weights are shards."""
    whole = drafter_of(
        drafter.config,
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        d2t_S=drafter.d2t_S,
        generator=torch.Generator().manual_seed(0),
    )
    whole.load_state_dict(masters)
    return whole.to(target.dtype)


def _provenance(
    target: Target,
    tokenizer: Tokenizer,
    recipe: Recipe,
    answers: Sequence[Answer],
    summary: TrainSummary,
) -> Provenance:
    conditions = conditions_of(answers)
    return Provenance(
        target_name=target.spec.name,
        target_fingerprint=target_fingerprint(target.embed_weight_VD),
        target_dtype=str(target.dtype).removeprefix("torch."),
        template_hash=tokenizer.template_hash,
        thinking=None if conditions is None else conditions.thinking,
        system=None if conditions is None else conditions.system,
        recipe={
            **asdict(recipe),
            "answers": None if conditions is None else asdict(conditions),
            "num_answers": len(answers),
            "num_answer_tokens": sum(len(answer.token_ids) for answer in answers),
            **asdict(summary),
        },
    )
