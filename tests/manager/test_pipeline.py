"""The stages of one room's chunks overlap: seen in the order of events, over a transport whose writes wait."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from pdstage import Config, State
from pdstage.manager import driver
from pdstage.plan.cost import CostModel
from pdstage.transport.base import Done
from pdstage.transport.local import LocalTransport
from tests.manager.engine import QUICK, Rank, drive
from tests.rows import inline_or_thread

TOKENS, CHUNK_TOKENS = 4096, 512
N_CHUNKS = TOKENS // CHUNK_TOKENS


class HeldTransport(LocalTransport):
    """`local`, but a post begins only with `let`; `log` takes what happens."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.log, self.held, self._n, self._ours = log, deque(), 0, {}
        self.hold = True

    def post(self, peer, spans, tag):
        self._n += 1
        self.log.append(("write", self._n - 1))
        self.held.append((-self._n, peer, spans, tag))
        if not self.hold:
            self.let()
        return -self._n

    def mapped(self, peer, address, nbytes):
        return None  # a gather into the peer's own memory would be the write

    def let(self) -> None:
        ticket, *what = self.held.popleft()
        self._ours[super().post(*what)] = ticket

    def poll(self):
        return [Done(self._ours.pop(one.ticket)) if isinstance(one, Done) else one for one in super().poll()]


class Watched:
    """One room of `N_CHUNKS` chunks, submitted and bound; `log` holds gathers, writes and scatters in their order."""

    def __init__(self, site, **options) -> None:
        self.log: list[tuple[str, int]] = []
        self.transport = HeldTransport(self.log)
        config = Config(retry_s=QUICK.retry_s, chunk_nbytes=CHUNK_TOKENS * 3 * 2 * 4 * 16)
        assert config.chunk_nbytes > driver._LARGE_NBYTES
        common = {"path": "staged", "config": config, "staging_nbytes": 4 << 20} | options
        ranks = (Rank(page=64, n_pages=80) for _ in range(2))
        self.pair = site.pair(*ranks, **common, prefill={"transport": self.transport, "n_buffers": 3})
        self.p, self.d = self.pair.nodes
        self._watch(self.p.stager, "gather")
        self._watch(self.d.stager, "scatter")
        self.room = self.pair.begin(1, TOKENS)

    def _watch(self, stager, what: str) -> None:
        """Logs each copy as its end is told."""
        poll, n = stager.poll, 0

        def told():
            nonlocal n
            done = poll()
            self.log.extend((what, n + i) for i in range(len(done)))
            n += len(done)
            return done

        stager.poll = told

    def until(self, *events: tuple[str, int]) -> None:
        drive(self.pair.nodes, lambda: set(events) <= set(self.log))

    def end(self) -> None:
        self.pair.arrives(self.room, TOKENS)


@inline_or_thread
def test_while_a_write_is_open_the_next_is_gathered_and_the_last_scattered(site, progress):
    room = Watched(site, progress=progress)
    for k in range(N_CHUNKS):
        around = [("gather", k + 1)] * (k + 1 < N_CHUNKS) + [("scatter", k - 1)] * (k > 0)
        room.until(("write", k), *around)
        assert len(room.transport.held) >= 1  # write k has not begun, and all around it is done
        assert ("scatter", k) not in room.log
        with room.p.driver.use():
            room.transport.let()
        room.p.socket.wake()
    room.end()


def test_a_gathered_chunk_is_written_before_the_next_is_gathered(site):
    """Else nothing is on its way while all free buffers are filled, and each is out of the cache when it is written."""
    room = Watched(site)
    room.transport.hold = False
    room.end()
    sent = [event for event in room.log if event[0] != "scatter"]
    assert sent == [(what, k) for k in range(N_CHUNKS) for what in ("gather", "write")]


def test_a_lease_is_given_back_before_the_next_chunk_is_scattered(site, monkeypatch):
    """Several tags may come at once; what the first scatter frees is told before the second is made."""
    room = Watched(site)
    while len(room.transport.held) < 2:
        room.until(("write", len(room.transport.held)))
    flush = room.d.driver._flush
    monkeypatch.setattr(room.d.driver, "_flush", lambda: (room.log.append(("flush", 0)), flush()))
    room.transport.let()
    room.transport.let()
    room.until(("scatter", 1))
    first, second = room.log.index(("scatter", 0)), room.log.index(("scatter", 1))
    assert ("flush", 0) in room.log[first:second]
    room.transport.hold = False
    while room.transport.held:
        room.transport.let()
    room.end()


def staged(chunk_s: float) -> CostModel:
    return CostModel(((1 << 20, 1e-4),), 1e-5, chunk_s=chunk_s)


def either(descriptor_s: float) -> CostModel:
    return CostModel(((1, descriptor_s), (1 << 30, descriptor_s)), 0.0, bulk_bytes_per_s=1e9, chunk_s=1e-9)


@pytest.mark.parametrize(
    ("path", "cost", "lanes_nbytes", "chunks"),
    [
        ("staged", staged(1e-9), 256 << 20, (0, 7)),  # cheap chunks
        ("staged", staged(1.0), 256 << 20, (0, 2)),
        ("staged", staged(1.0), 40 << 20, (0, 5)),
        ("direct", either(1.0), 256 << 20, (2, 0)),
        ("auto", either(1e-6), 256 << 20, (2, 0)),
        ("auto", either(1.0), 256 << 20, (0, 7)),
    ],
)
def test_chunks_of_a_long_room_are_as_long_as_the_transport_wants(site, path, cost, lanes_nbytes, chunks):
    """24 MiB: in chunks of at least 4 MiB, less what whole pages leave, of at most 16 MiB, and four to a lane. Direct
    chunks have no stages that could overlap, and are as long as they may be.
    """
    ranks = (Rank(page=64, n_pages=1024) for _ in range(2))
    lanes = {"staging_nbytes": lanes_nbytes, "n_lanes": 2, "path": "auto"}
    pair = site.pair(*ranks, decode=lanes, prefill={"path": path, "staging_nbytes": 64 << 20, "n_buffers": 4})
    pair.p.data_path.cost_of = lambda traits: cost
    pair.p.transport.mapped = lambda *_: None  # where pages are mapped no cost decides
    sender, receiver = pair.p.send(1), pair.receive(1)
    receiver.bind(pair.dst.allocate(65_536), 65_536)
    sender.chunk(pair.src.allocate(65_536), 65_536)
    sender.finish()
    drive(pair.nodes, lambda: receiver.released and sender.released)
    assert receiver.wait(0) is State.SUCCESS
    stats = pair.p.stats()
    assert stats["bytes_written"] == 24 << 20
    assert (stats["chunks_direct"], stats["chunks_staged"]) == chunks


def test_one_thread_at_a_time_carries_out_effects(site, monkeypatch):
    """While a turn does, an engine's call takes none, or it would send its frames before the turn's older ones."""
    node = site.prefill(Rank())
    inside, go, began = threading.Event(), threading.Event(), []
    carry_out = node.driver._carry_out

    def held(effects: object) -> bool:
        began.append(threading.current_thread())
        if threading.current_thread() is turn:
            inside.set()
            assert go.wait(60)
        return carry_out(effects)

    monkeypatch.setattr(node.driver, "_carry_out", held)
    turn = threading.Thread(target=node.turn)
    turn.start()
    assert inside.wait(60)
    node.send(1).abort()  # leaves what is to be done to the turn
    assert began == [turn]
    go.set()
    turn.join(60)
