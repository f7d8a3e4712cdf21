"""The directory's table: leases on a clock we turn by hand, take-over, shapes, and what is missing."""

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
    def __init__(self) -> None:
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
def directory(clock: Clock) -> Directory:
    return Directory(clock)


def test_lookup_answers_by_group_rank(directory: Directory) -> None:
    for rank in (3, 0, 2, 1):
        directory.publish(advert(rank, tp=4), 10)
    assert [a.topology.tp_rank for a in directory.lookup()] == [0, 1, 2, 3]
    assert directory.lookup("p0", 0) == directory.lookup()


def test_an_engine_of_more_ranks_than_the_directory_takes_is_refused(directory: Directory) -> None:
    """A lookup names those that are missing: of 2^30 ranks it would hardly end."""
    with pytest.raises(UsageError, match="one of 1073741824 ranks"):
        directory.publish(advert(tp=1 << 15, dp=1 << 15), 10)
    with pytest.raises(Incomplete, match="no rank"):
        directory.lookup()


def test_every_kind_of_rank_is_wanted(directory: Directory) -> None:
    shape = {"tp_size": 2, "pp_size": 2, "cp_size": 2, "dp_size": 2}
    places = [
        Topology(**shape, tp_rank=t, pp_rank=p, cp_rank=c, dp_rank=d)
        for t in range(2)
        for p in range(2)
        for c in range(2)
        for d in range(2)
    ]
    for place in places:
        directory.publish(Advert(instance="p", topology=place, endpoint="e", incarnation=1, layout=""), 10)
    for dp_rank in (0, 1):
        found = directory.lookup("p", dp_rank)
        assert [a.topology.group_rank for a in found] == list(range(8))
        assert {a.topology.dp_rank for a in found} == {dp_rank}


def test_missing_ranks_are_named(directory: Directory) -> None:
    for rank in (0, 3, 5):
        directory.publish(advert(rank, tp=4, dp=2), 10)
    with pytest.raises(Incomplete, match="2 of 4 ranks of dp replica 0 are not registered, ranks 1, 2") as caught:
        directory.lookup(dp_rank=0)
    assert caught.value.missing == (1, 2)
    with pytest.raises(Incomplete) as caught:
        directory.lookup(dp_rank=1)
    assert caught.value.missing == (4, 6, 7)


def test_an_empty_directory_is_incomplete(directory: Directory) -> None:
    for instance in (None, "p0"):
        with pytest.raises(Incomplete, match="registered") as caught:
            directory.lookup(instance)
        assert caught.value.missing == ()


def test_choices_that_must_be_made_are_named(directory: Directory) -> None:
    directory.publish(advert(tp=1, dp=2), 10)
    with pytest.raises(UsageError, match="2 dp replicas"):
        directory.lookup()
    for dp_rank in (2, -1):
        with pytest.raises(UsageError, match=f"no dp replica {dp_rank}"):
            directory.lookup(dp_rank=dp_rank)
    directory.publish(advert(instance="p1", tp=1), 10)
    with pytest.raises(UsageError, match=r"2 instances are registered \(p0, p1\)"):
        directory.lookup()
    assert directory.lookup("p1")


def test_a_lease_ends_and_is_renewed(directory: Directory, clock: Clock) -> None:
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


def test_what_the_directory_s_own_process_holds_needs_no_renewal(directory: Directory, clock: Clock) -> None:
    directory.publish(advert(0), None)
    directory.publish(advert(1), 10)
    clock.now += 1e6
    with pytest.raises(Incomplete) as caught:
        directory.lookup()
    assert caught.value.missing == (1,)
    assert directory.withdraw("p0", 0, 1)
    assert directory.instances() == {}


def test_a_new_process_takes_over_at_once_and_for_good(directory: Directory) -> None:
    directory.publish(advert(0, tp=1, incarnation=1), 10)
    directory.publish(advert(0, tp=1, incarnation=2), 10)
    assert directory.lookup()[0].incarnation == 2
    with pytest.raises(Conflict, match=r"taken over by a newer process at tcp://127\.0\.0\.1:9000"):
        directory.publish(advert(0, tp=1, incarnation=1), 10)
    directory.publish(advert(0, tp=1, incarnation=2), 10)
    with pytest.raises(Conflict):
        directory.publish(advert(0, tp=1, incarnation=1), 10)
    assert not directory.withdraw("p0", 0, 1), "a late withdrawal does not remove the successor"
    assert directory.lookup()[0].incarnation == 2
    assert directory.withdraw("p0", 0, 2)
    assert not directory.withdraw("p0", 0, 2)


def test_another_shape_waits_for_the_old_leases(directory: Directory, clock: Clock) -> None:
    directory.publish(advert(1, tp=4), 10)
    with pytest.raises(Conflict, match=r"live with .* = \(1, 1, 1, 4\), not \(1, 1, 1, 2\)"):
        directory.publish(advert(0, tp=2, incarnation=2), 10)
    clock.now += 10
    directory.publish(advert(0, tp=2, incarnation=2), 10)


@pytest.mark.parametrize("ttl_s", [0, -1, 3601, float("nan"), float("inf")])
def test_bad_durations_are_refused(directory: Directory, ttl_s: float) -> None:
    with pytest.raises(UsageError, match="a lease of"):
        directory.publish(advert(), ttl_s)


@pytest.mark.parametrize("name", ["", "x" * 257, "line\nbreak"])
def test_bad_names_are_refused(directory: Directory, name: str) -> None:
    with pytest.raises(UsageError, match="instance name"):
        directory.publish(advert(instance=name), 10)


def test_it_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.directory = Directory(self.clock)
        self.model: dict[tuple[str, int], tuple[int, float]] = {}
        self.incarnation = 0

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, 3), ttl_s=st.floats(0.5, 20))
    def publish_new(self, name: str, rank: int, ttl_s: float) -> None:
        self.incarnation += 1
        self.directory.publish(advert(rank, dp=2, instance=name, incarnation=self.incarnation), ttl_s)
        self.model[name, rank] = self.incarnation, self.clock.now + ttl_s

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, 3), ttl_s=st.floats(0.5, 20))
    def renew(self, name: str, rank: int, ttl_s: float) -> None:
        if held := self.live().get((name, rank)):
            self.directory.publish(advert(rank, dp=2, instance=name, incarnation=held[0]), ttl_s)
            self.model[name, rank] = held[0], self.clock.now + ttl_s

    @rule(name=st.sampled_from("ab"), rank=st.integers(0, 3), back=st.integers(0, 2))
    def withdraw(self, name: str, rank: int, back: int) -> None:
        incarnation = self.live().get((name, rank), (0, 0.0))[0] - back
        removed = self.directory.withdraw(name, rank, incarnation)
        assert not (removed and back)
        if removed:
            del self.model[name, rank]

    @rule(pass_s=st.floats(0, 15))
    def time_passes(self, pass_s: float) -> None:
        self.clock.now += pass_s

    def live(self) -> dict[tuple[str, int], tuple[int, float]]:
        return {place: held for place, held in self.model.items() if held[1] > self.clock.now}

    @invariant()
    def lookups_agree(self) -> None:
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
