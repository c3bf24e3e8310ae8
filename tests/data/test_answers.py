import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.data.answers import (
    Answer,
    AnswerFile,
    AnswerSettings,
    Sampling,
    join_turns,
    read_all_answers,
    read_answers,
)
from dspark.data.preparation import Answerer, Failure, Take, Turn, prepare
from dspark.data.prompts import Prompt
from dspark.errors import InputError

SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.95, top_k=20)]
SETTINGS = AnswerSettings(
    target="toy",
    engine="embedded float32",
    template_hash="abc",
    thinking=False,
    system="Be kind.",
    samplings=SAMPLINGS,
    max_new_tokens=8,
    seed=0,
)


def prompts(count: int, *, turns: int = 1) -> list[Prompt]:
    return [
        Prompt(
            id=f"p{i}",
            domain="math",
            system=None,
            turns=[f"question {i}.{turn}" for turn in range(turns)],
        )
        for i in range(count)
    ]


class Target:
    """Answers a turn by the numbers in it; remembers what it was asked, may be killed."""

    def __init__(self, *, dies_after: int | None = None, fails: str = "") -> None:
        self.asked: list[str] = []
        self.dies_after = dies_after
        self.fails = fails

    def __call__(self, take: Take) -> Iterator[tuple[Turn, Answer | Failure]]:
        while (turn := take()) is not None:
            if self.dies_after is not None and len(self.asked) >= self.dies_after:
                raise KeyboardInterrupt
            self.asked.append(turn.id)
            yield turn, Failure(reason="too long") if turn.id == self.fails else answer_to(turn)


def answer_to(turn: Turn) -> Answer:
    said = [1, 9690]
    for number in range(turn.turn):
        said += [3, 5, turn.number + 10, number + 20, 2]
    return Answer(
        id=turn.id,
        domain=turn.prompt.domain,
        temperature=turn.sampling.temperature,
        top_p=turn.sampling.top_p,
        top_k=turn.sampling.top_k,
        prompt_token_ids=[*said, 3],
        token_ids=[5, turn.number + 10, turn.turn + 20, 2],
        finish_reason="stop",
        text=f"{turn.chat()[-1]['content']} decodes to other ids ü",
        conversation=turn.prompt.id,
        turn=turn.turn,
    )


def run(
    path: Path,
    answerer: Answerer,
    *,
    count: int = 7,
    turns: int = 1,
    on_answer: Callable[[int, int], None] | None = None,
):
    return prepare(
        prompts(count, turns=turns),
        AnswerFile(path, settings=SETTINGS),
        answerer=answerer,
        samplings=SAMPLINGS,
        on_answer=on_answer,
    )


@pytest.mark.parametrize("turns", [1, 3])
def test_a_kill_at_any_byte_leaves_each_turn_answered_exactly_once(tmp_path: Path, turns: int):
    whole = tmp_path / "whole.jsonl"
    run(whole, Target(), count=3, turns=turns)
    expected, data = read_answers(whole), whole.read_bytes()
    assert len(expected) == 3 * turns
    assert sorted(answer.turn for answer in expected) == sorted([*range(turns)] * 3)
    for size in range(0, len(data) + 1, 23 * turns):
        file = tmp_path / "cut.jsonl"
        file.write_bytes(data[:size])
        num_whole = max(data[:size].count(b"\n") - 1, 0)  # the first line holds the settings
        target = Target()
        report = run(file, target, count=3, turns=turns)
        assert report.num_done_before == num_whole
        assert target.asked == [answer.id for answer in expected[num_whole:]]
        assert read_answers(file) == expected


@pytest.mark.parametrize(
    "content", ["my only notes", '{"note": "mine"}', "one line\nand one without its end", "\x00"]
)
def test_nothing_is_cut_off_a_file_that_holds_something_else(tmp_path: Path, content: str):
    file = tmp_path / "notes"
    file.write_text(content)
    with pytest.raises(InputError, match=r"notes (line 1 is not JSON|holds something else)"):
        AnswerFile(file, settings=SETTINGS)
    assert file.read_text() == content


