"""Least squares finds the numbers that made the times, and no number below 0."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import fields, replace

from pdstage.errors import UsageError
from pdstage.plan.cost import CostModel
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.calibrate.fit import Timed, Timings, model, non_negative

TRUE = CostModel(
    descriptors=tuple((run, 2.5e-6 + run / 5e9 + 20e-6 * (run == 1 << 16)) for run in pools.RUNS),  # with a step
    post_s=80e-6, bulk_bytes_per_s=6e9, gather_bytes_per_s=7e9,
    gather_run_s=30e-9, scatter_bytes_per_s=6e9, scatter_run_s=40e-9, lease_s=250e-6, chunk_s=150e-6, overlap=0.6,
)  # fmt: skip
CHUNK = 4 << 20
ROOM_S = 400e-6


def timings(noise: float = 0.0) -> Timings:
    """What a sweep would time if `TRUE` were the whole truth, each time off by up to `noise` of itself."""
    rng = random.Random(7)

    def timed(nbytes: int, n: int, chunks: int, seconds: float) -> Timed:
        return Timed(nbytes, n, chunks, seconds * rng.uniform(1 - noise, 1 + noise))

    sizes = [
        (b, b // run, -(-b // CHUNK)) for run in pools.RUNS for b in (256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20)
    ]
    small = [size for size in sizes if size[2] == 1]
    return Timings(
        gather=[timed(b, n, 1, 20e-6 + n * TRUE.gather_run_s + b / TRUE.gather_bytes_per_s) for b, n, _ in small],
        scatter=[timed(b, n, 1, 20e-6 + n * TRUE.scatter_run_s + b / TRUE.scatter_bytes_per_s) for b, n, _ in small],
        direct=[timed(b, n, c, ROOM_S + TRUE.direct_s(b, n, c)) for b, n, c in sizes],
        staged=[timed(b, n, c, ROOM_S + TRUE.staged_s(b, n, c)) for b, n, c in sizes],
    )


def test_noisy_times_still_choose_the_path_where_it_matters():
    """Wherever one path costs a quarter more than the other, times that are off by a tenth give the same choice."""
    found = model(timings(noise=0.1))
    for run in pools.RUNS:
        for nbytes in (1 << 20, 16 << 20, 256 << 20):
            what = nbytes, nbytes // run, -(-nbytes // CHUNK)
            direct_s, staged_s = TRUE.direct_s(*what), TRUE.staged_s(*what)
            if max(direct_s, staged_s) > 1.25 * min(direct_s, staged_s):
                assert found.prefers_direct(*what) == (direct_s < staged_s), what


def test_no_number_is_below_zero():
    """Times that fall with the bytes: the price of a byte is 0, and the constant takes what is left."""
    assert non_negative([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]], [3.0, 2.0, 1.0], [1.0] * 3) == pytest.approx([2.0, 0.0])
    with pytest.raises(UsageError, match="1 timings for 2 numbers"):
        non_negative([[1.0], [2.0]], [3.0], [3.0])


@pytest.mark.parametrize("overlap", [0.0, 0.3, TRUE.overlap, 1.0])
def test_exact_times_give_exact_numbers(overlap):
    held, true = timings(), replace(TRUE, overlap=overlap)
    staged = [one._replace(seconds=ROOM_S + true.staged_s(*one[:3])) for one in held.staged]
    found = model(held._replace(staged=staged))
    assert found.overlap == pytest.approx(overlap, abs=0.03)
    for field in fields(CostModel) if overlap == TRUE.overlap else ():
        ours, wanted = (np.array(getattr(cost, field.name)) for cost in (found, TRUE))
        assert ours == pytest.approx(wanted, rel=0.02), field.name
