"""A share of the seeds that `make sim` runs of whole nodes, that equal seeds do equal things, and what is reported."""

from __future__ import annotations

import pytest

from tests.rows import rows
from tests.sim.manager.run import run

N_SEEDS, N_BLOCKS = 160, 8


@pytest.mark.parametrize("block", rows(range(N_BLOCKS), full=range(1, N_BLOCKS)))
def test_whole_nodes_keep_what_they_promise(block: int) -> None:
    """I1, I2, I5, I10, I14, with their threads in any order. A failing seed: `python -m tests.sim.manager --seed N`."""
    n = N_SEEDS // N_BLOCKS
    assert sum(run(seed).outcomes["SUCCESS"] for seed in range(block * n, (block + 1) * n)) > n
