"""Ranks of engines that are cut differently: stages of a pipeline, a draft model on the last, state in slots.

Every byte comes from a generator; pools are numpy arrays `[items, page, heads, DIM]`, or heads first.
"""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from pdstage import Pool, State, Topology
from pdstage.layout.topology import shard_range
from pdstage.tensors import build, paged_hnd, paged_nhd
from tests.manager.engine import drive

LAYERS, HEADS, DIM, TOKENS = 4, 4, 16, 50
SLOTS = {"prefill": 3, "decode": 2}
TP, PP, DP = 4, 2, 4


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
        parts = []
        for name, layers in self.layers.items():
            page = 1 if name == "state" else self.page
            inner = (len(self.heads), page) if hnd else (page, len(self.heads))
            for role, layer in itertools.product("kv", layers):
                self.arrays[name, role, layer] = np.full((n_items, *inner, DIM), 0xAB, np.uint8)
            tensors = [[self.arrays[name, role, layer] for layer in layers] for role in "kv"]
            place = (topology.tp_size, topology.tp_rank)
            make = paged_hnd if hnd else paged_nhd
            parts.append(make(*tensors, total_heads=HEADS, tp=place, component=name, layers=layers))
        self.pool = Pool.of(build(*parts, slots=("state",)), keep=self.arrays)
        free = np.random.default_rng(topology.unique_rank).permutation(n_items)
        self._free = {name: list(free) for name in self.layers}

    def allocate(self, n_slots: int) -> dict[str, np.ndarray]:
        """Items for one room, of every component."""
        counts = {name: n_slots if name == "state" else -(-TOKENS // self.page) for name in self.layers}
        taken = {name: np.array(self._free[name][:n]) for name, n in counts.items()}
        self._free = {name: self._free[name][n:] for name, n in counts.items()}
        return taken

    def rows(self, key: tuple[str, str, int], items: np.ndarray) -> list[np.ndarray]:
        """A view `[heads, DIM]` of each token or slot, in order."""
        array = self.arrays[key]
        places = itertools.product(items, range(1 if key[0] == "state" else self.page))
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


def send(stage: Stage, sender, room: int, *spans: tuple[int, int]) -> None:
    """All of a room, its tokens in these spans."""
    items = stage.allocate(SLOTS["prefill"])
    stage.write(room, items)
    state = items.pop("state")
    for span in spans:
        sender.chunk(items, dict.fromkeys(items, span))
    sender.finish(aux=b"%d" % room, states={"state": state})


def test_tp_4_pp_2_to_dp_4(site):
    """Two replicas are staged to, two written in place; every byte, I9's trimmed slots included."""
    places = [Topology(tp_size=TP, tp_rank=rank % TP, pp_size=PP, pp_rank=rank // TP) for rank in range(TP * PP)]
    stages = [Stage(place) for place in places]
    ps = [site.prefill(stage, path="direct") for stage in stages]
    replicas = [Stage(Topology(dp_size=DP, dp_rank=n), page=(8, 4)[n % 2], hnd=n >= 2) for n in range(DP)]
    ds = [site.decode(replica, path=("staged", "direct")[n % 2]) for n, replica in enumerate(replicas)]
    n_rooms, into, receivers, senders = 2 * DP, [], [], []
    for room in range(n_rooms):
        for stage, node in zip(stages, ps, strict=True):
            senders.append(node.send(room))
            send(stage, senders[-1], room, (0, 20), (20, TOKENS))
        into.append(replicas[room % DP].allocate(SLOTS["decode"]))
        receivers.append(ds[room % DP].receive(room, site.address))
        receivers[-1].bind(into[-1], dict.fromkeys(("kv", "draft"), (0, TOKENS)))
    drive(site.nodes, lambda: all(handle.released for handle in (*receivers, *senders)))
    assert {handle.wait(0) for handle in (*receivers, *senders)} == {State.SUCCESS}
    for room, (receiver, items) in enumerate(zip(receivers, into, strict=True)):
        assert receiver.aux == b"%d" % room
        assert not replicas[room % DP].wrong(room, items, SLOTS["decode"])
    for node in ps:
        stats = node.stats()
        assert stats["chunks_staged"] > 0
        assert stats["chunks_direct"] > 0
        assert stats["slots_trimmed"] == n_rooms
    assert all(node.core.idle and not node.core.rooms.by_epoch for node in ds)


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize(("prefix", "n_slots"), [(24, 2), (TOKENS, 2), (TOKENS, 0)])
def test_what_decode_holds_already_is_not_computed_for_it(site, path, prefix, n_slots):
    """Slots have no positions, so they say nothing of the first token wanted; and a room may want aux alone."""
    pair = site.pair(Stage(Topology()), Stage(Topology(), page=8), path=path)
    into, receiver, sender = pair.dst.allocate(n_slots), pair.receive(1), pair.p.send(1)
    receiver.bind(into, dict.fromkeys(("kv", "draft"), (0, TOKENS)), prefix_tokens=prefix)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == prefix
    send(pair.src, sender, 1, *[(prefix, TOKENS)] * (prefix < TOKENS))
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.wait(0) is sender.wait(0) is State.SUCCESS
    assert receiver.aux == b"1"
    assert not pair.dst.wrong(1, into, n_slots, prefix)
    stats = pair.p.stats()
    assert (stats["chunks_staged"] + stats["chunks_direct"] > 0) is (prefix < TOKENS or n_slots > 0)


def test_each_component_has_its_own_first_token_wanted(site):
    """States may reach back to the start of a sequence of which the cache is wanted from later on."""
    pair = site.pair(Stage(Topology()), Stage(Topology(), page=8))
    sender = pair.p.send(1)
    assert sender.prefix_tokens_of("kv") is None
    pair.receive(1).bind(pair.dst.allocate(2), {"kv": (24, TOKENS), "draft": (0, TOKENS)})
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == 0
    assert (sender.prefix_tokens_of("kv"), sender.prefix_tokens_of("draft")) == (24, 0)
    assert sender.prefix_tokens_of("state") == 0
