"""Scale, small enough for every run: `python -m tests.sim.scale` is the full size."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing

import pytest

from tests.sim import cluster, scale
from tests.sim.fleet import Fleet, Node
from tests.sim.links import Links


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


def test_nics_divide_their_speed_among_the_writes_they_carry():
    fleet, ended = Fleet(), {}
    links = Links(fleet, bytes_per_s=100.0)
    nodes = {name: Node(name, (1, 0), None) for name in (b"a", b"b", b"c", b"d")}

    def write(at, src, dst, nbytes):
        name = src + dst
        done = functools.partial(lambda name: ended.__setitem__(name, fleet.now), name)
        fleet.at(at, links.write, nodes[src], nodes[dst], nbytes, done)

    write(0.0, b"a", b"c", 100)  # alone until 0.5, then beside the next one, at c
    write(0.5, b"b", b"c", 100)  # alone again from 1.5, when 50 of its bytes are left
    write(0.0, b"d", b"a", 300)  # shares nothing: what a sends is another direction
    fleet.run(10.0)
    assert ended == {b"ac": 1.5, b"bc": 2.0, b"da": 3.0}
    assert not any(links.carried.values())


@pytest.mark.parametrize(
    ("striped", "n", "seconds"), [(True, 1, 1.0), (False, 1, 4.0), (False, 4, 4.0), (True, 4, 4.0)]
)
def test_a_write_goes_over_all_rails_or_over_the_next_one(striped, n, seconds):
    fleet, ended = Fleet(), []
    links = Links(fleet, bytes_per_s=25.0, n_rails=4, striped=striped)
    for _ in range(n):
        links.write(Node(b"a", (1, 0), None), Node(b"b", (1, 0), None), 100, lambda: ended.append(fleet.now))
    fleet.run(10.0)
    assert ended == [seconds] * n


def test_a_cluster_is_never_better_than_a_schedule_without_limits_and_near_it_with_memory_enough():
    case = cluster.Case(n_ranks=4, n_targets=4, n_rooms=40, load=0.5)
    best, found = cluster.perfect(case), cluster.simulated(case)
    scarce = cluster.simulated(dataclasses.replace(case, staging_mib=16))
    assert best.p50_ms <= found.p50_ms <= scarce.p50_ms
    assert found.p50_ms < 2 * best.p50_ms
