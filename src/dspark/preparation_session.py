"""One run of `dspark prepare`: prompts, who answers them, and the answers file.

It joins data, tokenizer and engine; the bookkeeping of exactly once is in `data.preparation`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import read_lines
from dspark.completion import Completion, Job
from dspark.core import SamplingParams
from dspark.data.answers import Answer, AnswerFile, AnswerSettings, Sampling, read_answers
from dspark.data.endpoints import EndpointConfig, Endpoints, RequestOptions
from dspark.data.preparation import Answerer, Failure, PrepareReport, Take, Turn, prepare
from dspark.data.prompts import Prompt, read_prompts, with_system
from dspark.errors import DSparkError, InputError, ModelError
from dspark.llm import LLM
from dspark.models.target_source import resolve_source
from dspark.text.answer_span import AnswerSpan
from dspark.text.tokenizer import Tokenizer

NUM_SAMPLES = 16
"""Answers whose loss mask is read from the template again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """Prompts of several files, and what is to be said about rows that were left out."""

    prompts: Sequence[Prompt]
    remarks: Sequence[str]


def read_prompt_files(
    sources: Sequence[str],
    *,
    limit: int | None,
    columns: Mapping[str, str] | None = None,
    system: str | None = None,
    has_all_turns: bool = True,
    is_raw: bool = False,
) -> PromptFiles:
    """All prompts, in order; `limit` of each file; rows without a system prompt get `system`.

    With `is_raw` prompts are texts to be continued: rows that only a chat template could render
    are left out. Raises `InputError` for a system prompt beside it.
    """
    if is_raw and system is not None:
        raise InputError("A system prompt needs a chat template; leave --system or --raw out.")
    prompts: list[Prompt] = []
    remarks: list[str] = []
    for source in sources:
        found = read_prompts(source, limit=limit, columns=columns)
        prompts.extend(found.prompts)
        for reason, count in found.reasons().items():
            lines = [row.line for row in found.skipped if row.reason == reason]
            remarks.append(f"{source}: {count} rows left out, {reason} (lines {_listed(lines)})")
    if system is not None:
        prompts = with_system(prompts, system)
    if not has_all_turns:
        prompts = [_first_turn(prompt) for prompt in prompts]
    if is_raw:
        chats = [p.id for p in prompts if p.system is not None or len(p.turns) > 1]
        if len(chats) == len(prompts):
            raise InputError(
                "All rows have several turns or a system prompt, which only a chat template can "
                "render; leave --raw out, or take --first-turn."
            )
        if chats:
            remarks.append(
                f"{len(chats)} rows left out, several turns or a system prompt, which only a chat "
                f"template can render ({_listed(chats)})"
            )
            prompts = [p for p in prompts if p.system is None and len(p.turns) == 1]
    return PromptFiles(prompts=prompts, remarks=remarks)


