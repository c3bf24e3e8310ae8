"""The results file of a load sweep: asked answers, the work of each load, finished units, and what
steps were found to take meanwhile.

It runs nothing. A crash loses the unit that was being measured, nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.journal import PromptRecord
from dspark.benchmarks.load.config import Load, LoadKind, Unit
from dspark.benchmarks.load.tally import Counts, Measured
from dspark.benchmarks.results_file import ResultsFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt answered before the sweep, every block verified whole."""

    record: PromptRecord
    token_ids: Sequence[int]


class LoadResults:
    """What was measured so far, and the file that keeps it."""

    def __init__(self, path: str | Path, *, settings: Mapping[str, Any]) -> None:
        """Opens or begins the file. Raises `InputError` if it holds results of other settings."""
        self._file = ResultsFile(path, settings=settings, owner="a load sweep")
        self.path = self._file.path
        self.units: dict[Unit, Measured] = {}
        self.answers: list[Answer] = []
        self.work: dict[Load, float] = {}
        """Tokens of a unit of a closed load, seconds of a unit of an open one."""
        self.costs: dict[tuple[float, Load], list[StepCost]] = {}
        """By temperature and closed load, of each round: the profile as `auto` corrected it."""
        self.profiles: dict[tuple[float, Load], list[StepCost]] = {}
        """The same, as steps beside the load corrected it so far: the last one knows them all."""
        for number, row in enumerate(self._file.rows, start=1):
            try:
                self._take(row)
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                raise self._file.foreign(number) from error

    def add_unit(self, unit: Unit, measured: Measured) -> None:
        """A finished unit; it is on the disk afterwards."""
        self._file.add({"unit": asdict(unit), "measured": asdict(measured)})
        self.units[unit] = measured

    def add_answer(self, answer: Answer) -> None:
        """An answer asked before the sweep."""
        self._file.add({"answer": asdict(answer)})
        self.answers.append(answer)

    def add_work(self, load: Load, amount: float) -> None:
        """How much every unit of a load does."""
        self._file.add({"load": asdict(load), "work": amount})
        self.work[load] = amount

    def add_cost(self, temperature: float, load: Load, cost: StepCost) -> None:
        """What steps were found to take by the end of a round."""
        self._file.add(
            {"temperature": temperature, "load": asdict(load), "step_cost": cost.to_json()}
        )
        self.costs.setdefault((temperature, load), []).append(cost)

    def add_profile(self, temperature: float, load: Load, cost: StepCost) -> None:
        """What steps beside a load took in a round of it."""
        self._file.add(
            {"temperature": temperature, "load": asdict(load), "profile": cost.to_json()}
        )
        self.profiles.setdefault((temperature, load), []).append(cost)

    def _take(self, row: Mapping[str, Any]) -> None:
        if "unit" in row:
            unit = Unit(**{**row["unit"], "load": _load(row["unit"]["load"])})
            values = row["measured"]
            domains = {name: Counts(**counts) for name, counts in values["domains"].items()}
            self.units[unit] = Measured(**{**values, "domains": domains})
        elif "answer" in row:
            record = PromptRecord.from_row(row["answer"]["record"])
            self.answers.append(Answer(record=record, token_ids=row["answer"]["token_ids"]))
        elif "step_cost" in row:
            key = float(row["temperature"]), _load(row["load"])
            self.costs.setdefault(key, []).append(StepCost.from_json(row["step_cost"]))
        elif "profile" in row:
            key = float(row["temperature"]), _load(row["load"])
            self.profiles.setdefault(key, []).append(StepCost.from_json(row["profile"]))
        else:
            self.work[_load(row["load"])] = float(row["work"])


def _load(row: Mapping[str, Any]) -> Load:
    return Load(kind=LoadKind(row["kind"]), level=float(row["level"]))
