import json
import socket
from typing import Any

import pytest
import torch

from dspark.errors import InputError
from dspark.training.ranks import OneProcess, launched
from tests.data.toy_answers import answer, random_answers
from tests.training.children import exit_codes
from tests.training.two_processes import as_rank, run_toy, weights_at_start


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two gloo processes found, started once for all tests here."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert exit_codes(as_rank, [(folder, rank, 2, port) for rank in range(2)]) == [0, 0]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same trainings by one process."""
    folder = tmp_path_factory.mktemp("one")
    few = [answer(i, prompt=[5, 6], ids=[7, 8 + i, 9]) for i in range(2)]
    many = random_answers(24, vocab_size=47)
    return {
        "many": run_toy(folder / "many", group=None, answers=many, micro_batches=2),
        "few": run_toy(folder / "few", group=None, answers=few, num_held_out=0, answers_per_step=1),
        "start": weights_at_start(many, ranks=OneProcess()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "reference"),
    [("ddp", "many"), ("fsdp2", "many"), ("idle", "few"), ("idle fsdp2", "few")],
)
def test_two_processes_equal_one(
    case: str, reference: str, together: dict[str, Any], alone: dict[str, Any]
):
    """UC-111, UC-120: losses and held-out tau to 1e-5, also where a rank has nothing to do."""
    found, expected = together[case], alone[reference]
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["tau"] == pytest.approx(expected["tau"], abs=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        one, other = torch.tensor(found["weights"][name]), torch.tensor(values)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_two_processes_start_from_the_sums_of_one(
    together: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Least squares add up over ranks; roundings of sums grow in the solutions."""
    found, expected = together["start"], alone["start"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        one, other = torch.tensor(found[name]), torch.tensor(values)
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.slow
def test_states_from_another_process_give_the_same_bits(together: dict[str, Any]):
    """Each loss is bit-equal to that with the target in the trainer's own process."""
    found = together["remote"]
    assert found["remote"] == found["online"]
    assert len(found["remote"]) == 5
    assert found["bytes_per_token"] == (64 + 32) * 4


def test_a_process_that_nobody_launched_is_told_how(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    words = r"RANK, WORLD_SIZE, MASTER_ADDR not set.*torchrun"
    with pytest.raises(InputError, match=words), launched():
        pass
