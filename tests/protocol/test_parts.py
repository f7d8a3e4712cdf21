"""Both cores between ranks that hold different tokens of a sequence, with real bytes, over the scriptable network."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pdstage import Layout, TokenShard, Topology
from pdstage.plan import Rect, Share
from pdstage.plan.ownership import Common
from pdstage.protocol import messages as m
from pdstage.protocol.compat import items_problem
from pdstage.protocol.decode_rooms import Coverage
from tests.owners import with_owned
from tests.pair import PAGE, Memory, World, assert_flat, cell, held_of, make_layout, place, pool_nbytes
from tests.rows import both_paths

HEADS = 2


class Parts(World):
    """P and D of CP x TP ranks each; a way of cutting is (size, interleave). Every room has `n` tokens."""

    def __init__(self, src: tuple[int, int], dst: tuple[int, int], src_tp: int, dst_tp: int, n: int, **how) -> None:
        self.ways, self.tps, self.n = {"P": src, "D": dst}, {"P": src_tp, "D": dst_tp}, n
        how = {"n_pages": -(-n // PAGE) + 1, "lane_nbytes": 1024, "buffer_nbytes": 1024} | how
        super().__init__(prefill=src[0] * src_tp, decode=dst[0] * dst_tp, heads=HEADS, **how)

    def rank_of(self, side: str, rank: int) -> tuple[Memory, Layout, Topology]:
        (size, interleave), tp = self.ways[side], self.tps[side]
        cp_rank, tp_rank = divmod(rank, tp)
        page = PAGE if side == "P" else self.dst_page
        shape = {"heads": HEADS, "tp": tp, "rank": tp_rank, "layers": self.layers, "n_pages": self.n_pages * PAGE}
        memory = self.make_memory(pool_nbytes(**shape, page=page))
        layout = with_owned(make_layout(memory, **shape, page=page), TokenShard(size, cp_rank, interleave))
        return memory, layout, Topology(tp, tp_rank, cp_size=size, cp_rank=cp_rank)

    def check(self, handle, room: int, tokens: int, rank: int = 0, prefix: int = 0) -> None:
        """And nothing is written to what the prefix has."""
        super().check(handle, room, tokens, rank, prefix)
        node = self.decode[rank]
        for view in node.core.layout.views():
            for token, shard in itertools.product(held_of(node.core.layout, prefix), range(view.shards)):
                at = place(node.core.layout, token)
                assert not cell(view, node.memory, node.pages[handle], at, shard).any(), (view.key, token, shard)


def numbers(world: Parts, side: int, rank: int, page: int, seed: int) -> list[int]:
    """Pages from the start of the sequence on, whatever part of it the rank holds."""
    most = -(-world.n // page)
    return np.random.default_rng(seed).permutation(world.n_pages * PAGE)[:most].tolist()


def transfer(world: Parts, *, room: int = 1, step: int = 5, prefix: int = 0) -> list:
    """A room from every prefill rank to every decode rank, in chunks of `step` tokens."""
    handles = [
        world.receive(room, world.n, numbers(world, 1, rank, world.dst_page, 7 * room + rank), rank, prefix=prefix)
        for rank in range(len(world.decode))
    ]
    for rank in range(len(world.prefill)):
        world.send(room, world.n, numbers(world, 0, rank, PAGE, 3 * room + rank), rank, step)
    world.run(until=20.0)
    return handles


WAYS = [
    ((2, 1), (1, 0)), ((1, 0), (2, 1)), ((2, 16), (2, 16)), ((2, 1), (2, 1)), ((2, 16), (3, 1)), ((4, 1), (2, 16)),
    ((2, 3), (2, 4)), ((2, 64), (1, 0)), ((3, 2), (4, 3)),
]  # fmt: skip


@both_paths
@pytest.mark.parametrize(("src", "dst"), WAYS)
def test_rooms_between_ranks_that_hold_different_tokens(src, dst, path):
    """I5: Success, and every byte each destination holds is the truth; prefixes stay as they were."""
    for (src_tp, dst_tp), (n, step, prefix) in zip(
        [(1, 1), (2, 1), (1, 2)], [(37, 5, 0), (70, 70, 0), (40, 7, 21)], strict=True
    ):
        world = Parts(src, dst, src_tp, dst_tp, n, path=path, dst_page=6)
        for rank, handle in enumerate(transfer(world, step=step, prefix=prefix)):
            world.check(handle, 1, n, rank, prefix)
        assert_flat(world)


def test_a_writer_that_holds_none_of_a_rectangle_may_not_deliver_it():
    common = Common({"kv": (TokenShard(2, 0, 16), TokenShard())})
    coverage = Coverage((Share("kv", "k", (0, 2, 1), 0, 1),), (m.Asked("kv", 0, 100),), common)
    assert "hold no token both" in coverage.problem([Rect("kv", 16, 32, 0, 2)])
    assert not coverage.problem([Rect("kv", 15, 32, 0, 2)])


@pytest.mark.parametrize(("n_items", "first", "fits"), [(2, 0, True), (1, 0, False), (1, 4, False), (2, 4, False)])
def test_items_of_an_open_are_of_the_destinations_own_tokens(n_items, first, fits):
    """15 tokens by blocks of one: seven are rank 1's, two pages of four."""
    layout = with_owned(pages_of(4), TokenShard(2, 1, 1))
    said = problem(layout, np.arange(n_items, dtype=np.int32), m.Asked("kv", 0, 15), first)
    assert ("asks for 0..7" in said) is not fits and bool(said) is not fits


@pytest.mark.parametrize("n_items", [3, 400])
def test_an_open_names_no_item_twice(n_items):
    """Two of its tokens would be written to one place."""
    numbers = np.random.default_rng(0).permutation(n_items).astype(np.int32)
    assert not problem(pages_of(n_items), numbers, m.Asked("kv", 0, n_items))
    numbers[-1] = numbers[0]
    assert "Open gives an item of 'kv' twice" in problem(pages_of(n_items), numbers, m.Asked("kv", 0, n_items))


def pages_of(n_pages: int) -> Layout:
    shape = {"heads": 1, "tp": 1, "rank": 0, "layers": (0, 1), "n_pages": n_pages}
    return make_layout(Memory(pool_nbytes(**shape)), **shape)


def problem(layout: Layout, numbers: np.ndarray, asked: m.Asked, first: int = 0) -> str:
    return items_problem(layout, m.Items("kv", first, memoryview(numbers).cast("B")), asked)
