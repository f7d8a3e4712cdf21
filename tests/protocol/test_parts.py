"""Both cores between ranks that hold different tokens of a sequence, with real bytes, over the scriptable network."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from pdstage.errors import PeerError
from pdstage.layout import TokenShard
from pdstage.layout.topology import Topology
from pdstage.plan import Rect, Share, selects
from pdstage.plan.ownership import Common
from pdstage.protocol import messages as m
from pdstage.protocol.compat import check_items
from pdstage.protocol.coverage import Coverage
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.state import State
from tests.owners import holds, place_of, with_owned
from tests.pair import (
    PAGE,
    WIDTH,
    Decode,
    Memory,
    Prefill,
    World,
    assert_flat,
    cell,
    make_layout,
    pool_nbytes,
    truth,
)

HEADS = 2


class Parts(World):
    """P and D of CP x TP ranks each; a way of cutting is (size, interleave). Every room has `n` tokens."""

    def __init__(self, src: tuple[int, int], dst: tuple[int, int], src_tp: int, dst_tp: int, n: int, **how) -> None:
        self.ways, self.tps, self.n = (src, dst), (src_tp, dst_tp), n
        self.owned: dict[bytes, TokenShard] = {}
        how = {"n_pages": -(-n // PAGE) + 1, "lane_nbytes": 1024, "buffer_nbytes": 1024} | how
        super().__init__(prefill=src[0] * src_tp, decode=dst[0] * dst_tp, heads=HEADS, **how)

    def place(self, side: int, rank: int, page: int) -> tuple[Memory, object, Topology]:
        (size, interleave), tp = self.ways[side], self.tps[side]
        cp_rank, tp_rank = divmod(rank, tp)
        owned = self.owned[b"%s%d" % ((b"P", b"D")[side], rank)] = TokenShard(size, cp_rank, interleave)
        shape = {"heads": HEADS, "tp": tp, "rank": tp_rank, "layers": self.layers, "n_pages": self.n_pages * PAGE}
        memory = self.make_memory(pool_nbytes(**shape, page=page))
        layout = with_owned(make_layout(memory, **shape, page=page), owned)
        return memory, layout, Topology(tp, tp_rank, cp_size=size, cp_rank=cp_rank)

    def make_prefill(self, rank: int, life: int = 0) -> Prefill:
        memory, layout, topology = self.place(0, rank, PAGE)
        core = PrefillCore(
            1000 + rank, layout=layout, topology=topology, transport="test", description=b"", n_buffers=self.n_buffers,
            buffer_nbytes=self.buffer_nbytes, config=self.config, choose=self._choose,
        )  # fmt: skip
        buffers = [np.zeros(self.buffer_nbytes, np.uint8) for _ in range(self.n_buffers)]
        return Prefill(b"P%d" % rank, core, memory, buffers, self.make_memory(1))

    def make_decode(self, rank: int, life: int = 0) -> Decode:
        memory, layout, topology = self.place(1, rank, self.dst_page)
        staging = self.make_memory(self.lane_nbytes)
        core = DecodeCore(
            2000 + rank, layout=layout, topology=topology, transport="test", description=b"",
            lanes=(m.LaneSpan(staging.base, self.lane_nbytes),), config=self.config,
        )  # fmt: skip
        self.processes.append(Decode(b"D%d" % rank, core, memory, staging, self.make_memory(1)))
        return self.processes[-1]

    def cells(self, node, pages, key, first, count, tokens):
        view, places = node.core.layout.by_key()[key], place_of(self.owned[node.name], self.n)
        return [cell(view, node.memory, pages, places[t], s) for t in tokens for s in range(first, first + count)]

    def common(self, src, dst, rects):
        (rect,) = rects
        both = self.owned[src.name], self.owned[dst.name]
        tokens = [t for t in range(rect.start, rect.stop) if all(holds(owned, t, self.n) for owned in both)]
        assert tokens, "a chunk without a common token was sent"
        return tokens

    def staged(self, node, other, pages, shares, rects):
        """(staged offset, cell), view by view from multiples of 128, token by token."""
        at, tokens = 0, self.common(node, other, rects)
        for select in selects(node.core.layout, shares, rects):
            for one in self.cells(node, pages, *select, tokens):
                yield at, one
                at += WIDTH
            at += -at % 128

    def fill(self, room: int, tokens: int, pages: list[int], rank: int = 0) -> None:
        node = self.prefill[rank]
        for view in node.core.layout.views():
            for t, s in itertools.product(place_of(self.owned[node.name], self.n), range(view.shards)):
                value = truth(view.key.layer, view.key.role, t, view.axis.first + s, room)
                self.cells(node, pages, view.key, s, 1, [t])[0][:] = value

    def check(self, handle, room: int, tokens: int, rank: int = 0, prefix: int = 0) -> None:
        assert handle.state is State.SUCCESS, (handle.state, handle.error)
        node = self.decode[rank]
        mine = place_of(self.owned[node.name], self.n)
        for view in node.core.layout.views():
            for t, s in itertools.product(mine, range(view.shards)):
                (got,) = self.cells(node, node.pages[handle], view.key, s, 1, [t])
                value = truth(view.key.layer, view.key.role, t, view.axis.first + s, room)
                assert np.array_equal(got, value if t >= prefix else np.zeros(WIDTH)), (view.key, t, s)

    def _gather(self, node, effect) -> None:
        chunk = effect.chunk
        dst, buffer = self.greeter(chunk.destination.session.id), node.buffers[effect.buffer]
        pages = chunk.source.items["kv"]
        for offset, src in self.staged(node, dst, pages, chunk.destination.shares, chunk.rects):
            buffer[offset : offset + WIDTH] = src
        assert -(-(offset + WIDTH) // 128) * 128 == chunk.nbytes
        node.core.gathered(effect.ticket, self.now)
        self.carry(node)

    def copy_in(self, node, landing) -> int:
        src = next(p for p in self.prefill if p.core.incarnation == landing.writer.session.id.writer)
        held, pages = node.staging.at(landing.address, landing.nbytes), node.pages[landing.writer.room]
        for offset, dst in self.staged(node, src, pages, landing.writer.shares, landing.rects):
            dst[:] = held[offset : offset + WIDTH]
        return 0

    def _direct(self, node, dst, effect) -> None:
        chunk = effect.chunk
        self.check_pages(dst, chunk)
        tokens, destination = self.common(node, dst, chunk.rects), chunk.destination
        pages = chunk.source.items["kv"], np.frombuffer(destination.open.items[0].data, np.int32).tolist()
        sides = (
            selects(side.core.layout, destination.shares, chunk.rects) for side in (node, dst)
        )  # fmt: skip
        for ours, theirs in zip(*sides, strict=True):
            read, written = self.cells(node, pages[0], *ours, tokens), self.cells(dst, pages[1], *theirs, tokens)
            for a, b in zip(read, written, strict=True):
                b[:] = a
        self._landed(node, dst, effect.ticket, effect.tag)


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
    ((2, 0), (1, 0)), ((1, 0), (3, 0)), ((3, 0), (2, 0)), ((2, 0), (2, 0)), ((3, 0), (2, 4)), ((2, 3), (2, 0)),
    ((2, 64), (1, 0)), ((3, 2), (4, 3)),
]  # fmt: skip


@pytest.mark.parametrize("path", ["staged", "direct"])
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


def test_too_big_chunks_are_split_by_common_tokens():
    """Lanes of four tokens of one layer: chunks of 64 come in pieces that fit."""
    world = Parts((2, 1), (3, 16), 1, 1, 64, lane_nbytes=512, buffer_nbytes=512, layers=2)
    for rank, handle in enumerate(transfer(world, step=64)):
        world.check(handle, 1, 64, rank)
    assert_flat(world)


def test_a_writer_that_holds_none_of_a_rectangle_may_not_deliver_it():
    common = Common({"kv": (TokenShard(2, 0, 16), TokenShard())})
    coverage = Coverage((Share("kv", "k", (0, 2, 1), 0, 1),), (m.Asked("kv", 0, 100),), common)
    assert "hold no token both" in coverage.problem([Rect("kv", 16, 32, 0, 2)])
    assert not coverage.problem([Rect("kv", 15, 32, 0, 2)])
    for start, stop in ((0, 8), (8, 16), (40, 48), (32, 40), (60, 99)):
        assert not coverage.complete
        coverage.add([Rect("kv", start, stop, 0, 2)])
    assert not coverage.complete and "layer 0 from token 99" in coverage.missing()
    coverage.add([Rect("kv", 99, 100, 0, 2)])
    assert coverage.complete and coverage.covers([Rect("kv", 0, 100, 0, 2)])


def test_contiguous_parts_are_of_what_is_asked():
    common = Common({"kv": (TokenShard(2, 1), TokenShard(3, 1))})
    shares = (Share("kv", "k", (0, 1, 1), 0, 1),)
    coverage = Coverage(shares, (m.Asked("kv", 10, 60),), common)
    assert "outside 30..40" in coverage.problem([Rect("kv", 29, 31, 0, 1)])
    assert not coverage.problem([Rect("kv", 30, 40, 0, 1)])
    assert Coverage(shares, (m.Asked("kv", 45, 60),), common).complete


@pytest.mark.parametrize(("n_items", "first", "fits"), [(2, 0, True), (1, 0, False), (1, 4, False), (2, 4, False)])
def test_items_of_an_open_are_of_the_destinations_own_tokens(n_items, first, fits):
    """15 tokens by blocks of one: seven are rank 1's, two pages of four."""
    memory = Memory(pool_nbytes(heads=1, tp=1, rank=0, layers=(0, 1), n_pages=4))
    layout = with_owned(make_layout(memory, heads=1, tp=1, rank=0, layers=(0, 1), n_pages=4), TokenShard(2, 1, 1))
    items = m.Items("kv", first, memoryview(np.arange(n_items, dtype=np.int32)).cast("B"))
    if fits:
        check_items(layout, items, m.Asked("kv", 0, 15))
    else:
        with pytest.raises(PeerError, match=r"asks for 0\.\.7"):
            check_items(layout, items, m.Asked("kv", 0, 15))


