"""Every invariant is cited by the tests that hold it, and the generated parts of docs/ say the truth."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from pdstage import transport
from pdstage.transport import available
from tests.docs.test_generated import load

generate = load("generate")


def test_every_invariant_is_cited() -> None:
    missing = [number for number, files in generate.citations().items() if not files]
    assert not missing, f"no test cites invariants {missing}"


def test_no_page_is_stale() -> None:
    for path, parts in generate.PAGES.items():
        page = path.read_text()
        assert generate.written(page, parts) == page, f"{path.name}: run `make docs`"
    page = generate.API_PAGE.read_text()
    assert generate.reference.written(page) == page, "api.md: run `make docs`"


def test_traits_read_from_the_source_are_those_declared() -> None:
    table = generate.traits()
    ours = {path.stem for path in Path(transport.__file__).parent.glob("*.py")}
    for name in (name for name, why_not in available().items() if not why_not and name in ours):
        declared = import_module(f"pdstage.transport.{name}").TRANSPORT.traits
        assert generate.trait_row(asdict(declared)) in table.splitlines()
