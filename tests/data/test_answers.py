import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark.data.answers import Answer, Sampling, prepare, read_answers
from dspark.data.prompts import Message, Prompt
from dspark.errors import InputError

SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.95)]


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", domain="math", messages=[Message(role="user", content=f"question {i}")])
        for i in range(count)
    ]


class Target:
    """Answers a prompt by its number; remembers what it was asked, may be killed."""

    def __init__(self, *, dies_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.dies_after = dies_after

    def __call__(self, batch: Sequence[Prompt], how: Sequence[Sampling]) -> list[Answer]:
        if self.dies_after is not None and len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        self.asked += [prompt.id for prompt in batch]
        return [
            Answer(
                id=prompt.id,
                domain=prompt.domain,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                prompt_token_ids=[1, 9690, len(prompt.id)],
                token_ids=[5, 5, int(prompt.id[1:]) + 10, 2],
                finish_reason="stop",
                text="text that decodes to other ids ü",
            )
            for prompt, sampling in zip(batch, how, strict=True)
        ]


def test_a_kill_at_any_byte_leaves_each_prompt_answered_exactly_once(tmp_path: Path):
    whole = tmp_path / "whole.jsonl"
    prepare(prompts(7), whole, generate=Target(), samplings=SAMPLINGS, batch_size=2)
    expected, data = read_answers(whole), whole.read_bytes()
    assert [answer.id for answer in expected] == [f"p{i}" for i in range(7)]
    for size in range(0, len(data) + 1, 7):
        file = tmp_path / "cut.jsonl"
        file.write_bytes(data[:size])
        num_whole = data[:size].count(b"\n")
        target = Target()
        report = prepare(prompts(7), file, generate=target, samplings=SAMPLINGS, batch_size=2)
        assert report.num_done_before == num_whole
        assert target.asked == [f"p{i}" for i in range(num_whole, 7)]
        assert read_answers(file) == expected


def test_an_interrupted_run_goes_on_with_the_same_sampling_for_each_prompt(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        prepare(prompts(5), file, generate=Target(dies_after=3), samplings=SAMPLINGS, batch_size=1)
    assert len(read_answers(file)) == 3
    seen: list[tuple[int, int]] = []
    report = prepare(
        prompts(5),
        file,
        generate=Target(),
        samplings=SAMPLINGS,
        batch_size=1,
        on_batch=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 5), (5, 5)]
    assert (report.num_prompts, report.num_done_before, report.num_answered) == (5, 3, 2)
    assert report.num_answer_tokens == 8
    assert [a.temperature for a in read_answers(file)] == [0.0, 0.7, 0.0, 0.7, 0.0]


def test_ids_are_kept_as_generated_and_only_the_answer_is_supervised(tmp_path: Path):
    """UC-103, UC-093: no text is encoded again, no prompt token is a label."""
    file = tmp_path / "answers.jsonl"
    prepare(prompts(1), file, generate=Target(), samplings=SAMPLINGS)
    (answer,) = read_answers(file)
    assert answer.ids().tolist() == [1, 9690, 2, 5, 5, 10, 2]
    assert answer.loss_mask().tolist() == [False] * 3 + [True] * 4


def test_a_finished_file_asks_the_target_nothing(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    prepare(prompts(3), file, generate=Target(), samplings=SAMPLINGS)
    before, target = file.read_bytes(), Target()
    prepare(prompts(3), file, generate=target, samplings=SAMPLINGS)
    assert target.asked == []
    assert file.read_bytes() == before


def test_a_prompt_id_that_occurs_twice_is_refused_before_anything_is_asked(tmp_path: Path):
    target = Target()
    with pytest.raises(InputError, match="'p0' occurs twice"):
        prepare(
            [*prompts(1), *prompts(1)], tmp_path / "a.jsonl", generate=target, samplings=SAMPLINGS
        )
    assert target.asked == []


def test_a_line_that_is_no_answer_is_named(tmp_path: Path):
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"id": "a", "text": "x"}) + "\n")
    with pytest.raises(InputError, match="line 1 lacks domain, finish_reason"):
        read_answers(file)
    file.write_text("{}}\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        read_answers(file)
    with pytest.raises(InputError, match="is no answers file"):
        read_answers(tmp_path / "missing.jsonl")


def test_sampling_that_cannot_be_is_refused():
    with pytest.raises(InputError, match="temperature -1"):
        Sampling(temperature=-1.0)
    with pytest.raises(InputError, match="top_p 0"):
        Sampling(temperature=1.0, top_p=0.0)
