"""One fleet of SGLang servers a session."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.conftest import NOTES
from tests.e2e.fleet import Fleet


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    place = request.config.getoption("--e2e-logs") or tmp_path_factory.mktemp("e2e")
    place.mkdir(parents=True, exist_ok=True)
    made = Fleet(place.resolve(), [sys.executable, "-m", "tests.e2e.sglang.save"])
    yield made
    made.stop()
    request.config.stash[NOTES] = made.notes
