"""How exact a node's sleeps are: what it asked for beside what it got, and how late it notices that a copy ended.

`python -m tests.manager.test_waits` prints the medians. The tests compare them with a bare sleep of the same run.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import pytest

from pdstage import State, native
from pdstage.control.zmq import ControlSocket
from pdstage.manager import driver as drivers
from tests.manager.conftest import Site
from tests.manager.engine import Rank, drive

SHORT_S = 100e-6
COPIES_S = np.linspace(200e-6, 2e-3, 9)
N_WAITS, N_ROOMS = 100, 20
TOKENS = 4
MOVED_S = 5e-3
GET_TIMERSLACK = 30  # prctl(2)


class Late:
    """A device whose streams' copies take `COPIES_S` in turn; `noticed_s` is how long after its end each was seen."""

    flushes = False

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._over_at: dict[int, float] = {}
        self._lengths_s = itertools.cycle(COPIES_S)
        self.noticed_s: list[float] = []
        self.held = False

    def current(self):
        return nullcontext()

    def new_stream(self) -> int:
        return next(self._numbers)

    event = new_stream

    def reserve(self) -> None:
        """Host plans need nothing."""

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def record(self, event: int, stream: int) -> None:
        self._over_at[event] = time.perf_counter() + next(self._lengths_s)

    def done(self, event: int) -> bool:
        if self.held:
            return False
        late_s = time.perf_counter() - self._over_at.get(event, 0.0)
        if late_s >= 0 and self._over_at.pop(event, None) is not None:
            self.noticed_s.append(late_s)
        return late_s >= 0


def waits(take) -> tuple[float, float]:
    """Medians of what `take(SHORT_S)` and a bare sleep of as long take, in turn."""
    both: tuple[list[float], list[float]] = ([], [])
    for _ in range(N_WAITS):
        for took, wait in zip(both, (take, time.sleep), strict=True):
            began = time.perf_counter()
            wait(SHORT_S)
            took.append(time.perf_counter() - began)
    return median(both[0]), median(both[1])


def notices(site: Site) -> tuple[float, float]:
    """Medians: how long after a copy's end its node notices it; and a bare sleep of `SHORT_S`."""
    runtime, bare = Late(), []
    src, dst = Rank(), Rank()
    src.pool.runtime = dst.pool.runtime = lambda: runtime
    options = {"path": "staged", "progress": "thread", "journal": None}
    p, d = site.prefill(src, **options), site.decode(dst, **options)
    runtime.noticed_s.clear()  # of what a node measures at its start
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    for room in range(N_ROOMS):
        receiver, sender = d.receive(room, site.address), p.send(room)
        receiver.bind(into, TOKENS)
        sender.chunk(pages, (0, TOKENS))
        sender.finish()
        while not (receiver.released and sender.released):
            began = time.perf_counter()
            time.sleep(SHORT_S)
            bare.append(time.perf_counter() - began)
        assert receiver.state is State.SUCCESS
    assert len(runtime.noticed_s) == 2 * N_ROOMS
    return median(runtime.noticed_s), median(bare)


@pytest.mark.parametrize("ext", [native.ext, None], ids=["c++", "pyzmq"])
def test_a_short_wait_is_as_short_as_a_bare_sleep(monkeypatch, ext):
    monkeypatch.setattr(native, "ext", ext)
    with ControlSocket(identity=b"waits") as socket:
        took_s, bare_s = waits(socket.wait)
    assert took_s < 4 * bare_s


def test_the_end_of_a_copy_is_noticed_soon(site):
    noticed_s, bare_s = notices(site)
    assert noticed_s < 6 * bare_s


def test_an_event_loop_asks_soon_while_a_copy_is_under_way(site):
    """Nothing announces its end, whatever descriptors the transport has."""
    runtime = Late()
    src, dst = Rank(), Rank()
    src.pool.runtime = dst.pool.runtime = lambda: runtime
    p, d = (make(rank, path="staged", journal=None) for make, rank in ((site.prefill, src), (site.decode, dst)))
    receiver, sender = d.receive(1, site.address), p.send(1)
    receiver.bind(dst.allocate(TOKENS), TOKENS)
    sender.chunk(src.allocate(TOKENS), (0, TOKENS))
    sender.finish()
    runtime.held = True
    drive((p, d), lambda: p.stager.launched)
    assert p.transport.filenos()
    assert p.driver.look().pause_s <= SHORT_S
    runtime.held = False
    drive((p, d), lambda: receiver.released and sender.released)
    assert receiver.state is State.SUCCESS


