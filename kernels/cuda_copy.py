"""CUDA kernels, compiled at run time by NVRTC and launched through CuPy: the host half of csrc/cuda/copy.cu.

Imports CuPy only when a plan is made.

A plan compiles its kernels and uploads its tables when it is made. A call checks its arguments and makes one launch, or
two if some views need narrower accesses than others; it never waits or allocates. Item lists on the host are passed in
the kernel's parameters, or are uploaded if they do not fit.

A grid is a number of CTAs, and `max_sms` a number of multiprocessors. They are equal in a call with a limit: each of
its CTAs fills a multiprocessor, with 1,024 threads of more than 32 registers, or with the rings of a bulk copy. Other
calls of the plain kernel use CTAs of half that size, two per multiprocessor, which find room sooner beside a model's
kernels.
"""

from __future__ import annotations

import math
import threading
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import UsageError
from ..plan.tables import ComponentArgs
from .cuda_runtime import Arguments, held_runtime
from .cuda_runtime import missing as runtime_missing
from .cuda_tables import (
    EXTENT_NBYTES,
    LISTED_LARGE,
    PARAMS_NBYTES,
    UNIT,
    Counted,
    access_of,
    counts,
    n_tiles,
    pack_groups,
    pack_params,
    pack_views,
    run_nbytes,
)
from .device import DeviceTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..plan import Tokens
    from ..plan.tables import Index, Int64s
    from .arena import Table
    from .backend import Compiled, Launch, Recipe
    from .cuda_runtime import CudaRuntime
    from .device import Checked, Group
    from .driver import Kernel
    from .index_ring import IndexRing, Runtime, Slot

TO_STAGING, FROM_STAGING, TO_PEER = range(3)
SOURCE = "copy.cu"
LANES = 32
CTAS_PER_SM = 2
BULK_SOURCE = "bulk.cu"
BULK_THREADS = 128
BULK_FROM_NBYTES = {90: 2048, 100: 2048, 120: 0}
"""The shortest runs for bulk copies, by compute capability: a device uses the last entry that is not above its own; 0
is never. From 120 on a CTA has 99 KiB of shared memory, and the rings take 192. An H200 confirms 2,048.
"""


def missing() -> str:
    """Why it cannot be used here; empty if it can."""
    return runtime_missing() if find_spec("cupy") else "install pdstage[cuda13] or pdstage[cuda12]"


def compile_plan(recipe: Recipe) -> CudaPlan:
    """The selection's tables on the device, and the kernels that read them."""
    return CudaPlan(recipe, *held_runtime(recipe.device))


def runtime_of(device: str) -> Runtime:
    return held_runtime(device)[0]


def units(way: int, *, summed: bool, access: int = UNIT, longest: int = UNIT, far: bool = False) -> int:
    """Units of up to 16 bytes that a thread has in flight: as many as fit 64 registers. A checksum takes some of them,
    a second pool too, and so do offsets of 64 bits. Accesses of 32 bytes have half the addresses. Scattered units of
    several accesses are the slower the more there are (an H200: runs of 132 B). Of narrow summed ones two fit.
    """
    if access > UNIT:
        return 4
    if far:
        return 1
    if access < UNIT and (summed or (way == FROM_STAGING and access < longest)):
        return 2
    return 4 - summed - (way == TO_PEER) * (1 + (access < UNIT))


def plain_macros(machine: CudaRuntime | type[CudaRuntime], n_units: int, access: int = UNIT) -> dict[str, int]:
    return {
        "PDSTAGE_THREADS": CTAS_PER_SM * machine.threads, "PDSTAGE_UNITS": n_units, "PDSTAGE_ACCESS": access,
    }  # fmt: skip


def reach_macros(groups: Iterable[Group], narrow: int) -> dict[str, int]:
    """Of kernels for the groups of 16-byte access and wider, or for the narrower ones."""
    return {"PDSTAGE_NARROW": narrow, "PDSTAGE_FAR": int(bool(narrow) and not all(counts(g, 1) for g in groups))}


def bulk_macros(machine: CudaRuntime | type[CudaRuntime]) -> dict[str, int]:
    ring = machine.bulk
    return {
        "PDSTAGE_THREADS": BULK_THREADS, "PDSTAGE_STAGES": ring.stages, "PDSTAGE_STAGE_NBYTES": ring.stage_nbytes,
    }  # fmt: skip


def bulk_from_nbytes(capability: int) -> int:
    """The shortest runs for bulk copies on a device; 0 if it has none."""
    return BULK_FROM_NBYTES.get(max((known for known in BULK_FROM_NBYTES if known <= capability), default=0), 0)


class Call(NamedTuple):
    """What distinguishes kernels besides their groups."""

    way: int
    summed: bool
    few: bool
    """Whether the call has a limit on multiprocessors."""
    room: int
    """The number of items in the parameters; 0 if lists are in device memory."""
    access: int = UNIT
    """Bytes of the widest access that the device and all staging addresses allow."""


