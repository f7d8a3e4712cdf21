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
    group.addoption("--full", action="store_true", help="everything, not only what .ci/run has time for")
    group.addoption("--e2e-logs", type=Path, help="keep the servers' logs and the models here")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: left out where time is short; --full runs it")


class Missing(pytest.Directory):
    """The folder of an engine that cannot serve here."""

    def collect(self) -> NoReturn:
        pytest.skip(f"no whole {self.path.name} is installed here: make test-e2e ENGINES={self.path.name}")


def _is_whole(engine: str) -> bool:
    """Whether this Python is the one that has all that the engine's servers import."""
    own = Path(sys.prefix).name == ENGINES[engine]
    return own and importlib.util.find_spec(engine) is not None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path.parent != Path(__file__).parent or path.name not in ENGINES or _is_whole(path.name):
        return None
    return Missing.from_parent(parent, path=path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full", False):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="make test-e2e FULL=1 runs it"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What became of each part, and how long it took."""
    for note in config.stash.get(NOTES, []):
        terminalreporter.write_line(note)
