"""Planning on the host: runs of fragmented pages, the direct path's descriptors, a chunk of a hybrid model, a staged
call without its bytes, and the proof of a layout at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pdstage.kernels import Pool
from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.manager.items import check, rects_of
from pdstage.plan import TOKEN_MAJOR, Select, Stagings, selects, shares, tokens_of
from pdstage.plan.cost import CostModel
from pdstage.plan.ownership import EVERYTHING, Common
from pdstage.plan.spans import DirectPlan, coalesce
from pdstage.plan.tables import Index, Table
from pdstage.probe import LayerProbe, prove_layout
from pdstage.protocol.destinations import clip, split
from pdstage.stager import Stager
from pdstage.tensors import build, paged_nhd

from .harness import Row, interleaved
from .shapes import SLOTS, Array, Block, Model, place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pdstage.plan import Share
    from pdstage.probe import Cell
    from pdstage.protocol.destinations import Destination

N_PAGES = 20_000
LAYERS = 61
HYBRID_TOKENS = 8192
_NOWHERE = Region(4096, 0)
_COST = CostModel.linear(bytes_per_s=12e9, descriptor_s=400e-9, post_s=10e-6)
_CALLS = 10  # per turn: the first one after a baseline that freed a million objects must refill the heap


def run(quick: bool) -> list[Row]:
    return [*_coalescing(quick), _descriptors(quick), *_hybrid_chunks(quick), _call_overhead(quick), _proof(quick)]


def _grouped(src: NDArray[Any], dst: NDArray[Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The same grouping as engines do it today: numpy finds the breaks, and makes a list of arrays."""
    breaks = np.where((np.diff(src) != 1) | (np.diff(dst) != 1))[0] + 1
    return [group.tolist() for group in np.split(src, breaks)], [group.tolist() for group in np.split(dst, breaks)]


def _often(src: NDArray[Any], dst: NDArray[Any]) -> None:
    for _ in range(_CALLS):
        coalesce(src, dst)


def _coalescing(quick: bool) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for kind in (np.int32, np.int64):
        lists = [rng.permutation(4 * N_PAGES)[:N_PAGES].astype(kind) for _ in range(2)]
        ours, theirs = interleaved([partial(_often, *lists), partial(_grouped, *lists)], repeats=5 if quick else 31)
        rows.append(
            Row(
                name=f"coalesce {N_PAGES} fragmented pages, {np.dtype(kind).name}",
                value=ours / _CALLS * 1e6,
                baseline=theirs * 1e6,
                unit="us",
                target=100,
                on="value",
                better="lower",
                detail=f"{_CALLS} calls a turn; baseline: np.diff, np.split and lists",
            )
        )
    return rows


