"""Tables that are no ground for a choice are refused, each with its own reason."""

import math

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.cost_faults import Fault, find_fault
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import StepCost, VerifyRow
from tests.algorithms.toy_costs import BLOCK, curve, linear_cost


def one_row(verify: CostCurve, *, draft: float = 1e-3, num_requests: int = 4) -> StepCost:
    return StepCost(
        fingerprint=Fingerprint.of(),
        block_size=BLOCK,
        context=0,
        draft=curve((1,), lambda n: draft),
        verify=(VerifyRow(num_requests=num_requests, curve=verify),),
    )


def test_a_sound_table_passes():
    assert find_fault(linear_cost()) is None


def test_a_flat_table_is_refused():
    """UC-135: with it, every token would look free and everything would be verified."""
    found = find_fault(one_row(curve((4, 24), lambda n: 1.0 + 1e-4 * n)))
    assert found is not None
    assert found.fault is Fault.FLAT
    assert "4 and 24 tokens" in found.reason
    alone = find_fault(one_row(curve((4,), lambda n: 1.0)))
    assert alone is not None
    assert alone.fault is Fault.FLAT
    assert "every token looks free" in alone.reason


def test_a_noisy_table_is_refused():
    samples = {n: [0.01 * n * (1 + 0.3 * math.sin(7 * i)) for i in range(9)] for n in (4, 8, 24)}
    found = find_fault(one_row(CostCurve.of_samples(samples)))
    assert found is not None
    assert found.fault is Fault.NOISY


def test_inert_tables_are_refused_and_say_which_way():
    """The curve moves, but the choice never does."""
    never = find_fault(linear_cost(draft_base=10.0))
    assert never is not None
    assert never.fault is Fault.NEVER_PAYS
    assert "decode plainly" in never.reason
    always = find_fault(one_row(curve((1, 6), lambda n: 1.0 + 5e-3 * n), draft=0.0, num_requests=1))
    assert always is not None
    assert always.fault is Fault.ALWAYS_PAYS
