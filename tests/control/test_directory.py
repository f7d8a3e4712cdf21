"""The directory's table on a clock we turn by hand; what every directory does is in test_contract."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdstage.control import directory as table
from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.errors import PeerError, UsageError
from pdstage.layout.topology import Topology


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def advert(rank: int = 0, *, incarnation: int = 1, tp: int = 2, dp: int = 1, instance: str = "p0") -> Advert:
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
    directory.publish(advert(0), 10)
    directory.publish(advert(1), 10)
    clock.now += 9.5
    directory.publish(advert(0), 10)
    assert len(directory.lookup()) == 2
    clock.now += 0.5
    with pytest.raises(Incomplete) as caught:
        directory.lookup()
    assert caught.value.missing == (1,)
    clock.now += 9.5
    assert directory.instances() == {}


def test_what_the_directory_s_own_process_holds_needs_no_renewal(directory, clock):
    directory.publish(advert(0), None)
    directory.publish(advert(1), 10)
    clock.now += 1e6
    with pytest.raises(Incomplete) as caught:
        directory.lookup()
    assert caught.value.missing == (1,)
    assert directory.withdraw("p0", 0, 1)
    assert directory.instances() == {}


def test_another_shape_waits_for_the_old_leases(directory, clock):
    directory.publish(advert(1, tp=4), 10)
    with pytest.raises(Conflict, match=r"live with .* = \(1, 1, 1, 4\), not \(1, 1, 1, 2\)"):
        directory.publish(advert(0, tp=2, incarnation=2), 10)
    clock.now += 10
    directory.publish(advert(0, tp=2, incarnation=2), 10)


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf")])
def test_durations_that_no_other_carrier_has_are_refused(directory, ttl_s):
    with pytest.raises(UsageError, match="a lease of"):
        directory.publish(advert(), ttl_s)


def test_it_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(table, "MAX_ADVERTS", 2)
    directory = Directory(clock)
    directory.publish(advert(instance="a"), 10)
    directory.publish(advert(instance="b"), 10)
    with pytest.raises(PeerError, match="full: 2 ranks"):
        directory.publish(advert(instance="c"), 10)
    directory.publish(advert(instance="b"), 20)
    clock.now += 10
    directory.publish(advert(instance="c"), 10)
    assert list(directory.instances()) == ["b", "c"]


class AgainstAList(RuleBasedStateMachine):
    """The directory against the plainest model: a list of (place, incarnation, end)."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.directory = Directory(self.clock)
        self.model: dict[tuple[str, int], tuple[int, float]] = {}
        self.incarnation = 0

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, 3), ttl_s=st.floats(0.5, 20))
    def publish_new(self, name, rank, ttl_s):
        self.incarnation += 1
        self.directory.publish(advert(rank, dp=2, instance=name, incarnation=self.incarnation), ttl_s)
        self.model[name, rank] = self.incarnation, self.clock.now + ttl_s

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, 3), ttl_s=st.floats(0.5, 20))
    def renew(self, name, rank, ttl_s):
        if held := self.live().get((name, rank)):
            self.directory.publish(advert(rank, dp=2, instance=name, incarnation=held[0]), ttl_s)
            self.model[name, rank] = held[0], self.clock.now + ttl_s

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, 3), back=st.integers(0, 2))
    def withdraw(self, name, rank, back):
        incarnation = self.live().get((name, rank), (0, 0.0))[0] - back
        removed = self.directory.withdraw(name, rank, incarnation)
        assert not (removed and back)
        if removed:
            del self.model[name, rank]

    @rule(pass_s=st.floats(0, 15))
    def time_passes(self, pass_s):
        self.clock.now += pass_s

    def live(self) -> dict[tuple[str, int], tuple[int, float]]:
        return {place: held for place, held in self.model.items() if held[1] > self.clock.now}

    @invariant()
    def lookups_agree(self):
        live = self.live()
        for name in "ab":
            for dp_rank in (0, 1):
                wanted = [(name, rank) for rank in (2 * dp_rank, 2 * dp_rank + 1)]
                try:
                    found = [a.incarnation for a in self.directory.lookup(name, dp_rank)]
                except Incomplete as error:
                    known = any(place[0] == name for place in live)
                    assert error.missing == tuple(p[1] for p in wanted if p not in live and known)
                    assert any(p not in live for p in wanted)
                else:
                    assert found == [live[p][0] for p in wanted]
        assert sum(map(len, self.directory.instances().values())) == len(live)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
