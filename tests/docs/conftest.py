"""Pages that show a port are run one at a time, whichever worker has them."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS = ("README.md", "metrics.md")
"""Their examples listen at 9470."""


@pytest.fixture(autouse=True)
def port_to_itself(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not any(page in request.node.name for page in PORTS):
        yield
        return
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    with (shared / "port-9470").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
