"""The directory's table on a clock we turn by hand; what every directory does is in test_contract."""

from __future__ import annotations

import math

import pytest

from pdstage import PeerError, Topology, UsageError
from pdstage.control.directory import Advert, Conflict, Directory, Incomplete


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def advert(rank: int = 0, *, incarnation: int = 1, tp: int = 1, dp: int = 1, instance: str = "p0") -> Advert:
    place = Topology(tp_size=tp, tp_rank=rank % tp, dp_size=dp, dp_rank=rank // tp)
    endpoint = f"tcp://127.0.0.1:{9000 + rank}"
    return Advert(instance=instance, topology=place, endpoint=endpoint, incarnation=incarnation, layout="0f" * 8)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock) -> Directory:
    return Directory(clock)


def test_an_engine_of_more_ranks_than_the_directory_takes_is_refused(directory):
    """A lookup names those that are missing: of 2^30 ranks it would hardly end."""
    with pytest.raises(UsageError, match="one of 1073741824 ranks"):
        directory.publish(advert(tp=1 << 15, dp=1 << 15), 10)
    with pytest.raises(Incomplete, match="no rank"):
        directory.lookup()


def test_a_lease_ends_and_is_renewed(directory, clock):
    one, other = (advert(rank, tp=2) for rank in (0, 1))
    directory.publish(one, 10)
    directory.publish(other, 10)
    clock.now += 9.5
    directory.publish(one, 10)
    assert len(directory.lookup()) == 2
    clock.now += 0.5
    with pytest.raises(Incomplete) as caught:
        directory.lookup()
    assert caught.value.missing == (1,)
    with pytest.raises(Conflict):
        directory.publish(advert(0, tp=4, incarnation=2), 10)
    clock.now += 9.5
    assert [left_s for _, left_s in directory.instances()["p0"]] == [0.0, -9.5], "who was lost can be named"
    directory.withdraw(other)
    assert [one.topology.unique_rank for one, _ in directory.instances()["p0"]] == [0], "it closed in order after all"
    directory.publish(advert(0, tp=4, incarnation=2), 10)


def test_what_the_directory_s_own_process_holds_needs_no_renewal(directory, clock):
    own, other = (advert(rank, tp=2) for rank in (0, 1))
    directory.publish(own, None)
    directory.publish(other, 10)
    clock.now += 1e6
    with pytest.raises(Incomplete) as caught:
        directory.lookup()
    assert caught.value.missing == (1,)
    directory.withdraw(own)
    assert directory.instances() == {}


def test_durations_that_no_other_carrier_has_are_refused(directory):
    for ttl_s in (math.nan, math.inf):
        with pytest.raises(UsageError, match="a lease of"):
            directory.publish(advert(), ttl_s)


def test_it_is_bounded(clock, monkeypatch):
    monkeypatch.setattr("pdstage.control.directory.MAX_ADVERTS", 2)
    directory = Directory(clock)
    directory.publish(advert(instance="a"), 10)
    directory.publish(advert(instance="b"), 10)
    with pytest.raises(PeerError, match="full: 2 ranks"):
        directory.publish(advert(instance="c"), 10)
    directory.publish(advert(instance="b"), 20)
    clock.now += 10
    directory.publish(advert(instance="c"), 10)
    assert list(directory.instances()) == ["a", "b", "c"]
