"""A model with a draft model and with state in slots, between real nodes."""

from __future__ import annotations

import gc
import itertools
import weakref
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from pdstage import Pool, State, Topology
from pdstage.tensors import build, paged_nhd
from tests.manager.engine import drive
from tests.rows import both_paths

LAYERS = {"kv": [0, 1], "draft": [0], "state": [0, 1]}
HEADS, DIM, TOKENS, N_ITEMS, N_SLOTS = 4, 16, 50, 20, 3


class Whole:
    """A rank's pool of everything: `kv` and `draft` in pages, `state` in slots; and one room's items of it."""

    topology = Topology()

    def __init__(self, page: int, n_slots: int = N_SLOTS) -> None:
        self.arrays: dict[tuple[str, str, int], np.ndarray] = {}
        parts = []
        for name, layers in LAYERS.items():
            inner = (1 if name == "state" else page, HEADS, DIM)
            for role, layer in itertools.product("kv", layers):
                self.arrays[name, role, layer] = np.full((N_ITEMS, *inner), 0xAB, np.uint8)
            tensors = [[self.arrays[name, role, layer] for layer in layers] for role in "kv"]
            parts.append(paged_nhd(*tensors, total_heads=HEADS, tp=(1, 0), component=name, layers=layers))
        self.pool = Pool.of(build(*parts, slots=("state",)), keep=self.arrays)
        free = np.random.default_rng(page).permutation(N_ITEMS)
        self.items = {name: free[: n_slots if name == "state" else -(-TOKENS // page)] for name in LAYERS}

    def rows(self, since: int = 0) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
        """Of each view the room's tokens from `since` on, or its slots, as they are held, and what they must be."""
        for (name, role, layer), array in self.arrays.items():
            items = self.items[name]
            held = [array[item, t] for item in items for t in range(array.shape[1])][:TOKENS]
            drawn = np.random.default_rng(zlib.crc32(f"{name}/{role}/{layer}".encode()))
            true = drawn.integers(0, 256, (TOKENS, HEADS, DIM), np.uint8)[: len(held)]
            first = 0 if name == "state" else since
            yield held[first:], true[first:]


@both_paths
@pytest.mark.parametrize(("prefix", "n_slots"), [(24, 2), (TOKENS, 2), (TOKENS, 0)])
def test_what_decode_holds_already_is_not_computed_for_it(site, path, prefix, n_slots):
    """Slots have no positions, so they say nothing of the first token wanted, and those too many are left out (I9); a
    room may want aux alone.
    """
    pair = site.pair(Whole(4), Whole(8, n_slots), path=path)
    receiver, sender, items = pair.receive(1), pair.p.send(1), dict(pair.src.items)
    receiver.bind(pair.dst.items, dict.fromkeys(("kv", "draft"), (0, TOKENS)), prefix_tokens=prefix)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == prefix
    for rows, true in pair.src.rows():
        for row, value in zip(rows, true, strict=True):
            row[:] = value
    state = items.pop("state")
    if prefix < TOKENS:
        sender.chunk(items, dict.fromkeys(items, (prefix, TOKENS)))
    sender.finish(aux=b"first token", states={"state": state})
    site.ends(receiver, sender)
    assert receiver.wait(0) is sender.wait(0) is State.SUCCESS
    assert receiver.aux == b"first token"
    assert all(np.array_equal(rows, true[: len(rows)]) for rows, true in pair.dst.rows(prefix) if len(rows))
    stats = pair.p.stats()
    assert (stats["chunks_staged"] + stats["chunks_direct"] > 0) is (prefix < TOKENS or n_slots > 0)
    if n_slots:
        assert stats["slots_trimmed"] == 1


def test_a_peers_pages_are_mapped_no_longer_than_its_session(site):
    """Whenever garbage is collected: a device's memory would stay, that of a process which has ended too."""
    pair = site.pair(path="direct", transport="local")
    pair.move(1)
    (plan,) = pair.p.sessions._plans.values()
    mapped, plan = weakref.ref(plan.mapped), None
    assert mapped() is not None
    gc.disable()
    try:
        pair.d.close()
        drive([pair.p], lambda: not pair.p.core.sessions)
        assert mapped() is None
    finally:
        gc.enable()


def test_each_component_has_its_own_first_token_wanted(site):
    """States may reach back to the start of a sequence of which the cache is wanted from later on."""
    pair = site.pair(Whole(4), Whole(8))
    sender = pair.p.send(1)
    assert sender.prefix_tokens_of("kv") is None
    pair.receive(1).bind(pair.dst.items, {"kv": (24, TOKENS), "draft": (0, TOKENS)})
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == 0
    assert (sender.prefix_tokens_of("kv"), sender.prefix_tokens_of("draft")) == (24, 0)
    assert sender.prefix_tokens_of("state") == 0
