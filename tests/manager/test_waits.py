"""How a node waits: how exact its sleeps are, how soon it asks again while bytes move, and who asks."""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from dataclasses import replace
from itertools import groupby
from statistics import median
from types import SimpleNamespace

import pytest

from pdstage import State, native
from pdstage.control.zmq import ControlSocket
from pdstage.manager import driver as drivers
from tests.manager.engine import Rank, drive
from tests.manager.test_device import Device
from tests.rows import inline_or_thread

SHORT_S = 100e-6
TOKENS = 4
N_WAITS = 100
MOVED_S = 5e-3
GET_TIMERSLACK = 30  # prctl(2)


@pytest.mark.skipif(native.ext is None, reason="the port through pyzmq waits for whole milliseconds")
def test_a_short_wait_is_as_short_as_a_bare_sleep():
    took: dict[object, list[float]] = defaultdict(list)
    with ControlSocket(identity=b"waits") as socket:
        for wait in (socket.wait, time.sleep) * N_WAITS:
            began = time.perf_counter()
            wait(SHORT_S)
            took[wait].append(time.perf_counter() - began)
        assert median(took[socket.wait]) < 4 * median(took[time.sleep])


class Busy(Device):
    """Its copies go on while it is told."""

    over = True

    def done(self, event: object) -> bool:
        return self.over


def test_it_asks_soon_while_a_copy_is_under_way_and_sleeps_no_longer_than_that(site, monkeypatch):
    """Nothing announces its end, whatever descriptors the transport has."""
    runtime, src, dst, waits = Busy(), Rank(), Rank(), []
    src.pool.runtime = dst.pool.runtime = lambda: runtime
    pair = site.pair(src, dst, path="staged")
    p = pair.p
    assert not p.stager.launched
    runtime.over = False
    room = pair.begin(1, TOKENS)
    drive(pair.nodes, lambda: p.stager.launched)
    assert p.transport.filenos()
    wait = p.socket.wait

    def seen(wait_s: float, fds: tuple[int, ...] = ()):
        waits.append(wait_s)
        runtime.over = len(waits) == 2
        return wait(0.0, fds)

    monkeypatch.setattr(p.socket, "wait", seen)
    p.driver._sleep(60.0)
    assert len(waits) == 2
    assert max(waits) <= SHORT_S
    monkeypatch.undo()
    runtime.over = True
    pair.arrives(room, TOKENS)


@pytest.fixture
def waiting(site):
    """A decode node whose room waits for a write from pages to pages, over a library that moves bytes while asked."""
    pair = site.pair(transport="nixl", path="direct")
    d, room = pair.d, pair.open(1, TOKENS)
    drive(pair.nodes, lambda: room.sender.state is not State.BOOTSTRAPPING)
    assert not d.core.leases.live()
    assert not d.transport.filenos()
    yield d
    room.sender.abort()
    pair.end(room)


def test_decode_asks_for_what_is_written_to_its_pages(waiting):
    assert waiting._in_flight()


def test_what_moves_bytes_is_asked_again_at_once(waiting, monkeypatch):
    """But not a library that moves them in threads of its own, however long its calls take."""
    monkeypatch.setattr(drivers, "_MOVED_S", MOVED_S)

    def moves():
        until = time.thread_time() + 2 * MOVED_S
        while time.thread_time() < until:
            pass
        return []

    def moved_at(poll):
        monkeypatch.setattr(waiting.transport, "poll", poll)
        driver._moved_at = driver._look_at = 0.0
        driver._sleep(1e-3)
        return driver._moved_at

    driver = waiting.driver
    while moved_at(list):  # a heartbeat may be due
        pass
    assert moved_at(moves)
    traits = replace(waiting.transport.traits, polled=False)
    monkeypatch.setattr(waiting.transport, "traits", traits)
    while moved_at(moves):
        pass
    monkeypatch.setattr(waiting.transport, "traits", replace(traits, notifies=False))
    assert not waiting._in_flight(), "its tags come as messages"


@pytest.mark.parametrize(
    ("lent", "moves_in", "n_asked"), [([], 1, range(26, 32)), ([None], 1, (400,)), ([], 80, (400,))]
)
def test_pieces_for_its_pages_are_left_to_gather(waiting, monkeypatch, lent, moves_in, n_asked):
    """Over TCP each read alone is acknowledged alone: decode asks at once until they took 0.3 ms, then every ms,
    later every 2. A library that moves bytes in one of `moves_in` looks only is asked at once.
    """
    asked = [1e6]
    clock = SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.spent, now=1e6, spent=0.0)
    monkeypatch.setattr(drivers, "time", clock)
    monkeypatch.setattr(waiting.core.leases, "live", lambda: lent)

    def moves():
        if len(asked) % moves_in == 0:
            clock.spent += (clock.now - asked[-1]) / 2
        asked.append(clock.now)
        return []

    monkeypatch.setattr(waiting.transport, "poll", moves)
    for _ in range(400):
        clock.now += 1e-4
        waiting.driver.poll()
    monkeypatch.undo()
    assert len(asked) - 1 in n_asked


def test_sleeps_are_exact_in_a_caller_s_thread_too(waiting, monkeypatch):
    prctl, slacks = ctypes.CDLL(None).prctl, []
    before, wait = prctl(GET_TIMERSLACK, 0, 0, 0, 0), waiting.socket.wait
    monkeypatch.setattr(
        waiting.socket, "wait", lambda *given: slacks.append(prctl(GET_TIMERSLACK, 0, 0, 0, 0)) or wait(*given)
    )
    waiting.turn(1e-3)
    assert set(slacks) == {1}
    assert prctl(GET_TIMERSLACK, 0, 0, 0, 0) == before > 1


@inline_or_thread
def test_a_transport_is_asked_by_who_takes_effects_alone(site, progress):
    """Else an engine's call in another thread could post while it is asked."""
    pair, unlocked = site.pair(transport="nixl", progress=progress), []
    for node in pair.nodes:
        poll = node.transport.poll
        acting = node.driver.acting
        node.transport.poll = lambda poll=poll, acting=acting: (acting.locked() or unlocked.append(acting), poll())[1]
    room = pair.begin(1)
    if progress == "inline":
        pair.end(room)
    else:
        for handle in room[:2]:
            handle.wait_released(60)
    assert room.receiver.state is State.SUCCESS
    assert not unlocked


def test_a_turn_that_copies_for_long_hears_its_peers(site, monkeypatch):
    """Else they would count as silent, and what they gave up would be written still."""
    monkeypatch.setattr(drivers, "_READING_S", 0.0)
    pair, events = site.pair(Rank(mappable=True), Rank(mappable=True), path="direct"), []

    def note(of: object, name: str) -> None:
        call = getattr(of, name)
        monkeypatch.setattr(of, name, lambda *given: events.append(name) or call(*given))

    note(pair.p.socket, "recv")
    note(pair.p.stager, "copy_to")
    pair.end(pair.begin(1, 40, cuts=range(4, 40, 4)))
    copies = [len(list(run)) for name, run in groupby(events) if name == "copy_to"]
    assert sum(copies) == 10
    assert max(copies) <= 4, "as many as go at a time"
