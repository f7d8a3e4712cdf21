"""Engines and models for tests. Each fixture imports vLLM by itself: what stands in for a GPU comes first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engines.vllm import caches, models
    from tests.engines.vllm.lives import Pair


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    from tests.engines.vllm.lives import Pair  # noqa: PLC0415
    from tests.engines.vllm.models import CONSUMER, LLAMA, PRODUCER  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("shared")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with Pair(PRODUCER, CONSUMER, folder, folder) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """Engines for lives that leave them at rest."""
    yield shared
    shared.settle()


@pytest.fixture
def engines(tmp_path: Path) -> Callable[..., Pair]:
    """Engines of a test's own."""
    from tests.engines.vllm.lives import Pair  # noqa: PLC0415
    from tests.engines.vllm.models import CONSUMER, LLAMA, PRODUCER  # noqa: PLC0415

    def start(
        producer: models.Side = PRODUCER, consumer: models.Side = CONSUMER, model: dict[str, Any] = LLAMA,
        kind: type[Pair] = Pair,
    ) -> Pair:  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(model))
        return kind(producer, consumer, tmp_path, tmp_path)

    return start


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Callable[..., caches.Side]]:
    """Makes engines' workers, which are closed in the end."""
    from tests.engines.vllm.caches import Side, full  # noqa: PLC0415

    made: list[caches.Side] = []

    def make(role: str, specs: Any = full, **given: Any) -> caches.Side:
        made.append(Side(tmp_path, role, specs, **given))
        return made[-1]

    yield make
    for side in made:
        side.close()


@pytest.fixture
def src(sides: Callable[..., caches.Side]) -> caches.Side:
    return sides("kv_producer")


@pytest.fixture
def dst(sides: Callable[..., caches.Side]) -> caches.Side:
    return sides("kv_consumer")
