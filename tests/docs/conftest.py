"""Pages that show a port are run one at a time, whichever worker has them."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PORT = "9470"


@pytest.fixture
def port_to_itself(
    page: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """For a test that runs what `page` shows."""
    if PORT not in page.read_text():
        yield
        return
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    with (shared / f"port-{PORT}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
