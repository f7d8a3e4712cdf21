"""Rooms between real nodes of one process: every byte, on every path, in either order."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from pdstage import Items, PdstageError, State, UsageError
from pdstage.transport import open_transport
from tests.manager.engine import LAYERS, QUICK, TOKENS, Event, Rank, Room, bound, drive
from tests.rows import both_paths, inline_or_thread, usable

TRANSPORTS = usable("local", "nixl")


@inline_or_thread
@pytest.mark.parametrize("path", ["staged", "direct", "auto"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_path(site, transport, path, progress):
    pair = site.pair(transport=transport, path=path, progress=progress)
    p, d = pair.nodes
    rooms = [pair.begin(room, cuts=(16,), aux=b"first token") for room in range(3)]
    drive(site.nodes, lambda: all(room.released for room in rooms) and p.core.idle and d.core.idle)
    for number, room in enumerate(rooms):
        assert room.states == (State.SUCCESS, State.SUCCESS)
        assert pair.dst.holds(number, TOKENS, room.into)
        assert room.receiver.aux == b"first token"
    stats = p.stats()
    if path != "auto" or transport == "local":  # whose pages are mapped: one pass of copies
        assert stats[f"chunks_{path.replace('auto', 'direct')}"] == 6
    if (transport, path) == ("local", "staged"):
        assert stats["descriptors"] == 0  # gathered straight into their leases, in one pass


def test_one_message_asks_for_all_rooms_that_an_engine_looks_at_in_turn(site):
    pair = site.pair()
    pair.move(0)
    receivers, sent = [pair.receive(room) for room in (1, 2, 3)], pair.d.socket.counters.sent
    assert not any(receiver.ready_to_bind for receiver in receivers)
    pair.d.turn()
    assert pair.d.socket.counters.sent == sent + 1


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
    pair, broken = site.pair(), Event()
    monkeypatch.setattr(broken, "query", mock.Mock(side_effect=RuntimeError("CUDA error")))
    rooms = []
    for n, event in ((1, broken), (2, None), (3, None)):
        rooms.append(pair.open(n, after=event if side == "bind" else None))
        sender, _, pages, _ = rooms[-1]
        sender.chunk(pages, TOKENS, ready=event if side == "chunk" else None)
        sender.finish(ready=event if side == "finish" else None)
    pair.end(*rooms)
    assert [room.states for room in rooms] == [(State.FAILED,) * 2, (State.SUCCESS,) * 2, (State.SUCCESS,) * 2]
    assert all("CUDA error" in str(handle.error) for handle in rooms[0][:2])
    assert all(pair.dst.holds(n, TOKENS, rooms[n - 1].into) for n in (2, 3))


@both_paths
def test_pages_may_change_once_their_chunks_are_carried(site, path):
    """An engine that takes a request's pages in the middle of its prefill, and computes the rest in others."""
    pair = site.pair(path=path, progress="thread")
    sender, pages, half = pair.p.send(1), pair.src.allocate(TOKENS), 16
    assert not sender.opened
    sender.wait_carried(0)  # nothing was given
    pair.src.write(1, TOKENS, pages)
    sender.chunk(pages, (0, half))
    with pytest.raises(TimeoutError):
        sender.wait_carried(0.01)  # nobody has asked for it yet
    receiver, into = pair.receive(1), pair.dst.allocate(TOKENS)
    receiver.bind(into, TOKENS)
    sender.wait_carried(60.0)
    assert sender.opened
    pair.src.write(2, TOKENS, pages)
    others = pair.src.allocate(TOKENS)
    pair.src.write(1, TOKENS, others)
    sender.chunk(others, (half, TOKENS))
    sender.finish()
    receiver.wait_released(60.0)
    assert pair.dst.holds(1, TOKENS, into)
    sender.wait_released(60.0)
    sender.wait_carried(0)  # it has ended


