"""Skips what this machine cannot run, and watches for what a test leaves behind."""

from __future__ import annotations

import importlib.util
import threading

import pytest

from tests import descriptors


def _n_cuda_devices() -> int:
    if not importlib.util.find_spec("torch"):
        return 0
    import torch  # noqa: PLC0415  (most tests need no torch, and it costs seconds to import)

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs more CUDA devices than there are, and says so."""
    needs = {"gpu": 1, "multigpu": 2}
    marked = [(item, n) for item in items for mark, n in needs.items() if item.get_closest_marker(mark)]
    if not marked:
        return
    held = _n_cuda_devices()
    for item, n in marked:
        if n > held:
            item.add_marker(pytest.mark.skip(reason=f"needs {n} CUDA devices, this machine has {held}"))


@pytest.fixture
def no_leaks() -> object:
    """Fails the test if it leaves threads or open file descriptors behind."""
    threads, before = set(threading.enumerate()), descriptors.kinds()
    yield
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert not left, f"threads left behind: {left}"
    assert not descriptors.left(before), "file descriptors left behind"
