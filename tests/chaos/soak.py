"""One node for long, and thousands of real nodes of the other role that come, have rooms, and go in every way there is.

python -m tests.chaos.soak                            # 10,000 short-lived peers of a decode, then of a prefill rank
python -m tests.chaos.soak --peers 1200 --rooms 600   # twelve hours of rooms at 1,000 a minute, at full speed
python -m tests.chaos.soak --crowd 500                # so many peers at once, over one socket

Exits 1 if anything grew: descriptors, sockets, threads, resident memory, or a table of the node.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from pdstage import Config, DecodeNode, PrefillNode, State
from pdstage.control.bootstrap import BootstrapServer
from pdstage.manager.handle import Handle
from tests import descriptors
from tests.manager.engine import Rank, decode_node, prefill_node
from tests.processes import n_tasks, resident_nbytes

HASTE = Config(
    retry_s=0.1, retry_cap_s=0.4, hello_s=4.0, open_s=20.0, drain_s=4.0, max_silence_s=3.0, idle_s=0.3, open_wait_s=6.0,
    send_wait_s=6.0,
)  # fmt: skip
"""What is silent is given up soon; not so soon that on a busy machine a turn of all peers takes as long."""
PATIENT = Config(hello_s=60.0, idle_s=600.0, max_silence_s=60.0)
WAYS = ("bye", "killed", "silent", "idle", "mute")
"""How a peer goes: in order; at once; without a turn any more; once its session is idle. The last one's rooms fail: it
says nothing, or nothing more once it has asked.
"""
ROOMS_AT_ONCE = 16
TOKENS = 8
_ABORTED_BY_HUB, _ABORTED_BY_PEER = 37, 41
_WAIT_S = 120.0
_MAX_GROWTH_NBYTES = 1024
"""Of resident memory, a peer come and gone: an allocator's fragments, and what is remembered up to a cap."""
CAPPED = {
    "HandshakeServer.lost": 4096,  # lost sessions that no late Hello may begin again
    "PrefillRooms.ended": 4096,
    "DecodeRooms._given_up": 4096,
    "Roster._ended": 65_536,  # for `completions`
    "LogLimit._windows": 1024,
    "Inflow._open": 4096,  # by descriptor: libzmq does not say which it closed itself, and numbers are used again
}
"""Tables that remember the last so many of what is over, by design."""


class Gauge:
    """What a node and its process hold at one moment of rest, by name: the length of every table is among it."""

    def __init__(self, node: DecodeNode | PrefillNode) -> None:
        counts = {"descriptors": descriptors.count(), "sockets": descriptors.count("socket:"), "threads": n_tasks()}
        self.held = Counter(counts | _tables(node))
        self.resident_nbytes = resident_nbytes()

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

    def __init__(self, role: str, stack: ExitStack, transport: str = "local", config: Config = HASTE) -> None:
        self.role, self.other = role, "prefill" if role == "decode" else "decode"
        self.address = stack.enter_context(BootstrapServer()).address
        self._options = {"transport": transport, "config": config, "staging_nbytes": 1 << 16}
        self.rank = Rank(n_pages=16_384)
        self.node = stack.enter_context(self._make(role, self.rank, "hub", progress="thread"))
        self.ended: Counter[tuple[str, State]] = Counter()
        self._numbers = count()

    def _make(self, role: str, rank: Rank, instance: str, **options: object) -> DecodeNode | PrefillNode:
        options |= self._options
        if role == "decode":
            return decode_node(rank, **options)
        return prefill_node(rank, self.address, instance=instance, **options)

    def serve(self, n_peers: int, n_rooms: int = 1, at_once: int = 16, ways: Sequence[str] = WAYS) -> None:
        """`n_peers` come, `at_once` at a time, have `n_rooms` each, and go, each way in turn."""
        there: list[Peer] = []
        while n_peers or there:
            while n_peers and len(there) < at_once:
                n_peers -= 1
                there.append(self._born(ways[n_peers % len(ways)], n_rooms))
            there = [peer for peer in there if self._lives(peer)]
            self.node.completions()

    def crowd(self, n_peers: int) -> None:
        """So many at once, and two rooms of each over the session that it has."""
        before = self.node.stats()["sessions_opened"]
        peers = [self._born("bye", 0) for _ in range(n_peers)]
        for _ in range(2):
            for peer in peers:
                peer.left = 1
            while any(peer.left or peer.rooms for peer in peers):
                for peer in peers:
                    self._move(peer)
            assert self.node.stats()["sessions_opened"] - before == len(self.node.core.sessions) == n_peers
        assert not [state for _, state in self.ended if state is not State.SUCCESS]
        for peer in peers:
            peer.node.close()

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


def soak(role: str, options: argparse.Namespace) -> bool:
    """A tenth to warm up; from then on nothing may grow."""
    with ExitStack() as stack:
        star = Star(role, stack, options.transport, PATIENT if options.crowd else HASTE)
        before = None
        for n in range(10):
            began = time.monotonic()
            if options.crowd:
                star.crowd(options.crowd)
            else:
                star.serve(options.peers // 10, options.rooms, at_once=64)
            now = star.gauge(before)
            before = before or now
            counts = ", ".join(f"{now.held[name]} {name}" for name in ("descriptors", "sockets", "threads"))
            print(
                f"{role}, {n + 1} of 10: {counts}, {now.resident_nbytes >> 10} KiB ({time.monotonic() - began:.0f} s)"
            )
        for (way, state), n_rooms in sorted(star.ended.items()):
            print(f"  {way}: {n_rooms} rooms {state.name}")
        grown = now.grown(before)
        if now.resident_nbytes - before.resident_nbytes > max(4 << 20, _MAX_GROWTH_NBYTES * options.peers):
            grown["resident memory"] = before.resident_nbytes, now.resident_nbytes
        for name, (was, is_now) in grown.items():
            print(f"  GREW: {name}, from {was} to {is_now}")
        return not grown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=10_000)
    parser.add_argument("--rooms", type=int, default=1, help="of each peer")
    parser.add_argument("--crowd", type=int, default=0, help="peers, all at once")
    parser.add_argument("--role", choices=["decode", "prefill"], help="of the node in the middle; both if not given")
    parser.add_argument("--transport", default="local")
    options = parser.parse_args()
    logging.getLogger("pdstage").setLevel(logging.ERROR)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flat = [soak(role, options) for role in ([options.role] if options.role else ["decode", "prefill"])]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
