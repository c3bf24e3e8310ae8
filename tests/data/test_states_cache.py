import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.data import states_cache
from dspark.data.cache_fill import Filling, fill_cache
from dspark.data.hidden_states import OnlineStates, States
from dspark.data.states_cache import StatesCache, StatesWriter
from dspark.errors import CapacityError, ModelError
from tests.data.toy_answers import answer, random_answers
from tests.data.toy_caches import equal, random_states, toy_format
from tests.toys import VOCAB_SIZE, toy_target

TAPS = (0, 1)
A, B, C = (answer(i, prompt=[5, 6], ids=[7 + i] * (3 + i)) for i in range(3))
STATES = [random_states(len(item.ids()), i) for i, item in enumerate((A, B, C))]


def test_a_cache_holds_the_online_states_in_bf16_and_the_exact_log_sum_exp(tmp_path: Path):
    target, answers = toy_target(), random_answers(9, vocab_size=VOCAB_SIZE)
    cache = fill_cache(target, answers, tmp_path, format=toy_format(), tokens_per_pass=20)
    online = OnlineStates(target, tap_layers=TAPS)
    for item, cached, exact in zip(answers, cache.read(answers), online.read(answers), strict=True):
        assert cached.lse_N is not None
        first = len(item.prompt_token_ids)
        lse_N = target.logits(exact.last_ND).float().logsumexp(dim=1)
        torch.testing.assert_close(cached.lse_N[first:], lse_N[first:], atol=1e-4, rtol=1e-5)
        assert bool(cached.lse_N[:first].isnan().all())
        torch.testing.assert_close(cached.last_ND, exact.last_ND.bfloat16(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(cached.taps_NM, exact.taps_NM.bfloat16(), atol=0.02, rtol=0.02)


def test_filling_goes_on_after_a_kill_at_any_moment(tmp_path: Path):
    """Whatever the files hold behind the last indexed answer is cut off and computed again."""
    writer = StatesWriter(tmp_path / "whole", format=toy_format())
    writer.append(A, STATES[0])
    writer.mass_V += 1.0
    writer.flush()
    snapshot = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", snapshot)
    writer.append(B, STATES[1])  # a kill here: rows are there, mass and index are not
    writer.mass_V += 1.0
    writer.close()
    for name in ("rows.bin", "lse.bin"):
        data = (tmp_path / "whole" / name).read_bytes()
        (snapshot / name).write_bytes(data[:-3])
    (snapshot / "mass-2.npy").write_bytes(b"half a fi")
    with (snapshot / "index.jsonl").open("ab") as index:
        index.write(b'{"id": "a1", "st')
    again = StatesWriter(snapshot, format=toy_format())
    assert (again.holds(A), again.holds(B), len(again)) == (True, False, 1)
    assert again.mass_V.tolist() == [1.0] * VOCAB_SIZE
    again.append(B, STATES[1])
    again.append(C, STATES[2])
    again.mass_V += 1.0
    again.close()
    cache = StatesCache(snapshot)
    assert list(cache) == ["a0", "a1", "a2"]
    assert cache.num_tokens == 5 + 6 + 7
    assert cache.mass().tolist() == [2.0] * VOCAB_SIZE
    for found, expected in zip(cache.read([A, B, C]), STATES, strict=True):
        assert equal(found, expected)


def test_filling_twice_runs_the_target_once(tmp_path: Path):
    target, answers = toy_target(), random_answers(4, vocab_size=VOCAB_SIZE)
    first = fill_cache(target, answers[:2], tmp_path, format=toy_format())
    (before,) = first.read(answers[:1])
    seen: list[tuple[int, int]] = []
    started: list[Filling] = []
    cache = fill_cache(
        target,
        answers,
        tmp_path,
        format=toy_format(),
        on_start=started.append,
        on_answer=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 4)]
    assert [(f.num_cached, f.num_damaged, f.num_missing) for f in started] == [(2, 0, 2)]
    assert list(cache) == ["a0", "a1", "a2", "a3"]
    assert torch.equal(cache.read(answers[:1])[0].taps_NM, before.taps_NM)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_size_is_known_before_the_first_byte(tmp_path: Path, dtype: str):
    """UC-121: within 5 % on 32 answers of a realistic width."""
    answers = [answer(i, prompt=[5] * 40, ids=[6] * (60 + i)) for i in range(32)]
    format = toy_format(dtype=dtype, tap_size=5 * 256, hidden_size=256)
    num_tokens = sum(len(item.ids()) for item in answers)
    predicted = format.predicted_bytes(num_tokens=num_tokens, num_answers=32)
    writer = StatesWriter(tmp_path, format=format)
    for item in answers:
        count = len(item.ids())
        writer.append(
            item,
            States(taps_NM=torch.randn(count, 1280), last_ND=torch.randn(count, 256), lse_N=None),
        )
    writer.close()
    assert StatesCache(tmp_path).num_bytes == pytest.approx(predicted, rel=0.05)
    share = format.bytes_per_token / toy_format(tap_size=1280, hidden_size=256).bytes_per_token
    assert share == (1.0 if dtype == "bf16" else pytest.approx(0.516, abs=0.01))


@pytest.mark.parametrize(
    "change",
    [
        {"target": "other"},
        {"template": "other"},
        {"tokenizer": "other"},
        {"target_dtype": "bfloat16"},
        {"tap_layers": (1,), "tap_size": 32},
        {"dtype": "int8"},
    ],
)
def test_a_stale_cache_is_refused_by_name(tmp_path: Path, change: dict[str, object]):
    StatesWriter(tmp_path, format=toy_format()).close()
    name = next(iter(change)).replace("_", " ")
    with pytest.raises(ModelError, match=f"holds states with {name} .* but this run needs"):
        StatesWriter(tmp_path, format=toy_format(**change))


def test_an_answer_that_changed_is_computed_again(tmp_path: Path):
    """The id alone does not make it the same answer."""
    target, answers = toy_target(), random_answers(3, vocab_size=VOCAB_SIZE)
    fill_cache(target, answers, tmp_path, format=toy_format())
    changed = replace(answers[1], token_ids=[9, 8, 7])
    cache = fill_cache(target, [answers[0], changed], tmp_path, format=toy_format())
    (exact,) = OnlineStates(target, tap_layers=TAPS).read([changed])
    (found,) = cache.read([changed])
    torch.testing.assert_close(found.last_ND, exact.last_ND.bfloat16(), atol=0.02, rtol=0.02)
    with pytest.raises(ModelError, match="no states of answer 'a1' as it is now"):
        cache.read([answers[1]])


def test_a_missing_cache_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"manifest\.json is missing"):
        StatesCache(tmp_path)


