"""Results that outlive a crash, and settings that bind only where there are results."""

from pathlib import Path

import pytest

from dspark.benchmarks.results_file import ResultsFile
from dspark.errors import InputError


def test_settings_bind_only_where_there_is_a_result(tmp_path: Path) -> None:
    """A measurement that failed at once leaves the name of its file to the next."""
    path = tmp_path / "results.jsonl"
    ResultsFile(path, settings={"users": 1}, owner="a load")
    file = ResultsFile(path, settings={"users": 2}, owner="a load")
    assert file.rows == []
    file.add({"value": 3})
    assert ResultsFile(path, settings={"users": 2}, owner="a load").rows == [{"value": 3}]
    with pytest.raises(InputError, match="holds results with users 2, and now it is 1"):
        ResultsFile(path, settings={"users": 1}, owner="a load")


def test_a_single_line_that_is_no_setting_is_somebody_elses(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"note": "mine"}\n')
    with pytest.raises(InputError, match="line 1 is no result of a load"):
        ResultsFile(path, settings={}, owner="a load")
    assert path.read_text() == '{"note": "mine"}\n'


@pytest.mark.parametrize(
    "content", ["my only notes", '{"note": "mine"}', "one line\nand one without its end", "\x00"]
)
def test_nothing_is_cut_off_a_file_that_is_somebody_elses(tmp_path: Path, content: str) -> None:
    """What follows the last line's end is a row of ours that a kill cut, in a file of ours only."""
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(InputError, match="line 1 is no result of a load"):
        ResultsFile(path, settings={}, owner="a load")
    assert path.read_text() == content


def test_a_first_row_that_a_kill_cut_at_any_byte_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultsFile(path, settings={"users": 1}, owner="a load")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        ResultsFile(path, settings={"users": 1}, owner="a load")
        assert path.read_bytes() == whole
