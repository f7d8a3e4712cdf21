"""Every invariant is cited by the tests that hold it, and the generated parts of docs/ say the truth."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from pdstage import transport
from pdstage.protocol.config import Config
from pdstage.transport import available

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load()


def test_every_invariant_is_cited() -> None:
    missing = [number for number, files in generate.citations().items() if not files]
    assert not missing, f"no test cites invariants {missing}"


def test_a_citation_is_found_where_it_stands(tmp_path: Path) -> None:
    number = "I" + "12"  # not written out, or this test would cite it
    (tmp_path / "test_a.py").write_text(f'def test_b():\n    """{number}"""\n\ndef test_c():\n    x = 1  # {number}\n')
    (tmp_path / "test_d.py").write_text(f'"""{number}, I99, {number}x."""\n\ndef test_e(): ...\ndef helper(): ...\n')
    (tmp_path / "pair.py").write_text(f'"""{number}"""\ndef test_f(): ...\n')
    found = {number: dict(files) for number, files in generate.citations(tmp_path).items() if files}
    assert found == {12: {"test_a.py": 2, "test_d.py": 1}}


def test_no_page_is_stale() -> None:
    for path, parts in generate.PAGES.items():
        page = path.read_text()
        assert generate.written(page, parts) == page, f"{path.name}: run `make docs`"


def test_traits_read_from_the_source_are_those_declared() -> None:
    table = generate.traits()
    ours = {path.stem for path in Path(transport.__file__).parent.glob("*.py")}
    for name in (name for name, why_not in available().items() if not why_not and name in ours):
        declared = import_module(f"pdstage.transport.{name}").TRANSPORT.traits
        assert generate.trait_row(asdict(declared)) in table.splitlines()


def test_no_deadline_is_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(generate.DEADLINES, "wait_s")
    with pytest.raises(SystemExit, match=r"Config.wait_s needs a line"):
        generate.deadlines()


def test_words_are_of_deadlines_there_are() -> None:
    assert set(generate.DEADLINES) <= set(Config.__dataclass_fields__)


def test_every_promise_is_in_the_page() -> None:
    page = generate.PAGE.read_text()
    for number in range(1, generate.N_INVARIANTS + 1):
        assert f"| I{number} | " in page.partition("## A room's life")[0]
