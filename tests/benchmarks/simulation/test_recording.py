"""Recorded rounds: which of them are of use, and which one comes where."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dspark.benchmarks.journal import PLAIN, Cell, PromptRecord
from dspark.benchmarks.simulation.recording import Recording, read_records, recordings_of
from dspark.core import Request, RoundResult, SamplingParams
from dspark.errors import InputError
from tests.engine.toy_cycles import make_cycle
from tests.toys import toy_drafter, toy_target


def record(
    accepted: Sequence[int] = (2, 0, 3), *, temperature: float = 0.0, drafter: str = "d"
) -> PromptRecord:
    committed = [count + 1 for count in accepted]
    return PromptRecord(
        cell=Cell(drafter=drafter, weights="w", temperature=temperature, width=None, task="math"),
        index=0,
        prompt="p",
        num_tokens=1 + sum(committed),
        seconds=1.0,
        finish_reason="stop",
        offered=[3] * len(committed),
        planned=[3] * len(committed),
        accepted=list(accepted),
        committed=committed,
        confidence=[[float(n), 0.0, -1.0] for n in accepted],
        num_prompt_tokens=9,
    )


def test_an_answer_is_its_rounds_with_the_places_where_they_began() -> None:
    (answer,) = Recording.of([record()]).answers
    assert answer.starts_J == [1, 4, 5]
    assert answer.accepted_J == [2, 0, 3]
    assert answer.num_prompt_tokens == 9
    assert answer.is_stopped
    assert answer.logits_JK is not None
    assert answer.logits_JK[:, 0].tolist() == [2.0, 0.0, 3.0]
    # an answer of 9 tokens: 1 from the prompt, rounds of 3, 1, 4; behind its end it begins again
    assert [answer.round_at(n) for n in range(1, 12)] == [0, 0, 0, 1, 2, 2, 2, 2, 0, 0, 0]


def test_a_round_that_was_trimmed_is_refused(tmp_path: Path) -> None:
    """UC-128: what was not verified is unknown."""
    trimmed = replace(record(), planned=[3, 1, 3])
    with pytest.raises(InputError, match="verified 1 of 3"):
        Recording.of([trimmed])


def test_the_end_of_a_cut_answer_leaves_less_room_than_a_block() -> None:
    cut = replace(
        record(), finish_reason="length", num_tokens=7, planned=[3, 3, 1], accepted=[2, 0, 1],
        committed=[3, 1, 2],
    )  # fmt: skip
    (answer,) = Recording.of([cut]).answers
    assert not answer.is_stopped
    assert answer.accepted_J == [2, 0, 1]


def test_temperatures_are_kept_apart_and_plain_answers_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [
        {"settings": {}},
        asdict(record()),
        asdict(record(temperature=1.0)),
        asdict(record(drafter=PLAIN)),
        {"answer": {"record": asdict(record(temperature=1.0)), "token_ids": [1]}},
        {"unit": {}, "measured": {}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = recordings_of(read_records([path]))
    assert {t: len(r.answers) for t, r in found.items()} == {0.0: 1, 1.0: 2}
    with pytest.raises(InputError, match="2 drafters or temperatures"):
        Recording.of([record(), record(temperature=1.0)])


def test_nothing_recorded_is_refused(tmp_path: Path) -> None:
    plain = replace(record(), offered=[0] * 3, planned=[0] * 3, accepted=[0] * 3)
    with pytest.raises(InputError, match="no round with drafts"):
        Recording.of([plain])
    with pytest.raises(InputError, match="no round whose whole block"):
        recordings_of([replace(record(), cell=replace(record().cell, width=1))])
    with pytest.raises(InputError, match="does not exist"):
        read_records([tmp_path / "missing.jsonl"])


def test_a_recorded_answer_says_which_rounds_were_copies() -> None:
    """A simulation needs it: they cost no drafter, and their confidences are no drafter's."""
    params = SamplingParams(temperature=0.0, max_tokens=42, ignore_eos=True, logit_bias={7: 1e4})
    target = toy_target()
    cycle = make_cycle(target, toy_drafter(target), copies=True)
    cycle.submit(Request(id="0", prompt_ids=[5, 6], params=params))
    rounds: list[RoundResult] = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    record = PromptRecord.of_rounds(
        Cell(drafter="d", weights="w", temperature=0.0, width=None, task="t"),
        rounds,
        index=0,
        prompt="p",
        seconds=0.0,
        num_prompt_tokens=2,
    )
    again = PromptRecord.from_row(json.loads(json.dumps(asdict(record))))
    assert again.copied == [item.is_copied for item in rounds[1:]]
    (answer,) = Recording.of([again]).answers
    assert list(answer.copied_J) == again.copied
