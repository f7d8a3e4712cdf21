"""Rooms between real nodes of one process: every byte, on every path, in either order."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from pdstage import Items, State
from pdstage.errors import UsageError
from pdstage.protocol.state import ChunkPhase
from tests.manager.engine import LAYERS, QUICK, Rank, drive
from tests.rows import usable

TRANSPORTS = usable("local", "nixl")
TOKENS = 37


class Event:
    """Stands for a CUDA event, which cannot exist without a device."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("path", ["staged", "direct", "auto"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_path(site, transport, path, progress):
    src, dst = Rank(page=4), Rank(page=8, hnd=True)
    p = site.prefill(src, transport=transport, path=path, progress=progress)
    d = site.decode(dst, transport=transport, path=path, progress=progress)
    rooms = []
    for room in range(3):
        src_pages, dst_pages = src.allocate(TOKENS), dst.allocate(TOKENS)
        src.write(room, TOKENS, src_pages)
        receiver = d.receive(room, site.address)
        receiver.bind(dst_pages, TOKENS)
        sender = p.send(room)
        sender.chunk(src_pages, (0, 16))
        sender.chunk(Items(src_pages[4:], first_token=16), (16, TOKENS))
        sender.finish(aux=b"first token")
        rooms.append((receiver, sender, dst_pages))
    drive(site.nodes, lambda: all(r.released and s.released for r, s, _ in rooms) and p.core.idle and d.core.idle)
    for room, (receiver, sender, pages) in enumerate(rooms):
        assert (receiver.wait(0), sender.wait(0)) == (State.SUCCESS, State.SUCCESS)
        assert dst.holds(room, TOKENS, pages)
        assert receiver.aux == b"first token"
    stats = p.stats()
    if path != "auto":
        assert stats[f"chunks_{path}"] == 6
    if (transport, path) == ("local", "staged"):
        assert stats["descriptors"] == 0  # gathered straight into their leases, in one pass


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 2), (2, 4), (4, 1), (1, 4), (3, 2), (8, 4)])
@pytest.mark.parametrize("path", ["staged", "direct"])
def test_unequal_tp(site, src_tp, dst_tp, path):
    src, dst = [Rank(src_tp, r) for r in range(src_tp)], [Rank(dst_tp, r, page=8) for r in range(dst_tp)]
    ps = [site.prefill(rank, path=path) for rank in src]
    ds = [site.decode(rank, path=path) for rank in dst]
    into = [rank.allocate(TOKENS) for rank in dst]
    receivers = [d.receive("room", site.address) for d in ds]
    for receiver, pages in zip(receivers, into, strict=True):
        receiver.bind(pages, TOKENS)
    senders = [p.send("room") for p in ps]
    for rank, sender in zip(src, senders, strict=True):
        pages = rank.allocate(TOKENS)
        rank.write(5, TOKENS, pages)
        sender.chunk(pages, TOKENS)
        sender.finish(aux=b"x")
    drive(site.nodes, lambda: all(h.released for h in (*receivers, *senders)))
    for rank, receiver, pages in zip(dst, receivers, into, strict=True):
        assert receiver.wait(0) is State.SUCCESS
        assert receiver.aux == b"x"
        assert rank.holds(5, TOKENS, pages)


