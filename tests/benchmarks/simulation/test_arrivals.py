from pathlib import Path

import pytest

from dspark.benchmarks.simulation.arrivals import TracedRequest, read_trace
from dspark.errors import InputError


def test_both_kinds_of_lines_are_read_and_time_begins_with_the_first(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 5000, "input_length": 7, "output_length": 3}\n{"arrival_s": 4.5}\n'
    )
    assert read_trace(path) == [
        TracedRequest(arrival_s=0.0, num_prompt_tokens=None, num_answer_tokens=None),
        TracedRequest(arrival_s=0.5, num_prompt_tokens=7, num_answer_tokens=3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("{}\n", "line 1 is no request"),
        ("nonsense\n", "line 1 is no request"),
        ('{"arrival_s": 1, "prompt_tokens": 0}\n', "line 1 is no request"),
    ],
)
def test_a_file_of_anything_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_trace(path)
    with pytest.raises(InputError, match="does not exist"):
        read_trace(tmp_path / "missing")
