"""A share of the seeds that `make sim` runs of whole nodes, that equal seeds do equal things, and what is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import rows
from tests.sim.manager.primitives import Lock, SimpleQueue, Thread
from tests.sim.manager.run import run, run_many
from tests.sim.manager.scenario import draw
from tests.sim.manager.scheduler import Process, Scheduler, Violation

ROOT = Path(__file__).resolve().parents[3]
N_SEEDS, N_BLOCKS = 160, 4


@pytest.mark.parametrize("block", rows(range(N_BLOCKS), full=range(1, N_BLOCKS)))
def test_whole_nodes_keep_what_they_promise(block: int) -> None:
    """I1, I2, I5, I10, I14, with their threads in any order. A failing seed: `python -m tests.sim.manager --seed N`."""
    n = N_SEEDS // N_BLOCKS
    assert run_many(range(block * n, (block + 1) * n))["SUCCESS"] > n


def test_every_kind_of_scenario_is_among_the_seeds() -> None:
    """And each of those fails nothing by itself: FULL=1 runs them all in the tests above."""
    drawn = [draw(seed) for seed in range(N_SEEDS)]
    assert {one.kind for scenario in drawn for one in scenario.disturbances} == {"stop", "jump", "cut", "end", "close"}
    assert {scenario.threads for scenario in drawn} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {how for scenario in drawn for room in scenario.rooms for how in room.waits} >= {"wait", "poll", "async"}
    assert any(scenario.calm for scenario in drawn)


def test_equal_seeds_do_equal_things() -> None:
    """Step by step, in this process and in others with other hashes of strings."""
    seeds = [2, 5, 9]
    here = [run(seed).digest for seed in seeds]
    assert [run(seed).digest for seed in seeds] == here
    code = f"from tests.sim.manager.run import run; print([run(seed).digest for seed in {seeds}])"
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        there = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env
        )
        assert there.stdout.strip() == str(here)


def scheduled(switches: float = 0.5, seed: int = 1) -> Scheduler:
    return Scheduler(seed, switches=switches, lines=0.0, deep=False, max_steps=10_000)


def test_a_deadlock_is_told_with_every_stack() -> None:
    scheduler = scheduled(1.0)
    a, b = Lock(scheduler), Lock(scheduler)

    def take(first: Lock, second: Lock) -> None:
        for _ in range(50):
            with first, second:
                pass

    def main() -> None:
        other = Thread(scheduler, lambda: take(b, a), "other")
        other.start()
        take(a, b)
        other.join()

    with pytest.raises(Violation, match=r"nothing is to come(?s:.)*main of test(?s:.)*other of test(?s:.)*with first"):
        scheduler.run(main, Process("test"))


def test_what_a_thread_raises_ends_the_run() -> None:
    scheduler = scheduled()

    def main() -> None:
        Thread(scheduler, lambda: 1 // 0, "broken").start()
        SimpleQueue(scheduler).get()

    with pytest.raises(ZeroDivisionError):
        scheduler.run(main, Process("test"))


def test_time_goes_on_only_when_all_wait() -> None:
    scheduler, seen = scheduled(), []

    def main() -> None:
        began_at = scheduler.clock()
        scheduler.at(100.0, lambda: seen.append("event"))
        assert not scheduler.block("time", 50.0)
        assert 50.0 <= scheduler.clock() - began_at < 50.1
        assert seen == []
        scheduler.block("time", 60.0)
        assert seen == ["event"]

    scheduler.run(main, Process("test"))
