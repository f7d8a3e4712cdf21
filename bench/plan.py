"""Planning on the host: runs of fragmented pages, the direct path's descriptors, and a staged call without its bytes.

Layer 6.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.kernels import Pool
from pdstage.layout import Key, Layout, Region, View
from pdstage.layout import Row as RowLevel
from pdstage.plan import Select
from pdstage.spans import DirectPlan, coalesce
from pdstage.tables import Index
from pdstage.topology import Axis

from .harness import Row, interleaved

if TYPE_CHECKING:
    from numpy.typing import NDArray

N_PAGES = 20_000
LAYERS = 61
_CALLS = 10  # a turn: the first after a baseline that freed a million objects finds the heap's pages gone


def run(quick: bool) -> list[Row]:
    return [*_coalescing(quick), _descriptors(quick), _call_overhead(quick)]


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
