"""A whole run of prepare on a toy target: kills, many turns, what is remarked."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dspark import preparation_session as session
from dspark.core import SamplingParams
from dspark.data.answers import AnswerFile, Sampling, join_turns, read_answers
from dspark.data.prompts import Prompt
from dspark.errors import InputError, ModelError
from dspark.llm import LLM
from dspark.text.answer_span import AnswerSpan

ASKED = session.Asked(
    target="toy",
    samplings=[Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.9, top_k=40)],
    max_new_tokens=6,
    seed=3,
    thinking=None,
    system=None,
)

KILLER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from dspark import assembly, preparation_session as session
from dspark.data.answers import Sampling

model, prompts, reference, killed = sys.argv[1:]
llm = assembly.load_llm(
    target=model, drafter="none", dtype="fp32", is_compiled=False, max_requests=4
)
asked = session.Asked(
    target="toy", samplings=[Sampling(temperature=1.0)], max_new_tokens=8, seed=0,
    thinking=None, system=None,
)
files = session.read_prompt_files([prompts], limit=None)

def prepared(path, after):
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        session.run(
            files.prompts, session.Path(path),
            answering=session.embedded(llm, asked, quantization=None),
        )
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return time.perf_counter() - started, status

seconds, status = prepared(reference, None)
assert status == 0
moments = random.Random(7)
for _ in range(10):
    prepared(killed, seconds * moments.uniform(0.0, 0.3))
_, status = prepared(killed, None)
assert status == 0
"""


@pytest.fixture(scope="module")
def llm(toy_llm: LLM) -> LLM:
    return toy_llm.with_drafter(None)


def conversations(count: int, turns: int) -> list[Prompt]:
    return [
        Prompt(id=f"p{n}", domain="chat", system=None, turns=[f"say {n}.{t}" for t in range(turns)])
        for n in range(count)
    ]


