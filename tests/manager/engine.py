"""A minimal engine around real nodes: numpy pools, and rooms whose every byte comes from a generator."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from pdstage import Config, DecodeNode, Pool, PrefillNode, Receiver, Sender, State, Topology, shared
from pdstage.layout import ALL_TOKENS, Layout, TokenShard
from pdstage.layout.topology import shard_range
from pdstage.manager.node import Node
from pdstage.tensors import build, paged_hnd, paged_nhd

LAYERS, HEADS, DIM = 3, 4, 16
TOKENS = 37
"""Of a room unless said otherwise: no page ends there."""
N_ROOMS = 6
"""What nodes of two processes whose pools lie on GPUs send each other."""
QUICK = Config(retry_s=0.05, drain_s=20.0, hello_s=60.0, max_silence_s=30.0)
"""No wait for a question asked again; and no deadline that a busy machine alone might pass."""
IMPATIENT = Config(retry_s=0.05, drain_s=4.0, hello_s=20.0, max_silence_s=6.0)
"""Where a peer is going to be silent."""


def truth(room: int, layer: int, role: str, tokens: int, heads: range) -> np.ndarray:
    """`[tokens, heads, DIM]` uint8: what a room's K or V must be."""
    seed = zlib.crc32(f"{room}/{layer}/{role}".encode())
    return np.random.default_rng(seed).integers(0, 256, (tokens, HEADS, DIM), np.uint8)[:, heads.start : heads.stop]


def mappable_zeros(shape: tuple[int, ...], dtype: type[np.uint8]) -> np.ndarray:
    """In memory that peers on this host map."""
    nbytes = math.prod(shape)
    return shared.allocate(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)[:nbytes].view(dtype).reshape(shape)


