"""The README and the docs name only paths, commands and options that exist, and are complete."""

import re
from pathlib import Path

import click
import pytest
import typer

from dspark.cli import app

ROOT = Path(__file__).parents[1]
HISTORY = {"docs/log.md", "docs/user_cases.md"}  # what was; a page with a test of its own
PAGES = ["README.md", *sorted({f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")} - HISTORY)]
OTHER_PROGRAMS = ("guidellm ", "aiperf ", "vllm ", "pytest ")
PACKAGES = ("algorithms", "benchmarks", "data", "engine", "kernels", "models", "text", "training")
FOLDERS = ("src/dspark/", "docs/", "runs/", "drafters/", "tests/", ".ci/")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def paths_in(text: str) -> set[str]:
    """Words that are paths of the repository, or of modules below `src/dspark`."""
    words = {word.rstrip(".:") for word in re.findall(r"[\w./-]+", text)}
    modules = {word for word in words if word.split("/")[0] in PACKAGES and "/" in word}
    return {word for word in words if word.startswith(FOLDERS)} | modules


def is_there(path: str) -> bool:
    places = (ROOT / path, ROOT / "src/dspark" / path, ROOT / "src/dspark" / f"{path}.py")
    return any(place.exists() for place in places)


def tree_in(readme: str) -> set[str]:
    """Paths of the annotated tree: two columns, children indented below their folder."""
    block = readme.split("## Map")[1].split("## Work on it")[0]
    found, folder = set(), ""
    for line in block.splitlines():
        if not line.startswith("    "):
            continue
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if line.startswith("      "):
            found.update(folder + name for name in names)
        else:
            folder = names[0] if names[0].endswith("/") else ""
            found.update(names)
    return found


def commands_in(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """Each `dspark ...` with the long options on its (continued) line, comments cut."""
    joined = text.replace("\\\n", " ")
    found = set()
    for match in re.finditer(
        r"(?<!from )\b(?:dspark|DSPARK) ((?:bench )?[a-z]+)\b([^`\n#|]*)", joined
    ):
        found.add((match[1], tuple(re.findall(r"--[a-z][\w-]*", match[2]))))
    return found


def options_of(command: str) -> set[str]:
    """Long options of a command; raises KeyError for one that does not exist."""
    current = typer.main.get_command(app)
    for word in command.split():
        current = current.commands[word]  # type: ignore[attr-defined]
    return {name for p in current.params for name in (*p.opts, *p.secondary_opts)}


def all_options(command: click.Command) -> set[str]:
    """Options of a command and of all below it."""
    found = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    for below in getattr(command, "commands", {}).values():
        found |= all_options(below)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_path_named_exists(page: str) -> None:
    assert [path for path in sorted(paths_in(text_of(page))) if not is_there(path)] == []


def test_the_tree_of_the_readme_exists() -> None:
    tree = tree_in(text_of("README.md"))
    assert len(tree) > 10
    assert [path for path in sorted(tree) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "page", [*PAGES, *(f"runs/{p.name}" for p in sorted((ROOT / "runs").glob("*.sh")))]
)
def test_every_command_and_option_named_exists(page: str) -> None:
    """UC-164."""
    for command, options in commands_in(text_of(page)):
        if command.startswith("is ") or command in {"is", "with", "and"}:
            continue
        assert set(options) <= options_of(command) | {"--help"}, command


@pytest.mark.parametrize("page", PAGES)
def test_every_option_named_apart_from_a_command_is_one_of_some_command(page: str) -> None:
    lines = text_of(page).splitlines()
    own = [line for line in lines if not line.strip().startswith(OTHER_PROGRAMS)]
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(own)))
    assert sorted(named - all_options(typer.main.get_command(app)) - {"--help"}) == []


def test_the_pages_name_paths_commands_and_options() -> None:
    """Or the tests above would look at nothing."""
    texts = "\n".join(map(text_of, PAGES))
    assert len(paths_in(texts)) > 100
    assert len(commands_in(texts)) > 50


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"`?make ([a-z]+)", text_of("README.md")))
    defined = set(re.findall(r"^([a-z]+):", text_of("Makefile"), flags=re.MULTILINE))
    assert {"demo", "check", "test", "fix"} <= targets <= defined


def test_ci_calls_the_same_commands_as_a_developer() -> None:
    lines = text_of(".ci/run").splitlines()
    assert "set -euo pipefail" in lines
    assert [line for line in lines if line.startswith("make ")] == ["make check", "make test"]


def test_the_readme_fits_its_limit_and_keeps_its_order() -> None:
    readme = text_of("README.md")
    assert len(readme.splitlines()) <= 150
    headings = re.findall(r"^## (.+)$", readme, flags=re.MULTILINE)
    assert headings == [
        "Quick start",
        "The verbs",
        "Results",
        "Dive in",
        "Map",
        "Work on it",
        "Limits",
    ]


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_nothing_is_left_to_be_filled_in(page: str) -> None:
    assert re.findall(r"\(fill[^)]*\)|TODO|TBD", text_of(page)) == []


def test_each_row_of_the_paper_page_names_a_function_and_a_test_that_exist() -> None:
    """`file.py: name` in both columns; a name that was renamed breaks the page."""
    rows = [line for line in text_of("docs/paper.md").splitlines() if line.startswith("| ")]
    checked = 0
    for row in rows:
        for file, names in re.findall(r"`([\w/]+\.py): ([\w., ]+)`", row):
            folder = ROOT if file.startswith("tests/") else ROOT / "src/dspark"
            source = (folder / file).read_text(encoding="utf-8")
            for name in names.split(", "):
                last = name.split(".")[-1]
                assert re.search(rf"\b(def|class) {last}\b", source), f"{file}: {name}"
                checked += 1
    assert checked > 20
