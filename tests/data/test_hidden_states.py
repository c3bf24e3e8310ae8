import shutil
from pathlib import Path

import pytest
import torch

from dspark.data import hidden_states
from dspark.data.hidden_states import (
    CacheFormat,
    OnlineStates,
    States,
    StatesCache,
    StatesWriter,
    fill_cache,
    select_vocabulary,
)
from dspark.errors import CapacityError, ModelError
from tests.data.toy_answers import random_answers
from tests.toys import VOCAB_SIZE, toy_target

TAPS = (0, 1)
FORMAT = CacheFormat(
    target="toy", tap_layers=TAPS, tap_size=64, hidden_size=32, vocab_size=VOCAB_SIZE
)


def states(length: int, seed: int) -> States:
    generator = torch.Generator().manual_seed(seed)
    return States(
        taps_NM=torch.randn(length, 64, generator=generator).bfloat16(),
        last_ND=torch.randn(length, 32, generator=generator).bfloat16(),
        lse_N=torch.randn(length, generator=generator),
    )


def equal(one: States, other: States) -> bool:
    assert one.lse_N is not None
    assert other.lse_N is not None
    return (
        torch.equal(one.taps_NM, other.taps_NM)
        and torch.equal(one.last_ND, other.last_ND)
        and torch.equal(one.lse_N, other.lse_N)
    )


def test_online_states_are_those_of_each_answer_alone():
    """UC-114: packed answers do not see each other."""
    target, answers = toy_target(), random_answers(5, vocab_size=VOCAB_SIZE)
    online = OnlineStates(target, tap_layers=TAPS)
    for answer, together in zip(answers, online.read(answers), strict=True):
        (alone,) = online.read([answer])
        torch.testing.assert_close(together.taps_NM, alone.taps_NM, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(together.last_ND, alone.last_ND, atol=1e-5, rtol=1e-5)


def test_a_cache_holds_the_online_states_in_bf16_and_the_exact_log_sum_exp(tmp_path: Path):
    target, answers = toy_target(), random_answers(9, vocab_size=VOCAB_SIZE)
    cache = fill_cache(
        target, answers, tmp_path, tap_layers=TAPS, fingerprint="toy", tokens_per_pass=20
    )
    online = OnlineStates(target, tap_layers=TAPS)
    for answer, cached, exact in zip(
        answers, cache.read(answers), online.read(answers), strict=True
    ):
        assert cached.lse_N is not None
        first = len(answer.prompt_token_ids)
        lse_N = target.logits(exact.last_ND).float().logsumexp(dim=1)
        torch.testing.assert_close(cached.lse_N[first:], lse_N[first:], atol=1e-4, rtol=1e-5)
        assert bool(cached.lse_N[:first].isnan().all())
        torch.testing.assert_close(cached.last_ND, exact.last_ND.bfloat16(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(cached.taps_NM, exact.taps_NM.bfloat16(), atol=0.02, rtol=0.02)


def test_the_mass_is_the_summed_distribution_of_the_supervised_positions(tmp_path: Path):
    target, answers = toy_target(), random_answers(6, vocab_size=VOCAB_SIZE)
    cache = fill_cache(target, answers, tmp_path, tap_layers=TAPS, fingerprint="toy")
    expected_V = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for answer in answers:
        (exact,) = OnlineStates(target, tap_layers=()).read([answer])
        rows_ND = exact.last_ND[len(answer.prompt_token_ids) :]
        expected_V += target.logits(rows_ND).double().softmax(dim=1).sum(dim=0)
    torch.testing.assert_close(cache.mass(), expected_V, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        hidden_states.token_mass(target, answers), expected_V, atol=1e-4, rtol=1e-4
    )


def test_filling_goes_on_after_a_kill_at_any_moment(tmp_path: Path):
    """Whatever the files hold behind the last indexed answer is cut off and computed again."""
    kept = [states(5, 0), states(3, 1), states(4, 2)]
    writer = StatesWriter(tmp_path / "whole", format=FORMAT)
    writer.append("a", kept[0])
    writer.mass_V += 1.0
    writer.flush()
    snapshot = tmp_path / "cut"
    shutil.copytree(tmp_path / "whole", snapshot)
    writer.append("b", kept[1])  # a kill here: rows are there, mass and index are not
    writer.mass_V += 1.0
    writer.close()
    for name in ("rows.bin", "lse.bin"):
        data = (tmp_path / "whole" / name).read_bytes()
        (snapshot / name).write_bytes(data[:-3])
    (snapshot / "mass-2.npy").write_bytes(b"half a fi")
    with (snapshot / "index.jsonl").open("ab") as index:
        index.write(b'{"id": "b", "st')
    again = StatesWriter(snapshot, format=FORMAT)
    assert ("a" in again, "b" in again, len(again)) == (True, False, 1)
    assert again.mass_V.tolist() == [1.0] * VOCAB_SIZE
    again.append("b", kept[1])
    again.append("c", kept[2])
    again.mass_V += 1.0
    again.close()
    cache = StatesCache(snapshot)
    assert list(cache) == ["a", "b", "c"]
    assert cache.num_tokens == 12
    assert cache.mass().tolist() == [2.0] * VOCAB_SIZE
    for name, expected in zip("abc", kept, strict=True):
        assert equal(cache.read_one(name), expected)


def test_filling_twice_runs_the_target_once(tmp_path: Path):
    target, answers = toy_target(), random_answers(4, vocab_size=VOCAB_SIZE)
    first = fill_cache(target, answers[:2], tmp_path, tap_layers=TAPS, fingerprint="toy")
    before = first.read_one("a0")
    seen: list[tuple[int, int]] = []
    cache = fill_cache(
        target,
        answers,
        tmp_path,
        tap_layers=TAPS,
        fingerprint="toy",
        on_answer=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 4)]
    assert list(cache) == ["a0", "a1", "a2", "a3"]
    assert torch.equal(cache.read_one("a0").taps_NM, before.taps_NM)


def test_a_cache_of_another_target_is_refused_by_name(tmp_path: Path):
    StatesWriter(tmp_path, format=FORMAT).close()
    other = CacheFormat(
        target="other", tap_layers=TAPS, tap_size=64, hidden_size=32, vocab_size=VOCAB_SIZE
    )
    with pytest.raises(ModelError, match="with target 'toy', but this run needs 'other'"):
        StatesWriter(tmp_path, format=other)


def test_a_missing_answer_and_a_missing_cache_are_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"manifest\.json is missing"):
        StatesCache(tmp_path)
    writer = StatesWriter(tmp_path, format=FORMAT)
    writer.append("a", states(2, 0))
    writer.close()
    with pytest.raises(ModelError, match="holds no states of answer 'b'"):
        StatesCache(tmp_path).read_one("b")


def test_a_cache_that_does_not_fit_on_the_disk_is_refused_with_its_size(tmp_path: Path):
    assert hidden_states.require_space(tmp_path, num_tokens=1000, format=FORMAT) == 1000 * 196
    with pytest.raises(CapacityError, match=r"takes 196000000000\.0 GB"):
        hidden_states.require_space(tmp_path / "new", num_tokens=10**18, format=FORMAT)


def test_the_draft_vocabulary_takes_the_heaviest_tokens_and_those_always_wanted():
    mass_V = torch.tensor([0.0, 5.0, 1.0, 1.0, 9.0], dtype=torch.float64)
    assert select_vocabulary(mass_V, size=2).tolist() == [1, 4]
    assert select_vocabulary(mass_V, size=3).tolist() == [1, 2, 4]
    assert select_vocabulary(mass_V, size=3, always=[0]).tolist() == [0, 1, 4]
