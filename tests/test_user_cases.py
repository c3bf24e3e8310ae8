"""The page of user cases is complete, and each of its rows names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/user_cases.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| UC-")
]


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions of a file below `tests/`."""
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def cited(cell: str) -> list[tuple[str, str]]:
    """(path, test) of all that a row names."""
    return [(found[1], found[2]) for found in re.finditer(r"`([\w/]+\.py)::(\w+)`", cell)]


def test_each_id_of_the_list_has_one_row_and_no_other_has() -> None:
    found = re.search(r"^Ids: ([\d ]+)\.$", PAGE, flags=re.MULTILINE)
    assert found is not None
    ids = [f"UC-{number}" for number in found[1].split()]
    assert len(ids) == len(set(ids)) == 146
    assert [row[0] for row in ROWS] == ids


def test_every_row_names_its_fault_and_tests_that_exist() -> None:
    for number, fault, covered in ROWS:
        assert fault, number
        tests = cited(covered)
        assert tests, f"{number} names no test"
        missing = [f"{path}::{name}" for path, name in tests if name not in names_in(path)]
        assert missing == [], number


def test_a_row_holds_tests_or_says_why_not() -> None:
    """Words beside the tests are a refusal or the reason why a case is none of ours."""
    for number, _, covered in ROWS:
        words = re.sub(r"`[^`]*`|,", "", covered).strip()
        assert not words or re.match(r"refused:$|not applicable: .{20,}", words), (number, words)


def test_a_case_that_a_test_speaks_of_is_on_the_page() -> None:
    known = {row[0] for row in ROWS}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        spoken = set(re.findall(r"UC-\d{3}", path.read_text(encoding="utf-8")))
        assert spoken <= known, path
