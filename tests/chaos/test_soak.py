"""A node holds nothing of peers that are gone (I14): one node for long, and peers of the other role, in one process.

They come, have rooms, and go in every way there is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from pdstage import Config, DecodeNode, PrefillNode
from pdstage.control.bootstrap import BootstrapServer
from pdstage.manager.handle import Handle
from pdstage.protocol.state import State
from tests import descriptors
from tests.manager.engine import Rank, decode_node, prefill_node
from tests.processes import n_tasks

HASTE = Config(
    retry_s=0.1, hello_s=4.0, open_s=20.0, drain_s=4.0, max_silence_s=3.0, idle_s=0.3, open_wait_s=6.0,
    send_wait_s=6.0,
)  # fmt: skip
"""What is silent is given up soon; not so soon that on a busy machine a turn of all peers takes as long."""
PATIENT = Config(hello_s=60.0, idle_s=600.0, max_silence_s=60.0)
WAYS = ("bye", "killed", "silent", "idle", "mute")
"""How a peer goes: in order; at once; without a turn any more; once its session is idle. The last one's rooms fail: it
says nothing, or nothing more once it has asked.
"""
ROOMS_AT_ONCE = PEERS_AT_ONCE = 16
TOKENS = 8
_ABORTED_BY_HUB, _ABORTED_BY_PEER = 37, 41
_WAIT_S = 120.0
CAPPED = {
    "HandshakeServer.lost": 4096,  # lost sessions that no late Hello may begin again
    "PrefillCore.ended": 4096,
    "DecodeCore._given_up": 4096,
    "Roster._ended": 65_536,  # for `completions`
    "LogLimit._windows": 1024,
}
"""Tables that remember the last so many of what is over, by design."""


class Gauge:
    """What a node and its process hold at one moment of rest, by name: the length of every table is among it."""

    def __init__(self, node: DecodeNode | PrefillNode) -> None:
        counts = {"descriptors": descriptors.count(), "sockets": descriptors.count("socket:"), "threads": n_tasks()}
        self.held = Counter(counts | _tables(node))

    def grown(self, before: Gauge) -> dict[str, tuple[int, int]]:
        """What is more than it was, and more than its cap: (before, now)."""
        return {
            name: (before.held[name], now)
            for name, now in self.held.items()
            if now > max(before.held[name], CAPPED.get(name, 0))
        }


def _tables(node: DecodeNode | PrefillNode) -> dict[str, int]:
    """The length of everything that has one, by class and field, in the node and all that it is made of."""
    lengths: Counter[str] = Counter()
    found, met = [node], {id(node)}
    for part in found:  # which grows meanwhile
        slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        fields = {name: getattr(part, name) for name in slots if hasattr(part, name)} | getattr(part, "__dict__", {})
        for name, value in fields.items():
            if hasattr(value, "__len__") and not isinstance(value, str | bytes | memoryview | tuple):
                lengths[f"{type(part).__name__}.{name}"] += len(value)
            mine = type(value).__module__.startswith("pdstage") and not isinstance(value, tuple)
            if mine and id(value) not in met:
                met.add(id(value))
                found.append(value)
    return dict(lengths)


@dataclass(eq=False)
class Room:
    number: int
    here: Handle
    """The node's in the middle."""
    there: Handle
    pages: tuple[np.ndarray, np.ndarray]


@dataclass(eq=False)
class Peer:
    node: DecodeNode | PrefillNode
    rank: Rank
    instance: str
    way: str
    left: int
    """Rooms that it has still to begin."""
    rooms: list[Room] = field(default_factory=list)
    silent_since: float = 0.0


