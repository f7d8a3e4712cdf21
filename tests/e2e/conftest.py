"""Tests with whole engines run where the engine is: `make test-e2e` makes a Python for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import NoReturn

import pytest

ENGINES = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
"""The engine's package, and the environment that has all of it."""

NOTES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("e2e", "whole engines")
    group.addoption("--e2e-logs", type=Path, help="keep the servers' logs and the models here")


class Missing(pytest.Directory):
    """The folder of an engine that cannot serve here."""

    def collect(self) -> NoReturn:
        pytest.skip(f"no whole {self.path.name} is installed here: make test-e2e ENGINES={self.path.name}")


def _is_whole(engine: str) -> bool:
    """Whether this Python is the one that has all that the engine's servers import."""
    own = Path(sys.prefix).name == ENGINES[engine]
    return own and importlib.util.find_spec(engine) is not None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path.parent != Path(__file__).parent or path.name not in ENGINES:
        return None
    if not _is_whole(path.name):
        return Missing.from_parent(parent, path=path)
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # as tests.engines.stubs has it
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Operators come late, and faults last: they leave servers behind that must be started again."""
    if all(Path(__file__).parent in item.path.parents for item in items):
        items.sort(key=lambda item: ("test_operated.py", "test_faults.py").count(item.path.name))


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    """The session's servers."""
    from tests.e2e.fleet import Fleet  # noqa: PLC0415  (what it imports is in an engine's environment only)

    place = request.config.getoption("--e2e-logs") or tmp_path_factory.mktemp("e2e")
    place.mkdir(parents=True, exist_ok=True)
    made = Fleet(place.resolve())
    request.config.stash[NOTES] = made.notes
    try:
        yield made
    finally:
        made.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What became of each part, and how long it took."""
    for note in config.stash.get(NOTES, []):
        terminalreporter.write_line(note)
