from dataclasses import replace

from dspark.training.progress import ProgressLine, describe, describe_validation, format_duration
from dspark.training.trainer import StepReport
from dspark.training.validation import Validation


def report(step: int) -> StepReport:
    return StepReport(
        step=step,
        num_steps=100,
        loss=2.0 if step % 2 else 1.0,
        gradient_norm=1.0,
        learning_rate_factor=1.0,
        num_slots=30,
        accepted_K=(6.0, 2.0),
        slots_K=(12.0, 8.0),
        wall_s=0.5,
    )


def test_a_line_names_step_loss_acceptance_tau_speed_and_time_left():
    line = describe([report(9), report(10)], elapsed_s=1.0)
    assert line == (
        "step 10/100  loss 1.500  acceptance 0.500 0.250  tau~1.62  60 tokens/s  left 45s"
    )


def test_a_loss_that_looks_at_labels_alone_shows_no_acceptance_of_zero():
    unknown = replace(report(10), accepted_K=(0.0, 0.0), slots_K=(0.0, 0.0))
    assert describe([unknown], elapsed_s=1.0) == (
        "step 10/100  loss 1.000  acceptance only when held out  30 tokens/s  left 1m30s"
    )


def test_a_line_comes_when_it_is_due_and_at_the_end():
    seldom, often = ProgressLine(every_s=1e9), ProgressLine(every_s=0.0)
    assert seldom.push(report(1)) is None
    assert often.push(report(1)) is not None
    last = seldom.push(report(100))
    assert last is not None
    assert last.startswith("step 100/100  loss 1.500")


def test_held_out_figures_fit_in_a_line():
    validation = Validation(
        tau=1.875,
        acceptance_K=(0.5, 0.375),
        agreement_K=(0.5, 0.5),
        confidence_error=None,
        num_blocks=3,
    )
    assert describe_validation(20, validation) == (
        "step 20  held-out tau 1.875  acceptance 0.500 0.375"
    )


def test_durations_are_readable():
    assert [format_duration(s) for s in (12.4, 185, 3725)] == ["12s", "3m05s", "1h02m"]
