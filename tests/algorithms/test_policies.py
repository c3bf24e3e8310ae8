"""Baseline policies: lengths by hand, and none of them looks ahead."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.policies import (
    Adaptive,
    BatchSizeTable,
    ConfidenceThreshold,
    FixedWidth,
    Search,
    parse_policy,
)
from dspark.errors import InputError

CAPS = np.array([4, 4, 1, 0])
CONFIDENCE_RK = np.array(
    [[0.9, 0.8, 0.3, 0.9], [0.2, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]],
    dtype=np.float32,
)


def test_lengths_by_hand():
    assert FixedWidth(width=0).lengths(CONFIDENCE_RK, CAPS).tolist() == [0, 0, 0, 0]
    assert FixedWidth(width=3).lengths(CONFIDENCE_RK, CAPS).tolist() == [3, 3, 1, 0]
    threshold = ConfidenceThreshold(threshold=0.5, width=4)
    assert threshold.lengths(CONFIDENCE_RK, CAPS).tolist() == [2, 0, 1, 0]
    assert threshold.lengths(None, CAPS).tolist() == [4, 4, 1, 0]
    table = BatchSizeTable(up_to=(2, 8), widths=(5, 2))
    assert [table.widest(n) for n in (1, 2, 3, 8, 9)] == [5, 5, 2, 2, 0]
    assert table.lengths(CONFIDENCE_RK, CAPS).tolist() == [2, 2, 1, 0]


def test_a_threshold_is_on_the_confidence_and_not_on_the_survival():
    """UC-130: survival (0.9, 0.45, 0.405) would stop at one token, confidences at none of three."""
    c_RK = np.array([[0.9, 0.5, 0.9]], dtype=np.float32)
    assert ConfidenceThreshold(threshold=0.5, width=3).lengths(c_RK, np.array([3])).tolist() == [3]


@given(
    st.lists(st.floats(0.0, 1.0, width=32), min_size=4, max_size=4), st.integers(0, 3), st.data()
)
def test_later_confidences_never_change_an_earlier_admission(row, slot: int, data):
    changed = [*row[: slot + 1], *data.draw(st.lists(st.floats(0, 1), min_size=4, max_size=4))][:4]
    policy = ConfidenceThreshold(threshold=0.5, width=4)
    lengths = [
        int(policy.lengths(np.array([c], dtype=np.float32), np.array([4]))[0])
        for c in (row, changed)
    ]
    assert (lengths[0] > slot) == (lengths[1] > slot)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedWidth(width=-1),
        lambda: ConfidenceThreshold(threshold=1.5, width=3),
        lambda: BatchSizeTable(up_to=(4, 2), widths=(3, 1)),
        lambda: BatchSizeTable(up_to=(4,), widths=(3, 1)),
        lambda: BatchSizeTable(up_to=(4,), widths=(-3,)),
    ],
)
def test_values_out_of_range_are_one_sentence(make):
    with pytest.raises(InputError, match=r"but .* must .*\.$"):
        make()


def test_policies_by_name():
    assert parse_policy("auto") == Adaptive()
    assert parse_policy("auto:delayed") == Adaptive(search=Search.DELAYED)
    assert parse_policy("none") == FixedWidth(width=0)
    assert parse_policy("fixed").widest(3) >= 7
    assert parse_policy("fixed:4") == FixedWidth(width=4)
    assert parse_policy("mtp1") == FixedWidth(width=1)
    assert parse_policy("threshold:0.6:4") == ConfidenceThreshold(threshold=0.6, width=4)
    assert parse_policy("table:4=5,16=3") == BatchSizeTable(up_to=(4, 16), widths=(5, 3))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "best",
        "auto:quick",
        "none:1",
        "fixed:x",
        "fixed:-1",
        "threshold",
        "threshold:2",
        "table:",
    ],
)
def test_an_unknown_policy_is_refused(name: str):
    with pytest.raises(InputError, match="must"):
        parse_policy(name)
