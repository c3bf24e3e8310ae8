"""Thought and speech of an answer, however it is cut."""

import random

import pytest

from dspark.serving.thoughts import Thought, ThoughtReader

CASES = [
    (Thought.AHEAD, "<think>\nhm, 1 < 2\n</think>\n\nYes.", "hm, 1 < 2", "Yes."),
    (Thought.AHEAD, "\n <think>a\n\nb</think>c\n", "a\n\nb", "c\n"),
    (Thought.AHEAD, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (Thought.AHEAD, "Yes <think>no</think>.", "", "Yes <think>no</think>."),
    (Thought.AHEAD, "\n\nYes", "", "\n\nYes"),
    (Thought.AHEAD, "<thin", "", "<thin"),
    (Thought.AHEAD, "<think>cut off </thi", "cut off </thi", ""),
    (Thought.OPEN, "hm\n</think>\n\nYes.", "hm", "Yes."),
    (Thought.OPEN, "still", "still", ""),
    (Thought.NOWHERE, "<think>hm</think>Yes.", "", "<think>hm</think>Yes."),
]


@pytest.mark.parametrize(("start", "text", "thought", "said"), CASES)
def test_the_parts_do_not_depend_on_the_cuts(
    start: Thought, text: str, thought: str, said: str
) -> None:
    chance = random.Random(text)
    for _ in range(50):
        reader = ThoughtReader(start)
        found, at = [], 0
        while at < len(text):
            size = chance.randint(1, 9)
            found.append(reader.push(text[at : at + size]))
            at += size
        found.append(reader.flush())
        assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == (thought, said)


def test_no_more_is_held_back_than_may_be_a_mark() -> None:
    reader = ThoughtReader(Thought.AHEAD)
    assert reader.push("<think>one ") == ("one ", "")
    assert reader.push("two <") == ("two ", "")
    assert reader.push("3</think>four") == ("<3", "four")
    assert reader.push(" five <think>") == ("", " five <think>")


def test_a_prompt_tells_whether_it_has_begun_the_thought() -> None:
    assert Thought.of("user: <think>\n", has_marks=True) is Thought.OPEN
    assert Thought.of("user: <think>\n\n</think>\n\n", has_marks=True) is Thought.AHEAD
    assert Thought.of("user: <think>", has_marks=False) is Thought.NOWHERE
