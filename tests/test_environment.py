"""Environment variables: one table, read in one place, and a word on what is wrong with each."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

from pdstage import UsageError, environment
from pdstage.environment import VARIABLES
from tests.test_architecture import ROOT, sources

NAMES = {variable.name for variable in VARIABLES}
SOURCES = [*(path for _, path in sources()), *(ROOT / "tests").rglob("*.py")]


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_unset_and_empty_are_the_same(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.read() is None
    monkeypatch.setenv(variable.name, "")
    assert variable.read() is None


@pytest.mark.parametrize(
    ("variable", "text", "why"),
    [
        (environment.NATIVE, "maybe", "it is not yes or no; set it to `yes` or `no`, or unset it"),
        (environment.NATIVE, "NO", "it is not yes or no"),
        (environment.NODE, "path=staged", "it is not JSON"),
        (environment.NODE, "[1]", "it is not an object"),
        (environment.NODE, '{"config": 3}', "it is not an object, or its config is not"),
        (environment.CALIBRATION, "/nowhere.json", "there is no such file; .*calibrate --output"),
        (environment.CALIBRATION, str(ROOT), "there is no such file"),
        (environment.CACHE_DIR, __file__, "it is not a folder"),
        (environment.GPU_TESTS, "many", "it is not few"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(variable, text, why, monkeypatch):
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(UsageError, match=rf"^{variable.name}='{re.escape(text)}': {why}") as caught:
        variable.read()
    assert caught.value.fields == {"variable": variable.name}


def test_a_name_nothing_reads_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(environment, "_warned_of", set())
    monkeypatch.setenv("PDSTAGE_CALIBRATE", "costs.json")
    with caplog.at_level(logging.WARNING, "pdstage"):
        for _ in range(3):
            environment.CALIBRATION.read()
            environment.COMMIT.read()
    assert [record.getMessage() for record in caplog.records] == [
        "nothing reads the environment variable PDSTAGE_CALIBRATE; the nearest known one is PDSTAGE_CALIBRATION"
    ]


def test_variables_are_read_through_the_table_only():
    """setup.py cannot: it runs where nothing is installed."""
    asked = re.compile(rf"(environ(\.get\(|\[)|getenv\()\s*['\"]({environment.PREFIX}\w*)")
    found = [
        f"{path.relative_to(ROOT)}: {hit.group(3)}" for path in SOURCES for hit in asked.finditer(path.read_text())
    ]
    assert not found, "read them through pdstage.environment"
    assert asked.findall((ROOT / "setup.py").read_text())[0][2] == environment.NATIVE.name


def test_the_table_is_whole():
    """Each variable of the module is in it, and each is read by somebody."""
    defined = {
        node.targets[0].id
        for node in ast.parse(Path(environment.__file__).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Variable(")
    }
    assert {getattr(environment, name) for name in defined} == set(VARIABLES)
    text = "\n".join(path.read_text() for path in SOURCES if path.name != "test_environment.py")
    assert [name for name in defined if f"environment.{name}.read()" not in text] == []


def test_pages_name_variables_there_are():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    named = {(page.name, name) for page in pages for name in re.findall(r"\bPDSTAGE_[A-Z_]+\b", page.read_text())}
    assert {name for _, name in named} >= NAMES
    assert not [one for one in named if one[1] not in NAMES]
