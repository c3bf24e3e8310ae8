"""A line of text about a running training, every few seconds. It knows no tensors."""

import time

from dspark.training.trainer import StepReport
from dspark.training.validation import Validation


class ProgressLine:
    """Gathers step reports and says in one line how the run stands when it is due."""

    def __init__(self, *, every_s: float = 5.0) -> None:
        self._every_s = every_s
        self._last_s = time.monotonic()
        self._reports: list[StepReport] = []

    def push(self, report: StepReport) -> str | None:
        """The line for the steps since the last line, or `None` while it is not yet due."""
        self._reports.append(report)
        is_last = report.step == report.num_steps
        if not is_last and time.monotonic() - self._last_s < self._every_s:
            return None
        line = describe(self._reports, elapsed_s=time.monotonic() - self._last_s)
        self._last_s = time.monotonic()
        self._reports.clear()
        return line


def describe(reports: list[StepReport], *, elapsed_s: float) -> str:
    """Means over `reports`: step, loss, acceptance by slot, tau, slots a second, time left."""
    last = reports[-1]
    loss = sum(r.loss for r in reports) / len(reports)
    per_s = sum(r.num_slots for r in reports) / max(elapsed_s, 1e-9)
    left_s = (last.num_steps - last.step) * elapsed_s / len(reports)
    return (
        f"step {last.step}/{last.num_steps}  loss {loss:.3f}  "
        f"{_acceptance(reports)}  {per_s:,.0f} tokens/s  left {format_duration(left_s)}"
    )


def _acceptance(reports: list[StepReport]) -> str:
    """By slot, and the accepted length that follows; cross-entropy alone looks at labels only."""
    accepted = [sum(column) for column in zip(*(r.accepted_K for r in reports), strict=True)]
    counted = [sum(column) for column in zip(*(r.slots_K for r in reports), strict=True)]
    if not any(counted):
        return "acceptance only when held out"
    rates = [a / max(c, 1.0) for a, c in zip(accepted, counted, strict=True)]
    survival, tau = 1.0, 1.0
    for rate in rates:
        survival *= rate
        tau += survival
    return f"acceptance {' '.join(f'{rate:.3f}' for rate in rates)}  tau~{tau:.2f}"


def describe_validation(step: int, validation: Validation) -> str:
    """One line of held-out figures."""
    rates = " ".join(f"{rate:.3f}" for rate in validation.acceptance_K)
    return f"step {step}  held-out tau {validation.tau:.3f}  acceptance {rates}"


def format_duration(seconds: float) -> str:
    """Seconds as `1h02m`, `3m05s` or `12s`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
