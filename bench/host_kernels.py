"""Host gather and scatter beside one memcpy of the same bytes, and beside torch's own indexing. One thread.

More rows cover a checksum beside the copy, a copy from pool to pool, which reads and writes scattered, and two threads;
memcpy has one thread in all of them.

A slot is one run, taken in random order from a pool twice as big as the data. The targets are for 64 MiB, a big chunk.
At 256 MiB glibc's memcpy switches to non-temporal stores, four pages at a time, and is up to twice as fast; those rows
show that.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from pdstage.kernels import Pool
from pdstage.layout import Key, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.plan import Select
from pdstage.plan.tables import Index

from .harness import Row, interleaved

RUNS = (64, 128, 256, 512, 1024, 4096, 65536)
TARGETS = {256: 0.6, 1024: 0.8}
N_VIEWS = 16


def run(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for mib in (64,) if quick else (64, 256):
        for run_nbytes in (256, 1024) if quick else RUNS:
            rows += _measure(mib << 20, run_nbytes, repeats=5 if quick else 11, targets=TARGETS if mib == 64 else {})
    return rows


class _Case:
    """`nbytes` in runs of `run` bytes, distributed over views as over layers, and each way to move them."""

    def __init__(self, nbytes: int, run: int) -> None:
        self.n = nbytes // run // N_VIEWS
        self.memory = torch.full((2 * nbytes,), 1, dtype=torch.uint8)
        self.out = torch.full((nbytes,), 2, dtype=torch.uint8)
        self.other = torch.full((nbytes,), 3, dtype=torch.uint8)
        items = np.random.default_rng(run).permutation(2 * self.n)[: self.n]
        self.index = {"kv": Index.of(items.astype(np.int32))}
        self.items = torch.from_numpy(items)
        self.pools = self.memory.view(N_VIEWS, 2 * self.n, run)
        self.dense = self.out.view(N_VIEWS, self.n, run)
        views = [
            View(
                key=Key("kv", "k", layer),
                region=0,
                offset=layer * 2 * self.n * run,
                n_items=2 * self.n,
                item_stride=run,
                tokens_per_item=1,
                rows=(RowLevel(1, run),),
                shards=1,
                shard_stride=run,
                width=run,
                axis=Axis("kv_head", 1, 0, 1),
                format="bytes",
            )
            for layer in range(N_VIEWS)
        ]
        region = Region(self.memory.data_ptr(), self.memory.numel())
        pool, select = Pool([region], views, keep=self.memory), [Select(view.key, 0, 1) for view in views]
        self.plan, self.shared = pool.plan(select), pool.plan(select, threads=2)
        self.summed = pool.plan(select, checksum=True)
        self.sum = np.zeros(1, np.uint64)
        self.target = torch.full((2 * nbytes,), 4, dtype=torch.uint8)
        region = Region(self.target.data_ptr(), self.target.numel())
        self.peer = Pool([region], views, keep=self.target).plan(select, checksum=True)
        peer_items = np.random.default_rng(run + 1).permutation(2 * self.n)[: self.n]
        self.peer_index = {"kv": Index.of(peer_items.astype(np.int32))}
        self.tokens = {"kv": (0, self.n)}

    def memcpy(self) -> None:
        ctypes.memmove(self.other.data_ptr(), self.out.data_ptr(), self.out.numel())

    def gather(self) -> None:
        self.plan.gather(self.out.data_ptr(), self.out.numel(), self.index, self.tokens)

    def scatter(self) -> None:
        self.plan.scatter(self.out.data_ptr(), self.out.numel(), self.index, self.tokens)

    def gather_summed(self) -> None:
        at = self.sum.ctypes.data
        self.summed.gather(self.out.data_ptr(), self.out.numel(), self.index, self.tokens, sum_ptr=at)

    def scatter_summed(self) -> None:
        at = self.sum.ctypes.data
        self.summed.scatter(self.out.data_ptr(), self.out.numel(), self.index, self.tokens, sum_ptr=at)

    def copy(self) -> None:
        self.summed.copy_to(self.peer, self.index, self.peer_index, self.tokens)

    def copy_summed(self) -> None:
        self.summed.copy_to(self.peer, self.index, self.peer_index, self.tokens, sum_ptr=self.sum.ctypes.data)

    def gather_shared(self) -> None:
        self.shared.gather(self.out.data_ptr(), self.out.numel(), self.index, self.tokens)

    def scatter_shared(self) -> None:
        self.shared.scatter(self.out.data_ptr(), self.out.numel(), self.index, self.tokens)

    def index_select(self) -> None:
        for pool, dense in zip(self.pools, self.dense, strict=True):
            torch.index_select(pool, 0, self.items, out=dense)

    def index_copy(self) -> None:
        for pool, dense in zip(self.pools, self.dense, strict=True):
            pool.index_copy_(0, self.items, dense)

    def torch_gather(self) -> None:
        """torch.gather, as in one engine's host path: an index for every element."""
        for pool, dense in zip(self.pools, self.dense, strict=True):
            torch.gather(pool, 0, self.items[:, None].expand_as(dense), out=dense)


def _measure(nbytes: int, run_nbytes: int, *, repeats: int, targets: dict[int, float]) -> list[Row]:
    case = _Case(nbytes, run_nbytes)
    works = {
        "gather": case.gather,
        "scatter": case.scatter,
        "gather + checksum": case.gather_summed,
        "scatter + checksum": case.scatter_summed,
        "pool to pool": case.copy,
        "pool to pool + checksum": case.copy_summed,
        "gather, 2 threads": case.gather_shared,
        "scatter, 2 threads": case.scatter_shared,
        "torch.index_select": case.index_select,
        "torch.index_copy_": case.index_copy,
    }
    if run_nbytes <= 1024:
        works["torch.gather"] = case.torch_gather
    memcpy, *times = (nbytes / s / 1e9 for s in interleaved([case.memcpy, *works.values()], repeats=repeats))
    size = f"{run_nbytes} B runs" if run_nbytes < 1024 else f"{run_nbytes // 1024} KiB runs"
    return [
        Row(
            name=f"{name}, {size}, {nbytes >> 20} MiB",
            value=value,
            baseline=memcpy,
            unit="GB/s",
            target=targets.get(run_nbytes) if name in ("gather", "scatter") else None,
            detail="baseline: one memcpy",
        )
        for name, value in zip(works, times, strict=True)
    ]
