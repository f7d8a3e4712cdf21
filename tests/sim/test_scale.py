"""Scale, small enough for every run: `python -m tests.sim.scale` is the full size."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.sim import scale


def _run(name: str) -> None:
    scale.EXPERIMENTS[name](scale.SMALL)


@pytest.mark.full  # `make scale` runs them at their full size
@pytest.mark.parametrize("name", scale.EXPERIMENTS)
def test_small(name: str) -> None:
    """In a process of its own: what other tests leave for the garbage collector is not the fleet's."""
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(name,))
    process.start()
    process.join()
    assert process.exitcode == 0, "see its traceback"
