"""`dspark train` as a person uses it, on a toy model, in this process."""

import json
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dspark import training_command
from dspark.data.states_cache import StatesCache
from dspark.training.snapshot import read_snapshot
from tests.command_line import Run
from tests.toy_answers import write_answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve answers of random bytes."""
    return write_answers(tmp_path_factory.mktemp("answers") / "answers.jsonl", domain="math")


@pytest.fixture
def shape(model_dir: Path) -> Sequence[object]:
    return (
        *("--target", model_dir, "--dtype", "fp32", "--eager", "--num-layers", 1),
        *("--block-size", 3, "--markov-rank", 4, "--draft-vocab-size", 64, "--num-held-out", 2),
        *("--answers-per-step", 2, "--validate-every", 2, "--json"),
    )


def test_online_states_leave_no_states_on_the_disk_and_the_last_line_is_whole(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    done = run("train", answers, "--out", tmp_path / "d", "--steps", 4, *shape)
    assert done.code == 0, done.err
    assert not (tmp_path / "d-work" / "states").exists()
    found = done.last_json()
    assert {"steps", "supervised_tokens", "tokens_per_s", "peak_memory_bytes"} <= found.keys()
    assert found["states"] == "online"
    assert found["cache_bytes"] is None
    assert found["held_out_tau"] >= 1.0
    assert "step 4/4" in done.err
    assert "tau~" in done.err
    assert "left 0s" in done.err
    assert "10 answers to train on, 2 held out, 0 too short" in done.err
    assert "12 were cut at their length limit" in done.err  # UC-100


@pytest.mark.parametrize("is_own", [True, False])
def test_answers_of_another_author_are_told(
    run: Run, answers: Path, shape: Sequence[object], model_dir: Path, tmp_path: Path, is_own: bool
):
    """UC-101: what the target did not write flatters the figures of training."""
    settings = {
        "target": str(model_dir) if is_own else "somebody/else",
        "engine": "endpoint x",
        "template_hash": None,
        "thinking": None,
        "system": None,
        "samplings": [],
        "max_new_tokens": 14,
        "seed": 0,
    }
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"prepare": settings}) + "\n" + answers.read_text())
    done = run("train", file, "--out", tmp_path / "d", "--steps", 1, *shape)
    assert done.code == 0, done.err
    assert ("OFF-POLICY: the answers name somebody/else as their author" in done.err) is not is_own
    assert ("OFF-POLICY" in done.err) is not is_own


def test_a_cache_is_announced_filled_confirmed_and_used_again(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    """UC-121: predicted before, confirmed after; int8 takes about half."""
    sizes = {}
    for dtype in ("bf16", "int8"):
        out = tmp_path / dtype
        options = ("--states", "cache", "--cache-dtype", dtype, *shape)
        done = run("train", answers, "--out", out, "--steps", 2, *options)
        assert done.code == 0, done.err
        assert "MB in all, 0 answers there, 12 to compute" in done.err
        assert "MB on the disk" in done.err
        sizes[dtype] = done.last_json()["state_bytes_per_token"]
        cache = StatesCache(out.with_name(dtype + "-work") / "states")
        assert cache.num_tokens == 12 * 19
    assert sizes["int8"] < 0.6 * sizes["bf16"]
    work = tmp_path / "bf16-work"
    (work / "training.pt").unlink()
    done = run(
        *("train", answers, "--out", tmp_path / "again", "--work", work, "--steps", 2),
        *("--states", "cache", *shape),
    )
    assert done.code == 0, done.err
    assert "12 answers there, 0 to compute" in done.err


@pytest.mark.parametrize(
    ("watcher", "count", "message"),
    [("on_step", 3, "Stopped behind step 3 of 6"), ("bar", 1, "Stopped with the hidden states of")],
)
def test_ctrl_c_saves_what_is_in_hand_and_the_same_command_goes_on(
    run: Run,
    answers: Path,
    shape: Sequence[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watcher: str,
    count: int,
    message: str,
):
    """Weights end as those of a run that nobody stopped, bit for bit."""
    arguments = ("train", answers, "--steps", 6, "--states", "cache", *shape)
    straight = run(*arguments, "--out", tmp_path / "straight")
    assert straight.code == 0, straight.err
    function, calls = getattr(training_command._Screen, watcher), []
    before = signal.getsignal(signal.SIGINT)

    def call(*given: object) -> None:
        function(*given)
        calls.append(given)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(training_command._Screen, watcher, call)
        stopped = run(*arguments, "--out", tmp_path / "stopped")
    assert stopped.code == 130
    assert message in stopped.err
    assert not (tmp_path / "stopped").exists()
    done = run(*arguments, "--out", tmp_path / "stopped")
    assert done.code == 0, done.err
    weights = [tmp_path / name / "model.safetensors" for name in ("straight", "stopped")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_cache_above_the_limit_is_refused_before_anything_is_written(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    """UC-121."""
    done = run(
        *("train", answers, "--out", tmp_path / "d", "--steps", 2, "--states", "cache"),
        *("--cache-gb", 0.000001, *shape),
    )
    assert done.code == 1
    assert "raise --cache-gb" in done.err
    assert not (tmp_path / "d-work" / "states").exists()


def test_a_trained_drafter_goes_on_with_its_shape_and_its_vocabulary(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    """UC-077, UC-119: the map belongs to the weights; the start is measured and kept if better."""
    first, second = tmp_path / "first", tmp_path / "second"
    done = run("train", answers, "--out", first, "--steps", 4, *shape)
    assert done.code == 0, done.err
    start = done.last_json()["held_out_tau"]
    done = run(
        *("train", answers, "--out", second, "--steps", 2, "--init-from", first, *shape),
        *("--muon-lr", 5.0, "--adam-lr", 5.0, "--block-size", 3),
    )
    assert done.code == 0, done.err
    kept = done.last_json()
    assert f"the shape of {first} stays" in done.err.replace("\n", " ")
    assert kept["best_step"] == 0
    assert kept["held_out_tau"] == pytest.approx(start, abs=1e-3)
    configs = [json.loads((path / "config.json").read_text()) for path in (first, second)]
    assert configs[0]["block_size"] == configs[1]["block_size"]
    from safetensors.torch import load_file

    maps = [load_file(path / "model.safetensors")["d2t"] for path in (first, second)]
    assert torch.equal(*maps)


def test_the_draft_vocabulary_is_chosen_once(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    """UC-077: it stays with the run; another size is refused where a run is under way."""
    out = tmp_path / "d"
    assert run("train", answers, "--out", out, "--steps", 2, *shape).code == 0
    chosen = read_snapshot(tmp_path / "d-work" / "vocabulary.pt")["d2t_S"]
    assert len(chosen) == 64
    done = run("train", answers, "--out", out, "--steps", 2, *shape, "--draft-vocab-size", 32)
    assert done.code == 1
    assert "a draft vocabulary of 64 tokens, not 32" in done.err


def test_every_switch_of_the_loss_trains(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    """Each is one field of the recipe and one option."""
    switches: list[tuple[object, ...]] = [
        ("--position-weights", "dpace", "--dpace-alpha", 0.3),
        ("--loss-l1", 0, "--loss-hybrid", 1.0),
        ("--loss-nla", 0.5, "--loss-ce", 0),
        ("--markov-head", "rnn", "--base-weight", 1.0, "--base-until", 0.5),
        ("--on-policy", 0.5),
        ("--tap-layers", "0,1"),
        ("--tap-mixing",),
        ("--pair-start", "--markov-head", "gated"),
        ("--state-start", "--markov-head", "rnn"),
        ("--state-start", "--pair-start", "--num-layers", 3),
        ("--micro-batches", 2),
    ]
    for number, switch in enumerate(switches):
        done = run(
            "train", answers, "--out", tmp_path / f"d{number}", "--steps", 2, *shape, *switch
        )
        assert done.code == 0, (switch, done.err)
        assert done.last_json()["held_out_tau"] >= 1.0


def test_the_sequential_head_can_start_from_the_pairs_of_the_answers(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    """What it starts with: one step at a rate of nearly nothing leaves it as it is."""
    from safetensors.torch import load_file

    still = ("--muon-lr", 1e-12, "--adam-lr", 1e-12, "--markov-rank", 64)
    options = (*shape, *still, "--pair-start")
    done = run("train", answers, "--out", tmp_path / "d", "--steps", 1, *options)
    assert done.code == 0, done.err
    weights = load_file(tmp_path / "d" / "model.safetensors")
    w1_Vr, w2_Sr = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    column = {int(token): at for at, token in enumerate(weights["d2t"])}
    seen_VS = torch.zeros(len(w1_Vr), len(w2_Sr), dtype=torch.bool)
    for row in map(json.loads, answers.read_text().splitlines()):
        ids = [*row["prompt_token_ids"], *row["token_ids"]]
        for previous, token in pairwise(ids[len(row["prompt_token_ids"]) - 1 :]):
            if token in column:
                seen_VS[previous, column[token]] = True
    bias_VS = w1_Vr @ w2_Sr.T
    assert bias_VS[~seen_VS].abs().max() < 1e-3
    assert bias_VS[seen_VS].mean() > 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pair-start", "--markov-head", "rnn"), "pair_start is on, but it needs"),
        (("--state-start", "--tap-mixing"), "state_start is on, but it needs"),
        (("--state-start", "--kind", "eagle3"), "state_start is on, but it needs"),
        (("--states", "disk"), "states is 'disk', but it must be online, cache or remote"),
        (("--states", "remote"), "this is the only process; start it with torchrun"),
        (("--cache-dtype", "fp8", "--states", "cache"), "dtype is 'fp8'"),
        (("--cache-gb", 3), "cache_gb is 3.0, which means nothing where states are online"),
        (("--cache-dtype", "int8"), "cache_dtype is 'int8', which means nothing"),
        (("--target-workers", 2, "--states", "cache"), "add --states remote, or leave it out"),
        (("--num-answers", 5), "num_answers is 5, but only --dry-run plans with amounts"),
        (("--dry-run", "--num-answers", 0), "num_answers is 0, but it must be above 0"),
        (("--parallel", "tp"), "parallel is 'tp', but it must be ddp or fsdp2"),
        (("--mask-token-id", 400), "mask token is 400, but the target's embedding"),
        (("--mask-token-id", 1), "mask token is 1, which ends the target's answers"),
        (("--tap-layers", "one"), "tap_layers is 'one'"),
        (("--position-weights", "none"), "Position weights are 'none'"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(
    run: Run,
    answers: Path,
    shape: Sequence[object],
    tmp_path: Path,
    options: Sequence[object],
    words: str,
):
    done = run("train", answers, "--out", tmp_path / "d", "--steps", 2, *shape, *options)
    assert done.code == 1
    assert words in done.err
    assert not (tmp_path / "d").exists()


def test_a_dry_run_says_what_it_needs_from_a_configuration_alone(
    run: Run, model_dir: Path, tmp_path: Path
):
    config = tmp_path / "config-only"
    config.mkdir()
    (config / "config.json").write_text((model_dir / "config.json").read_text())
    options = ("--dry-run", "--target", config, "--num-answers", 1000, "--draft-vocab-size", 64)
    amount = ("--prompt-tokens", 100, "--answer-tokens", 200, "--tera-flops", 1.0)
    done = run("train", *options, *amount, "--steps", 500, "--states", "cache", "--json")
    assert done.code == 0, done.err
    found = done.last_json()
    assert found["steps"] == 500
    assert found["epochs"] == pytest.approx(500 * 16 / 1000)
    assert found["state_bytes_per_token"] == 2 * (2 * 32 + 32) + 4
    assert found["cache_bytes"] == pytest.approx(300_000 * found["state_bytes_per_token"], rel=0.02)
    assert found["logit_bytes_per_token"] == 2 * 304
    done = run("train", *options, *amount, "--minutes", 60)
    assert done.code == 0
    assert "no disk" in done.out
    assert "about 1.00 hours" in done.out


def test_a_missing_tensorboard_is_named_with_its_command(
    run: Run,
    answers: Path,
    shape: Sequence[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = run(
        *("train", answers, "--out", tmp_path / "d", "--steps", 2, *shape),
        *("--tensorboard", tmp_path / "curves"),
    )
    assert done.code == 1
    assert "pip install 'dspark[tensorboard]'" in done.err


def test_curves_are_written_where_tensorboard_is_installed(
    run: Run, answers: Path, shape: Sequence[object], tmp_path: Path
):
    curves = tmp_path / "curves"
    done = run(
        *("train", answers, "--out", tmp_path / "d", "--steps", 4, *shape),
        *("--tensorboard", curves),
    )
    assert done.code == 0, done.err
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(curves))
    events.Reload()
    assert [event.step for event in events.Scalars("held_out/tau")] == [2, 4]
    assert len(events.Scalars("train/loss")) == 4


def test_int8_states_are_compared_with_bf16_ones(
    run: Run, answers: Path, model_dir: Path, tmp_path: Path
):
    done = run(
        *("bench", "states", answers, "--target", model_dir, "--dtype", "fp32", "--steps", 3),
        *("--num-layers", 1, "--num-held-out", 2, "--draft-vocab-size", 64),
        *("--answers-per-step", 2, "--eager", "--json"),
    )
    assert done.code == 0, done.err
    found = done.last_json()
    assert abs(found["tau_loss"]) < 0.05
    assert 0.5 < found["size_ratio"] < 0.6
