"""What nodes tell their observers: each room's life, each stage of each chunk, alike on both sides; and that nobody who
observes harms a room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict

import pytest

from pdstage import Config, State, UsageError
from pdstage.manager.observer import RoomBound, RoomEnded, RoomOpened, RoomReleased, StageOver
from tests.manager.engine import Event, Rank, drive
from tests.rows import inline_or_thread

ROLES = ("prefill", "decode")
KINDS = ("lease_wait", "gather", "write", "scatter", "direct", "aux")


class Recorder:
    def __init__(self) -> None:
        self.events = []
        self.threads = {role: set() for role in ROLES}

    def observe(self, origin, event) -> None:
        self.events.append((origin, event))
        self.threads[origin.role].add(threading.get_ident())

    def of(self, role, kind):
        return [event for origin, event in self.events if origin.role == role and isinstance(event, kind)]

    def stages(self, role):
        return {kind: [s for s in self.of(role, StageOver) if s.kind == kind] for kind in KINDS}


@pytest.fixture
def seen() -> Recorder:
    return Recorder()


@inline_or_thread
def test_a_staged_rooms_life_and_its_stages(site, seen, progress):
    before = time.monotonic()
    pair = site.pair(observers=(seen,), path="staged", progress=progress)
    room = pair.begin("r", 50, cuts=(20,))
    if progress == "inline":
        pair.end(room)
    else:
        for handle in room[:2]:
            handle.wait_released(20)
        # What is told at the close itself comes from there: so looked at before.
        assert seen.threads == {node.role: {node.driver._thread.ident} for node in pair.nodes}
    assert pair.dst.holds("r", 50, room.into)
    for node in pair.nodes:
        node.close()
    after = time.monotonic()
    for role in ROLES:
        (opened,), (bound,), (ended,) = (seen.of(role, kind) for kind in (RoomOpened, RoomBound, RoomEnded))
        (released,) = seen.of(role, RoomReleased)
        assert {event.room for event in (opened, bound, ended, released)} == {"r"}
        assert (ended.state, ended.reason, ended.error) == (State.SUCCESS, "", "")
        assert (ended.opened_at, ended.bound_at) == (opened.at, bound.at)
        assert before <= opened.at <= bound.at <= ended.moved_at <= ended.ended_at <= released.at <= after
    src, dst = seen.stages("prefill"), seen.stages("decode")
    n = len(src["gather"])
    assert n >= 2
    assert not (src["direct"] or src["aux"] or src["scatter"])
    assert [kind for kind in KINDS if dst[kind]] == ["scatter"]
    by_chunk = defaultdict(list)
    for stage in (*src["lease_wait"], *src["gather"], *src["write"], *dst["scatter"]):
        by_chunk[stage.session, stage.epoch, stage.chunk].append(stage)
    assert len(by_chunk) == n
    for stages in by_chunk.values():
        assert [stage.kind for stage in stages] == ["lease_wait", "gather", "write", "scatter"]
        assert len({stage.lane for stage in stages}) == 1
        assert {stage.room for stage in stages} == {"r"}
        assert not any(stage.error for stage in stages)
        times = [t for stage in stages[:3] for t in (stage.began_at, stage.ended_at)]
        assert times == sorted(times)
        assert before <= times[0]
        scatter = stages[3]
        assert stages[1].ended_at <= scatter.began_at < scatter.ended_at <= after
        assert scatter.nbytes == stages[1].nbytes > 0
    assert sum(stage.nbytes for stage in dst["scatter"]) == 2 * 3 * 50 * 4 * 16  # K and V of 3 layers


def test_a_room_whose_prefill_is_still_looked_up_ends_for_its_observer_too(site, seen):
    d = site.decode(Rank(), observers=(seen,))
    d.receive("early", site.address).abort("changed its mind")
    with pytest.raises(UsageError):
        d.receive("nowhere", "no address")
    drive([d], lambda: seen.of("decode", RoomReleased))
    (ended,) = seen.of("decode", RoomEnded)
    assert (ended.room, ended.state, ended.error) == ("early", State.FAILED, "Aborted")
    assert "changed its mind" in ended.reason
    assert ended.bound_at is ended.moved_at is None
    assert [event.room for event in seen.of("decode", RoomOpened)] == ["early"], "the other never began"
    assert not d.observed._rooms


def test_a_name_used_again_is_another_room(site, seen):
    pair = site.pair(observers=(seen,))
    for _ in range(3):
        pair.move(7)
    for role in ROLES:
        assert [event.number for event in seen.of(role, RoomEnded)] == [1, 2, 3]
    assert len({stage.epoch for stage in seen.of("prefill", StageOver)}) == 3


def test_an_observer_that_raises_is_asked_no_more_and_harms_no_room(site, seen, caplog):
    class Broken:
        n_asked = 0

        def observe(self, origin, event) -> None:
            self.n_asked += 1
            raise IndexError("its own bug")

    broken = Broken()
    with caplog.at_level(logging.ERROR, "pdstage"):
        site.pair(observers=(broken, seen), path="staged").move(1)
    assert broken.n_asked == 2  # once by each node
    assert [record.message.count("is asked no more") for record in caplog.records] == [1, 1]
    assert [len(seen.of(role, RoomReleased)) for role in ROLES] == [1, 1]


def test_a_driver_that_breaks_ends_its_rooms_for_the_observer(site, seen, monkeypatch):
    d = site.decode(Rank(), observers=(seen,))
    d.receive("r", site.address)
    monkeypatch.setattr(d.transport, "poll", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        d.turn()
    (ended,) = seen.of("decode", RoomEnded)
    assert ended.state is State.FAILED
    assert "ZeroDivisionError" in ended.reason


def test_a_write_whose_session_is_lost_is_told_once(site, seen, monkeypatch):
    pair = site.pair(path="direct", prefill={"observers": (seen,)})
    p = pair.p
    monkeypatch.setattr(p.transport, "poll", list)  # the end of no post is ever seen
    room = pair.open(1)
    room.sender.chunk(room.pages, 8)
    drive(pair.nodes, p._in_flight)
    pair.d.close(0.1)
    drive([p], lambda: bool(seen.of("prefill", StageOver)))
    (stage,) = seen.of("prefill", StageOver)
    assert stage.kind == "direct"
    assert "session was lost" in stage.error
    assert not p.observed._stages


def test_a_chunk_that_waited_in_vain_and_went_direct(site, seen):
    """Decode's only lane is full of leases nobody writes: a chunk falls back, and its wait is told before its write."""
    config = Config(retry_s=0.02, fall_back_after_s=0.1, recall_after_s=30.0)
    lane = {"staging_nbytes": 8192, "n_lanes": 1}
    pair = site.pair(config=config, path="auto", prefill={"observers": (seen,)}, decode=lane)
    pair.p.core.chunks._choose = lambda chunk: False
    first, second = pair.open("first", 16), pair.open("second", 16)  # 6 KiB each: two do not fit the lane
    first.sender.chunk(first.pages, 16, ready=Event())
    drive(pair.nodes, lambda: bool(pair.d.core.leases.live()))
    second.sender.chunk(second.pages, 16)
    second.sender.finish()
    drive(pair.nodes, lambda: second.sender.state is State.SUCCESS)
    waited, written = seen.of("prefill", StageOver)
    assert (waited.kind, written.kind, written.lane) == ("lease_wait", "direct", None)
    assert waited.ended_at - waited.began_at >= 0.1
    assert waited.ended_at <= written.began_at
    assert {waited.room, written.room} == {"second"}