def test_states_shorter_than_the_answer_are_refused(tmp_path: Path):
    """UC-123: never padded."""
    writer = StatesWriter(tmp_path, format=toy_format())
    with pytest.raises(ModelError, match="'a0' has 5 tokens, but 4 rows of taps came back"):
        writer.append(A, random_states(4, 0))
    assert len(writer) == 0
    writer.close()


def assert_close(found: list[States], expected: list[States]) -> None:
    """Up to the rounding of a pass of another shape."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.taps_NM, other.taps_NM, atol=0.02, rtol=0.02)
        torch.testing.assert_close(one.last_ND, other.last_ND, atol=0.02, rtol=0.02)
        torch.testing.assert_close(one.lse_N, other.lse_N, atol=1e-3, rtol=0, equal_nan=True)


def test_every_kind_of_damage_is_found_named_and_repaired(tmp_path: Path):
    """UC-125: a byte changed, a byte cut off; the other answers stay usable."""
    target, answers = toy_target(), random_answers(6, vocab_size=VOCAB_SIZE)
    whole = fill_cache(target, answers, tmp_path / "whole", format=toy_format())
    expected = whole.read(answers)
    row_bytes = toy_format().codec.row_bytes
    starts = torch.tensor([0] + [len(item.ids()) for item in answers]).cumsum(0).tolist()
    for number, name in enumerate(["a0", "a3", "a5"]):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        data = bytearray((folder / "rows.bin").read_bytes())
        data[starts[(0, 3, 5)[number]] * row_bytes + 7] ^= 1
        (folder / "rows.bin").write_bytes(data)
        cache = StatesCache(folder)
        assert cache.damaged() == [name]
        with pytest.raises(ModelError, match=rf"rows\.bin is damaged at answer '{name}'"):
            cache.read(answers)
        repaired = fill_cache(target, answers, folder, format=toy_format())
        assert_close(repaired.read(answers), expected)
    for file in ("rows.bin", "lse.bin"):
        folder = tmp_path / file
        shutil.copytree(tmp_path / "whole", folder)
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[:-1])
        assert StatesCache(folder).damaged() == ["a5"]
        repaired = fill_cache(target, answers, folder, format=toy_format())
        assert_close(repaired.read(answers), expected)
        lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
        assert [line["id"] for line in lines] == [*(f"a{i}" for i in range(6)), "a5", "a5"]


def test_a_cache_above_the_limit_or_the_disk_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """UC-121: before a row is computed; the remedy is in the sentence."""
    target, answers = toy_target(), random_answers(3, vocab_size=VOCAB_SIZE)
    with pytest.raises(CapacityError, match=r"above the limit of 1e-06 GB; raise --cache-gb"):
        fill_cache(target, answers, tmp_path, format=toy_format(), limit_gb=1e-6)
    assert list(tmp_path.iterdir()) == []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(states_cache.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(CapacityError, match=r"0\.00 GB free; use int8 rows"):
        fill_cache(target, answers, tmp_path, format=toy_format())


class FullDisk:
    """A file that takes no more bytes."""

    def __init__(self, stream: object) -> None:
        self.stream = stream

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def test_a_disk_that_fills_up_leaves_a_cache_that_goes_on(tmp_path: Path):
    """UC-121."""
    writer = StatesWriter(tmp_path, format=toy_format())
    writer.append(A, STATES[0])
    writer.flush()
    writer._rows = FullDisk(writer._rows)  # type: ignore[assignment]
    with pytest.raises(CapacityError, match="took 5 tokens and then refused"):
        writer.append(B, STATES[1])
    writer.release()
    again = StatesWriter(tmp_path, format=toy_format())
    assert (again.holds(A), again.holds(B)) == (True, False)
    again.append(B, STATES[1])
    again.close()
    assert all(
        equal(x, y) for x, y in zip(StatesCache(tmp_path).read([A, B]), STATES[:2], strict=True)
    )


def test_int8_states_are_close_and_survive_a_restart(tmp_path: Path):
    """UC-122: the channels' scales are those of the first fill."""
    target, answers = toy_target(), random_answers(12, vocab_size=VOCAB_SIZE)
    format = toy_format(dtype="int8")
    fill_cache(target, answers[:5], tmp_path, format=format)
    cache = fill_cache(target, answers, tmp_path, format=format)
    exact = OnlineStates(target, tap_layers=TAPS).read(answers)
    for one, other in zip(cache.read(answers), exact, strict=True):
        for found, wanted in ((one.taps_NM, other.taps_NM), (one.last_ND, other.last_ND)):
            error = (found.float() - wanted).norm() / wanted.norm()
            assert error.item() < 0.012
