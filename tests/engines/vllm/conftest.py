"""Engines and models for tests. Each fixture imports vLLM by itself: what stands in for a GPU comes first."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engines.vllm import caches

# Processes of engines are forked from one that has imported what all of them import.
multiprocessing.set_forkserver_preload([
    "tests.engines.vllm.first", "tests.engines.vllm.engine", "tests.engines.vllm.workers",
    "pdstage.integrations.vllm", "nixl._api"
])  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    from tests.engines.vllm.lives import start  # noqa: PLC0415

    with start(tmp_path_factory.mktemp("shared")) as pair:
        yield pair


@pytest.fixture
def pair(shared):
    """Engines for lives that leave them at rest."""
    yield shared
    shared.settle()


@pytest.fixture
def engines(tmp_path):
    """Makes engines of a test's own."""
    from tests.engines.vllm.lives import start  # noqa: PLC0415

    return partial(start, tmp_path)


@pytest.fixture
def sides(tmp_path):
    """Makes engines' workers, which are closed in the end."""
    from tests.engines.vllm.caches import Side, full  # noqa: PLC0415

    made: list[caches.Side] = []

    def make(role, specs=full, **given) -> caches.Side:
        made.append(Side(tmp_path, role, specs, **given))
        return made[-1]

    yield make
    for side in made:
        side.close()


@pytest.fixture
def src(sides):
    return sides("kv_producer")


@pytest.fixture
def dst(sides):
    return sides("kv_consumer")
