"""Pictures and the performance page are what the code and the committed results make of them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

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


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert not [path.name for path in pictures.FOLDER.iterdir() if f"(pictures/{path.name})" not in pages]


def test_the_performance_page_is_not_stale() -> None:
    assert performance.PAGE.read_text() == performance.page(), "run `make docs`"