def _layout(heads: int, page: int, n_items: int, base: int) -> Layout:
    """K and V of every layer, `[page, head, token, 256 bytes]`. Nothing reads the memory."""
    width = 256
    item = heads * page * width
    regions = [Region(base + i * n_items * item, n_items * item) for i in range(2 * LAYERS)]
    views = [
        View(
            key=Key("kv", "kv"[i // LAYERS], i % LAYERS),
            region=i,
            offset=0,
            n_items=n_items,
            item_stride=item,
            tokens_per_item=page,
            rows=(RowLevel(1, width),),
            shards=heads,
            shard_stride=page * width,
            width=width,
            axis=Axis("kv_head", heads, 0, heads),
            format="bf16",
        )
        for i in range(2 * LAYERS)
    ]
    return Layout.of(regions, views)


def _descriptors(quick: bool) -> Row:
    """1,000 pages of 122 views, head by head: the direct path's plan, beside forming its addresses by broadcasting."""
    n, page, heads = 1000, 16, 4
    src, dst = _layout(heads, page, 4 * n, 1 << 40), _layout(heads, page, 4 * n, 1 << 41)
    select = [Select(view.key, 0, heads // 2) for view in src.views()]
    plan = DirectPlan(src, select, dst, select)
    rng = np.random.default_rng(1)
    items = [rng.permutation(4 * n)[:n].astype(np.int32) for _ in range(2)]
    indexes = [{"kv": Index.of(list_)} for list_ in items]

    def broadcast() -> int:
        made = 0
        for layout, list_ in zip((src, dst), items, strict=True):
            for region in layout.regions:
                item = list_.astype(np.int64)[:, None] * (heads * page * 256)
                made += (region.base + item + np.arange(heads // 2) * (page * 256)).size
        return made

    tokens = {"kv": (0, n * page)}
    n_made = plan.spans(tokens, *indexes).nbytes.size
    ours, theirs = interleaved([lambda: plan.spans(tokens, *indexes), broadcast], repeats=3 if quick else 15)
    return Row(
        name=f"direct path, {n_made} descriptors",
        value=ours / n_made * 1e9,
        baseline=theirs / n_made * 1e9,
        unit="ns",
        better="lower",
        detail="each; baseline: numpy broadcasting of the addresses alone, nothing checked or joined",
    )


@dataclass(frozen=True, slots=True)
class _Claim:
    """What `clip` and `split` read of a destination."""

    asked: dict[str, tuple[int, int]]
    shares: tuple[Share, ...]
    session: _Session


@dataclass(frozen=True, slots=True)
class _Session:
    """What `clip` and `split` read of a destination's session."""

    stagings: Stagings
    common: Common = EVERYTHING


class HybridChunk:
    """A chunk of `n_tokens` of all 61 layers of a hybrid model, from prefill rank 1 of 4 to decode rank 0 of 2.

    A third of the layers are attention with sparse attention's index keys and scales, a third a sliding window, a third
    a convolution of three sections and a state. `page` is the tokens of a page; the pages are in any order.
    """

    def __init__(self, page: int, n_tokens: int = HYBRID_TOKENS) -> None:
        model = hybrid(page)
        n_pages = n_tokens // page
        names = model.components()
        n_items = {name: 8 if name == SLOTS else 4 * n_pages for name in names}
        rng = np.random.default_rng(0)
        self.items = {n: np.array([3]) if n == SLOTS else rng.permutation(n_items[n])[:n_pages] for n in names}
        self.tokens = {name: (0, 1 if name == SLOTS else n_tokens) for name in names}
        self.src, self.dst = (
            place(model, tp, rank, n_items, base=1 << at) for tp, rank, at in ((4, 1, 40), (2, 0, 41))
        )
        writers = {rank: place(model, 4, rank, n_items, base=1 << 40) for rank in range(4)}
        self.stagings = [Stagings(self.src), Stagings(self.dst)]
        claim = _Claim(self.tokens, shares(writers, self.dst, (2, 0))[1], _Session(self.stagings[0]))
        self.destination = cast("Destination", claim)
        checked = check(self.src, self.items, self.tokens, unique=True)
        self.rects = rects_of(self.src, checked, None)
        self.indexes = {name: one.index for name, one in checked.items()}
        chosen = [selects(layout, self.destination.shares, self.rects) for layout in (self.src, self.dst)]
        self.direct = DirectPlan(self.src, chosen[0], self.dst, chosen[1])
        self.stagers = [Stager(Pool.of(layout)) for layout in (self.src, self.dst)]
        self.n_views = len(chosen[0])

    def at_prefill(self) -> None:
        """From the engine's call to the gather's first byte, in a session that has sent such a chunk before."""
        checked = check(self.src, self.items, self.tokens, unique=False)
        given = rects_of(self.src, checked, None)
        indexes = {name: one.index for name, one in checked.items()}
        for rects, nbytes in split(clip(given, self.destination), self.destination, 1 << 40):
            _COST.prefers_direct(nbytes, self.direct.n_descriptors(tokens_of(rects)))
            _but_the_bytes(self.stagers[0].gather, self.destination.shares, rects, items=indexes, dst=_NOWHERE)

    def at_decode(self) -> None:
        """From the tag to the scatter's first byte."""
        self.stagings[1].of(self.destination.shares, self.rects).nbytes(tokens_of(self.rects))
        _but_the_bytes(self.stagers[1].scatter, self.destination.shares, self.rects, items=self.indexes, src=_NOWHERE)

    def anew(self, layout: Layout) -> None:
        """One side's tables from its layout: what the first such chunk of a session costs besides."""
        Table.of(layout, selects(layout, self.destination.shares, self.rects))


def _but_the_bytes(call: Callable[..., None], *given: object, **named: object) -> None:
    """A call into the pool that checks and places everything, and then finds the staging too small."""
    call(0, *given, order=TOKEN_MAJOR, **named)
    stager: Stager = call.__self__  # type: ignore[attr-defined]
    (copied,) = stager.poll()
    assert copied.error is not None
    assert "too small" in str(copied.error), copied.error


def _hybrid_chunks(quick: bool) -> list[Row]:
    rows = []
    for page in (64, 1):
        chunk = HybridChunk(page)
        for name, ours, layout in (("prefill", chunk.at_prefill, chunk.src), ("decode", chunk.at_decode, chunk.dst)):
            works: list[Callable[[], object]] = [ours, partial(chunk.anew, layout)]
            planned, anew = interleaved(works, repeats=11 if quick else 61, inner=5)
            rows.append(
                Row(
                    name=f"{name} plans {HYBRID_TOKENS} tokens x {LAYERS} layers, pages of {page}",
                    value=planned * 1e6,
                    baseline=anew * 1e6,
                    unit="us",
                    target=200,
                    on="value",
                    better="lower",
                    detail=f"{chunk.n_views} views of kv, swa, mamba and dsa; baseline: their tables made anew",
                )
            )
    return rows


def hybrid(page: int) -> Model:
    """61 layers: attention with index keys, sliding window and linear attention in turn."""
    full, window, linear = (range(first, LAYERS, 3) for first in range(3))
    kv_heads = tuple(Array(role, "kv_head", 8, 256) for role in "kv")
    conv = (("conv_q", "k_head", 16), ("conv_k", "k_head", 16), ("conv_v", "v_head", 32))
    of_layers = (
        ("kv", full, kv_heads),
        ("dsa", full, (Array("key", "none", 1, 128, "fp8_e4m3"), Array("scale", "none", 1, 4, "fp32"))),
        ("swa", window, kv_heads),
        (SLOTS, linear, tuple(Array(role, axis, total, 768) for role, axis, total in conv)),
        (SLOTS, linear, (Array("ssm", "v_head", 32, 128 * 128 * 4, "fp32"),)),
    )
    blocks = (
        Block(name, range(layer, layer + 1), arrays) for name, layers, arrays in of_layers for layer in layers
    )  # fmt: skip
    return Model("hybrid", tuple(blocks), page)


def _call_overhead(quick: bool) -> Row:
    """A gather of one 16-byte token row from 122 views: all but the bytes; beside an empty call of numpy's take."""
    memory = np.zeros(1 << 20, np.uint8)
    views = [
        View(
            key=Key("kv", "kv"[i // LAYERS], i % LAYERS),
            region=0,
            offset=i * 64 * 16,
            n_items=64,
            item_stride=16,
            tokens_per_item=1,
            rows=(RowLevel(1, 16),),
            shards=1,
            shard_stride=16,
            width=16,
            axis=Axis("kv_head", 1, 0, 1),
            format="bf16",
        )
        for i in range(2 * LAYERS)
    ]
    pool = Pool([Region(memory.ctypes.data, memory.nbytes)], views, keep=memory)
    plan = pool.plan([Select(view.key, 0, 1) for view in views])
    out = np.zeros(plan.nbytes({"kv": (0, 1)}), np.uint8)
    index, ptr = {"kv": Index.of(np.zeros(1, np.int32))}, out.ctypes.data
    cells, one = memory.reshape(-1, 16), np.zeros(1, np.int64)
    small = np.zeros((1, 16), np.uint8)

    def each_view() -> None:
        for _ in range(2 * LAYERS):
            np.take(cells, one, axis=0, out=small, mode="clip")

    ours, theirs = interleaved(
        [lambda: plan.gather(ptr, out.nbytes, index, {"kv": (0, 1)}), each_view], repeats=5 if quick else 31, inner=100
    )
    return Row(
        name="one gather call of 122 views",
        value=ours * 1e6,
        baseline=theirs * 1e6,
        unit="us",
        target=10,
        on="value",
        better="lower",
        detail="16 bytes a view; baseline: np.take a view",
    )


def _proof(quick: bool) -> Row:
    """`prove_layout` of every layer of a host pool, by a writer that stores rows with numpy."""
    pages, tokens, heads, dim = 8, 64, 8, 128
    k = np.zeros((LAYERS, pages, tokens, heads, dim), np.float16)
    v = np.zeros_like(k)
    layout = build(paged_nhd(k, v, total_heads=heads, tp=(1, 0)))

    def write(layer: int, cells: Sequence[Cell], rng: np.random.Generator) -> dict[Key, NDArray[np.uint8]]:
        stored = {}
        for role, cache in (("k", k), ("v", v)):
            drawn = rng.standard_normal((len(cells), heads, dim)).astype(np.float16)
            for cell, row in zip(cells, drawn, strict=True):
                cache[layer, cell.item, cell.token] = row
            stored[Key("kv", role, layer)] = drawn.view(np.uint8)
        return stored

    probes = [
        LayerProbe(str(layer), "numpy", (Key("kv", "k", layer), Key("kv", "v", layer)), partial(write, layer))
        for layer in range(LAYERS)
    ]
    ours, zeroed = interleaved(
        [partial(prove_layout, layout, probes), partial(_zero, k.nbytes + v.nbytes)], repeats=3 if quick else 11
    )
    return Row(
        name=f"prove a layout of {LAYERS} layers, {heads} heads of {dim}",
        value=ours * 1e3,
        baseline=zeroed * 1e3,
        unit="ms",
        on="value",
        better="lower",
        detail=f"baseline: to allocate and zero this pool of {(k.nbytes + v.nbytes) >> 20} MiB",
    )


def _zero(nbytes: int) -> None:
    np.empty(nbytes, np.uint8).fill(0)