def test_an_interrupted_run_goes_on_with_the_same_sampling_for_each_prompt(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(file, Target(dies_after=3), count=5)
    assert len(read_answers(file)) == 3
    seen: list[tuple[int, int]] = []
    report = run(file, Target(), count=5, on_answer=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 5), (5, 5)]
    assert (report.num_prompts, report.num_done_before, report.num_answered) == (5, 3, 2)
    assert report.num_answer_tokens == 8
    answers = read_answers(file)
    assert [a.temperature for a in answers] == [0.0, 0.7, 0.0, 0.7, 0.0]
    assert [a.top_k for a in answers] == [None, 20, None, 20, None]


def test_every_turn_is_asked_with_the_target_s_own_answers_before_it(tmp_path: Path):
    chats: list[list[dict[str, str]]] = []

    def watched(take: Take) -> Iterator[tuple[Turn, Answer | Failure]]:
        while (turn := take()) is not None:
            chats.append(turn.chat())
            yield turn, answer_to(turn)

    run(tmp_path / "a.jsonl", watched, count=1, turns=3)
    answers = read_answers(tmp_path / "a.jsonl")
    assert [answer.id for answer in answers] == ["p0", "p0/2", "p0/3"]
    assert [answer.turn for answer in answers] == [0, 1, 2]
    said = [answer.text for answer in answers]
    last = chats[-1]
    assert [m["content"] for m in last if m["role"] == "assistant"] == said[:2]
    assert [m["content"] for m in last if m["role"] == "user"] == [
        *("question 0.0", "question 0.1", "question 0.2")
    ]