@pytest.fixture
def waiting(site):
    """A decode node whose room waits for a write from pages to pages, over a library that moves bytes while asked."""
    src, dst = Rank(), Rank()
    p, d = (make(rank, transport="nixl", path="direct") for make, rank in ((site.prefill, src), (site.decode, dst)))
    receiver, sender = d.receive(1, site.address), p.send(1)
    receiver.bind(dst.allocate(TOKENS), TOKENS)
    drive((p, d), lambda: sender.state is not State.BOOTSTRAPPING)
    assert not d.core.leases.lent
    assert not d.transport.filenos()
    yield d
    sender.abort()
    drive((p, d), lambda: receiver.released and sender.released)


def test_decode_asks_for_what_is_written_to_its_pages(waiting):
    assert waiting.driver._is_under_way(())


@pytest.mark.parametrize("wait", ["sleep", "event loop"])
def test_what_moves_bytes_is_asked_again_at_once(waiting, monkeypatch, wait):
    """But not a library that moves them in threads of its own, however long its calls take."""
    monkeypatch.setattr(drivers, "_MOVED_S", MOVED_S)

    def moves():
        until = time.thread_time() + 2 * MOVED_S
        while time.thread_time() < until:
            pass
        return []

    def moved_at(poll):
        monkeypatch.setattr(waiting.transport, "poll", poll)
        driver._moved_at = 0.0
        driver._doze(1e-3, ()) if wait == "sleep" else driver.look()
        return driver._moved_at

    driver = waiting.driver
    while moved_at(list):  # a heartbeat may be due
        pass
    assert moved_at(moves)
    monkeypatch.setattr(waiting.transport, "traits", replace(waiting.transport.traits, polled=False, notifies=False))
    while moved_at(moves):
        pass
    assert not driver._is_under_way(()), "its tags come as messages"


def test_sleeps_are_exact_in_a_caller_s_thread_too(waiting, monkeypatch):
    prctl, slacks = ctypes.CDLL(None).prctl, []
    before, wait = prctl(GET_TIMERSLACK, 0, 0, 0, 0), waiting.socket.wait
    monkeypatch.setattr(
        waiting.socket, "wait", lambda *given: slacks.append(prctl(GET_TIMERSLACK, 0, 0, 0, 0)) or wait(*given)
    )
    waiting.turn(1e-3)
    assert set(slacks) == {1}
    assert prctl(GET_TIMERSLACK, 0, 0, 0, 0) == before > 1


@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_a_transport_is_asked_by_who_takes_effects_alone(site, progress):
    """Else an engine's call in another thread could post while it is asked."""
    p, d = (
        site.prefill(Rank(), transport="nixl", progress=progress),
        site.decode(Rank(), transport="nixl", progress=progress),
    )
    unlocked = []
    for node in (p, d):
        node.transport.poll = partial(_asked, node, node.transport.poll, unlocked)
    receiver, sender = d.receive(1, site.address), p.send(1)
    receiver.bind(range(TOKENS), TOKENS)
    sender.chunk(range(TOKENS), (0, TOKENS))
    sender.finish()
    while not (receiver.released and sender.released):
        for node in (p, d) if progress == "inline" else ():
            node.turn(1e-3)
        time.sleep(SHORT_S)
    assert receiver.state is State.SUCCESS
    assert not unlocked


def _asked(node, poll, unlocked):
    if not node.driver.acting.locked():
        unlocked.append(node.role)
    return poll()


def main() -> None:
    with ControlSocket(identity=b"waits") as socket:
        took_s, bare_s = waits(socket.wait)
    print(f"a wait of {SHORT_S * 1e6:.0f} us takes {took_s * 1e6:.0f} us, a bare sleep {bare_s * 1e6:.0f}")
    with ExitStack() as stack:
        noticed_s, bare_s = notices(Site(stack))
    print(f"a thread notices a copy's end after {noticed_s * 1e6:.0f} us, a bare sleep takes {bare_s * 1e6:.0f}")


if __name__ == "__main__":
    main()
