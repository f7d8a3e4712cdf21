"""Half a day of rooms at full speed through one node, whose real peers live for a while and leave in three ways."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import numpy as np

from pdstage import DecodeNode, PrefillNode, Receiver, Sender
from pdstage.protocol.state import State
from tests.manager.engine import Rank
from tests.soak.real import CONFIG, RealPeers

AT_ONCE = 16
"""Rooms under way at a peer."""
N_ALIVE = 3
N_CLOSING = 16
"""Peers that leave at once, each in a thread that waits for its close."""
TOKENS = 4
ABORTED_BY_DECODE, ABORTED_BY_PREFILL = 37, 41
WAYS = ("at rest", "idle", "with rooms under way")
"""How a peer leaves."""


@dataclass(eq=False)
class Room:
    sender: Sender
    receiver: Receiver
    ranks: tuple[Rank, Rank]
    pages: tuple[np.ndarray, np.ndarray]
    value: int

    @property
    def is_over(self) -> bool:
        return self.sender.released and self.receiver.released


class Peer:
    """One node's life of `n_rooms`."""

    def __init__(self, node: PrefillNode | DecodeNode, rank: Rank, instance: str, way: str, n_rooms: int) -> None:
        self.node, self.rank, self.instance, self.way, self.left = node, rank, instance, way, n_rooms
        self.rooms: deque[Room] = deque()
        self.over_by = math.inf
        self.closed: Future[bool] = Future()

    @property
    def is_done(self) -> bool:
        """Whether it has begun all its rooms, and leaves as soon as it may."""
        return not self.left and (not self.rooms or self.way == WAYS[2])


class Long(RealPeers):
    """`ended` counts rooms by how they ended at decode; `lives` peers by how they left."""

    def __init__(self, role: str, stack: ExitStack, transport: str) -> None:
        super().__init__(role, stack, transport, progress="thread")  # a peer that closes waits for its answers
        self.ended: Counter[str] = Counter()
        self.lives: Counter[str] = Counter()
        self._serials = count(1)
        self._closing = stack.enter_context(ThreadPoolExecutor(N_CLOSING))
        all_there = threading.Barrier(N_CLOSING + 1)  # else threads are counted that come later
        for _ in range(N_CLOSING):
            self._closing.submit(all_there.wait)
        all_there.wait()

    def serve_rooms(self, n_rooms: int, a_peer: int) -> None:
        """`n_rooms` rooms, `a_peer` in each peer's life; at the end every peer has gone.

        Nobody waits for one that leaves: the others go on meanwhile.
        """
        n_to_come = -(-n_rooms // a_peer)
        alive: list[Peer] = []
        gone: list[Peer] = []
        while n_to_come or alive or gone:
            while n_to_come and sum(not peer.is_done for peer in alive) < N_ALIVE:
                n_to_come -= 1
                alive.append(self._born(a_peer))
            for peer in list(alive):
                while peer.left and len(peer.rooms) < AT_ONCE:
                    peer.left -= 1
                    peer.rooms.append(self._begin(peer))
                if peer.is_done and not (peer.way == "idle" and peer.node.core.sessions):
                    peer.closed = self._closing.submit(peer.node.close)
                    # A room that the hub opens after the peer has gone ends as its handshake does.
                    peer.over_by = time.monotonic() + 2 * CONFIG.hello_s
                    alive.remove(peer)
                    gone.append(peer)
                    continue
                peer.node.turn()
                self._end_rooms(peer)
            if all(peer.is_done for peer in alive):
                time.sleep(1e-3)  # leave the processor to the nodes' own threads
            self.node.completions()
            for peer in list(gone):
                self._end_rooms(peer)
                if not peer.rooms and peer.closed.done():
                    assert peer.closed.result(), "it could not give its memory back"
                    gone.remove(peer)
                assert time.monotonic() < peer.over_by, f"a peer does not go, or its rooms do not end: {peer.rooms}"

    def _born(self, n_rooms: int) -> Peer:
        number = self.lives.total()
        way = WAYS[number % len(WAYS)]
        self.lives[way] += 1
        other = "prefill" if self.role == "decode" else "decode"
        rank, instance = Rank(), f"life {number}" if other == "prefill" else "hub"
        return Peer(self._make(other, rank, instance), rank, instance, way, n_rooms)

    def _begin(self, peer: Peer) -> Room:
        serial = next(self._serials)
        here, there = (self.node, self.rank), (peer.node, peer.rank)
        (src, src_rank), (dst, dst_rank) = (there, here) if self.role == "decode" else (here, there)
        assert isinstance(src, PrefillNode)
        assert isinstance(dst, DecodeNode)
        pages = src_rank.allocate(TOKENS), dst_rank.allocate(TOKENS)
        value = serial % 251 + 1
        _fill(src_rank, pages[0], value)
        _fill(dst_rank, pages[1], 0)
        receiver = dst.receive(serial, self.address, instance=peer.instance)
        receiver.bind(pages[1], (0, TOKENS))
        if serial % ABORTED_BY_DECODE == 0:
            receiver.abort()
        sender = src.send(serial)
        sender.chunk(pages[0], (0, TOKENS))
        if serial % ABORTED_BY_PREFILL == 0:
            sender.abort()
        else:
            sender.finish(aux=b"aux")
        return Room(sender, receiver, (src_rank, dst_rank), pages, value)

    def _end_rooms(self, peer: Peer) -> None:
        while peer.rooms and peer.rooms[0].is_over:
            self._end(peer.rooms.popleft())

    def _end(self, room: Room) -> None:
        self.ended[room.receiver.state.name] += 1
        if room.receiver.state is State.SUCCESS:
            assert room.sender.state is State.SUCCESS, room.sender.error
            assert _holds(room.ranks[1], room.pages[1], room.value), "Success, and not every byte is there"
        for rank, pages in zip(room.ranks, room.pages, strict=True):
            rank.free(pages)


def _views(rank: Rank) -> list[np.ndarray]:
    return [*rank.k, *rank.v]


def _fill(rank: Rank, pages: np.ndarray, value: int) -> None:
    for n, view in enumerate(_views(rank)):
        view[pages] = (value + n) % 256 if value else 0


def _holds(rank: Rank, pages: np.ndarray, value: int) -> bool:
    return all((view[pages] == (value + n) % 256).all() for n, view in enumerate(_views(rank)))
