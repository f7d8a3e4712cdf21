"""Scale, small enough for every full run: `make scale` is the full size."""

from __future__ import annotations

import pytest

from tests.sim import scale


@pytest.mark.full
def test_small() -> None:
    scale.main(60, 100)
