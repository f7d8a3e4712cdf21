"""A pool on a device: whatever a node does that may call it, its transport above all, finds it current in the thread.

`Device` stands in for a GPU's runtime, which cannot be here; the pools are host memory, and every copy is over at once.
"""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import numpy as np
import pytest

from pdstage import State
from pdstage.control.zmq import name_of
from pdstage.kernels import Plan
from pdstage.manager.driver import Driver
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.session import HangUp
from pdstage.stager import DEFAULT_MAX_SMS
from pdstage.transport.local import LocalTransport
from tests.manager.engine import TOKENS, Pair, Rank, drive
from tests.rows import both_paths, inline_or_thread

VERBS = (
    "register", "unregister", "describe", "offers", "connect", "prepare", "identify", "post", "mapped", "notify",
    "poll", "disconnect", "proved_dead", "forget", "close",
)  # fmt: skip


class Device:
    """Knows which threads it is current in."""

    def __init__(self, *, flushes: bool = False) -> None:
        self.flushes = flushes
        self.log: list[str] = []
        self.thread = threading.local()
        self.n_entered = self.n_reserved = 0

    @contextlib.contextmanager
    def current(self):
        self.n_entered += 1
        self.thread.depth = self.depth + 1
        try:
            yield
        finally:
            self.thread.depth -= 1

    @property
    def depth(self) -> int:
        return getattr(self.thread, "depth", 0)

    def flush(self) -> None:
        assert self.depth
        self.log.append("flush")

    def new_stream(self) -> int:
        return 0

    def reserve(self) -> None:
        assert self.depth
        self.n_reserved += 1

    def event(self) -> object:
        return object()

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def record(self, event: object, stream: int) -> None:
        assert self.depth
        self.log.append("copy")

    def done(self, event: object) -> bool:
        assert self.depth
        return True


class Asked:
    """What an engine gives as an event."""

    def __init__(self, device: Device) -> None:
        self.device, self.depths = device, []

    def query(self) -> bool:
        self.depths.append(self.device.depth)
        return True


@pytest.fixture
def device() -> Device:
    return Device()


def rank_on(device, monkeypatch) -> Rank:
    rank = Rank()
    monkeypatch.setattr(rank.pool, "runtime", lambda: device)
    return rank


def pair_on(site, monkeypatch, src: Device, dst: Device, **options) -> Pair:
    pair = site.pair(*(rank_on(device, monkeypatch) for device in (src, dst)), **options)
    for each in (src, dst):
        each.log.clear()  # what a node measures at its start
    return pair


@inline_or_thread
@both_paths
def test_no_transport_is_made_or_used_before_the_device_is_current(site, device, monkeypatch, progress, path):
    used: dict[str, set[bool]] = {}

    def watched(name):
        inner = getattr(LocalTransport, name)

        def call(self, *args, **kwargs):
            used.setdefault(name, set()).add(device.depth > 0)
            return inner(self, *args, **kwargs)

        return call

    for name in ("__init__", *VERBS):
        monkeypatch.setattr(LocalTransport, name, watched(name))
    pair = pair_on(site, monkeypatch, device, device, path=path, progress=progress)
    pair.move(1)
    assert device.n_reserved == 2, "as each side's session began, and not as chunks came"
    p = pair.p
    pair.d.close()

    def fenced():
        for endpoint in p.unfenced():
            assert endpoint == name_of(pair.d.incarnation), "as an operator's word names it"
            p.fence(endpoint)
        return not p.core.sessions

    drive([p], fenced)
    p.close()
    assert device.depth == 0
    wrong = {name for name, current in used.items() if current != {True}}
    assert not wrong, f"{wrong} of the transport ran where no device was current"
    assert {"__init__", "register", "offers", "connect", "identify", "prepare", "poll", "close", "notify"} <= set(used)


def test_the_device_is_left_even_when_a_turn_raises(site, device, monkeypatch):
    p = site.prefill(rank_on(device, monkeypatch))
    monkeypatch.setattr(p.transport, "poll", mock.Mock(side_effect=RuntimeError("cudaErrorIllegalAddress")))
    entered = device.n_entered
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        p.turn()
    assert device.n_entered > entered
    assert device.depth == 0


def test_engines_events_are_asked_with_the_device_current(site, device, monkeypatch):
    pair = pair_on(site, monkeypatch, device, device, path="staged")
    event = Asked(device)
    room = pair.open(1, after=event)
    room.sender.chunk(room.pages, TOKENS, ready=event)
    room.sender.finish()
    pair.arrives(room)
    assert len(event.depths) >= 2
    assert all(event.depths)


@pytest.mark.parametrize("given", [{}, {"max_sms": np.int64(3)}, {"max_sms": None}])
def test_how_many_multiprocessors_a_node_takes_reaches_every_launch(site, device, monkeypatch, given):
    made, seen = Plan._launch, set()
    monkeypatch.setattr(Plan, "_launch", lambda *args: seen.add(args[2]) or made(*args))
    pair_on(site, monkeypatch, device, device, path="staged", **given).move(1)
    assert seen == {given.get("max_sms", DEFAULT_MAX_SMS)}


@both_paths
@pytest.mark.parametrize("flushes", [True, False])
def test_what_a_nic_wrote_is_flushed_before_it_is_read_once_for_a_turns_chunks(site, monkeypatch, path, flushes):
    """Where the device does not order a NIC's writes before its kernels' reads: Ampere."""
    src, dst = (Device(flushes=flushes) for _ in range(2))
    pair = pair_on(site, monkeypatch, src, dst, path=path)
    told = pair.d.roster.changed
    monkeypatch.setattr(pair.d.roster, "changed", lambda *args: dst.log.append(str(args[1] & 0x7F)) or told(*args))
    pair.move(1, cuts=(10, 20))
    assert "flush" not in src.log, "prefill reads nothing that a NIC wrote"
    if not flushes:
        assert "flush" not in dst.log
        return
    for n, what in enumerate(dst.log):
        if what in ("copy", str(int(State.SUCCESS))):
            assert "flush" in dst.log[:n]
    assert dst.log.count("copy") == (3 if path == "staged" else 0)


def test_several_scatters_of_a_turn_are_one_flush(site, monkeypatch):
    device = Device(flushes=True)
    d = site.decode(rank_on(device, monkeypatch))
    monkeypatch.setattr(Driver, "_carry", lambda *_: False)
    with device.current():
        d.driver._carry_out([Scatter(ticket, None, None, 0, 0, 0) for ticket in range(3)])
        d.driver._carry_out([HangUp(b"")])
    monkeypatch.undo()
    assert device.log == ["flush"]
