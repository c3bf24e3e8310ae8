"""Puts a target, a drafter and their data together for the commands. It knows no argv.

Each function is what one command does between parsing and printing.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark import recipes
from dspark.benchmarks.arithmetic import arithmetics_of
from dspark.benchmarks.evaluation import Chat, Chats, Contender
from dspark.benchmarks.journal import Journal
from dspark.core import resolve_dtype
from dspark.data.prompt_rows import stem_of
from dspark.data.prompts import read_prompts, with_system
from dspark.engine.cycle import CycleConfig
from dspark.errors import InputError, ModelError
from dspark.kernels import extension
from dspark.llm import LLM, PROMPT_LOOKUP, resolve_device, shipped_drafter
from dspark.machine import num_processors
from dspark.models.attention import resolve_kv_dtype
from dspark.models.checkpoint import check_folder, read_provenance
from dspark.models.drafter import Drafter
from dspark.models.embedded import DEFAULT_TARGET
from dspark.models.gguf import default_cache
from dspark.models.target import Target


def set_threads(num_threads: int | None) -> None:
    """Threads of every matrix product from now on; `None` leaves PyTorch's choice.

    Never more than processors: they wait for one another many times a layer, and one that has no
    processor holds up all. PyTorch does not know the limit of a container.
    """
    if num_threads is None:
        torch.set_num_threads(min(torch.get_num_threads(), num_processors()))
        return
    if not 1 <= num_threads <= num_processors():
        raise InputError(
            f"threads is {num_threads}, but it must lie in 1..{num_processors()}, the processors "
            "that this process may use."
        )
    torch.set_num_threads(num_threads)


def load_llm(
    *,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    is_compiled: bool = True,
    threads: int | None = None,
    max_requests: int | None = None,
    page_size: int | None = None,
    thinking: bool | None = None,
    policy: str | None = None,
    copies: bool = True,
) -> LLM:
    """What the options of a command mean; `None` takes the default of `LLM.load`.

    `drafter` "none" is plain decoding; `copies`: see `CycleConfig`; with `max_requests` the cache
    holds so many requests of the target's usual length.
    """
    set_threads(threads)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "thinking": thinking,
        "policy": policy,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if drafter is not None:
        options["drafter"] = None if drafter == "none" else drafter
    config = CycleConfig(copies=copies)
    if max_requests is not None:
        config = replace(config, max_requests=max_requests, num_positions=max_requests * 1024)
    if page_size is not None:
        config = replace(config, page_size=page_size)
    options["config"] = config
    return LLM.load(DEFAULT_TARGET if target is None else target, compile=is_compiled, **options)


def load_arithmetics(names: Sequence[str], **options: Any) -> Iterator[tuple[str, LLM]]:
    """The same LLM in each of bf16, fp32, int8, one after the other; `options` of `load_llm`.

    Only one lies in memory at a time if the caller keeps none.
    """
    for arithmetic in arithmetics_of(names):
        llm = load_llm(
            dtype=arithmetic.dtype,
            quantization=arithmetic.quantization,
            kv_cache_dtype=arithmetic.kv_cache_dtype,
            **options,
        )
        yield arithmetic.name, llm


def load_target(
    *,
    target: str | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
    is_compiled: bool = True,
    is_packed: bool | None = True,
    threads: int | None = None,
) -> Target:
    """The target alone; `is_packed` `None` is what training takes: packed unless there is a GPU.

    Packed weights are a form for the CPU; plain ones lie on a GPU where there is one. The usual
    arithmetic is that in which it is served if it is packed, else PyTorch's: training multiplies
    by PyTorch beside it, in the target's arithmetic.
    """
    set_threads(threads)
    serves = is_packed is True
    if is_packed is None:
        is_packed = resolve_device("auto").type == "cpu"
    device = torch.device("cpu") if is_packed else resolve_device("auto")
    arithmetic = resolve_dtype(
        "auto" if dtype is None else dtype,
        by_operators=serves and extension.multiplies_on(device),
    )
    return Target.load(
        DEFAULT_TARGET if target is None else target,
        dtype=arithmetic,
        device=device,
        compile=is_compiled,
        quantization=quantization,
        kv_dtype=resolve_kv_dtype(
            "auto" if kv_cache_dtype is None else kv_cache_dtype,
            dtype=arithmetic,
            quantization=quantization,
            device=device,
        ),
        packed=is_packed,
    )


def recipe_of(
    name: str | None,
    values: Mapping[str, Any],
    *,
    objective: Mapping[str, Any] | None = None,
    losses: Mapping[str, Any] | None = None,
    positions: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
) -> recipes.Recipe:
    """The named recipe (the general one for `None`) with some values of its parts changed.

    A `kind` among the values comes first: it sets what the others may change.
    """
    match name:
        case None:
            recipe = recipes.Recipe()
        case "smollm2":
            recipe = recipes.smollm2()
        case "qwen3-4b":
            recipe = recipes.qwen3_4b()
        case _:
            raise InputError(f"recipe is {name!r}, but it must be smollm2 or qwen3-4b.")
    recipe = recipes.of_kind(recipe, values.get("kind", recipe.kind))
    changed = replace(
        recipe.objective,
        weights=replace(recipe.objective.weights, **(losses or {})),
        positions=replace(recipe.objective.positions, **(positions or {})),
        **(objective or {}),
    )
    rule = replace(recipe.optimizer, **(optimizer or {}))
    return replace(recipe, objective=changed, optimizer=rule, **values)


def layers_of(text: str | None) -> tuple[int, ...] | None:
    """Layer numbers as they are typed: "1,7,14"."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"tap_layers is {text!r}, but it must be layer numbers with commas, such as 1,7,14."
        ) from error