def test_a_turn_that_fails_ends_its_conversation_is_named_and_asked_again(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    report = run(file, Target(fails="p1/2"), count=3, turns=3)
    assert report.failures == [("p1/2", "too long")]
    assert {answer.id for answer in read_answers(file)} == {
        *("p0", "p0/2", "p0/3", "p1", "p2", "p2/2", "p2/3")
    }
    target = Target()
    assert run(file, target, count=3, turns=3).failures == []
    assert target.asked == ["p1/2", "p1/3"]


def test_ids_are_kept_as_generated_and_only_the_answer_is_supervised(tmp_path: Path):
    """UC-103, UC-093: no text is encoded again, no prompt token is a label."""
    run(tmp_path / "a.jsonl", Target(), count=1)
    (answer,) = read_answers(tmp_path / "a.jsonl")
    assert answer.ids().tolist() == [1, 9690, 3, 5, 10, 20, 2]
    assert answer.loss_mask().tolist() == [False] * 3 + [True] * 4


def test_turns_that_continue_each_other_become_one_sequence_with_a_span_for_each(tmp_path: Path):
    """UC-097: three answers, three spans; what lies between them teaches nothing."""
    run(tmp_path / "a.jsonl", Target(), count=2, turns=3)
    for number, joined in enumerate(join_turns(read_answers(tmp_path / "a.jsonl"))):
        assert joined.id == f"p{number}"
        own = [5, number + 10, 20, 2], [5, number + 10, 21, 2], [5, number + 10, 22, 2]
        assert joined.ids().tolist() == [1, 9690, 3, *own[0], 3, *own[1], 3, *own[2]]
        spans = [False] * 3 + [True] * 4 + [False] + [True] * 4 + [False] + [True] * 4
        assert joined.loss_mask().tolist() == spans


def test_a_turn_whose_prompt_was_rewritten_stays_a_sequence_of_its_own(tmp_path: Path):
    """UC-094: a template that drops old thoughts; each mask covers exactly its own answer."""
    run(tmp_path / "a.jsonl", Target(), count=2, turns=3)
    answers = read_answers(tmp_path / "a.jsonl")
    dropped = [
        replace(a, prompt_token_ids=[1, 9690, 4, 3]) if a.turn == 1 and a.id == "p0/2" else a
        for a in answers
    ]
    joined = join_turns(dropped)
    assert [a.id for a in joined] == ["p0", "p0/2", "p0/3", "p1"]
    for answer in joined[:3]:
        masked = answer.ids()[answer.loss_mask()].tolist()
        assert masked == [5, 10, 20 + answer.turn, 2]


def test_answers_of_single_turns_are_left_as_they_are(tmp_path: Path):
    run(tmp_path / "a.jsonl", Target())
    answers = read_answers(tmp_path / "a.jsonl")
    assert join_turns(answers) == answers


def test_a_finished_file_asks_the_target_nothing(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    run(file, Target())
    before, target = file.read_bytes(), Target()
    run(file, target)
    assert target.asked == []
    assert file.read_bytes() == before


def test_the_file_says_how_it_was_made_and_takes_no_answers_made_otherwise(tmp_path: Path):
    """UC-102: thinking mode, system prompt and sampling stay with the answers."""
    file = tmp_path / "answers.jsonl"
    run(file, Target(), count=1)
    (answer,) = read_answers(file)
    assert answer.settings == SETTINGS
    for change in ({"thinking": True}, {"target": "other"}, {"samplings": SAMPLINGS[:1]}):
        name = next(iter(change))
        with pytest.raises(InputError, match=f"made with {name}"):
            AnswerFile(file, settings=replace(SETTINGS, **change))  # type: ignore[arg-type]


def test_a_run_that_got_no_answer_settles_nothing(tmp_path: Path):
    """Its server was down; the next command may ask another one, or with other settings."""
    file = tmp_path / "answers.jsonl"
    AnswerFile(file, settings=SETTINGS)
    other = replace(SETTINGS, engine="another")
    assert AnswerFile(file, settings=other).turns == {}
    assert file.read_bytes().count(b"\n") == 1
    assert b'"another"' in file.read_bytes()


def test_files_put_one_behind_the_other_keep_their_own_settings(tmp_path: Path):
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run(one, Target(), count=1)
    AnswerFile(other, settings=replace(SETTINGS, thinking=True)).add(
        replace(read_answers(one)[0], id="q", settings=None)
    )
    both = tmp_path / "both.jsonl"
    both.write_bytes(one.read_bytes() + other.read_bytes())
    modes = [a.settings.thinking for a in read_answers(both) if a.settings is not None]
    assert modes == [False, True]


def test_a_file_from_before_settings_were_kept_is_read(tmp_path: Path):
    file = tmp_path / "old.jsonl"
    row = {
        "id": "a",
        "domain": "d",
        "temperature": 1.0,
        "top_p": 1.0,
        "prompt_token_ids": [1],
        "token_ids": [2],
        "finish_reason": "length",
        "text": "x",
    }
    file.write_text(json.dumps(row) + "\n")
    (answer,) = read_answers(file)
    assert (answer.settings, answer.conversation_id, answer.is_truncated) == (None, "a", True)
    assert AnswerFile(file, settings=SETTINGS).turns.keys() == {"a"}


def test_files_without_an_answer_are_refused_before_a_model_is_loaded(tmp_path: Path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.touch()
    with pytest.raises(InputError, match=r"no answer in .*a\.jsonl, .*b\.jsonl; write some"):
        read_all_answers(files)


def test_a_prompt_id_that_occurs_twice_is_refused_before_anything_is_asked(tmp_path: Path):
    target = Target()
    with pytest.raises(InputError, match="'p0' occurs twice"):
        prepare(
            [*prompts(1), *prompts(1)],
            AnswerFile(tmp_path / "a.jsonl", settings=SETTINGS),
            answerer=target,
            samplings=SAMPLINGS,
        )
    assert target.asked == []


def test_a_line_that_is_no_answer_is_named(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"id": "a", "text": "x"}) + "\n")
    with pytest.raises(InputError, match=r"line 1 lacks domain, .*; give an answers file"):
        read_answers(file)
    file.write_text("{}}\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_answers(file)
    file.write_text('{"prepare": {"target": "x"}}\n')
    with pytest.raises(InputError, match="line 1 does not say how"):
        read_answers(file)
    with pytest.raises(InputError, match="is no answers file"):
        read_answers(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -1.0}, "temperature -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k 0"),
        ({"temperature": 1.0, "min_p": 2.0}, "min_p 2"),
    ],
)
def test_sampling_that_cannot_be_is_refused(values: dict[str, float], words: str):
    with pytest.raises(InputError, match=words):
        Sampling(**values)  # type: ignore[arg-type]
