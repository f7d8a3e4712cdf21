"""Host gather and scatter, and copies from pool to pool, beside the best that this machine can do. One thread.

There are two limits: one streaming copy of the same bytes, the fastest that there is, and a loop tuned by hand for just
that list of runs (`limits`). Slots are single runs in random order, in a pool twice as big as the data. Heads are one
of eight, in random pages of 16 tokens: a run, then seven of others. More rows cover checksums, beside the streaming
copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdstage.kernels import Pool
from pdstage.layout import Key, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.plan import Select
from pdstage.plan.tables import Index

from . import limits
from .harness import Row, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

RUNS = (64, 128, 256, 512, 1024, 4096, 65536)
TARGET = 0.9
MAX_VIEWS = 16


class Access(NamedTuple):
    """Which runs of a pool are taken: one of `heads`, of `page` tokens, of one in `spare` pages."""

    name: str
    page: int
    heads: int
    spare: int

    def views(self, nbytes: int, run: int) -> list[View]:
        """Views that together have `spare * heads` times as many bytes, as layers of one buffer."""
        page_nbytes, stride = self.page * run, self.heads * run
        n_views = min(MAX_VIEWS, max(1, nbytes // page_nbytes // 8))
        n_pages = self.spare * nbytes // page_nbytes // n_views
        return [
            View(
                key=Key("kv", "k", layer), region=0, offset=layer * n_pages * self.page * stride, n_items=n_pages,
                item_stride=self.page * stride, tokens_per_item=self.page, rows=(RowLevel(1, stride),),
                shards=self.heads, shard_stride=run, width=run, axis=Axis("kv_head", self.heads, 0, self.heads),
                format="bytes",
            )
            for layer in range(n_views)
        ]  # fmt: skip


ACCESSES = (Access("slots", 1, 1, 2), Access("one head of 8", 16, 8, 1))


def run(quick: bool) -> list[Row]:
    rows = []
    for mib in (64,) if quick else (64, 256):
        for run_nbytes in (256, 1024) if quick else RUNS:
            for access in ACCESSES:
                rows += _measure(access, mib << 20, run_nbytes, repeats=5 if quick else 11)
    return rows


class _Side:
    """One pool, its plans, and the runs that its items name, as offsets."""

    def __init__(self, views: list[View], head: int, items: NDArray[np.int32]) -> None:
        self.memory = limits.aligned(max(view.offset + view.n_items * view.item_stride for view in views))
        self.base, self.items, self.index = self.memory.ctypes.data, items, {"kv": Index.of(items)}
        pool = Pool([Region(self.base, self.memory.nbytes)], views, keep=self.memory)
        select = [Select(view.key, head, 1) for view in views]
        self.plan, self.summed = pool.plan(select), pool.plan(select, checksum=True)
        tokens = np.arange(views[0].tokens_per_item) * views[0].rows[0].stride + head * views[0].shard_stride
        within = (items.astype(np.int64)[:, None] * views[0].item_stride + tokens).ravel()
        self.offsets = np.concatenate([view.offset + within for view in views])


class _Case:
    """`nbytes` in runs of `run` bytes, distributed over views as over layers, and each way to move them."""

    def __init__(self, access: Access, nbytes: int, run: int) -> None:
        views = access.views(nbytes, run)
        self.run, self.n = run, views[0].n_items // access.spare
        rngs = (np.random.default_rng(seed) for seed in (run, run + 1))
        lists = (rng.permutation(views[0].n_items)[: self.n].astype(np.int32) for rng in rngs)
        self.own, self.peer = (_Side(views, access.heads // 2, items) for items in lists)
        self.out, self.sum = limits.aligned(nbytes), np.zeros(1, np.uint64)
        self.tokens = {"kv": (0, self.n * access.page)}
        self.staged = self.out.ctypes.data, self.out.nbytes

    def ours(self) -> dict[str, Callable[[], object]]:
        """Those that have a loop to stand beside."""
        own, peer = self.own, self.peer
        return {
            "gather": lambda: own.plan.gather(*self.staged, own.index, self.tokens),
            "scatter": lambda: own.plan.scatter(*self.staged, own.index, self.tokens),
            "pool to pool": lambda: own.plan.copy_to(peer.plan, own.index, peer.index, self.tokens),
        }

    def loops(self) -> dict[str, Callable[[], object]]:
        own, peer, dense = self.own, self.peer, self.staged[0]
        return {
            "gather": limits.gather_runs(dense, own.base, own.offsets, self.run),
            "scatter": limits.scatter_runs(dense, own.base, own.offsets, self.run),
            "pool to pool": limits.copy_runs(peer.base, peer.offsets, own.base, own.offsets, self.run),
        }

    def others(self) -> dict[str, Callable[[], object]]:
        own, tokens, at = self.own, self.tokens, self.sum.ctypes.data
        return {
            "gather + checksum": lambda: own.summed.gather(*self.staged, own.index, tokens, sum_ptr=at),
            "scatter + checksum": lambda: own.summed.scatter(*self.staged, own.index, tokens, sum_ptr=at),
        }  # fmt: skip


def _measure(access: Access, nbytes: int, run_nbytes: int, *, repeats: int) -> list[Row]:
    case = _Case(access, nbytes, run_nbytes)
    ours, loops = case.ours(), case.loops()
    rest = case.others()
    works = [limits.streaming_copy(nbytes), *loops.values(), *ours.values(), *rest.values()]
    streaming, *times = (nbytes / s / 1e9 for s in interleaved(works, repeats=repeats))
    limit = dict(zip(loops, times, strict=False))
    measured = dict(zip([*ours, *rest], times[len(loops) :], strict=True))
    size = f"{run_nbytes} B" if run_nbytes < 1024 else f"{run_nbytes // 1024} KiB"
    what = f"{access.name}, {size} runs, {nbytes >> 20} MiB"

    def row(name: str, way: str, baseline: float, beside: str, target: float | None = None) -> Row:
        return Row(
            name=f"{name}, {what}", value=measured[way], baseline=baseline, unit="GB/s", target=target,
            detail=f"baseline: {beside}",
        )  # fmt: skip

    return [
        *(row(f"{way} beside a loop", way, limit[way], "a loop tuned for these runs", TARGET) for way in ours),
        *(row(way, way, streaming, "a streaming copy") for way in measured),
    ]
