"""docs/record.md names tests and deliberate bugs that there are, and has no row without one or a word on why not."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from typing import NamedTuple

from tests.docs.pages import ROOT
from tests.sim.mutants import everyone

RECORD = ROOT / "docs" / "record.md"
COLUMNS = ("where", "what went wrong", "why pdstage does not have it", "shown by")
UNSHOWN = "not shown: "
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[^`]*\])?`")
MUTANTS = re.compile(r'`make mutants ARGS="((?:\\"|[^"`])*)"`')
REPORT = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w-]+/([\w.-]+)/(?:pull|issues)/(\d+)\)")


class Row(NamedTuple):
    """One row of a table: its line, and its four columns as they stand."""

    line: int
    where: str
    wrong: str
    why: str
    shown: str


def rows(text: str) -> list[Row]:
    """Of all tables. Raises `ValueError` for a row that has not four columns."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            continue
        columns = tuple(column.strip() for column in line.strip("|").split("|"))
        if len(columns) != len(COLUMNS):
            raise ValueError(f"line {number} has {len(columns)} columns, not {len(COLUMNS)}")
        if columns != COLUMNS and set("".join(columns)) != {"-"}:
            found.append(Row(number, *columns))
    return found


def named_tests(text: str) -> set[tuple[str, str]]:
    """Files and functions of the tests named, whatever their parameters."""
    return set(TEST.findall(text))


def named_mutants(text: str) -> list[str]:
    """Names of the deliberate bugs, as the shell would give them to the command."""
    return [name for given in MUTANTS.findall(text) for name in shlex.split(given.replace('\\"', '"'))]


def is_shown(row: Row) -> bool:
    """By a test or a deliberate bug, or it says why not."""
    return bool(row.shown.startswith(UNSHOWN) or named_tests(row.shown) or named_mutants(row.shown))


@functools.cache
def functions(path: str) -> set[str]:
    """The test functions of a file; none if it is not there."""
    file = ROOT / path
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_named_exists() -> None:
    named = named_tests(RECORD.read_text())
    assert len(named) > 50
    assert not [f"{path}::{name}" for path, name in sorted(named) if name not in functions(path)]


def test_every_deliberate_bug_named_exists() -> None:
    named = named_mutants(RECORD.read_text())
    assert len(named) > 10
    assert set(named) <= {mutant.name for mutant in everyone()}


def test_every_row_is_shown_or_says_why_not() -> None:
    found = rows(RECORD.read_text())
    assert len(found) > 60
    for row in found:
        assert all(row[1:]), f"record.md:{row.line} has an empty column"
        assert is_shown(row), f"record.md:{row.line}: name a test, `make mutants`, or say '{UNSHOWN}...'"


def test_a_report_is_linked_under_its_own_number() -> None:
    text = RECORD.read_text()
    links = REPORT.findall(text)
    assert len(links) == len(re.findall(r"\[[\w.-]+#\d+\]", text)) > 60
    assert not [link for link in links if link[0] != link[2] or link[1] != link[3]]