def test_pages_that_were_taken_back_are_sent_to_nobody_else(site):
    """A router tries another decode engine meanwhile."""
    pair = site.pair(progress="thread")
    room = pair.open(1)
    room.sender.chunk(room.pages, (0, 16))
    room.sender.wait_carried(60.0)
    room.sender.chunk(room.pages, (16, 32), ready=Event())
    with pytest.raises(TimeoutError):
        room.sender.wait_carried(0.01)
    pair.src.write(2, TOKENS, room.pages)
    d = site.decode(Rank(page=8, hnd=True), progress="thread")
    other = bound(d, pair.dst, 1, pair.p.directory_address)
    for one in (other, room.sender):
        with pytest.raises(PdstageError, match="hold something else by now"):
            one.wait(60.0)


def test_a_room_may_wait_longer_for_its_first_chunk_than_others(site):
    pair = site.pair(decode={"config": replace(QUICK, wait_s=0.05)})
    hasty, patient = pair.receive(1), pair.receive(2, wait_s=60.0)
    for receiver in (hasty, patient):
        receiver.bind(pair.dst.allocate(TOKENS), TOKENS)
    drive(site.nodes, lambda: hasty.state is State.FAILED)
    assert "got no chunk in 0.05 s" in str(hasty.error)
    assert patient.error is None
    with pytest.raises(UsageError, match="wait_s"):
        pair.receive(3, wait_s=0.0)


def test_the_callers_arrays_stay_as_they_are(site):
    """And what the engine does with them afterwards is no matter (I9)."""
    pair = site.pair()
    pages, into = pair.src.allocate(TOKENS), pair.dst.allocate(TOKENS).astype(np.int32)
    pair.src.write(1, TOKENS, pages)
    given = pages.copy(), into.copy()
    receiver, sender = pair.receive(1), pair.p.send(1)
    receiver.bind(into, TOKENS)
    assert np.array_equal(into, given[1])
    into[:] = -1  # an engine may reuse its array at once
    sender.chunk(pages, TOKENS)
    sender.finish()
    drive(site.nodes, lambda: receiver.released)
    assert np.array_equal(pages, given[0])
    assert pair.dst.holds(1, TOKENS, given[1])


def test_what_a_call_did_is_heard_without_waiting(site, monkeypatch):
    """A chunk given to an open room is written within the call: the next turn hears of it before it waits."""
    pair = site.pair(path="direct")
    p, (sender, _, pages, _) = pair.p, pair.open(1)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    p.turn()
    wait, woken = p.socket.wait, []

    def look(_: float, fds: tuple[int, ...] = ()):
        ready = wait(0.0, fds)
        woken.append(ready.woken)
        return ready

    monkeypatch.setattr(p.socket, "wait", look)
    sender.chunk(pages, TOKENS)
    p.turn(60.0)
    assert woken == [True]
    assert p.stats()["chunks_direct"] == 1


def test_a_turn_reads_for_a_while_only(site, monkeypatch) -> None:
    """Of a flood it reads a part, says the heartbeats that are due, and takes nobody for silent whose word may be in
    the rest: strangers' frames made 591 of 600 rooms fail.
    """
    pair = site.pair()
    p = pair.p
    monkeypatch.setattr("pdstage.manager.driver._READING_S", -1.0)  # a frame a turn
    pair.move(1)
    (session,) = p.core.sessions.values()
    p.driver._unread.extend([(b"stranger", b"whatever")] * 4)
    session.received_at = session.sent_at = long_ago = time.monotonic() - 1000.0
    for left in (3, 2, 1):
        p.turn()
        assert len(p.driver._unread) == left
        assert session.id in p.core.sessions
        assert session.sent_at > long_ago, "its peer hears of us meanwhile"
    p.core.endpoint.after(0.0, p.core.endpoint._listen, session)
    drive([p], lambda: session.id not in p.core.sessions)


