"""Step costs and calibrations on disk: found again, never another machine's."""

from dataclasses import replace
from pathlib import Path

import pytest

from dspark import artifacts
from dspark.algorithms.calibration import Calibration
from dspark.algorithms.fingerprint import Fingerprint
from dspark.errors import ModelError
from tests.algorithms.toy_costs import linear_cost
from tests.toys import toy_drafter, toy_target


def test_step_costs_are_found_by_what_they_were_measured_on() -> None:
    cost = replace(linear_cost(), fingerprint=Fingerprint.of(target="a", threads=3))
    other = Fingerprint.of(target="a", threads=4)
    assert artifacts.stored_step_cost(cost.fingerprint, max_requests=4) is None
    artifacts.store_step_cost(cost)
    assert artifacts.stored_step_cost(cost.fingerprint, max_requests=64) == cost
    assert artifacts.stored_step_cost(cost.fingerprint, max_requests=65) is None
    assert artifacts.stored_step_cost(other, max_requests=4) is None


def test_a_damaged_table_is_measured_again() -> None:
    fingerprint = Fingerprint.of(target="damaged")
    path = artifacts.store_step_cost(replace(linear_cost(), fingerprint=fingerprint))
    path.write_text("{")
    assert artifacts.stored_step_cost(fingerprint, max_requests=1) is None
    with pytest.raises(ModelError, match="cannot be read"):
        artifacts.read_step_cost(path)


def test_the_fingerprint_names_all_that_seconds_depend_on() -> None:
    target = toy_target()
    drafter = toy_drafter(target)
    first = artifacts.fingerprint_of(target, drafter, quantization=None)
    assert first.difference(artifacts.fingerprint_of(target, drafter, quantization=None)) is None
    wider = toy_drafter(target, block_size=6)
    for other in (
        artifacts.fingerprint_of(target, drafter, quantization="int8"),
        artifacts.fingerprint_of(target, wider, quantization=None),
    ):
        assert first.difference(other) is not None


def test_a_calibration_lies_beside_its_drafter(tmp_path: Path) -> None:
    assert artifacts.read_calibration(tmp_path) is None
    calibration = Calibration.identity(5)
    assert artifacts.store_calibration(calibration, tmp_path) == tmp_path / "calibration.json"
    assert artifacts.read_calibration(tmp_path) == calibration