class Rank:
    """One rank's pool of K and V: `[pages, page, heads, dim]` or, `hnd`, `[pages, heads, page, dim]`."""

    def __init__(
        self,
        tp: int = 1,
        rank: int = 0,
        *,
        page: int = 4,
        n_pages: int = 64,
        hnd: bool = False,
        layers: int = LAYERS,
        owned: TokenShard = ALL_TOKENS,
        mappable: bool = False,
    ):
        self.heads = range(*shard_range(HEADS, tp, rank))
        self.page, self.hnd, self.n_pages, self.layers = page, hnd, n_pages, layers
        inner = (len(self.heads), page) if hnd else (page, len(self.heads))
        make = mappable_zeros if mappable else np.zeros
        self.k, self.v = ([make((n_pages, *inner, DIM), np.uint8) for _ in range(layers)] for _ in "kv")
        self.topology = Topology(tp_size=tp, tp_rank=rank, cp_size=owned.size, cp_rank=owned.rank)
        self.owned = owned
        self.pool = Pool.of(self.layout_of(), keep=(self.k, self.v))
        self._free = list(np.random.default_rng(rank).permutation(n_pages))

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return (*self.k, *self.v)

    def layout_of(self) -> Layout:
        """Of the tensors where they are now."""
        make, tp = paged_hnd if self.hnd else paged_nhd, (self.topology.tp_size, self.topology.tp_rank)
        return build(make(self.k, self.v, total_heads=HEADS, tp=tp), owned={"kv": self.owned})

    def allocate(self, tokens: int) -> np.ndarray:
        n = -(-tokens // self.page)
        pages, self._free = self._free[:n], self._free[n:]
        assert len(pages) == n, "the pool is exhausted"
        return np.array(pages)

    def free(self, pages: np.ndarray) -> None:
        self._free += list(pages)

    def write(self, room: int, tokens: int, pages: np.ndarray) -> None:
        for layer in range(self.layers):
            for role, tensors in (("k", self.k), ("v", self.v)):
                values = self.stored(truth(room, layer, role, tokens, self.heads))
                for t in range(tokens):
                    self._row(tensors[layer], pages[t // self.page], t % self.page)[:] = values[t]

    def stored(self, values: np.ndarray) -> np.ndarray:
        """As the pool's tensors take them."""
        return values

    def read(self, layer: int, role: str, tokens: int, pages: np.ndarray) -> np.ndarray:
        tensor = self.fetched((self.k if role == "k" else self.v)[layer])
        return np.stack([self._row(tensor, pages[t // self.page], t % self.page) for t in range(tokens)])

    def fetched(self, tensor: np.ndarray) -> np.ndarray:
        """A tensor of the pool, in host memory."""
        return tensor

    def holds(self, room: int, tokens: int, pages: np.ndarray, prefix: int = 0) -> bool:
        return all(
            np.array_equal(
                self.read(layer, role, tokens, pages)[prefix:], truth(room, layer, role, tokens, self.heads)[prefix:]
            )
            for layer in range(self.layers)
            for role in "kv"
        )

    def _row(self, tensor: np.ndarray, page: int, t: int) -> np.ndarray:
        return tensor[page, :, t] if self.hnd else tensor[page, t]


def drive(nodes: Sequence[Node], done: Callable[[], bool], timeout_s: float = 240.0) -> None:
    """Gives every node turns until `done`."""
    deadline_at = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_at, "it did not come to pass"
        for node in nodes:
            node.turn(1e-4)


def fails(node: Node, room: Receiver | Sender, words: str = "") -> None:
    """Gives the node turns until the room has failed, with these words."""
    drive([node], lambda: room.state is State.FAILED)
    assert words in str(room.error)


def bound(node: DecodeNode, rank: Rank, room: int, address: str, tokens: int = TOKENS) -> Receiver:
    """The receiver of a room, which has its pages."""
    receiver = node.receive(room, address)
    receiver.bind(rank.allocate(tokens), tokens)
    return receiver


def begun(node: DecodeNode, rank: Rank, address: str) -> Receiver:
    """The receiver of room 0, some of which is there."""
    receiver = bound(node, rank, 0, address)
    drive([node], lambda: receiver.state is State.TRANSFERRING)
    return receiver


def write_all(rank: Rank) -> list[np.ndarray]:
    """The pages of all rooms, which hold what they must."""
    pages = [rank.allocate(TOKENS) for _ in range(N_ROOMS)]
    for room, held in enumerate(pages):
        rank.write(room, TOKENS, held)
    return pages


def send_all(node: PrefillNode, pages: list[np.ndarray]) -> list[Sender]:
    """All rooms, each in two chunks."""
    senders = []
    for room, held in enumerate(pages):
        senders.append(node.send(room))
        senders[-1].chunk(held, (0, 20))
        senders[-1].chunk(held, (20, TOKENS))
        senders[-1].finish()
    return senders


def all_arrive(pipe: Connection, node: PrefillNode, rank: Rank) -> None:
    """Sends all rooms to a process in `serve_all`, which says that it has every byte of each."""
    senders = send_all(node, write_all(rank))
    drive([node], lambda: all(sender.released for sender in senders) and pipe.poll())
    assert pipe.recv() == [(int(State.SUCCESS), True)] * N_ROOMS


def receive_all(
    node: DecodeNode, rank: Rank, address: str, n: int = N_ROOMS
) -> tuple[list[Receiver], list[np.ndarray]]:
    """All rooms, and their pages."""
    pages = [rank.allocate(TOKENS) for _ in range(n)]
    receivers = [node.receive(room, address) for room in range(n)]
    for receiver, into in zip(receivers, pages, strict=True):
        receiver.bind(into, TOKENS)
    return receivers, pages


def serve_all(pipe: Connection, node: DecodeNode, rank: Rank, address: str) -> None:
    """Receives all rooms, says for each how it ended and whether it holds what it must, and stays until told."""
    receivers, pages = receive_all(node, rank, address)
    drive([node], lambda: all(receiver.released for receiver in receivers))
    pipe.send([(int(one.state), rank.holds(n, TOKENS, pages[n])) for n, one in enumerate(receivers)])
    drive([node], pipe.poll)


def altering(node: DecodeNode) -> None:
    """From now on a byte of each chunk changes on its way to that node."""
    scatter = node.stager.scatter

    def altered(ticket, move, src) -> None:
        ctypes.c_uint8.from_address(src.base + 100).value ^= 4
        scatter(ticket, move, src)

    node.stager.scatter = altered


def unheard(node: Node) -> None:
    """As if its peers had promised to be heard again at once: it takes them for silent in one of its next turns."""
    endpoint = node.core.endpoint
    for session in node.core.sessions.values():
        session.silence_s = 0.1
        endpoint.after(0.0, endpoint._listen, session)


def prefill_node(rank: Rank, directory: str, **options) -> PrefillNode:
    options = {"transport": "local", "staging_nbytes": 1 << 20, "config": QUICK} | options
    return PrefillNode(rank.pool, rank.topology, directory=directory, **options)


def decode_node(rank: Rank, **options) -> DecodeNode:
    options = {"transport": "local", "staging_nbytes": 1 << 20, "config": QUICK} | options
    return DecodeNode(rank.pool, rank.topology, **options)


class Event:
    """Stands for a CUDA event, which cannot exist without a device."""

    done = False

    def query(self) -> bool:
        return self.done


class Room(NamedTuple):
    """A room under way: both handles, and its pages on both sides."""

    sender: Sender
    receiver: Receiver
    pages: np.ndarray
    into: np.ndarray

    @property
    def released(self) -> bool:
        return self.sender.released and self.receiver.released

    @property
    def states(self) -> tuple[State, State]:
        return self.sender.state, self.receiver.state


class Pair:
    """A prefill and a decode node of one rank each, and rooms between them."""

    def __init__(self, p: PrefillNode, src: Rank, d: DecodeNode, dst: Rank) -> None:
        self.p, self.src, self.d, self.dst = p, src, d, dst

    @property
    def nodes(self) -> tuple[PrefillNode, DecodeNode]:
        return self.p, self.d

    def receive(self, room, **options) -> Receiver:
        return self.d.receive(room, self.p.directory_address, **options)

    def open(self, room, tokens: int = TOKENS, **bound) -> Room:
        """Begun on both sides: its bytes are written and its pages bound, and nothing is handed over yet."""
        pages, into = self.src.allocate(tokens), self.dst.allocate(tokens)
        self.src.write(room, tokens, pages)
        receiver = self.receive(room)
        receiver.bind(into, tokens, **bound)
        return Room(self.p.send(room), receiver, pages, into)

    def begin(self, room, tokens: int = TOKENS, *, cuts: Sequence[int] = (), aux: bytes = b"aux", **bound) -> Room:
        """All is handed over, in chunks that are cut at `cuts`."""
        opened = self.open(room, tokens, **bound)
        for span in pairwise((0, *cuts, tokens)):
            opened.sender.chunk(opened.pages, span)
        opened.sender.finish(aux=aux)
        return opened

    def end(self, *rooms: Room) -> None:
        drive(self.nodes, lambda: all(room.released for room in rooms))

    def arrives(self, room: Room, tokens: int = TOKENS) -> None:
        """It ends well, with every byte in its place."""
        self.end(room)
        assert room.states == (State.SUCCESS, State.SUCCESS), room.receiver.error
        assert self.dst.holds(room.receiver.id, tokens, room.into)

    def move(self, room, tokens: int = TOKENS, **how) -> Room:
        """One room, checked byte for byte; its pages are free again."""
        moved = self.begin(room, tokens, **how)
        self.arrives(moved, tokens)
        self.src.free(moved.pages)
        self.dst.free(moved.into)
        return moved