def repeats_of(text: str | None) -> tuple[tuple[str, int], ...] | None:
    """Domains and numbers as they are typed: "chat=2,code=3"."""
    if text is None:
        return None
    pairs = [part.rpartition("=") for part in text.split(",")]
    try:
        return tuple((domain, int(times)) for domain, _, times in pairs)
    except ValueError as error:
        raise InputError(
            f"repeats is {text!r}, but it must be domains with numbers, such as chat=2,code=3."
        ) from error


def require_drafter(llm: LLM) -> None:
    """Raises `ModelError` for an LLM that can only decode plainly."""
    if llm.drafter is None:
        raise _no_drafter_for(llm.target.spec.name)


def check_drafters(target: str | None, drafters: Sequence[str]) -> None:
    """The drafters of a command that is about drafting, asked before a target is loaded.

    Raises `ModelError` where none is shipped or a directory holds none, `InputError` for "none".
    """
    name = DEFAULT_TARGET if target is None else target
    for drafter in drafters:
        if drafter == "none":
            raise InputError(
                "drafter is 'none', but this command is about drafting; give the directory of a "
                "drafter, or leave it out (evaluate measures plain decoding by --against-plain)."
            )
        if drafter == "auto" and shipped_drafter(name) is None:
            raise _no_drafter_for(name)
        if drafter not in ("auto", PROMPT_LOOKUP):
            check_folder(drafter)


def _no_drafter_for(target: str) -> ModelError:
    return ModelError(
        f"No drafter is shipped for target {target!r}; train one with `dspark train` and give its "
        "directory with --drafter."
    )


def drafter_folder(target: str | None, drafter: str | None) -> Path:
    """The directory that `--drafter` means. Raises `ModelError` where that is none."""
    if drafter is None or drafter == "auto":
        path = shipped_drafter(DEFAULT_TARGET if target is None else target)
    else:
        path = Path(drafter)
    if path is None or not path.is_dir():
        raise ModelError(
            f"drafter is {drafter or 'auto'!r}, which is no directory of a drafter here; give one "
            "with --drafter."
        )
    return path


def prompt_of(llm: LLM, text: str, *, system: str | None, is_raw: bool) -> list[int]:
    """Ids of a prompt: a chat where the target has a template, the bare text where it has none.

    Raises `InputError` for a prompt without text.
    """
    if not text.strip():
        raise InputError("The prompt is empty; give some text, or - to read it from the input.")
    if is_raw or not llm.tokenizer.has_chat_template:
        if system is not None:
            raise InputError("A system prompt needs a chat template; leave --system out.")
        return llm.tokenizer.encode(text)
    system_turn = [] if system is None else [{"role": "system", "content": system}]
    return llm.prompt_ids([*system_turn, {"role": "user", "content": text}])


