"""A pytest plugin that writes each test's outcome as it ends, so that finished tests count however the run ends.

python -m pytest -p pdstage.bench.outcomes --outcomes FILE ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="a line of JSON for each test that ended")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--outcomes")
    if path is not None:
        config.pluginmanager.register(Outcomes(path))


class Outcomes:
    """Writes {"collected": n}, {"test", "outcome", "why"} of each test, or file, that has one, and {"ended": test}."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("a")

    def _say(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._out, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._say({"collected": len(session.items)})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Files whose import is skipped or fails have no tests to tell of."""
        if not report.passed:
            self._say({"test": report.nodeid, "outcome": report.outcome, "why": _why(report)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._say({"test": report.nodeid, "outcome": report.outcome, "why": _why(report)})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say({"ended": nodeid})


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why it was skipped; the last line of what failed."""
    reason = report.longrepr
    if isinstance(reason, tuple):
        return reason[2].removeprefix("Skipped: ")
    lines = str(reason or "").strip().splitlines()
    return lines[-1] if lines else ""