class Star:
    """The node in the middle, with a thread of its own. `ended` counts rooms by their peer's way and their end."""

    def __init__(self, role: str, stack: ExitStack, config: Config = HASTE) -> None:
        self.role, self.other = role, "prefill" if role == "decode" else "decode"
        self.address = stack.enter_context(BootstrapServer()).address
        self._options = {"transport": "local", "config": config, "staging_nbytes": 1 << 16}
        self.rank = Rank(n_pages=16_384)
        self.node = stack.enter_context(self._make(role, self.rank, "hub", progress="thread"))
        self.ended: Counter[tuple[str, State]] = Counter()
        self._numbers = count()

    def _make(self, role: str, rank: Rank, instance: str, **options: object) -> DecodeNode | PrefillNode:
        options |= self._options
        if role == "decode":
            return decode_node(rank, **options)
        return prefill_node(rank, self.address, instance=instance, **options)

    def serve(self, n_peers: int, n_rooms: int = 1, ways: Sequence[str] = WAYS) -> None:
        """`n_peers` come, some at a time, have `n_rooms` each, and go, each way in turn."""
        there: list[Peer] = []
        while n_peers or there:
            while n_peers and len(there) < PEERS_AT_ONCE:
                n_peers -= 1
                there.append(self._born(ways[n_peers % len(ways)], n_rooms))
            there = [peer for peer in there if self._lives(peer)]
            self.node.completions()

    def gauge(self, before: Gauge | None = None) -> Gauge:
        """What is held at rest. Libraries close connections in their own time: `before` is waited for, a while."""
        until = time.monotonic() + _WAIT_S
        while self._is_busy():
            assert time.monotonic() < until, "the node does not let go of its peers"
            time.sleep(0.01)
        self.node.directory.forget()
        until = time.monotonic() + 5.0
        while (now := Gauge(self.node)) and before is not None and now.grown(before) and time.monotonic() < until:
            time.sleep(0.05)
        return now

    def _is_busy(self) -> bool:
        with self.node.driver.use():
            core = self.node.core
            peers = getattr(core.handshake, "peers", ())
            return bool(core.sessions or peers or len(core.endpoint.timers) or self.node.sessions.lost)

    # One peer.

    def _born(self, way: str, n_rooms: int) -> Peer:
        number = next(self._numbers)
        rank, instance = Rank(n_pages=256), f"peer {number}" if self.other == "prefill" else "hub"
        return Peer(self._make(self.other, rank, instance), rank, instance, way, n_rooms)

    def _lives(self, peer: Peer) -> bool:
        self._move(peer)
        if peer.left or peer.rooms or (peer.way == "idle" and peer.node.core.sessions):
            return True
        if peer.way == "silent":
            peer.silent_since = peer.silent_since or time.monotonic()
            if time.monotonic() < peer.silent_since + 2 * HASTE.max_silence_s:
                return True
        if peer.way == "killed":
            peer.node.socket.send = lambda *_: False  # it says nothing of its end
        assert peer.node.close(20.0), "it could not give its memory back"
        return False

    def _move(self, peer: Peer) -> None:
        """Begins its rooms, gives it a turn unless it is mute or silent, and ends its rooms."""
        while peer.left and len(peer.rooms) < ROOMS_AT_ONCE:
            peer.left -= 1
            peer.rooms.append(self._begin(peer))
        is_mute = peer.way == "mute" and (self.other == "prefill" or bool(peer.node.core.handshake.peers))
        if not is_mute and not peer.silent_since:
            peer.node.turn()
        for room in list(peer.rooms):
            if room.here.released and (is_mute or room.there.released):
                peer.rooms.remove(room)
                self._end(peer, room)

    def _begin(self, peer: Peer) -> Room:
        number = next(self._numbers)
        pages = self.rank.allocate(TOKENS), peer.rank.allocate(TOKENS)
        ends = [(self.node, self.rank, pages[0]), (peer.node, peer.rank, pages[1])]
        (src, src_rank, src_pages), (dst, _, dst_pages) = ends if self.role == "prefill" else reversed(ends)
        src_rank.write(number, TOKENS, src_pages)
        receiver = dst.receive(number, self.address, instance=peer.instance)
        receiver.bind(dst_pages, TOKENS)
        sender = src.send(number)
        sender.chunk(src_pages, TOKENS)
        sender.finish(aux=b"aux")
        here, there = (receiver, sender) if self.role == "decode" else (sender, receiver)
        for handle, each in ((here, _ABORTED_BY_HUB), (there, _ABORTED_BY_PEER)):
            if peer.left and number % each == 0:
                handle.abort()
        return Room(number, here, there, pages)

    def _end(self, peer: Peer, room: Room) -> None:
        self.ended[peer.way, room.here.state] += 1
        if room.here.state is State.SUCCESS:
            rank, pages = (self.rank, room.pages[0]) if self.role == "decode" else (peer.rank, room.pages[1])
            assert rank.holds(room.number, TOKENS, pages), "Success, and not every byte is there"
        self.rank.free(room.pages[0])
        peer.rank.free(room.pages[1])


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_nothing_grows_with_peers_that_come_and_go(role: str) -> None:
    """Descriptors, sockets, threads and every table (I14); and each room ended as its peer's way has it (I10)."""
    with ExitStack() as stack:
        star = Star(role, stack)
        star.serve(24)
        before = star.gauge()
        star.serve(96)
        assert not star.gauge(before).grown(before)
        assert {way for way, _ in star.ended} == set(WAYS)
        assert all((state is State.SUCCESS) == (way != "mute") for way, state in star.ended), star.ended
        idle = star.ended["idle", State.SUCCESS]
        stats = star.node.stats()
        assert stats["sessions_ended"] == star.ended["bye", State.SUCCESS] + idle
        assert stats["sessions_idle"] == (idle if role == "decode" else 0)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_crowd_is_served_over_one_socket_and_leaves_nothing(role: str) -> None:
    """All rooms of a peer over one session; they succeed, or are aborted at either end; peers go in order (I14)."""
    with ExitStack() as stack:
        star = Star(role, stack, config=PATIENT)
        star.serve(4, 40, ways=("bye",))
        before, opened = star.gauge(), star.node.stats()["sessions_opened"]
        star.serve(32, 20, ways=("bye",))
        assert not star.gauge(before).grown(before)
        assert star.node.stats()["sessions_opened"] - opened == 32
        assert star.ended["bye", State.SUCCESS] > 700
        assert star.ended["bye", State.FAILED] > 10