def read_tasks(
    sources: Sequence[str],
    *,
    limit: int | None,
    names: Sequence[str] | None = None,
    system: str | None = None,
    is_raw: bool = False,
) -> Mapping[str, Chats]:
    """Prompts to evaluate on, by the file's name, split by domain where a file holds several.

    The first turn of each conversation, whose context is the user's alone: a data set's own
    answers would be text that the target does not write (UC-101). `limit` of each task, from the
    file's top; `names` keeps these tasks only; `system` is for rows without a system prompt.
    With `is_raw` it is a text, without a chat template. Raises `InputError` for a name that no file
    has, and for a system prompt beside `is_raw`.
    """
    if is_raw and system is not None:
        raise InputError("A system prompt needs a chat template; leave --system or --raw out.")
    if names is not None and not names:
        raise InputError("tasks is empty; name some, or leave --tasks out for all of them.")
    tasks: dict[str, list[Chat]] = {}
    for source in sources:
        prompts = read_prompts(source).prompts
        if system is not None:
            prompts = with_system(prompts, system)
        domains = {prompt.domain for prompt in prompts}
        for prompt in prompts:
            stem = stem_of(source)
            name = stem if len(domains) == 1 else f"{stem}/{prompt.domain}"
            chats = tasks.setdefault(name, [])
            if limit is None or len(chats) < limit:
                chats.append(prompt.turns[0] if is_raw else prompt.as_chat())
    for name in names or ():
        if name not in tasks:
            raise InputError(f"There is no task {name!r}; these files have {', '.join(tasks)}.")
    return {name: chats for name, chats in tasks.items() if names is None or name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMode:
    """How chats are rendered; `None` leaves it to the template."""

    thinking: bool | None
    system: str | None


def recorded_mode(
    target: str | None,
    drafters: Sequence[str] | None,
    *,
    thinking: bool | None,
    system: str | None,
) -> ChatMode:
    """The mode of the answers that the drafters learnt, so that they are used alike (UC-102).

    `thinking` and `system` are the user's own choice and come first. Raises `InputError` if the
    drafters differ in what was not chosen.
    """
    name = DEFAULT_TARGET if target is None else target
    paths = [shipped_drafter(name) if d == "auto" else Path(d) for d in drafters or ("auto",)]
    origins = [read_provenance(p) for p in paths if p is not None and (p / "config.json").is_file()]
    found: dict[str, Any] = {"thinking": thinking, "system": system}
    for key, chosen in found.items():
        values = {getattr(origin, key) for origin in origins if origin is not None}
        if chosen is None and len(values) > 1:
            raise InputError(
                f"These drafters learnt answers with different values of {key} "
                f"({', '.join(sorted(map(repr, values)))}); choose one with --{key}."
            )
        if chosen is None and values:
            found[key] = values.pop()
    return ChatMode(**found)


def contenders(
    llm: LLM, drafters: Sequence[str] | None, *, has_heads_off: bool
) -> Mapping[str, Contender]:
    """The drafters to evaluate on the target of `llm`, by a short name of each.

    None given: the one shipped for the target. With `has_heads_off` each comes a second time with
    its sequential head off. Raises `ModelError` or `InputError` for what cannot be evaluated.
    """
    if drafters is None or "auto" in drafters:
        path = shipped_drafter(llm.target.spec.name)
        if path is None:
            raise _no_drafter_for(llm.target.spec.name)
        drafters = [str(path) if d == "auto" else d for d in drafters or ("auto",)]
    names = [Path(drafter).name for drafter in drafters]
    found: dict[str, Contender] = {}
    for drafter, name in zip(drafters, names, strict=True):
        key = name if names.count(name) == 1 else drafter
        if drafter == "none" or key in found:
            raise InputError(
                f"drafter is {drafter!r}, but each must be the directory of another drafter; "
                "--against-plain measures decoding without one."
            )
        weights = weights_hash(drafter)
        found[key] = Contender(weights=weights, load=partial(llm.with_drafter, drafter))
        if has_heads_off:
            found[f"{key}, sequential head off"] = Contender(
                weights=f"{weights}-off", load=partial(_heads_off, llm, drafter)
            )
    return found


def weights_hash(drafter: str) -> str:
    """Tells drafters apart by their files; by the name where there are none."""
    digest = hashlib.sha256(drafter.encode() if not Path(drafter).is_dir() else b"")
    for file in sorted(Path(drafter).glob("*")):
        if file.suffix in (".json", ".safetensors"):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def journal_of(
    path: Path | None, settings: Mapping[str, Any], identity: Mapping[str, Any]
) -> Journal:
    """The results file of an evaluation: `path`, or one in the cache that only the same command
    (`identity`) finds again."""
    if path is None:
        key = json.dumps([settings, identity], sort_keys=True, default=str)
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        path = default_cache() / "evaluations" / f"{name}.jsonl"
    return Journal(path, settings=settings)


def _heads_off(llm: LLM, drafter: str) -> LLM:
    return without_sequential_head(llm.with_drafter(drafter))


def without_sequential_head(llm: LLM) -> LLM:
    """An LLM of the same target and drafter, its sequential head off: how much that is worth."""
    require_drafter(llm)
    if not isinstance(llm.drafter, Drafter) or llm.drafter.markov_head is None:
        raise ModelError("This drafter has no sequential head that could be switched off.")
    llm.drafter.markov_head = None
    llm.drafter.confidence_head = None  # it may read that head's embeddings; nothing else needs it
    return LLM(llm.target, tokenizer=llm.tokenizer, drafter=llm.drafter, config=llm.config)
