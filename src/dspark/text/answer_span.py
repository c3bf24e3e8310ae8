"""Where an answer stands in a conversation, found by the chat template itself: the loss mask.

The template is rendered with and without an answer; what it adds is the answer and its end. It
knows no training. Nothing is searched for in user text, so a user who writes the assistant's
header changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.errors import InputError, ModelError
from dspark.text.tokenizer import Tokenizer

_QUESTION = ({"role": "user", "content": "Which word comes next?"},)
_ANSWER = "The word is seven."
_REASONING = "Counting leads there."
_REMEDY = (
    "let the embedded engine answer, which keeps the ids as generated, or an endpoint that "
    "returns token ids (--token-ids)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredIds:
    """Ids of a prompt, generation prompt included, and of the answer with the end that the
    target generates; the loss mask is exactly the second part (UC-093, UC-095)."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


class AnswerSpan:
    """Finds the ids of answers that came as text, for one template and thinking mode."""

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool | None = None) -> None:
        """Renders a sample first. Raises `ModelError` with the remedy for a template in which the
        answer cannot be told from the rest."""
        self._tokenizer = tokenizer
        self._thinking = thinking
        prompt = tokenizer.render(_QUESTION, thinking=thinking)
        whole = self._answered(_QUESTION, {"role": "assistant", "content": _ANSWER})
        if not whole.startswith(prompt):
            raise ModelError(
                "The chat template renders a prompt differently once it is answered, so no loss "
                f"mask can be read from it; {_REMEDY}."
            )
        inserted, _, suffix = whole[len(prompt) :].partition(_ANSWER)
        self._opening = inserted.split()[0] if inserted.strip() else ""
        self._end = self._end_of_turn(suffix)
        if inserted and not self._holds_reasoning():
            raise ModelError(
                f"The chat template puts {inserted!r} between prompt and answer, which the target "
                f"would have to generate, so no loss mask can be read from it; {_REMEDY}."
            )

    def _holds_reasoning(self) -> bool:
        """Whether what stands before an answer is the place of its reasoning."""
        try:
            return bool(self._with_reasoning(_QUESTION, _ANSWER, _REASONING))
        except InputError:
            return False

    @property
    def end(self) -> str:
        """What the template writes behind an answer, up to its first special token."""
        return self._end

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        *,
        reasoning: str | None = None,
        is_truncated: bool = False,
    ) -> AnsweredIds:
        """Ids of the prompt `messages` and of the answer `text` to it.

        A truncated answer has no end: nothing teaches the target to stop there (UC-100).
        Raises `InputError` where the answer's ids cannot be told from the prompt's.
        """
        if reasoning is None and not text.startswith(self._opening):
            raise InputError(f"the answer lacks {self._opening!r}, with which this mode begins")
        prompt = self._tokenizer.render(messages, thinking=self._thinking)
        answer = text if reasoning is None else self._with_reasoning(messages, text, reasoning)
        prompt_ids = self._tokenizer.encode_rendered(prompt)
        end = "" if is_truncated else self._end
        whole_ids = self._tokenizer.encode_rendered(prompt + answer + end)
        if whole_ids[: len(prompt_ids)] != prompt_ids:
            raise InputError("a token spans the end of the prompt")
        answer_ids = whole_ids[len(prompt_ids) :]
        if not answer_ids:
            raise InputError("the answer is empty")
        return AnsweredIds(prompt_ids=prompt_ids, answer_ids=answer_ids)

    def _with_reasoning(
        self, messages: Sequence[Mapping[str, Any]], text: str, reasoning: str
    ) -> str:
        """The answer as the template writes it with its reasoning, without the end."""
        prompt = self._tokenizer.render(messages, thinking=self._thinking)
        message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
        whole = self._answered(messages, message)
        at = whole.rfind(text)
        if not whole.startswith(prompt) or reasoning.strip() not in whole[len(prompt) : at]:
            raise InputError("the template drops the reasoning")
        return whole[len(prompt) : at + len(text)]

    def _answered(self, messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> str:
        return self._tokenizer.render(
            [*messages, answer], thinking=self._thinking, is_answered=True
        )

    def _end_of_turn(self, suffix: str) -> str:
        ids = self._tokenizer.encode_rendered(suffix)
        special = self._tokenizer.special_ids
        for count, token in enumerate(ids, start=1):
            if token in special:
                return self._tokenizer.decode(ids[:count], keep_special=True)
        raise ModelError(
            f"The chat template ends an answer with {suffix!r}, which holds no special token, so "
            f"the end of an answer cannot be found; {_REMEDY}."
        )