def test_ten_kills_leave_every_turn_once_and_with_the_same_answer(
    model_dir: Path, tmp_path: Path
) -> None:
    """Kill -9 at seeded moments; what is asked again gets the same seed and the same text."""
    rows = [{"id": f"p{n}", "turns": [f"say {n}", "and then?"]} for n in range(10)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [tmp_path / "reference.jsonl", tmp_path / "killed.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", KILLER, *map(str, (model_dir, prompts, *files))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reference, killed = ({a.id: a for a in read_answers(file)} for file in files)
    assert len(read_answers(files[1])) == len(killed) == 20
    assert killed == reference


def test_turns_are_answered_like_a_server_would_and_join_into_one_sequence(
    llm: LLM, tmp_path: Path
) -> None:
    """Each answer is what `generate` says to the conversation so far."""
    prompts = conversations(3, 3)
    out = tmp_path / "a.jsonl"
    answering = session.embedded(llm, ASKED, quantization=None)
    report = session.run(prompts, out, answering=answering)
    assert (report.num_prompts, report.num_answered, report.failures) == (3, 9, [])
    answers = {answer.id: answer for answer in read_answers(out)}
    for number, prompt in enumerate(prompts):
        said: list[str] = []
        for turn in range(3):
            answer = answers[prompt.id if turn == 0 else f"{prompt.id}/{turn + 1}"]
            sampling = ASKED.samplings[number % 2]
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=6,
                seed=None if sampling.temperature == 0 else 3 + number,
            )
            (expected,) = llm.generate([prompt.as_chat(said)], params)
            assert answer.token_ids == list(expected.token_ids)
            assert (answer.top_k, answer.turn) == (sampling.top_k, turn)
            said.append(answer.text)
    ordered = sorted(answers.values(), key=lambda a: (a.conversation_id, a.turn))
    joined = join_turns(ordered)
    supervised = [token for a in joined for token in a.ids()[a.loss_mask()].tolist()]
    assert supervised == [token for answer in ordered for token in answer.token_ids]


def test_what_cannot_be_answered_is_named_and_ends_nothing(llm: LLM, tmp_path: Path) -> None:
    long = Prompt(id="long", domain="chat", system=None, turns=["word " * 600])
    prompts = [*conversations(2, 1), long]
    answering = session.embedded(llm, ASKED, quantization=None)
    report = session.run(prompts, tmp_path / "a.jsonl", answering=answering)
    remarks = session.remarks_on(report, answering, prompts, tmp_path / "a.jsonl")
    assert report.num_answered == 2
    assert "1 turns not answered, the prompt does not fit" in remarks[0]
    assert "(long)" in remarks[0]
    assert "2 of 2 answers were cut by a limit" in remarks[1]


def test_the_loss_mask_is_compared_with_the_template_s_on_samples(llm: LLM, tmp_path: Path) -> None:
    """Answers written by hand: one as the template encodes it, one with other ids, one cut."""
    prompts = conversations(3, 1)
    answering = session.embedded(llm, ASKED, quantization=None)
    session.run(prompts, tmp_path / "raw.jsonl", answering=answering)
    raw = read_answers(tmp_path / "raw.jsonl")
    span = AnswerSpan(llm.tokenizer)
    file = AnswerFile(tmp_path / "a.jsonl", settings=answering.settings)
    for number, answer in enumerate(sorted(raw, key=lambda a: a.id)):
        ids = list(span.ids(prompts[number].as_chat(), "hello").answer_ids)
        if number == 1:  # the same text, letter by letter
            ids = [i for letter in "hello" for i in llm.tokenizer.encode(letter)] + ids[-1:]
        reason = "length" if number == 2 else "stop"
        file.add(replace(answer, token_ids=ids, text="hello", finish_reason=reason))
    remark = session.mask_remark(llm.tokenizer, prompts, tmp_path / "a.jsonl", thinking=None)
    assert remark is not None
    assert "agrees with the ids of 1 of 2 sampled answers" in remark
    assert "<|stop|>" in remark


def test_servers_need_a_template_that_shows_the_answer(tmp_path: Path, model_dir: Path) -> None:
    """And with ids from the server they need none."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    asked = replace(ASKED, target=str(folder))
    config = {"urls": ["http://localhost:1/v1"], "model": "toy"}
    with pytest.raises(ModelError, match=r"end of an answer cannot be found.*--token-ids"):
        session.over_http(asked, **config)
    assert session.over_http(asked, has_token_ids=True, **config).settings.engine == "endpoint toy"
    with pytest.raises(InputError, match="no thinking mode"):
        session.over_http(replace(asked, thinking=True), has_token_ids=True, **config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.7", Sampling(temperature=0.7)),
        ("0.7:0.95", Sampling(temperature=0.7, top_p=0.95)),
        ("0.7:0.8:20", Sampling(temperature=0.7, top_p=0.8, top_k=20)),
        ("0.7::20:0.1", Sampling(temperature=0.7, top_k=20, min_p=0.1)),
    ],
)
def test_a_sampling_is_read_from_the_left(text: str, expected: Sampling) -> None:
    assert session.sampling_of(text) == expected


@pytest.mark.parametrize("text", ["warm", "1:2:3:4:5", "0.7:x", ""])
def test_a_sampling_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="sampling is"):
        session.sampling_of(text)


def test_columns_and_keys_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert session.columns_of(["turns=questions", "id=a=b"]) == {"turns": "questions", "id": "a=b"}
    with pytest.raises(InputError, match="must be KEY=COLUMN"):
        session.columns_of(["turns"])
    (tmp_path / "key").write_text("secret\n")
    assert session.key_in(tmp_path / "key") == "secret"
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)))
    for name, words in (
        ("empty", "holds no key"),
        ("missing", "does not exist"),
        ("binary", "holds no text"),
        ("", "is a directory"),
    ):
        with pytest.raises(InputError, match=words):
            session.key_in(tmp_path / name)


def test_raw_prompts_are_continued_as_they_are_by_a_base_model(
    model_dir: Path, tmp_path: Path
) -> None:
    """No template is asked, or could be; the continuation is what is learnt."""
    shutil.copytree(model_dir, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    base = LLM.load(tmp_path / "base", drafter=None, dtype="fp32", compile=False)
    rows = [{"prompt": "the end of"}, {"turns": ["one", "two"]}, {"prompt": "hello"}]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = session.read_prompt_files([str(source)], limit=None, is_raw=True)
    assert [prompt.turns[0] for prompt in files.prompts] == ["the end of", "hello"]
    assert "1 rows left out" in files.remarks[0]
    answering = session.embedded(base, replace(ASKED, is_raw=True), quantization=None)
    out = tmp_path / "a.jsonl"
    report = session.run(files.prompts, out, answering=answering)
    assert (report.num_answered, report.failures) == (2, [])
    for answer, text in zip(read_answers(out), ("the end of", "hello"), strict=True):
        assert list(answer.prompt_token_ids) == base.tokenizer.encode(text)
        assert answer.settings is not None
        assert answer.settings.template_hash is None
    (expected,) = base.generate(["the end of"], SamplingParams(temperature=0.0, max_tokens=6))
    assert read_answers(out)[0].token_ids == list(expected.token_ids)
    assert not any("loss mask" in line for line in session.remarks_on(report, answering, [], out))


def test_a_base_model_that_is_to_chat_is_told_of_raw(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    base = LLM.load(tmp_path / "base", drafter=None, dtype="fp32", compile=False)
    with pytest.raises(ModelError, match="add --raw"):
        session.embedded(base, ASKED, quantization=None)


def test_raw_takes_no_system_prompt_no_server_and_no_conversation(tmp_path: Path) -> None:
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps({"turns": ["one", "two"]}) + "\n")
    with pytest.raises(InputError, match="A system prompt needs a chat template"):
        session.read_prompt_files([str(source)], limit=None, system="Be brief.", is_raw=True)
    with pytest.raises(InputError, match="All rows have several turns"):
        session.read_prompt_files([str(source)], limit=None, is_raw=True)
    with pytest.raises(InputError, match="leave --endpoint out"):
        session.over_http(replace(ASKED, is_raw=True), urls=["http://localhost:1/v1"], model="m")