@pytest.mark.parametrize("n_items", [3, 400])
def test_an_open_names_no_item_twice(n_items):
    """Two of its tokens would be written to one place."""
    memory = Memory(pool_nbytes(heads=1, tp=1, rank=0, layers=(0, 1), n_pages=n_items))
    layout = make_layout(memory, heads=1, tp=1, rank=0, layers=(0, 1), n_pages=n_items)
    numbers = np.random.default_rng(0).permutation(n_items).astype(np.int32)
    asked = m.Asked("kv", 0, n_items)
    check_items(layout, m.Items("kv", 0, memoryview(numbers).cast("B")), asked)
    numbers[-1] = numbers[0]
    with pytest.raises(PeerError, match="Open gives an item of 'kv' twice"):
        check_items(layout, m.Items("kv", 0, memoryview(numbers).cast("B")), asked)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_arrival(seed):
    """I4, I5, I11: several rooms at once through lanes of a few chunks, whatever overtakes what."""
    rng = random.Random(seed)
    src, dst = rng.choice(WAYS)
    world = Parts(
        src, dst, 1, rng.choice([1, 2]), 24, n_pages=24, lane_nbytes=1024, path=rng.choice(["staged", "direct"])
    )
    world.pick = rng.randrange
    handles = []
    for room in (1, 2, 3):
        pages = range(6 * room, 6 * room + 6)
        for rank in range(len(world.decode)):
            handles.append((room, rank, world.receive(room, world.n, rng.sample(pages, 6), rank)))
        for rank in range(len(world.prefill)):
            world.send(room, world.n, rng.sample(pages, 6), rank, rng.randint(1, 24))
    world.run(until=60.0)
    for room, rank, handle in handles:
        world.check(handle, room, world.n, rank)
    assert_flat(world)
