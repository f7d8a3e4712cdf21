"""CUDA kernels, compiled at run time by NVRTC and launched through CuPy: the host half of csrc/cuda/copy.cu.

Imports CuPy only when a plan is made.

A plan compiles its kernels and uploads its tables when it is made. A call checks and makes one launch; it waits for
nothing and allocates nothing. Lists that lie on the host travel in the kernel's parameters, or are uploaded where they
do not fit.
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import UsageError
from ..tables import ComponentArgs
from .cuda_tables import LISTED_LARGE, PARAMS_NBYTES, UNIT, n_tiles, pack_groups, pack_params, pack_views, run_nbytes
from .cupy_runtime import Arguments, held_runtime
from .cupy_runtime import missing as runtime_missing
from .device import DeviceTable
from .index_ring import IndexRing, Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..plan import Tokens
    from ..tables import Index, Int64s
    from .arena import Arena, Table
    from .backend import Compiled, Launch, Recipe
    from .cupy_runtime import Bulk, Kernel
    from .device import Checked, Group
    from .index_ring import Slot

TO_STAGING, FROM_STAGING, TO_PEER = range(3)
SOURCE = "copy.cu"
# Units of 16 bytes that a thread has in flight, with a checksum and without: 24 and 32 KiB a CTA. A fourth beside a
# checksum does not fit 64 registers.
UNITS = {True: 3, False: 4}
CTAS_PER_SM = 2
BULK_SOURCE = "bulk.cu"
BULK_THREADS = 32
# Runs of at least so many bytes go by bulk copies, where the device has them. To be measured on each architecture.
BULK_FROM_NBYTES = 2048
BULK_CAPABILITY = 90


class Machine(Runtime, Protocol):
    """A device as plans use it; `CupyRuntime` is one."""

    n_sms: int
    threads: int
    """Threads of a CTA, and the most groups of a plan."""
    capability: int
    listed: tuple[int, ...]
    """How many items a kernel's parameters may hold, ascending."""
    bulk: Bulk

    @property
    def tables(self) -> Arena:
        """Where plans' tables lie."""

    def kernel(self, name: str, macros: Mapping[str, int], threads: int, shared_nbytes: int = 0) -> Kernel: ...

    def launch(self, kernel: Kernel, grid: int, stream: int, params: int, table: Table) -> None: ...


def missing() -> str:
    """Why it cannot be used here; empty if it can."""
    return runtime_missing() if find_spec("cupy") else "install pdstage[cuda13] or pdstage[cuda12]"


def compile_plan(recipe: Recipe) -> CudaPlan:
    """The selection's tables on the device, and the kernels that read them."""
    return CudaPlan(recipe, *held_runtime(recipe.device))


def runtime_of(device: str) -> Runtime:
    return held_runtime(device)[0]


class Tables(NamedTuple):
    """Groups and views on the device, for kernels of these macros. `peer` is the same as `pool` without a peer."""

    pool: Sequence[Group]
    addresses: tuple[int, int, int]
    macros: dict[str, int]
    bulk: bool
    table: Table
    kernels: dict[tuple[int, bool, int], Kernel]

    @classmethod
    def of(
        cls,
        machine: Machine,
        pool: Sequence[Group],
        peer: Sequence[Group],
        views: tuple[Int64s, Int64s],
        *,
        head_major: bool,
        bulk_from: int | None,
    ) -> Tables:
        if len(pool) > machine.threads:
            raise UsageError(
                f"a selection of {len(pool)} differently shaped groups of views",
                remedy=f"make plans of at most {machine.threads}",
            )
        both = (*pool, *peer)
        flat = all(g.shards == g.segs == 1 and g.outer_rows == g.rows_per_item for g in both)
        macros = {
            "PDSTAGE_HEAD_MAJOR": int(head_major and not flat),
            "PDSTAGE_NARROW": int(any(g.access < 16 for g in both)),
            "PDSTAGE_FLAT": int(flat),
        }
        runs = min((run_nbytes(g, head_major=head_major) for g in both), default=0)
        wanted = BULK_FROM_NBYTES if bulk_from is None else bulk_from
        # Between pools of other page sizes head-major runs do not meet.
        meets = pool is peer or not macros["PDSTAGE_HEAD_MAJOR"]
        bulk = (
            machine.capability >= BULK_CAPABILITY
            and not macros["PDSTAGE_NARROW"]
            and meets
            and 0 < wanted <= runs
            and len(pool) <= BULK_THREADS
        )
        groups = pack_groups(pool, peer, head_major=head_major)
        table = machine.tables.put(np.concatenate([groups, pack_views(*views)]))
        return cls(pool, (table.ptr, table.ptr + groups.nbytes, len(pool)), macros, bulk, table, {})