def test_who_speaks_while_the_transport_takes_its_time_is_not_silent(site, monkeypatch) -> None:
    """The socket is read at the beginning of a turn, or not at all where it had nothing then."""
    pair = site.pair()
    pair.move(1)
    p, d = pair.p, pair.d
    (ours,), (theirs,) = d.core.sessions.values(), p.core.sessions.values()
    ours.received_at = theirs.sent_at = d.driver._read_at = 0.0
    speaks = p.core.endpoint.keep_alive
    monkeypatch.setattr(d.transport, "poll", lambda: [speaks(), p.turn(), d.socket.wait(60.0, [])][3:])
    d.core.endpoint.after(0.0, d.core.endpoint._listen, ours)
    d.driver._turn(False, True)
    assert ours.id in d.core.sessions


@pytest.mark.skipif("nixl" not in TRANSPORTS, reason="NIXL does not import here")
@pytest.mark.parametrize("asked", [True, False])
def test_posts_are_counted_by_what_nixl_measured(site, asked):
    measuring = {"transport": open_transport("nixl", telemetry=asked)}
    pair = site.pair(path="staged", prefill=measuring, decode={"transport": "nixl"})
    pair.move(1, cuts=(20,))
    stats = pair.p.stats()
    measured = [stats[name] for name in ("posts_measured", "posts_measured_bytes")]
    assert measured == ([2, stats["bytes_written"]] if asked else [0, 0])
    assert stats["bytes_written"] > 0
    assert stats["writes_measured_us"] >= stats["posts_measured_us"]
    assert pair.d.stats()["posts_measured"] == 0


# Of which decode holds the first tokens already, or which are sent before their forward pass is done.


@both_paths
@pytest.mark.parametrize(("src_page", "dst_page"), [(4, 16), (16, 4), (8, 8)])
def test_any_prefix(site, src_page, dst_page, path):
    """The first k tokens, page-aligned or not, stay as decode has them; no chunk needs to know of them."""
    pair = site.pair(Rank(page=src_page, n_pages=512), Rank(page=dst_page, n_pages=512, hnd=True), path=path)
    src, dst, rooms = pair.src, pair.dst, []
    for k in range(TOKENS + 1):
        pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
        src.write(k, TOKENS, pages)
        first = k // dst_page if k % 2 else 0  # an engine names the pages of its cached prefix too, or leaves them out
        receiver, sender = pair.receive(k), pair.p.send(k)
        receiver.bind(Items(into[first:], first * dst_page), (min(first * dst_page, TOKENS), TOKENS), prefix_tokens=k)
        sender.chunk(pages, (0, 21))
        sender.chunk(Items(pages[16 // src_page :], 16), (21, TOKENS))
        sender.finish(aux=b"x")
        rooms.append(Room(sender, receiver, pages, into))
    pair.end(*rooms)
    for k, room in enumerate(rooms):
        assert room.states == (State.SUCCESS, State.SUCCESS), room.receiver.error
        assert room.receiver.aux == b"x"
        assert dst.holds(k, TOKENS, room.into, prefix=k)
        kept = [dst.read(layer, role, TOKENS, room.into)[:k] for layer in range(LAYERS) for role in "kv"]
        assert not np.any(kept), f"tokens below {k} were sent"


@both_paths
def test_layers_leave_as_they_are_computed(site, path):
    """Each layer has its own event; a layer that is not there yet holds up none that is."""
    pair, computed = site.pair(Rank(page=16), Rank(page=4, hnd=True), path=path), [Event() for _ in range(LAYERS)]
    room = sender, receiver, pages, into = pair.open(1, prefix_tokens=5)
    for layer, event in enumerate(computed):
        sender.chunk(pages, (0, TOKENS), layers=(layer, layer + 1), ready=event)
    sender.finish()

    def there(layer):
        sides = (pair.dst, into), (pair.src, pages)
        return all(np.array_equal(*(rank.read(layer, role, TOKENS, held)[5:] for rank, held in sides)) for role in "kv")

    for at, layer in enumerate((1, 0, 2)):
        computed[layer].done = True
        drive(site.nodes, lambda layer=layer: there(layer))
        assert not any(there(later) for later in (1, 0, 2)[at + 1 :])
        assert sender.backlog_nbytes or at == 2
    pair.end(room)
    assert not sender.backlog_nbytes
    assert receiver.state is State.SUCCESS
