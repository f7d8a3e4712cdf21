"""Ranks of engines that are cut differently: stages of a pipeline, a draft model on the last, state in slots.

Every byte comes from a generator; pools are numpy arrays `[items, page, heads, DIM]`, or heads first.
"""

from __future__ import annotations

import itertools
import zlib
from multiprocessing.connection import Connection

import numpy as np

from pdstage import Pool, Topology
from pdstage.layout.topology import shard_range
from pdstage.tensors import Part, build, paged_hnd, paged_nhd
from tests.manager.engine import drive, prefill_node

LAYERS, HEADS, DIM, TOKENS = 4, 4, 16, 50
SLOTS = {"prefill": 3, "decode": 2}


def truth(room: int, name: str, role: str, layer: int, n: int) -> np.ndarray:
    """`[n, HEADS, DIM]` uint8: what a room's tokens or slots must be."""
    seed = zlib.crc32(f"{room}/{name}/{role}/{layer}".encode())
    return np.random.default_rng(seed).integers(0, 256, (n, HEADS, DIM), np.uint8)


class Stage:
    """One rank's pool: `kv` of its stage's layers, `state` in slots alike, and `draft` on the last stage."""

    def __init__(self, topology: Topology, *, page: int = 4, hnd: bool = False, n_items: int = 128) -> None:
        self.topology, self.page, self.hnd = topology, page, hnd
        self.heads = range(*shard_range(HEADS, topology.tp_size, topology.tp_rank))
        pp, stage = topology.pp_size, topology.pp_rank
        layers = list(range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp))
        self.layers = {"kv": layers, "state": layers} | ({"draft": [0]} if stage == pp - 1 else {})
        self.arrays: dict[tuple[str, str, int], np.ndarray] = {}
        parts = [self._part(name, n_items) for name in self.layers]
        self.pool = Pool.of(build(*parts, slots=("state",)), keep=self.arrays)
        self._free = {
            name: list(np.random.default_rng(topology.unique_rank).permutation(n_items)) for name in self.layers
        }

    def _part(self, name: str, n_items: int) -> Part:
        page = 1 if name == "state" else self.page
        inner = (len(self.heads), page) if self.hnd else (page, len(self.heads))
        for role, layer in itertools.product("kv", self.layers[name]):
            self.arrays[name, role, layer] = np.full((n_items, *inner, DIM), 0xAB, np.uint8)
        k, v = ([self.arrays[name, role, layer] for layer in self.layers[name]] for role in "kv")
        make = paged_hnd if self.hnd else paged_nhd
        place = (self.topology.tp_size, self.topology.tp_rank)
        return make(k, v, total_heads=HEADS, tp=place, component=name, layers=self.layers[name])

    def allocate(self, n_slots: int) -> dict[str, np.ndarray]:
        """Items for one room, of every component."""
        counts = {name: n_slots if name == "state" else -(-TOKENS // self.page) for name in self.layers}
        taken = {name: np.array(self._free[name][:n]) for name, n in counts.items()}
        self._free = {name: self._free[name][n:] for name, n in counts.items()}
        return taken

    def rows(self, key: tuple[str, str, int], items: np.ndarray) -> list[np.ndarray]:
        """A view `[heads, DIM]` of each token or slot, in order."""
        array = self.arrays[key]
        page = 1 if key[0] == "state" else self.page
        places = itertools.product(items, range(page))
        return [array[item, :, t] if self.hnd else array[item, t] for item, t in places]

    def write(self, room: int, items: dict[str, np.ndarray]) -> None:
        for name, role, layer in self.arrays:
            n = SLOTS["prefill"] if name == "state" else TOKENS
            values = truth(room, name, role, layer, n)[:, self.heads.start : self.heads.stop]
            for row, value in zip(self.rows((name, role, layer), items[name]), values, strict=False):
                row[:] = value

    def wrong(self, room: int, items: dict[str, np.ndarray], n_slots: int, prefix: int = 0) -> list[object]:
        """Where the pool holds anything but the room's truth from token `prefix` on, the first row of each view."""
        found: list[object] = []
        for name, role, layer in self.arrays:
            n = n_slots if name == "state" else TOKENS
            values = truth(room, name, role, layer, max(n, 1))[:n, self.heads.start : self.heads.stop]
            rows = self.rows((name, role, layer), items[name])
            rest = range(0 if name == "state" else prefix, n)
            at = next((i for i in rest if not np.array_equal(rows[i], values[i])), None)
            found += [(name, role, layer, at)] if at is not None else []
        return found


def serve_stage(pipe: Connection, address: str, topology: Topology, transport: str, rooms: int) -> None:
    """Sends `rooms` rooms in two chunks each, wherever a destination lets itself be written."""
    stage = Stage(topology)
    with prefill_node(stage, address, transport=transport, path="direct") as node:
        pipe.send("ready")
        senders = []
        for room in range(rooms):
            items = stage.allocate(SLOTS["prefill"])
            stage.write(room, items)
            state = items.pop("state")
            sender = node.send(room)
            for span in ((0, 20), (20, TOKENS)):
                sender.chunk(items, dict.fromkeys(items, span))
            sender.finish(aux=b"%d" % room, states={"state": state})
            senders.append(sender)
        drive([node], lambda: all(sender.released for sender in senders))
        pipe.send(([int(sender.state) for sender in senders], node.stats()))
        drive([node], pipe.poll)
