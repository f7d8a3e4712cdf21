"""docs/operate.md names only errors, counters and limits that exist."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict, fields

import pdstage
from pdstage import Config
from pdstage.metrics import Counters
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "operate.md").read_text()


def part(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    body = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("| ")
    ]
    return rows[1:]


def said() -> str:
    """All literal text of the package; strings of several parts have `{}` where a value stands."""
    found = []
    for path in (ROOT / "pdstage").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts]
            found.append(re.sub(r"%[sd]", "{}", "".join(texts)))
    return "\n".join(found)


def test_every_error_listed_is_one_that_is_raised() -> None:
    text, rows = said(), part("Messages, and what to do")
    assert len(rows) > 20
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row[0])]
    missing = [one for one in quoted if not re.search(r"\{\}".join(map(re.escape, one.split("..."))), text)]
    assert not missing


def test_every_counter_watched_is_one_that_is_counted() -> None:
    known = asdict(Counters()).keys() | {"unfenced()"}
    named = [name for row in part("What to watch") for name in re.findall(r"`([a-z_()]+)`", row[0])]
    assert len(named) > 10
    assert not set(named) - known


def test_limits_are_those_of_the_configuration() -> None:
    named = set(re.findall(r"`(?:Config\.)?(max_\w+)`", PAGE))
    limits = {field.name: field.default for field in fields(Config)}
    assert named <= limits.keys()
    for row in part("Limits"):
        name = re.search(r"`Config\.(\w+)`", row[0])
        number = re.match(r"([\d,]+)( MiB)?", row[1])
        if name and number:
            assert int(number[1].replace(",", "")) << (20 if number[2] else 0) == limits[name[1]], row


def test_the_kinds_of_error_are_all_named() -> None:
    kinds = [name for name in pdstage.__all__ if isinstance(getattr(pdstage, name), type)]
    errors = [name for name in kinds if issubclass(getattr(pdstage, name), pdstage.PdstageError)]
    assert not [name for name in errors if f"`{name}`" not in PAGE]
