"""Thoughts: parts a growing answer into what a model thinks first and what it then says.

One pair of marks is spoken, that of Qwen, DeepSeek and SmolLM3; templates that have none get none
read. It knows text, no HTTP and no engine.
"""

from enum import Enum

_BEGIN, END = "<think>", "</think>"


class Thought(Enum):
    """Where an answer may hold a thought."""

    NOWHERE = "nowhere"
    AHEAD = "ahead"
    """It may begin with one."""
    OPEN = "open"
    """The prompt has begun one already."""

    @classmethod
    def of(cls, prompt: str, *, has_marks: bool) -> "Thought":
        """Behind a rendered prompt; `has_marks`: the template writes thoughts."""
        if not has_marks:
            return cls.NOWHERE
        return cls.OPEN if prompt.rstrip().endswith(_BEGIN) else cls.AHEAD


class ThoughtReader:
    """Takes pieces of an answer, however it is cut. The marks and the line breaks beside them
    belong to neither part.

    Held back, and never longer than needed: a text that may still grow into a mark.
    """

    def __init__(self, start: Thought) -> None:
        self.is_inside = start is Thought.OPEN
        self._is_behind = start is Thought.NOWHERE
        self._is_fresh = True  # nothing of this part was given yet
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Thought and speech that this further text makes certain."""
        self._held += text
        if not self.is_inside and not self._is_behind:
            self._begin()
        thought = self._think() if self.is_inside else ""
        return thought, self._speak() if self._is_behind else ""

    def flush(self) -> tuple[str, str]:
        """What is left at the end of the answer."""
        text, self._held = self._held, ""
        return (text, "") if self.is_inside else ("", text)

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(_BEGIN):
            self.is_inside, self._held = True, text[len(_BEGIN) :]
        elif not _BEGIN.startswith(text):
            self._is_behind, self._is_fresh = True, False

    def _think(self) -> str:
        thought, mark, rest = self._held.partition(END)
        if mark:
            thought = self._without_lead(thought.rstrip("\n"))
            self.is_inside, self._is_behind, self._is_fresh = False, True, True
            self._held = rest
            return thought
        keep = _partial(self._held)
        kept_at = len(self._held[: len(self._held) - keep].rstrip("\n"))
        thought, self._held = self._held[:kept_at], self._held[kept_at:]
        return self._without_lead(thought)

    def _speak(self) -> str:
        text, self._held = self._held, ""
        return self._without_lead(text)

    def _without_lead(self, text: str) -> str:
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        return text


def _partial(text: str) -> int:
    """Characters at the end of `text` that begin the mark of the end."""
    for length in range(min(len(text), len(END) - 1), 0, -1):
        if END.startswith(text[-length:]):
            return length
    return 0
