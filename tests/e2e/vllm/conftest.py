"""One fleet of vLLM servers a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import NOTES
from tests.e2e.fleet import MOST, Fleet
from tests.e2e.vllm.engines import Pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Faults come last: they leave servers behind that must be started again."""
    here = Path(__file__).with_name("test_faults.py")
    items.sort(key=lambda item: item.path == here)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    place = request.config.getoption("--e2e-logs") or tmp_path_factory.mktemp("e2e")
    place.mkdir(parents=True, exist_ok=True)
    made = Fleet(place.resolve())
    wanted = dict.fromkeys(engine for row in _rows(request.session) for engine in row.engines)
    if len(wanted) <= MOST:  # what starts together is up sooner than one after the other
        made.up(*wanted)
    yield made
    made.stop()
    request.config.stash[NOTES] = made.notes


def _rows(session: pytest.Session) -> list[Pair]:
    items = [item for item in session.items if not item.get_closest_marker("skip")]
    found = [value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values()]
    return [value for value in found if isinstance(value, Pair)]
