"""The tests of one engine run where its package is: `make test-engines` makes a Python for each."""

from __future__ import annotations

import importlib.util
from typing import NoReturn

import pytest

from tests.engines import stubs

ENGINES = {"vllm", "sglang"}


class Missing(pytest.Directory):
    """The folder of an engine that is not installed."""

    def collect(self) -> NoReturn:
        pytest.skip(f"{self.path.name} is not installed here: make test-engines ENGINES={self.path.name}")


def pytest_collect_directory(path, parent: pytest.Collector) -> pytest.Collector | None:
    if path.parent.name != "engines" or path.name not in ENGINES:
        return None
    if not importlib.util.find_spec(path.name):
        return Missing.from_parent(parent, path=path)
    stubs.install()
    return None


def pytest_itemcollected(item: pytest.Item):
    """On a machine with a GPU, caches lie on it."""
    if stubs.on_gpu():
        item.add_marker("gpu")
