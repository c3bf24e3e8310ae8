"""Curves of a training as TensorBoard reads them; the package is an extra, `tensorboard`."""

from pathlib import Path
from typing import Any

from dspark.errors import InputError
from dspark.training.trainer import StepReport
from dspark.training.validation import Validation


class TensorBoard:
    """Writes the figures of steps and validations into a folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `InputError` where the package is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "TensorBoard is not installed; pip install 'dspark[tensorboard]', or leave "
                "--tensorboard out."
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def on_step(self, report: StepReport) -> None:
        """Loss, gradient, rate, speed, and acceptance by slot."""
        values = {
            "train/loss": report.loss,
            "train/gradient_norm": report.gradient_norm,
            "train/learning_rate_factor": report.learning_rate_factor,
            "train/tokens_per_s": report.num_slots / max(report.wall_s, 1e-9),
        }
        for slot, (accepted, count) in enumerate(
            zip(report.accepted_K, report.slots_K, strict=True), start=1
        ):
            if count > 0:
                values[f"train/acceptance/{slot}"] = accepted / count
        self._write(values, report.step)

    def on_validation(self, step: int, found: Validation) -> None:
        """Held-out tau and acceptance."""
        values = {"held_out/tau": found.tau}
        for slot, rate in enumerate(found.acceptance_K, start=1):
            values[f"held_out/acceptance/{slot}"] = rate
        if found.confidence_error is not None:
            values["held_out/confidence_error"] = found.confidence_error
        self._write(values, step)

    def close(self) -> None:
        """Write what is still waiting."""
        self._writer.close()

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
