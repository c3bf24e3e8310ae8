"""Prompts to answers: every turn of every conversation answered exactly once, in any order.

It knows the file and what is left to do; who answers is a callable (`Answerer`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dspark.data.answers import Answer, AnswerFile, Sampling
from dspark.data.prompts import Prompt
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One user turn that waits for its answer."""

    prompt: Prompt
    number: int
    """Of the prompt among all; with the turn it decides seed and sampling."""
    answers: Sequence[str]
    """What the target said to the turns before."""
    sampling: Sampling

    @property
    def turn(self) -> int:
        """Number of the turn in its conversation."""
        return len(self.answers)

    @property
    def id(self) -> str:
        """Of its line: the prompt's own for the first turn, then with the turn's number."""
        return self.prompt.id if self.turn == 0 else f"{self.prompt.id}/{self.turn + 1}"

    def chat(self) -> list[dict[str, str]]:
        """The conversation up to this turn."""
        return self.prompt.as_chat(self.answers)

    def answered(
        self,
        *,
        prompt_token_ids: Sequence[int],
        token_ids: Sequence[int],
        finish_reason: str,
        text: str,
        reasoning: str | None = None,
    ) -> Answer:
        """The line of the answers file for this turn."""
        return Answer(
            id=self.id,
            domain=self.prompt.domain,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            prompt_token_ids=prompt_token_ids,
            token_ids=token_ids,
            finish_reason=finish_reason,
            text=text,
            conversation=self.prompt.id,
            turn=self.turn,
            reasoning=reasoning,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A turn that could not be answered; it is not written, so the next run asks it again."""

    reason: str


Take = Callable[[], Turn | None]
"""The next turn, or `None` while there is none; more may follow as answers come in."""

Answerer = Callable[[Take], Iterator[tuple[Turn, Answer | Failure]]]
"""Answers turns as they are taken, each as it ends, until none is left and none is in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What one call of `prepare` did; prompts and turns are counted apart."""

    num_prompts: int
    num_done_before: int
    """Turns that the file held."""
    num_answered: int
    num_truncated: int
    """Of those answered now, cut by a limit."""
    num_answer_tokens: int
    failures: Sequence[tuple[str, str]]
    """Turn and reason of each that could not be answered."""


def prepare(
    prompts: Sequence[Prompt],
    file: AnswerFile,
    *,
    answerer: Answerer,
    samplings: Sequence[Sampling],
    on_answer: Callable[[int, int], None] | None = None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> PrepareReport:
    """Answer each turn exactly once, appending to `file`; run again, it goes on (any kill).

    Prompt number i uses `samplings[i % len(samplings)]`, whatever was done before. A turn that
    fails ends its conversation and nothing else. `on_answer(turns done, turns in all)` hears of
    progress. Once `may_go_on()` says no, nothing new is asked; what is in flight still ends.
    """
    if not samplings:
        raise InputError("samplings is empty, but at least one temperature is needed.")
    _check_unique(prompts)
    total = sum(len(prompt.turns) for prompt in prompts)
    done = [_answers_of(prompt, file) for prompt in prompts]
    num_before = num_done = sum(map(len, done))
    waiting = deque(
        Turn(
            prompt=prompt,
            number=number,
            answers=[answer.text for answer in answers],
            sampling=samplings[number % len(samplings)],
        )
        for number, (prompt, answers) in enumerate(zip(prompts, done, strict=True))
        if len(answers) < len(prompt.turns)
    )
    failures: list[tuple[str, str]] = []
    num_tokens = num_truncated = 0

    def take() -> Turn | None:
        return waiting.popleft() if waiting and may_go_on() else None

    for turn, outcome in answerer(take):
        if isinstance(outcome, Failure):
            failures.append((turn.id, outcome.reason))
            continue
        assert outcome.id == turn.id, "an answer carries the id of its turn"
        file.add(outcome)
        num_done += 1
        num_tokens += len(outcome.token_ids)
        num_truncated += outcome.is_truncated
        if turn.turn + 1 < len(turn.prompt.turns):
            waiting.appendleft(replace(turn, answers=[*turn.answers, outcome.text]))
        if on_answer is not None:
            on_answer(num_done, total)
    return PrepareReport(
        num_prompts=len(prompts),
        num_done_before=num_before,
        num_answered=num_done - num_before,
        num_truncated=num_truncated,
        num_answer_tokens=num_tokens,
        failures=failures,
    )


def _answers_of(prompt: Prompt, file: AnswerFile) -> list[Answer]:
    """The answers in the file from the first turn on without a gap."""
    found = file.turns.get(prompt.id, [])
    return [answer for turn, answer in enumerate(found) if answer.turn == turn]


def _check_unique(prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InputError(f"Prompt id {prompt.id!r} occurs twice; give each prompt its own id.")
        seen.add(prompt.id)