def test_prefill_first_and_decode_allocates_late(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    pages = src.allocate(TOKENS)
    src.write(1, TOKENS, pages)
    sender = p.send(1)
    sender.chunk(pages, TOKENS)
    sender.finish()
    receiver = d.receive(1, site.address)
    drive(site.nodes, lambda: receiver.ready_to_bind)
    assert sender.state is State.BOOTSTRAPPING
    into = dst.allocate(TOKENS)
    receiver.bind(into, TOKENS)
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert dst.holds(1, TOKENS, into)


def test_a_room_finished_after_announcing_says_so(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    receiver = d.receive(1, site.address)
    drive(site.nodes, lambda: receiver.state is State.WAITING_FOR_INPUT)
    sender = p.send(1)
    sender.chunk(src.allocate(4), 4)
    sender.finish()
    drive(site.nodes, lambda: receiver.ready_to_bind)


@pytest.mark.parametrize("hnd", [True, False])
def test_equal_pages_in_head_major_order(site, hnd):
    """Both sides HND with one page size: staged head-major, in runs of a page; chunks begin and end inside pages."""
    src, dst = Rank(page=4, hnd=True), Rank(page=4, hnd=hnd)
    p, d = site.prefill(src, path="staged"), site.decode(dst, path="staged")
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    src.write(3, TOKENS, pages)
    receiver = d.receive(3, site.address)
    receiver.bind(into, TOKENS)
    sender = p.send(3)
    for start, stop in ((0, 6), (6, 21), (21, TOKENS)):
        sender.chunk(pages, (start, stop))
    sender.finish()
    drive(site.nodes, lambda: receiver.released)
    assert dst.holds(3, TOKENS, into)


@pytest.mark.parametrize("side", ["after", "ready"])
def test_events_are_noticed_by_the_thread(site, side):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, progress="thread"), site.decode(dst, progress="thread")
    event = Event()
    receiver = d.receive(1, site.address)
    receiver.bind(dst.allocate(4), 4, after=event if side == "after" else None)
    sender = p.send(1)
    sender.chunk(src.allocate(4), 4, ready=event if side == "ready" else None)
    sender.finish()
    receiver.poll()
    event.done = True
    assert receiver.wait(60) is State.SUCCESS


def test_nothing_is_opened_before_after(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    sender = p.send(1)
    sender.chunk(src.allocate(4), 4)
    sender.finish()
    after = Event()
    receiver = d.receive(1, site.address)
    receiver.bind(dst.allocate(4), 4, after=after)
    drive(site.nodes, lambda: receiver.ready_to_bind or sender.state is not State.BOOTSTRAPPING)
    assert sender.state is State.BOOTSTRAPPING, "the room was opened while its pages were in use"
    after.done = True
    drive(site.nodes, lambda: receiver.released)
    assert receiver.state is State.SUCCESS


def test_a_sleeping_thread_is_woken_for_an_event_that_nobody_announces(site, monkeypatch) -> None:
    """An engine's call is all that happens: without it the thread would sleep on, whatever the event says."""
    src, event, asleep = Rank(), Event(), threading.Event()
    p = site.prefill(src, progress="thread")
    monkeypatch.setattr(p.driver, "longest_s", lambda: asleep.set() or 600.0)
    assert asleep.wait(20)
    sender = p.send(1)
    sender.chunk(src.allocate(4), 4, ready=event)
    n_asked = itertools.count()
    monkeypatch.setattr(event, "query", lambda: next(n_asked) > 3)
    (source,) = sender.room.sources
    drive([], lambda: source.ready, 20)


@pytest.mark.parametrize("side", ["bind", "chunk", "finish"])
def test_an_event_that_raises_fails_its_room_and_no_other(site, monkeypatch, side) -> None:
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    broken = Event()
    monkeypatch.setattr(broken, "query", mock.Mock(side_effect=RuntimeError("CUDA error")))
    events, rooms = {1: broken, 2: None, 3: None}, {}
    for n, event in events.items():
        pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
        src.write(n, TOKENS, pages)
        receiver, sender = d.receive(n, site.address), p.send(n)
        receiver.bind(into, TOKENS, after=event if side == "bind" else None)
        sender.chunk(pages, TOKENS, ready=event if side == "chunk" else None)
        sender.finish(ready=event if side == "finish" else None)
        rooms[n] = receiver, sender, into
    drive(site.nodes, lambda: all(r.released and s.released for r, s, _ in rooms.values()))
    receiver, sender, _ = rooms[1]
    assert receiver.state is sender.state is State.FAILED
    assert "CUDA error" in str(receiver.error)
    assert "CUDA error" in str(sender.error)
    for n in (2, 3):
        receiver, _, into = rooms[n]
        assert receiver.state is State.SUCCESS
        assert dst.holds(n, TOKENS, into)


def test_data_is_gathered_only_when_ready(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, path="staged"), site.decode(dst, path="staged")
    receiver = d.receive(1, site.address)
    into = dst.allocate(TOKENS)
    receiver.bind(into, TOKENS)
    sender, pages, ready = p.send(1), src.allocate(TOKENS), Event()
    sender.chunk(pages, TOKENS, ready=ready)
    sender.finish()
    drive(site.nodes, lambda: any(r.chunks for r in p.core.rooms.destinations.values()))
    (chunk,) = [chunk for destination in p.core.rooms.destinations.values() for chunk in destination.chunks.values()]
    drive(site.nodes, lambda: chunk.phase is not ChunkPhase.RESERVING)
    assert chunk.phase is ChunkPhase.HELD, "it has its lease, and waits for its data"
    assert sender.backlog_nbytes > 0
    with pytest.raises(TimeoutError):
        sender.wait_carried(0.01)
    src.write(1, TOKENS, pages)  # the data comes after the lease
    ready.done = True
    drive(site.nodes, lambda: receiver.released)
    assert dst.holds(1, TOKENS, into)
    assert sender.backlog_nbytes == 0


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pages_may_change_once_their_chunks_are_carried(site, transport, path):
    """An engine that takes a request's pages in the middle of its prefill, and computes the rest in others."""
    src, dst = Rank(), Rank()
    p = site.prefill(src, transport=transport, path=path, progress="thread")
    d = site.decode(dst, transport=transport, path=path, progress="thread")
    sender, pages, half = p.send(1), src.allocate(TOKENS), 16
    assert not sender.opened
    sender.wait_carried(0)  # nothing was given
    src.write(1, TOKENS, pages)
    sender.chunk(pages, (0, half))
    with pytest.raises(TimeoutError):
        sender.wait_carried(0.01)  # nobody has asked for it yet
    receiver, into = d.receive(1, site.address), dst.allocate(TOKENS)
    receiver.bind(into, TOKENS)
    sender.wait_carried(60.0)
    assert sender.opened
    src.write(2, TOKENS, pages)
    others = src.allocate(TOKENS)
    src.write(1, TOKENS, others)
    sender.chunk(others, (half, TOKENS))
    sender.finish()
    receiver.wait_released(60.0)
    assert receiver.state is State.SUCCESS
    assert dst.holds(1, TOKENS, into)
    sender.wait_released(60.0)
    sender.wait_carried(0)  # it has ended


def test_a_room_may_wait_longer_for_its_first_chunk_than_others(site):
    src, dst = Rank(), Rank()
    site.prefill(src)
    d = site.decode(dst, config=replace(QUICK, wait_s=0.05))
    hasty, patient = d.receive(1, site.address), d.receive(2, site.address, wait_s=60.0)
    for receiver in (hasty, patient):
        receiver.bind(dst.allocate(TOKENS), TOKENS)
    drive(site.nodes, lambda: hasty.state is State.FAILED)
    assert "got no chunk in 0.05 s" in str(hasty.error)
    assert patient.error is None
    with pytest.raises(UsageError, match="wait_s"):
        d.receive(3, site.address, wait_s=0.0)


def test_layer_by_layer_and_past_the_prefix(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    src.write(9, TOKENS, pages)
    receiver = d.receive(9, site.address)
    receiver.bind(into, TOKENS, prefix_tokens=8)
    sender = p.send(9)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == 8
    assert sender.max_chunk_tokens > TOKENS
    for layer in range(LAYERS):
        sender.chunk(pages, (0, TOKENS), layers=(layer, layer + 1))
    sender.finish()
    drive(site.nodes, lambda: receiver.released)
    assert receiver.wait(0) is State.SUCCESS
    assert dst.holds(9, TOKENS, into, prefix=8)
    assert not dst.read(0, "k", 8, into).any(), "tokens below the prefix are not sent"


def test_chunks_larger_than_the_lanes_are_split(site):
    src, dst = Rank(n_pages=256), Rank(n_pages=256)
    p = site.prefill(src, staging_nbytes=32 << 10, path="staged", n_buffers=2)
    d = site.decode(dst, staging_nbytes=16 << 10, path="staged")
    tokens = 1000
    pages, into = src.allocate(tokens), dst.allocate(tokens)
    src.write(1, tokens, pages)
    receiver = d.receive(1, site.address)
    receiver.bind(into, tokens)
    sender = p.send(1)
    sender.chunk(pages, tokens)
    sender.finish()
    drive(site.nodes, lambda: receiver.released)
    assert dst.holds(1, tokens, into)
    assert p.stats()["chunks_staged"] > 40


@pytest.mark.parametrize("copy_thread", [True, False])
def test_large_copies_in_either_thread(site, copy_thread):
    src, dst = (Rank(page=64, n_pages=80) for _ in "ab")
    tokens = 4096
    options = {"path": "staged", "staging_nbytes": 8 << 20, "copy_thread": copy_thread}
    prefill, decode = site.prefill(src, **options), site.decode(dst, **options)
    src_pages, dst_pages = src.allocate(tokens), dst.allocate(tokens)
    src.write(1, tokens, src_pages)
    receiver, sender = decode.receive(1, site.address), prefill.send(1)
    receiver.bind(dst_pages, tokens)
    sender.chunk(src_pages, tokens)
    sender.finish()
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.error is None
    assert dst.holds(1, tokens, dst_pages)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("pdstage-copies") == (2 if copy_thread else 0)


def test_the_callers_arrays_stay_as_they_are(site):
    """And what the engine does with them afterwards is no matter (I9)."""
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS).astype(np.int32)
    src.write(1, TOKENS, pages)
    given = pages.copy(), into.copy()
    receiver = d.receive(1, site.address)
    receiver.bind(into, TOKENS)
    expected = into.copy()
    into[:] = -1  # an engine may reuse its array at once
    sender = p.send(1)
    sender.chunk(pages, TOKENS)
    sender.finish()
    drive(site.nodes, lambda: receiver.released)
    assert np.array_equal(pages, given[0])
    assert np.array_equal(expected, given[1])
    assert dst.holds(1, TOKENS, expected)


def test_polling_many(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    receivers = [d.receive(room, site.address) for room in range(8)]
    states, released = d.poll_many(receivers)
    assert states.dtype == np.int8
    assert released.dtype == np.uint8
    assert set(states) <= {State.BOOTSTRAPPING, State.WAITING_FOR_INPUT}
    for receiver in receivers:
        receiver.bind(dst.allocate(4), 4)
    for room in range(8):
        sender = p.send(room)
        sender.chunk(src.allocate(4), 4)
        sender.finish()
    drive(site.nodes, lambda: bool(d.poll_many(receivers)[1].all()))
    assert list(d.poll_many(receivers)[0]) == [State.SUCCESS] * 8
    assert set(d.completions()) == set(receivers)
    assert d.completions() == []


def test_nothing_grows_with_rooms_served(site):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    sizes = []
    for room in range(60):
        pages, into = src.allocate(8), dst.allocate(8)
        receiver = d.receive(room, site.address)
        receiver.bind(into, 8)
        sender = p.send(room)
        sender.chunk(pages, 8)
        sender.finish()
        drive(site.nodes, lambda r=receiver, s=sender: r.released and s.released and p.core.idle)
        src.free(pages)
        dst.free(into)
        cores = (p.core.snapshot(), d.core.snapshot(), len(p.core.endpoint.timers), len(d.core.endpoint.timers))
        sizes.append(len(repr(cores)) // 100)
        p.completions(), d.completions()
    assert sizes[-1] <= sizes[5] + 1
    assert not p.roster
    assert not d.roster
    assert not d.core.rooms.by_epoch


@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_calls_of_many_threads_keep_the_order_of_frames(site, progress):
    """An engine's call may send by itself what it caused: a frame that overtakes another makes that one stale."""
    src, dst = Rank(n_pages=1), Rank(n_pages=1)
    p, d = site.prefill(src, progress=progress), site.decode(dst, progress=progress)
    page, n_threads, n_each = np.array([0]), 4, 40
    ended = []

    def serve(first: int) -> None:
        for room in range(first, first + n_each):
            sender, receiver = p.send(room), d.receive(room, site.address)
            receiver.bind(page, src.page)
            sender.chunk(page, src.page)
            sender.finish()
            ended.append((sender, receiver))

    threads = [threading.Thread(target=serve, args=(n * n_each,)) for n in range(n_threads)]
    for thread in threads:
        thread.start()
    done = n_threads * n_each
    drive(site.nodes, lambda: len(ended) == done and all(s.released and r.released for s, r in ended))
    for thread in threads:
        thread.join()
    assert {handle.wait(0) for pair in ended for handle in pair} == {State.SUCCESS}
    assert p.stats()["frames_stale"] == d.stats()["frames_stale"] == 0


def test_what_a_call_did_is_heard_without_waiting(site, monkeypatch):
    """A chunk given to an open room is written within the call: the next turn hears of it before it waits."""
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, path="direct"), site.decode(dst, path="direct")
    pages, sender = src.allocate(4), p.send(1)
    receiver = d.receive(1, site.address)
    receiver.bind(dst.allocate(4), 4)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    p.turn()
    wait, woken = p.socket.wait, []

    def look(_: float, fds: tuple[int, ...] = ()):
        ready = wait(0.0, fds)
        woken.append(ready.woken)
        return ready

    monkeypatch.setattr(p.socket, "wait", look)
    sender.chunk(pages, 4)
    p.turn(60.0)
    assert woken == [True]
    assert p.stats()["chunks_direct"] == 1


def test_a_turn_reads_for_a_while_only(site, monkeypatch) -> None:
    """Of a flood it reads a part, says the heartbeats that are due, and takes nobody for silent whose word may be in
    the rest: strangers' frames made 591 of 600 rooms fail.
    """
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    monkeypatch.setattr("pdstage.manager.driver._READING_S", -1.0)  # a frame a turn
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    src.write(1, TOKENS, pages)
    receiver, sender = d.receive(1, site.address), p.send(1)
    receiver.bind(into, TOKENS)
    sender.chunk(pages, TOKENS)
    sender.finish()
    drive([p, d], lambda: receiver.released and sender.released)
    assert receiver.state is State.SUCCESS
    assert dst.holds(1, TOKENS, into)
    (session,) = p.core.sessions.values()
    p.driver._unread.extend([(b"stranger", b"whatever")] * 4)
    session.received_at = session.sent_at = long_ago = time.monotonic() - 1000.0
    for left in (3, 2, 1):
        p.turn()
        assert len(p.driver._unread) == left
        assert session.id in p.core.sessions
        assert session.sent_at > long_ago, "its peer hears of us meanwhile"
    p.core.endpoint.timers.set(("silence", session), 0.0)
    drive([p], lambda: session.id not in p.core.sessions)