def sampling_of(text: str) -> Sampling:
    """A text like "0.7", "0.7:0.95" or "0.7:0.8:20:0.05": temperature, top_p, top_k, min_p."""
    try:
        temperature, top_p, top_k, min_p = [*text.split(":"), "", "", ""][:4]
        if text.count(":") > 3:
            raise ValueError(text)
        return Sampling(
            temperature=float(temperature),
            top_p=float(top_p or 1.0),
            top_k=int(top_k) if top_k else None,
            min_p=float(min_p or 0.0),
        )
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"sampling is {text!r}, but it must be a temperature such as 0.7, or 0.7:0.95 with "
            "top_p after the colon; top_k and min_p may follow."
        ) from error


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Texts like "turns=questions": our key, and their column that holds it."""
    columns = {}
    for text in texts:
        key, is_there, column = text.partition("=")
        if not is_there or not key or not column:
            raise InputError(
                f"column is {text!r}, but it must be KEY=COLUMN, such as messages=chat."
            )
        columns[key] = column
    return columns


class EmbeddedEngine:
    """An `Answerer`: the target decodes here, as many turns together as it holds."""

    def __init__(self, llm: LLM, *, options: RequestOptions, is_raw: bool = False) -> None:
        """`is_raw`: prompts are continued as they are, without a chat template."""
        self._llm = llm
        self._options = options
        self._is_raw = is_raw

    def __call__(self, take: Take) -> Iterator[tuple[Turn, Answer | Failure]]:
        """Answers as they end, short ones not waiting for long ones."""
        failed: list[tuple[Turn, Failure]] = []
        turns: dict[str, Turn] = {}

        def next_job() -> Job | None:
            while (turn := take()) is not None:
                try:
                    job = self._job(turn)
                except DSparkError as error:
                    failed.append((turn, Failure(reason=str(error))))
                    continue
                turns[turn.id] = turn
                return job
            return None

        for job, completion in self._llm.drain(next_job, speculation=False):
            turn = turns.pop(job.key)
            yield turn, _answer(turn, completion)
        yield from failed

    def _job(self, turn: Turn) -> Job:
        tokenizer = self._llm.tokenizer
        if self._is_raw:
            ids = tokenizer.encode(turn.prompt.turns[0])
        else:
            ids = tokenizer.chat(turn.chat(), thinking=self._options.thinking)
        limit = self._llm.target.spec.max_positions
        if len(ids) >= limit:
            raise InputError(f"the prompt does not fit into the target's {limit} positions")
        if min(len(ids) + self._options.max_new_tokens, limit) > self._llm.config.num_positions:
            raise InputError(
                f"prompt and answer do not fit into a cache of {self._llm.config.num_positions} "
                "positions; raise --concurrency"
            )
        sampling = turn.sampling
        seed = None if sampling.temperature == 0 else self._options.seed + turn.number
        return Job(
            key=turn.id,
            prompt=ids,
            params=SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=self._options.max_new_tokens,
                seed=seed,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command asks of whoever answers."""

    target: str
    samplings: Sequence[Sampling]
    max_new_tokens: int
    seed: int
    thinking: bool | None
    system: str | None
    is_raw: bool = False
    """Prompts are continued as they are: for base models, which have no chat template."""

    def __post_init__(self) -> None:
        SamplingParams(seed=self.seed)  # else each turn would fail by itself

    def options(self) -> RequestOptions:
        """What each request carries besides its conversation."""
        return RequestOptions(
            max_new_tokens=self.max_new_tokens, seed=self.seed, thinking=self.thinking
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Who answers, by which tokenizer, and what the file will say of it."""

    answerer: Answerer
    tokenizer: Tokenizer
    settings: AnswerSettings


def embedded(llm: LLM, asked: Asked, *, quantization: str | None) -> Answering:
    """The target decodes here. Raises `ModelError` for a base model that is to chat."""
    if not asked.is_raw and not llm.tokenizer.has_chat_template:
        raise ModelError(
            f"{asked.target} has no chat template because it is a base model; add --raw, and it "
            "continues each prompt as it is."
        )
    dtype = str(llm.target.dtype).removeprefix("torch.")
    kept = ["int8 keys and values"] if llm.target.has_int8_cache else []
    return Answering(
        answerer=EmbeddedEngine(llm, options=asked.options(), is_raw=asked.is_raw),
        tokenizer=llm.tokenizer,
        settings=_settings(
            asked,
            llm.tokenizer,
            f"embedded {' '.join([dtype, *filter(None, [quantization]), *kept])}",
        ),
    )


def over_http(asked: Asked, **config: Any) -> Answering:
    """Servers decode; only the target's tokenizer is loaded. `config`: see `EndpointConfig`.

    Raises `ModelError` with the remedy if answers come as text and the chat template does not
    show which of its tokens are the answer, `InputError` for raw continuations.
    """
    if asked.is_raw:
        raise InputError(
            "Servers are asked for chats; leave --endpoint out, and --raw decodes here."
        )
    tokenizer = Tokenizer.load(resolve_source(asked.target))
    tokenizer.check_thinking(asked.thinking)
    endpoint = EndpointConfig(**config)
    span = None if endpoint.has_token_ids else AnswerSpan(tokenizer, thinking=asked.thinking)
    return Answering(
        answerer=Endpoints(endpoint, options=asked.options(), span=span),
        tokenizer=tokenizer,
        settings=_settings(asked, tokenizer, f"endpoint {endpoint.model}"),
    )


def key_in(file: Path) -> str:
    """The first line of a file. Raises `InputError` if there is none."""
    lines = read_lines(file, wanted="a file with the key on its first line")
    if not lines or not lines[0].strip():
        raise InputError(f"{file} holds no key; put it on the first line.")
    return lines[0].strip()


def _settings(asked: Asked, tokenizer: Tokenizer, engine: str) -> AnswerSettings:
    return AnswerSettings(
        target=asked.target,
        engine=engine,
        template_hash=None if asked.is_raw else tokenizer.template_hash,
        thinking=asked.thinking,
        system=asked.system,
        samplings=asked.samplings,
        max_new_tokens=asked.max_new_tokens,
        seed=asked.seed,
    )


def run(
    prompts: Sequence[Prompt],
    out: Path,
    *,
    answering: Answering,
    minutes: float | None = None,
    on_answer: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> PrepareReport:
    """Answer what `out` does not hold yet; run again after a kill, it goes on.

    After `minutes`, or once `should_stop()` says yes, nothing new is asked.
    """
    deadline_s = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    return prepare(
        prompts,
        AnswerFile(out, settings=answering.settings),
        answerer=answering.answerer,
        samplings=answering.settings.samplings,
        on_answer=on_answer,
        may_go_on=lambda: time.monotonic() < deadline_s and not should_stop(),
    )


def remarks_on(
    report: PrepareReport, answering: Answering, prompts: Sequence[Prompt], out: Path
) -> list[str]:
    """What is to be said about turns that failed, answers that were cut, and the loss mask."""
    remarks = []
    for reason in dict.fromkeys(reason for _, reason in report.failures):
        ids = [turn for turn, why in report.failures if why == reason]
        remarks.append(f"{len(ids)} turns not answered, {reason} ({_listed(ids)})")
    if report.num_truncated:
        remarks.append(
            f"{report.num_truncated} of {report.num_answered} answers were cut by a limit; they "
            "are marked, and nothing teaches the drafter to end there"
        )
    if answering.settings.template_hash is None:  # all that follows a text is the answer
        return remarks
    mask = mask_remark(answering.tokenizer, prompts, out, thinking=answering.settings.thinking)
    return remarks if mask is None else [*remarks, mask]


def mask_remark(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], out: Path, *, thinking: bool | None
) -> str | None:
    """Reads the loss mask of some answers in the file from the template, beside the kept ids.

    `None` where there is nothing to compare. A difference is no fault: generated ids may encode
    the same text otherwise (UC-103), and they are what is learnt.
    """
    try:
        span = AnswerSpan(tokenizer, thinking=thinking)
    except DSparkError as error:
        return f"loss mask: the ids as generated decide, the template cannot be asked ({error})"
    chats = {prompt.id: prompt.as_chat() for prompt in prompts}
    whole = [a for a in read_answers(out) if not a.is_truncated and a.id in chats]
    samples = whole[:NUM_SAMPLES]
    if not samples:
        return None
    num_same = sum(_agrees(span, chats[answer.id], answer) for answer in samples)
    return (
        f"loss mask: read from the chat template, it agrees with the ids of {num_same} of "
        f"{len(samples)} sampled answers, which end with {span.end!r}"
    )


def _agrees(span: AnswerSpan, chat: Sequence[Mapping[str, str]], answer: Answer) -> bool:
    try:
        found = span.ids(chat, answer.text, reasoning=answer.reasoning)
    except InputError:
        return False
    return list(found.prompt_ids) == list(answer.prompt_token_ids) and list(
        found.answer_ids
    ) == list(answer.token_ids)


def _answer(turn: Turn, completion: Completion) -> Answer:
    return turn.answered(
        prompt_token_ids=list(completion.prompt_ids),
        token_ids=list(completion.token_ids),
        finish_reason=completion.finish_reason.value,
        text=completion.text,
    )


def _first_turn(prompt: Prompt) -> Prompt:
    return Prompt(id=prompt.id, domain=prompt.domain, system=prompt.system, turns=prompt.turns[:1])


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:5])) + (", .." if len(values) > 5 else "")
