"""Pictures and the performance page are what the code and the committed results make of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from pdstage.protocol.state import ROOM
from tests.docs.pages import ROOT


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pictures, performance = load("pictures"), load("performance")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_no_picture_is_stale(name: str) -> None:
    drawn = pictures.PICTURES[name]().svg()
    ElementTree.fromstring(drawn)
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn, "run `make docs`"


def test_every_picture_is_drawn_and_shown() -> None:
    assert {path.stem for path in pictures.FOLDER.iterdir()} == set(pictures.PICTURES)
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert not [name for name in pictures.PICTURES if f"(pictures/{name}.svg)" not in pages]


def test_the_room_table_is_whole() -> None:
    drawn = pictures.states().svg()
    assert drawn.count("marker-end") == sum(dst is not None for row in ROOM.rows.values() for dst in row.values())


def test_the_lane_says_what_the_ring_did() -> None:
    """The words under a moment are true of the ring that was run for it."""
    drawn = pictures.lanes().svg()
    first, second, third, fourth, fifth = drawn.split("watermark</text>")[:5]
    assert ("D, closed" in second, "D, closed" in third, "D, closed" in fourth) == (True, True, False)
    assert "#f48fb1" not in first + second + third + fourth
    assert "#f48fb1" in fifth


def test_the_performance_page_is_not_stale() -> None:
    assert performance.PAGE.read_text() == performance.page(), "run `make docs`"


def test_every_report_is_on_the_page_with_its_targets() -> None:
    page = performance.PAGE.read_text()
    for name, report in performance.reports().items():
        assert f"## {name}\n" in page
        assert f"`{report['commit']}`" in page
        aimed = [row for row in report["rows"] if row["target"] is not None and not row["point"]]
        for row in aimed[: performance.N_SHOWN]:
            assert f"| {row['name']} | {performance._short(row['value'])} {row['unit']} |" in page


def test_a_quick_look_is_not_on_the_page(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "look.json").write_text(json.dumps({"quick": True}))
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    assert performance.reports() == {}
