"""A share of the seeds that `make sim` runs, and that equal seeds do equal things."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import rows
from tests.sim.digests import N_SEEDS as N_DIGESTS
from tests.sim.digests import digest, frozen
from tests.sim.run import run, run_many
from tests.sim.scenario import draw

ROOT = Path(__file__).resolve().parent.parent.parent
N_SEEDS, N_BLOCKS = 320, 8


@pytest.mark.full  # `make sim` runs ten times as many
@pytest.mark.parametrize("block", range(N_BLOCKS))
def test_every_invariant_holds_under_every_fault(block: int) -> None:
    """I1 to I16. A failing seed is explained by `pdstage sim --seed N`."""
    n = N_SEEDS // N_BLOCKS
    summary = run_many(range(block * n, (block + 1) * n), workers=1)
    assert not summary.failed
    assert summary.n_faulty >= n * 500


def test_every_kind_of_fault_and_every_end_of_a_room_comes() -> None:
    summary = run_many(range(5000, 5060), workers=1)
    assert not summary.failed
    faults = {"drop", "twice", "fail", "alter", "crash", "close", "stall", "resume", "cut", "heal", "abort", "idle"}
    assert faults <= set(summary.counts)
    assert {"Success", "Aborted", "DeadlineExceeded", "PeerError", "TransportError"} <= set(summary.outcomes)


@pytest.mark.parametrize("block", rows(range(N_BLOCKS), full=range(3, N_BLOCKS)))
def test_seeds_do_what_they_did(block: int) -> None:
    """An oracle for changes of structure. Where behaviour is meant to change: `python -m tests.sim.digests`."""
    seeds = range(block, N_DIGESTS, N_BLOCKS)
    was = frozen()
    differ = [seed for seed in seeds if digest(seed) != was[seed]]
    assert not differ, f"seeds {differ} do something else than before: `pdstage sim --seed {differ[0]}` on both sides"


def test_equal_seeds_do_equal_things() -> None:
    """Byte for byte, in this process and in others with other hashes of strings."""
    seeds = [3, 4, 17]
    here = [digest(seed) for seed in seeds]
    assert [digest(seed) for seed in seeds] == here
    code = f"from tests.sim.digests import digest; print([digest(seed) for seed in {seeds}])"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        there = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env
        )
        assert there.stdout.strip() == str(here)


def test_a_schedule_says_again_what_its_seed_did() -> None:
    """The events alone, without the scheduler that drew them."""
    drawn = run(11, tracing=True)
    assert run(11, scenario=draw(11), events=drawn.events, tracing=True).trace == drawn.trace
