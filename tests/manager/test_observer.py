"""What nodes tell their observers: each room's life, each stage of each chunk, alike on both sides; and that nobody who
observes harms a room.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest

from pdstage import Config, State, UsageError
from pdstage.manager.observer import RoomBound, RoomEnded, RoomOpened, RoomReleased, StageOver
from tests.manager.engine import Rank, drive

TOKENS = 50


class Recorder:
    def __init__(self) -> None:
        self.events = []
        self.threads = set()

    def observe(self, origin, event) -> None:
        self.events.append((origin, event))
        self.threads.add(threading.get_ident())

    def of(self, role, kind):
        return [event for origin, event in self.events if origin.role == role and isinstance(event, kind)]

    def stages(self, role):
        return {kind: [s for s in self.of(role, StageOver) if s.kind == kind] for kind in _KINDS}


_KINDS = ("lease_wait", "gather", "write", "scatter", "direct", "aux")


def move(site, observers, *, room="r", done=None, **options):
    """One room of two chunks, each way that `options` name; gives both handles."""
    src, dst = Rank(), Rank(hnd=True)
    p = site.prefill(src, observers=observers, **options)
    d = site.decode(dst, observers=observers, **options)
    into, pages = dst.allocate(TOKENS), src.allocate(TOKENS)
    src.write(1, TOKENS, pages)
    receiver, sender = d.receive(room, site.address), p.send(room)
    receiver.bind(into, TOKENS)
    sender.chunk(pages, (0, 20))
    sender.chunk(pages, (20, TOKENS))
    sender.finish()
    if p.driver.inline:
        drive([p, d], lambda: receiver.released and sender.released)
    else:
        receiver.wait_released(20)
        sender.wait_released(20)
    assert receiver.state is State.SUCCESS
    assert dst.holds(1, TOKENS, into)
    p.close()
    d.close()
    return sender, receiver


@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("copy_thread", [False, True])
def test_a_staged_rooms_life_and_its_stages(site, monkeypatch, progress, copy_thread):
    monkeypatch.setattr("pdstage.stager._LARGE_NBYTES", 0)  # so that the copier makes these small copies too
    seen, before = Recorder(), time.monotonic()
    move(site, (seen,), path="staged", progress=progress, copy_thread=copy_thread)
    after = time.monotonic()
    for role in ("prefill", "decode"):
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
    assert [kind for kind in _KINDS if dst[kind]] == ["scatter"]
    by_chunk = {
        (s.session, s.epoch, s.chunk): [s]
        for s in sorted(src["lease_wait"], key=lambda stage: stage.chunk)
    }  # fmt: skip
    assert len(by_chunk) == n
    for stage in (*src["gather"], *src["write"], *dst["scatter"]):
        by_chunk[stage.session, stage.epoch, stage.chunk].append(stage)
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
    assert sum(stage.nbytes for stage in dst["scatter"]) == 2 * 3 * TOKENS * 4 * 16  # K and V of 3 layers


def test_a_direct_room_has_writes_without_lanes(site):
    seen = Recorder()
    move(site, (seen,), path="direct")
    src = seen.stages("prefill")
    assert len(src["direct"]) >= 2
    assert {stage.lane for stage in src["direct"]} == {None}
    assert not (src["gather"] or src["write"] or src["lease_wait"] or seen.stages("decode")["scatter"])


def test_nodes_with_a_thread_tell_it_on_that_thread_alone(site):
    seen = {role: Recorder() for role in ("prefill", "decode")}
    src, dst = Rank(), Rank()
    p = site.prefill(src, observers=(seen["prefill"],), progress="thread")
    d = site.decode(dst, observers=(seen["decode"],), progress="thread")
    for number in range(20):
        receiver, sender = d.receive(number, site.address), p.send(number)
        receiver.bind(dst.allocate(8), 8)
        sender.chunk(src.allocate(8), (0, 8))
        sender.finish()
        receiver.wait_released(20)
        sender.wait_released(20)
    # What is told at the close itself comes from there: so looked at before.
    assert seen["prefill"].threads == {p.driver._thread.ident}
    assert seen["decode"].threads == {d.driver._thread.ident}


def test_a_room_that_fails_says_why(site):
    seen = Recorder()
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, observers=(seen,)), site.decode(dst, observers=(seen,))
    receiver, sender = d.receive("gone", site.address), p.send("gone")
    receiver.bind(dst.allocate(8), 8)
    drive([p, d], lambda: sender.state is State.WAITING_FOR_INPUT)
    receiver.abort("no longer wanted")
    drive([p, d], lambda: receiver.released and sender.released)
    for role in ("prefill", "decode"):
        (ended,) = seen.of(role, RoomEnded)
        assert (ended.state, ended.error, ended.moved_at) == (State.FAILED, "Aborted", None)
        assert "no longer wanted" in ended.reason
        assert ended.bound_at is not None
        assert len(seen.of(role, RoomReleased)) == 1


def test_a_room_whose_prefill_is_still_looked_up_ends_for_its_observer_too(site):
    seen = Recorder()
    d = site.decode(Rank(), observers=(seen,))
    receiver = d.receive("early", site.address)
    receiver.abort("changed its mind")
    with pytest.raises(UsageError):
        d.receive("nowhere", "no address")
    drive([d], lambda: seen.of("decode", RoomReleased))
    (ended,) = seen.of("decode", RoomEnded)
    assert (ended.room, ended.state, ended.bound_at) == ("early", State.FAILED, None)
    assert [event.room for event in seen.of("decode", RoomOpened)] == ["early"], "the other never began"
    assert not d.observed._rooms


def test_a_name_used_again_is_another_room(site):
    seen = Recorder()
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, observers=(seen,)), site.decode(dst, observers=(seen,))
    for _ in range(3):
        receiver, sender = d.receive(7, site.address), p.send(7)
        receiver.bind(dst.allocate(8), 8)
        sender.chunk(src.allocate(8), (0, 8))
        sender.finish()
        drive([p, d], lambda r=receiver, s=sender: r.released and s.released)
    for role in ("prefill", "decode"):
        assert [event.number for event in seen.of(role, RoomEnded)] == [1, 2, 3]
    epochs = {stage.epoch for stage in seen.of("prefill", StageOver)}
    assert len(epochs) == 3


def test_an_observer_that_raises_is_asked_no_more_and_harms_no_room(site, caplog):
    class Broken:
        n_asked = 0

        def observe(self, origin, event) -> None:
            self.n_asked += 1
            raise IndexError("its own bug")

    broken, seen = Broken(), Recorder()
    with caplog.at_level(logging.ERROR, "pdstage"):
        move(site, (broken, seen), path="staged")
    assert broken.n_asked == 2  # once by each node
    assert [record.message.count("is asked no more") for record in caplog.records] == [1, 1]
    assert [len(seen.of(role, RoomReleased)) for role in ("prefill", "decode")] == [1, 1]


def test_a_driver_that_breaks_ends_its_rooms_for_the_observer(site, monkeypatch):
    seen = Recorder()
    d = site.decode(Rank(), observers=(seen,))
    d.receive("r", site.address)
    monkeypatch.setattr(d.transport, "poll", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        d.turn()
    d.close(0.1)
    (ended,) = seen.of("decode", RoomEnded)
    assert ended.state is State.FAILED
    assert "ZeroDivisionError" in ended.reason


def test_a_write_whose_session_is_lost_is_told_once(site, monkeypatch):
    seen = Recorder()
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, path="direct", observers=(seen,)), site.decode(dst, path="direct")
    monkeypatch.setattr(p.transport, "poll", list)  # the end of no post is ever seen
    receiver, sender = d.receive(1, site.address), p.send(1)
    receiver.bind(dst.allocate(8), 8)
    sender.chunk(src.allocate(8), (0, 8))
    drive([p, d], lambda: p.data_path.writing)
    d.close(0.1)
    drive([p], lambda: bool(seen.of("prefill", StageOver)))
    (stage,) = seen.of("prefill", StageOver)
    assert stage.kind == "direct"
    assert "session was lost" in stage.error
    assert not p.observed._stages


def test_nobody_observing_times_nothing(site):
    p = site.prefill(Rank())
    assert p.observed is None


def test_a_chunk_that_waited_in_vain_and_went_direct(site):
    """Decode's only lane is full of leases nobody writes: a chunk falls back, and its wait is told before its write."""
    seen = Recorder()
    src, dst = Rank(), Rank()
    config = Config(retry_s=0.02, fall_back_after_s=0.1, recall_after_s=30.0)
    p = site.prefill(src, observers=(seen,), config=config)
    p.path = "auto"
    p.core.chunks._choose = lambda chunk: False
    d = site.decode(dst, staging_nbytes=8192, n_lanes=1, path="auto", config=config)
    wanting = [d.receive(room, site.address) for room in ("first", "second")]
    first, second = p.send("first"), p.send("second")
    for receiver in wanting:
        receiver.bind(dst.allocate(16), 16)  # 6 KiB of K and V of three layers: two do not fit the lane
    first.chunk(src.allocate(16), (0, 16), ready=Never())
    drive([p, d], lambda: bool(d.core.leases.lent))
    second.chunk(src.allocate(16), (0, 16))
    second.finish()
    drive([p, d], lambda: second.state is State.SUCCESS)
    kinds = [stage.kind for stage in seen.of("prefill", StageOver)]
    assert kinds == ["lease_wait", "direct"]
    waited, written = seen.of("prefill", StageOver)
    assert waited.ended_at - waited.began_at >= 0.1
    assert waited.ended_at <= written.began_at
    assert {waited.room, written.room} == {"second"}


class Never:
    def query(self) -> bool:
        return False
