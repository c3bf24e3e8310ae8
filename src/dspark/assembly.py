"""Puts a target, a drafter and their data together for the commands. It knows no argv.

Each function is what one command does between parsing and printing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark import recipes
from dspark.benchmarks.evaluation import Chats, Contender
from dspark.benchmarks.journal import Journal
from dspark.core import Coupling, SamplingParams, resolve_dtype
from dspark.data.answers import Answer, PrepareReport, Sampling, prepare
from dspark.data.prompts import Prompt, read_prompts
from dspark.engine.cycle import CycleConfig
from dspark.errors import InputError, ModelError
from dspark.llm import LLM, shipped_drafter
from dspark.models.drafter import Drafter
from dspark.models.embedded import DEFAULT_TARGET
from dspark.models.gguf import default_cache
from dspark.models.target import Target


def set_threads(num_threads: int | None) -> None:
    """Threads of every matrix product from now on; `None` leaves PyTorch's choice."""
    if num_threads is None:
        return
    if num_threads < 1:
        raise InputError(f"threads is {num_threads}, but it must be at least 1.")
    torch.set_num_threads(num_threads)


def load_llm(
    *,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    quantization: str | None = None,
    is_compiled: bool = True,
    threads: int | None = None,
    max_requests: int | None = None,
) -> LLM:
    """What the options of a command mean; `None` takes the default of `LLM.load`.

    `drafter` "none" is plain decoding; with `max_requests` the cache holds so many requests of
    the target's usual length.
    """
    set_threads(threads)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "quantization": quantization}
    options = {name: value for name, value in options.items() if value is not None}
    if drafter is not None:
        options["drafter"] = None if drafter == "none" else drafter
    if max_requests is not None:
        options["config"] = CycleConfig(
            max_requests=max_requests, num_positions=max_requests * 1024
        )
    return LLM.load(DEFAULT_TARGET if target is None else target, compile=is_compiled, **options)


def load_target(
    *,
    target: str | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    is_compiled: bool = True,
    is_packed: bool = True,
    threads: int | None = None,
) -> Target:
    """The target alone; training reads its plain weights, so it is not packed there."""
    set_threads(threads)
    return Target.load(
        DEFAULT_TARGET if target is None else target,
        dtype=resolve_dtype("auto" if dtype is None else dtype),
        compile=is_compiled,
        quantization=quantization,
        packed=is_packed,
    )


def recipe_of(name: str | None, values: Mapping[str, Any]) -> recipes.Recipe:
    """The named recipe (the general one for `None`) with some values changed."""
    match name:
        case None:
            return replace(recipes.Recipe(), **values)
        case "smollm2":
            return replace(recipes.smollm2(), **values)
        case "qwen3-4b":
            return replace(recipes.qwen3_4b(), **values)
        case _:
            raise InputError(f"recipe is {name!r}, but it must be smollm2 or qwen3-4b.")


def require_drafter(llm: LLM) -> None:
    """Raises `ModelError` for an LLM that can only decode plainly."""
    if llm.drafter is None:
        raise ModelError(
            f"No drafter is shipped for target {llm.target.spec.name!r}; train one with "
            "`dspark train` and give its directory with --drafter."
        )


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
    return llm.tokenizer.chat([*system_turn, {"role": "user", "content": text}])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """Prompts of several files, and what is to be said about rows that were left out."""

    prompts: Sequence[Prompt]
    remarks: Sequence[str]


def read_prompt_files(files: Sequence[Path], *, limit: int | None) -> PromptFiles:
    """All prompts, in order; `limit` of each file."""
    prompts: list[Prompt] = []
    remarks: list[str] = []
    for file in files:
        found = read_prompts(file, limit=limit)
        prompts.extend(found.prompts)
        for reason, count in found.reasons().items():
            lines = [row.line for row in found.skipped if row.reason == reason]
            shown = ", ".join(str(line) for line in lines[:5]) + (", .." if count > 5 else "")
            remarks.append(f"{file}: {count} rows left out, {reason} (lines {shown})")
    return PromptFiles(prompts=prompts, remarks=remarks)


def sampling_of(text: str) -> Sampling:
    """A text like "0.7" or "0.7:0.95": a temperature and, after a colon, top_p."""
    try:
        temperature, _, top_p = text.partition(":")
        return Sampling(temperature=float(temperature), top_p=float(top_p or 1.0))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"sampling is {text!r}, but it must be a temperature such as 0.7, or 0.7:0.95 with "
            "top_p after the colon."
        ) from error


def prepare_answers(
    llm: LLM,
    prompts: Sequence[Prompt],
    path: Path,
    *,
    samplings: Sequence[Sampling],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    on_batch: Callable[[int, int], None] | None = None,
) -> PrepareReport:
    """The target's own answers, appended to `path`; run again after a kill, it goes on."""
    number_of = {prompt.id: number for number, prompt in enumerate(prompts)}

    def generate(batch: Sequence[Prompt], how: Sequence[Sampling]) -> list[Answer]:
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=max_new_tokens,
                seed=None if sampling.temperature == 0 else seed + number_of[prompt.id],
                coupling=Coupling.SHARED_NOISE,
            )
            for prompt, sampling in zip(batch, how, strict=True)
        ]
        completions = llm.generate([prompt.as_chat() for prompt in batch], params)
        return [
            Answer(
                id=prompt.id,
                domain=prompt.domain,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                prompt_token_ids=list(completion.prompt_ids),
                token_ids=list(completion.token_ids),
                finish_reason=completion.finish_reason.value,
                text=completion.text,
            )
            for prompt, sampling, completion in zip(batch, how, completions, strict=True)
        ]

    return prepare(
        prompts,
        path,
        generate=generate,
        samplings=samplings,
        batch_size=batch_size,
        on_batch=on_batch,
    )


def read_tasks(
    files: Sequence[Path], *, limit: int | None, names: Sequence[str] | None = None
) -> Mapping[str, Chats]:
    """Prompts to evaluate on, by the file's name, split by domain where a file holds several.

    `limit` of each task, from the file's top; `names` keeps these tasks only. Raises `InputError`
    for a name that no file has.
    """
    tasks: dict[str, list[list[dict[str, str]]]] = {}
    for file in files:
        prompts = read_prompts(file).prompts
        domains = {prompt.domain for prompt in prompts}
        for prompt in prompts:
            name = file.stem if len(domains) == 1 else f"{file.stem}/{prompt.domain}"
            chats = tasks.setdefault(name, [])
            if limit is None or len(chats) < limit:
                chats.append(prompt.as_chat())
    for name in names or ():
        if name not in tasks:
            raise InputError(f"There is no task {name!r}; these files have {', '.join(tasks)}.")
    return {name: chats for name, chats in tasks.items() if names is None or name in names}


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
            require_drafter(llm)
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
