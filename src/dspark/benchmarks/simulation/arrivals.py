"""Requests of a trace: when they came and how long they were. It reads a file, simulates nothing.

One JSON object a line:

    {"arrival_s": 0.4, "prompt_tokens": 120, "answer_tokens": 300}   in seconds
    {"timestamp": 400, "input_length": 120, "output_length": 300}    in milliseconds (Mooncake)

Lengths may be left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import read_lines
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One line; `None` takes the recorded answer's own length."""

    arrival_s: float
    num_prompt_tokens: int | None
    num_answer_tokens: int | None


def read_trace(path: str | Path) -> Sequence[TracedRequest]:
    """The requests by time, the first one at 0. Raises `InputError` for a file of anything else."""
    lines = read_lines(Path(path), wanted="a trace of arrivals, JSON lines")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_request(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{path} line {number} is no request of a trace; it needs arrival_s in seconds, or "
                "timestamp in milliseconds."
            ) from error
    if not found:
        raise InputError(f"{path} holds no request.")
    start = min(request.arrival_s for request in found)
    shifted = [
        TracedRequest(
            arrival_s=request.arrival_s - start,
            num_prompt_tokens=request.num_prompt_tokens,
            num_answer_tokens=request.num_answer_tokens,
        )
        for request in found
    ]
    return sorted(shifted, key=lambda request: request.arrival_s)


def _request(row: dict[str, Any]) -> TracedRequest:
    if "arrival_s" in row:
        arrival_s, prompt, answer = float(row["arrival_s"]), "prompt_tokens", "answer_tokens"
    else:
        arrival_s, prompt, answer = row["timestamp"] / 1e3, "input_length", "output_length"
    return TracedRequest(
        arrival_s=arrival_s,
        num_prompt_tokens=_length(row.get(prompt)),
        num_answer_tokens=_length(row.get(answer)),
    )


def _length(value: Any) -> int | None:
    if value is None:
        return None
    if int(value) < 1:
        raise ValueError(value)
    return int(value)
