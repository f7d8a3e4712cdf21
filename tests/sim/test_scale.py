"""Scale, small enough for every run: `python -m tests.sim.scale` is the full size."""

from __future__ import annotations

import pytest

from tests.sim import scale


@pytest.mark.parametrize("name", scale.EXPERIMENTS)
def test_small(name: str) -> None:
    scale.EXPERIMENTS[name](scale.SMALL)