class CudaPlan:
    """A plan on one device. The lock guards the one argument block, for the time of a launch."""

    merges = True
    """Whether cells that follow each other in memory may be one run, where nothing is summed."""

    def __init__(self, recipe: Recipe, machine: Machine, ring: IndexRing, bulk_from: int | None = None) -> None:
        """`bulk_from`: the shortest runs, in bytes, for bulk copies; None for `BULK_FROM_NBYTES`, 0 for never."""
        self._recipe = recipe
        self._machine = machine
        self._ring = ring
        self._bulk_from = bulk_from
        self.table = DeviceTable(recipe, merged=self.merges and not recipe.checksum)
        self._arguments = Arguments(PARAMS_NBYTES, LISTED_LARGE)
        self._lock = threading.Lock()
        self._peers: WeakKeyDictionary[CudaPlan, Tables] = WeakKeyDictionary()
        with machine.current():
            self._tables = self._new_tables()
            for way in (TO_STAGING, FROM_STAGING):
                for summed, room in product({False, recipe.checksum}, (0, *machine.listed)):
                    self._kernel(self._tables, way, summed, room)

    def _new_tables(self) -> Tables:
        groups, views = self.table.group_list, self.table.views
        return Tables.of(
            self._machine, groups, groups, (views, views), head_major=self.table.head_major, bulk_from=self._bulk_from
        )

    @property
    def uses_bulk(self) -> bool:
        """Whether calls without a checksum go by bulk copies."""
        return self._tables.bulk

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = self._checked(indexes, tokens, (self._recipe.device,), unique=False)
        self.table.check_staging(dst_ptr, dst_nbytes, [one.span for one in side])
        self._run(self._tables, TO_STAGING, dst_ptr, (side,), launch)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = self._checked(indexes, tokens, (self._recipe.device,), unique=True)
        self.table.check_staging(src_ptr, src_nbytes, [one.span for one in side])
        self._run(self._tables, FROM_STAGING, src_ptr, (side,), launch)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, CudaPlan)
        devices = (self._recipe.device, peer._recipe.device)
        mine = self._checked(indexes, tokens, devices, unique=False)
        theirs = peer._checked(peer_indexes, tokens, devices, unique=True)
        self._run(self._paired(peer), TO_PEER, 0, (mine, theirs), launch)

    def _checked(
        self, indexes: Mapping[str, Index], tokens: Tokens, devices: tuple[str, ...], *, unique: bool
    ) -> list[Checked]:
        for name in self.table.table.names:
            if name in indexes and indexes[name].device not in ("cpu", *devices):
                raise UsageError(
                    f"items of component {name!r} are on {indexes[name].device!r}",
                    remedy=f"give them in host memory or on {' or '.join(devices)}",
                    component=name,
                )
        return self.table.checked(indexes, tokens, unique=unique)

    def _paired(self, peer: CudaPlan) -> Tables:
        """Tables of both pools; cold for the first copy to a plan, so engines make one before they are in a hurry."""
        tables = self._peers.get(peer)
        if tables is None:
            pool, other = self.table.paired(peer.table, merged=not self._recipe.checksum)
            views = (self.table.views, peer.table.views)
            with self._machine.current():
                tables = Tables.of(
                    self._machine, pool, other, views, head_major=self.table.head_major, bulk_from=self._bulk_from
                )
            self._peers[peer] = tables
        return tables

    def _kernel(self, tables: Tables, way: int, summed: bool, room: int) -> Kernel:
        kernel = tables.kernels.get((way, summed, room))
        if kernel is None:
            macros = {**tables.macros, "PDSTAGE_WAY": way, "PDSTAGE_SUM": int(summed), "PDSTAGE_LISTED": room}
            machine = self._machine
            if tables.bulk and not summed:
                ring = machine.bulk
                macros |= {"PDSTAGE_THREADS": BULK_THREADS}
                macros |= {"PDSTAGE_STAGES": ring.stages, "PDSTAGE_STAGE_NBYTES": ring.stage_nbytes}
                kernel = machine.kernel(BULK_SOURCE, macros, BULK_THREADS, ring.nbytes)
            else:
                macros |= {"PDSTAGE_THREADS": machine.threads, "PDSTAGE_UNITS": UNITS[summed]}
                kernel = machine.kernel(SOURCE, macros, machine.threads)
            tables.kernels[way, summed, room] = kernel
        return kernel

    def _tiling(self, tables: Tables, way: int, summed: bool) -> tuple[int, int]:
        """Units of a tile, and the CTAs that fill the device."""
        machine = self._machine
        if tables.bulk and not summed:
            return machine.bulk.stage_nbytes // UNIT, machine.bulk.ctas_per_sm * machine.n_sms
        return machine.threads * UNITS[summed], CTAS_PER_SM * machine.n_sms

    def _run(
        self, tables: Tables, way: int, staging: int, sides: tuple[Sequence[Checked], ...], launch: Launch
    ) -> None:
        machine = self._machine
        summed = bool(launch.sum_ptr)
        tile_units, most = self._tiling(tables, way, summed)
        tiles = n_tiles(tables.pool, [one.span for one in sides[0]], tile_units)
        if not tiles:
            return
        grid = min(tiles, launch.max_sms or most)
        room = 0 if way == TO_PEER else self._room(sides[0])
        kernel = self._kernel(tables, way, summed, room)
        with machine.current():
            stream = machine.stream(launch.stream)
            slot, spans = (None, []) if room else self._uploaded(sides, stream)
            try:
                with self._lock:
                    if room:
                        spans = [self._listed(sides[0])]
                    pack_params(self._arguments.buffer, staging, launch.sum_ptr, tables.addresses, spans)
                    machine.launch(kernel, grid, stream, self._arguments.params, tables.table)
            finally:
                if slot is not None:
                    self._ring.give(slot, stream)

    def _room(self, side: Sequence[Checked]) -> int:
        """The least room in parameters that holds all lists of a call; 0 where none does, or one is elsewhere."""
        n = 0
        for one in side:
            if one.elsewhere:
                return 0
            n += one.items.size if one.items is not None else 0
        for room in self._machine.listed:
            if n <= room:
                return room
        return 0

    def _listed(self, side: Sequence[Checked]) -> list[ComponentArgs]:
        """Puts the lists into the parameters; the spans with the place there, in 32 bits, of each list's item 0."""
        at, spans, places = 0, [], self._arguments.listed
        for span, items, skipped, _ in side:
            if items is None:
                spans.append(span)
                continue
            end = at + items.size
            places[at:end] = items
            spans.append(ComponentArgs((at - skipped) & 0xFFFFFFFF, *span[1:]))
            at = end
        return spans

    def _uploaded(
        self, sides: Sequence[Sequence[Checked]], stream: int
    ) -> tuple[Slot | None, list[list[ComponentArgs]]]:
        """The spans with lists that the device can read, and the slot that holds those until the kernel has run."""
        lists = [(one.items.ctypes.data, one.items.nbytes) for side in sides for one in side if one.items is not None]
        if not lists:
            return None, [[one.span for one in side] for side in sides]
        slot, addresses = self._ring.put(lists, stream)
        starts = iter(addresses)
        return slot, [
            [
                one.span
                if one.items is None
                else one.span._replace(ptr=next(starts) - one.skipped * one.items.itemsize)
                for one in side
            ]
            for side in sides
        ]