class Fitted(NamedTuple):
    """A kernel as a call launches it: units per tile, warps per CTA, and the number of CTAs that fill the device."""

    kernel: Kernel
    tile_units: int
    warps: int
    ctas: int


class Part(NamedTuple):
    """The groups of one launch, and its kernels.

    `access`: bytes of the widest access that all of them allow.
    """

    groups: list[Counted]
    macros: dict[str, int]
    bulk: bool
    access: int
    fitted: dict[Call, Fitted]


class Tables(NamedTuple):
    """Groups and views on the device, and their launches. Every launch reads all groups, for offsets in staging."""

    addresses: tuple[int, int, int]
    parts: list[Part]
    table: Table

    @classmethod
    def of(
        cls,
        machine: CudaRuntime,
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
        wanted = bulk_from_nbytes(machine.capability)
        if len(pool) > BULK_THREADS:
            wanted = 0
        elif wanted and bulk_from is not None:
            wanted = bulk_from
        pairs = list(zip(pool, peer, strict=True))
        wide = [pair for pair in pairs if access_of(*pair) >= UNIT]
        narrow = [pair for pair in pairs if access_of(*pair) < UNIT]
        parts = [_part(wide, 0, wanted, head_major=head_major)] if wide else []
        parts += [_part(narrow, 1, 0, head_major=head_major)] if narrow else []
        groups = pack_groups(pool, peer, head_major=head_major)
        table = machine.tables.put(np.concatenate([groups, pack_views(*views)]))
        return cls((table.ptr, table.ptr + groups.nbytes, len(pool)), parts, table)

    @property
    def n_groups(self) -> int:
        return self.addresses[2]


def _part(pairs: Sequence[tuple[Group, Group]], narrow: int, bulk_from: int, *, head_major: bool) -> Part:
    both = [group for pair in pairs for group in pair]
    flat = all(g.shards == g.segs == 1 and g.outer_rows == g.rows_per_item for g in both)
    macros = {
        **reach_macros(both, narrow), "PDSTAGE_HEAD_MAJOR": int(head_major and not flat), "PDSTAGE_FLAT": int(flat),
        "PDSTAGE_LONGEST": min(UNIT, max(g.width for g in both)),
    }  # fmt: skip
    # Between pools of different page sizes head-major runs do not match.
    meets = not macros["PDSTAGE_HEAD_MAJOR"] or all(mine is other for mine, other in pairs)
    runs = min(run_nbytes(g, head_major=head_major) for g in both)
    # One launch for all wide groups, one for all narrow ones: a single group with a narrower access limits it.
    access = min(access_of(*pair) for pair in pairs)
    return Part([Counted.of(mine) for mine, _ in pairs], macros, meets and 0 < bulk_from <= runs, access, {})


class CudaPlan:
    """A plan on one device. The lock guards the one argument block during a launch."""

    merges = True
    """Whether cells that are adjacent in memory may form one run, if nothing is summed."""

    def __init__(self, recipe: Recipe, machine: CudaRuntime, ring: IndexRing, bulk_from: int | None = None) -> None:
        """`bulk_from`: the shortest runs for bulk copies, in bytes; None as in `BULK_FROM_NBYTES`, 0 for never."""
        self._recipe = recipe
        self._machine = machine
        self._ring = ring
        self._bulk_from = bulk_from
        self.table = DeviceTable(recipe, merged=self.merges and not recipe.checksum, widest=machine.widest)
        self._arguments = Arguments(PARAMS_NBYTES, LISTED_LARGE)
        self._lock = threading.Lock()
        self._peers: WeakKeyDictionary[CudaPlan, Tables] = WeakKeyDictionary()
        with machine.current():
            self._tables = self._new_tables()
            for tables, call in self._ahead():
                for part in tables.parts:
                    part.fitted[call] = self._fitted(tables, part, call)

    def _new_tables(self) -> Tables:
        groups, views = self.table.group_list, self.table.views
        return Tables.of(
            self._machine, groups, groups, (views, views), head_major=self.table.head_major, bulk_from=self._bulk_from
        )

    def _ahead(self) -> Iterator[tuple[Tables, Call]]:
        """The kernels that are compiled when the plan is made; those for a peer are compiled with its first copy."""
        sums, rooms = {False, self._recipe.checksum}, (0, *self._machine.listed)
        ways = {
            "gather": [TO_STAGING], "scatter": [FROM_STAGING], "copy_to": [], "": [TO_STAGING, FROM_STAGING],
        }[self._recipe.only]  # fmt: skip
        accesses = {UNIT, self._machine.widest}
        for way, summed, few, room, access in product(ways, sums, (False, True), rooms, accesses):
            yield self._tables, Call(way, summed, few, room, access)

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = self.table.checked(indexes, tokens, self._recipe.device, unique=False)
        self.table.check_staging(dst_ptr, dst_nbytes, [one.span for one in side])
        self._run(self._tables, TO_STAGING, dst_ptr, (side,), launch)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = self.table.checked(indexes, tokens, self._recipe.device, unique=True)
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
        devices = self._recipe.device, peer._recipe.device
        mine = self.table.checked(indexes, tokens, *devices, unique=False)
        theirs = peer.table.checked(peer_indexes, tokens, *devices, unique=True)
        self._run(self._paired(peer), TO_PEER, 0, (mine, theirs), launch)

    def _paired(self, peer: CudaPlan) -> Tables:
        """Tables of both pools. Slow for the first copy to a plan, so engines make one in advance."""
        tables = self._peers.get(peer)
        if tables is None:
            pool, other = self.table.paired(peer.table)
            views = (self.table.views, peer.table.views)
            with self._machine.current():
                tables = Tables.of(
                    self._machine, pool, other, views, head_major=self.table.head_major, bulk_from=self._bulk_from
                )
            self._peers[peer] = tables
        return tables

    def _fitted(self, tables: Tables, part: Part, call: Call) -> Fitted:
        """Slow for the first call of its kind, except those of `_ahead`."""
        machine = self._machine
        macros = {
            **part.macros, "PDSTAGE_WAY": call.way, "PDSTAGE_SUM": int(call.summed), "PDSTAGE_LISTED": call.room,
        }  # fmt: skip
        if part.bulk and not call.summed:
            shared = BULK_THREADS // LANES * machine.bulk.nbytes + BULK_THREADS * EXTENT_NBYTES
            kernel = machine.kernel(BULK_SOURCE, macros | bulk_macros(machine), BULK_THREADS, shared)
            return Fitted(kernel, machine.bulk.stage_nbytes // UNIT, BULK_THREADS // LANES, machine.n_sms)
        access, longest, far = min(part.access, call.access), macros["PDSTAGE_LONGEST"], bool(macros["PDSTAGE_FAR"])
        n_units = units(call.way, summed=call.summed, access=access, longest=longest, far=far)
        macros |= plain_macros(machine, n_units, access)
        return self._resized(SOURCE, macros, tables, few=call.few)

    def _resized(self, source: str, macros: dict[str, int], tables: Tables, *, few: bool) -> Fitted:
        """A kernel whose CTAs may have up to PDSTAGE_THREADS threads, and do in a call with limited multiprocessors."""
        machine = self._machine
        most, threads = macros["PDSTAGE_THREADS"], machine.threads
        # Shared memory for the largest plan: an image is loaded once.
        kernel = machine.kernel(source, macros, threads, threads * EXTENT_NBYTES)._replace(
            threads=most if few else threads, shared_nbytes=tables.n_groups * EXTENT_NBYTES
        )
        return Fitted(kernel, LANES * macros["PDSTAGE_UNITS"], kernel.threads // LANES, most // threads * machine.n_sms)

    def _launches(
        self, tables: Tables, call: Call, spans: Sequence[ComponentArgs], max_sms: int | None
    ) -> list[tuple[Kernel, int]]:
        """Kernels and their grids, for views that have something to copy."""
        launches = []
        for part in tables.parts:
            fitted = part.fitted.get(call)
            if fitted is None:
                fitted = part.fitted[call] = self._fitted(tables, part, call)
            tiles = n_tiles(part.groups, spans, fitted.tile_units)
            if tiles:
                launches.append((fitted.kernel, min(-(-tiles // fitted.warps), max_sms or fitted.ctas)))
        return launches

    def _run(
        self, tables: Tables, way: int, staging: int, sides: tuple[Sequence[Checked], ...], launch: Launch
    ) -> None:
        machine = self._machine
        room = 0 if way == TO_PEER else self._room(sides[0])
        call = Call(way, bool(launch.sum_ptr), bool(launch.max_sms), room, math.gcd(machine.widest, staging))
        launches = self._launches(tables, call, [one.span for one in sides[0]], launch.max_sms)
        if not launches:
            return
        with machine.current():
            stream = machine.stream(launch.stream)
            slot, spans = (None, []) if room else self._uploaded(sides, stream)
            try:
                with self._lock:
                    if room:
                        spans = [self._listed(sides[0])]
                    pack_params(self._arguments.buffer, staging, launch.sum_ptr, tables.addresses, spans)
                    for kernel, grid in launches:
                        machine.launch(kernel, grid, stream, self._arguments.params, tables.table)
            finally:
                if slot is not None:
                    self._ring.give(slot, stream)

    def _room(self, side: Sequence[Checked]) -> int:
        """The smallest parameter size that holds all lists of a call; 0 if none does, or a list is on the device."""
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
        """Writes the lists into the parameters. Returns the spans with the 32-bit index there of each list's item 0."""
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
        """The spans with lists that the device can read, and the slot that holds them until the kernel has run."""
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
