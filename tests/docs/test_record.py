"""docs/record.md names tests and deliberate bugs that there are, and has no row without one or a word on why not."""

from __future__ import annotations

import ast
import functools
import re
import shlex

from tests.docs.pages import ROOT
from tests.sim.mutants import everyone

RECORD = ROOT / "docs" / "record.md"
COLUMNS = ["where", "what went wrong", "why pdstage does not have it", "shown by"]
UNSHOWN = "not shown: "
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[^`]*\])?`")
MUTANTS = re.compile(r'`make mutants ARGS="((?:\\"|[^"`])*)"`')
REPORT = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w-]+/([\w.-]+)/(?:pull|issues)/(\d+)\)")


def rows() -> dict[int, list[str]]:
    """The columns of each row of all tables, by line."""
    lines = enumerate(RECORD.read_text().splitlines(), 1)
    found = {n: [column.strip() for column in line.strip("|").split("|")] for n, line in lines if line.startswith("|")}
    return {n: columns for n, columns in found.items() if columns != COLUMNS and set("".join(columns)) != {"-"}}


def named_mutants(text: str) -> list[str]:
    """Names of the deliberate bugs, as the shell would give them to the command."""
    return [name for given in MUTANTS.findall(text) for name in shlex.split(given.replace('\\"', '"'))]


@functools.cache
def functions(path: str) -> set[str]:
    """The test functions of a file; none if it is not there."""
    file = ROOT / path
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_named_exists() -> None:
    named = set(TEST.findall(RECORD.read_text()))
    assert len(named) > 50
    assert not [f"{path}::{name}" for path, name in sorted(named) if name not in functions(path)]


def test_every_deliberate_bug_named_exists() -> None:
    named = named_mutants(RECORD.read_text())
    assert len(named) > 10
    assert set(named) <= {mutant.name for mutant in everyone()}


def test_every_row_is_shown_or_says_why_not() -> None:
    found = rows()
    assert len(found) > 60
    for line, columns in found.items():
        assert len(columns) == len(COLUMNS) and all(columns), f"record.md:{line} has not four columns"
        shown = columns[-1].startswith(UNSHOWN) or TEST.search(columns[-1]) or named_mutants(columns[-1])
        assert shown, f"record.md:{line}: name a test, `make mutants`, or say '{UNSHOWN}...'"


def test_a_report_is_linked_under_its_own_number() -> None:
    text = RECORD.read_text()
    links = REPORT.findall(text)
    assert len(links) == len(re.findall(r"\[[\w.-]+#\d+\]", text)) > 60
    assert not [link for link in links if link[0] != link[2] or link[1] != link[3]]
