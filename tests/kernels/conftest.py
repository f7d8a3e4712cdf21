"""A GPU's driver where there is none."""

from __future__ import annotations

import pytest

from tests import cuda_double


@pytest.fixture
def gpu():
    """A process's GPUs, of which the calling thread uses device 0; no rule of theirs may be broken."""
    if why := cuda_double.missing():
        pytest.skip(why)
    with cuda_double.use() as gpu:
        gpu.reset()
        gpu["strict"] = 1
        with gpu.on(0):
            yield gpu
        broken = gpu.broken()
        gpu.reset()
        assert not broken
