"""Triton kernels, for NVIDIA and AMD: plans, whose device half is triton_kernels.py.

Imports neither torch nor triton before a plan is made.

A plan has its tables on the device. A call uploads at most its item lists. It makes one launch for each component and
class of widths (16; 8 and 4; 2 and 1 bytes per access), on a grid of as many programs as multiprocessors.
"""

from __future__ import annotations

import importlib.util
import math
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import UsageError
from ..plan import VIEW_ALIGNMENT
from ..plan.tables import integers
from .device import DeviceTable, rows
from .triton_device import Variant, device_of, interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from ..plan import Tokens
    from ..plan.tables import ComponentArgs, Index
    from .backend import Compiled, Launch, Recipe
    from .device import Group
    from .index_ring import Runtime
    from .triton_device import Device, Held

GATHER, SCATTER, COPY = range(3)  # as in triton_kernels.py
# Units that a thread loads before it stores the first, by way and checksum: as many as 64 registers hold without
# spilling on every target, which is 64 KiB per program for a gather.
DEPTH = {
    (GATHER, False): 4, (SCATTER, False): 4, (COPY, False): 1, (GATHER, True): 2, (SCATTER, True): 2,
}  # fmt: skip
_CLASSES = ((16,), (8, 4), (2, 1))
# Units and tokens of a call are counted in 32 bits, including one more tile.
_MAX_UNITS = 2**31 - 2**16


def missing() -> str:
    """Why it cannot be used here; empty if it can."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("triton")):
        return "install pdstage[triton]"
    if interpreted():
        return ""
    import torch  # noqa: PLC0415

    return "" if torch.cuda.is_available() else "torch finds no GPU"


def compile_plan(recipe: Recipe) -> TritonPlan:
    """Uploads tables and compiles kernels, so that no call waits for either.

    In Triton's interpreter plans are for host memory, elsewhere for a GPU's; raises `UsageError` for the other.
    """
    problem = missing()
    if not problem and interpreted() != (recipe.device == "cpu"):
        problem = "set TRITON_INTERPRET=1 for host memory, to test; unset it for a GPU's"
    if problem:
        raise UsageError(f"triton does not copy memory on {recipe.device!r} here", remedy=problem, device=recipe.device)
    return TritonPlan(recipe, device_of(recipe.device))


def runtime_of(device: str) -> Runtime | None:
    return device_of(device).runtime


class _Run(NamedTuple):
    """Consecutive equal views: `own` in the plan's pool, `peer` in another pool; equal to `own` without one."""

    own: Group
    peer: Group

    @property
    def access(self) -> int:
        return math.gcd(self.own.access, self.peer.access)


class _Class(NamedTuple):
    """What one launch copies: the `runs` whose column ACCESS_CLASS is the variant's ACCESS."""

    variant: Variant
    runs: tuple[_Run, ...]


class _Section(NamedTuple):
    """The runs of one component, as a table, `groups`; for copies also a table of the peer's views."""

    component: int
    runs: tuple[_Run, ...]
    groups: Held
    peer_views: Held
    classes: tuple[_Class, ...]

    def nbytes(self, span: ComponentArgs) -> int:
        """Staged bytes of all its views."""
        return sum(own.n_views * _aligned(rows(own.tokens_per_row, span) * own.row_nbytes) for own, _ in self.runs)


class TritonPlan:
    """A selection's tables on the device and its kernels."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe = recipe
        self._device = device
        self._table = DeviceTable(recipe, merged=not recipe.checksum)
        self._views = device.put(self._table.views)
        alone = [_Run(group, group) for group in self._table.group_list]
        self._sections = {way: list(self._compile(way, alone, self._views)) for way in (GATHER, SCATTER)}
        self._peers: WeakKeyDictionary[TritonPlan, list[_Section]] = WeakKeyDictionary()

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = _Side(self, self._spans(indexes, tokens, self._device.name, unique=False), indexes)
        self._table.check_staging(dst_ptr, dst_nbytes, side.spans)
        self._launch(self._sections[GATHER], dst_ptr, [side], launch)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = _Side(self, self._spans(indexes, tokens, self._device.name, unique=True), indexes)
        self._table.check_staging(src_ptr, src_nbytes, side.spans)
        self._launch(self._sections[SCATTER], src_ptr, [side], launch)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, TritonPlan)
        devices = self._device.name, peer._device.name
        src = _Side(self, self._spans(indexes, tokens, *devices, unique=False), indexes)
        dst = _Side(peer, peer._spans(peer_indexes, tokens, *devices, unique=True), peer_indexes)
        self._launch(self._paired(peer), 0, [src, dst], launch)

    def _paired(self, peer: TritonPlan) -> list[_Section]:
        """Tables of both pools, on this one's device. Slow for the first copy to a plan."""
        sections = self._peers.get(peer)
        if sections is None:
            pairs = zip(*self._table.paired(peer._table), strict=True)
            views = self._device.put(peer._table.views)
            sections = self._peers[peer] = list(self._compile(COPY, [_Run(*pair) for pair in pairs], views))
        return sections

    def _spans(self, indexes: Mapping[str, Index], tokens: Tokens, *devices: str, unique: bool) -> list[ComponentArgs]:
        spans = [one.span for one in self._table.checked(indexes, tokens, *devices, unique=unique)]
        for name, span in zip(self._table.table.names, spans, strict=True):
            if span.stop > _MAX_UNITS:
                raise UsageError(f"a list of {span.stop} tokens", remedy=f"list at most {_MAX_UNITS}", component=name)
        return spans

    def _launch(self, sections: Sequence[_Section], staged: int, sides: Sequence[_Side], launch: Launch) -> None:
        """One launch for each class of each section that has tokens."""
        work = []
        for section in sections:
            span = sides[0].spans[section.component]
            work += [(section, one.variant, staged, n) for one in section.classes if (n := _n_tiles(one, span))]
            staged += section.nbytes(span)
        if not work:
            return
        stream = self._device.stream(launch.stream)
        most = launch.max_sms or self._device.n_programs
        lists = [found for side in sides for found in side.lists()]
        tables = [self._views, *(held for section, *_ in work for held in (section.groups, section.peer_views))]
        with self._device.call(tables, [items for _, items, _ in lists], stream) as placed:
            at = {span: address - skipped for (span, _, skipped), address in zip(lists, placed, strict=True)}
            for section, variant, base, n_tiles in work:
                own, peer = (side.spans[section.component] for side in (sides[0], sides[-1]))
                arguments = (
                    section.groups.ptr, len(section.runs), base, self._views.ptr, at.get(id(own), own.ptr), own.bits,
                    own.start, own.stop, own.first_token, section.peer_views.ptr, at.get(id(peer), peer.ptr), peer.bits,
                    peer.start, launch.sum_ptr,
                )  # fmt: skip
                chosen = variant if launch.sum_ptr or not variant.CHECKSUM else variant._replace(CHECKSUM=False)
                self._device.launch(chosen, min(n_tiles, most), arguments, stream)

    def _compile(self, way: int, runs: Sequence[_Run], peer_views: Held) -> Iterator[_Section]:
        """The sections of one way of copying, with tables uploaded and kernels ready."""
        for number, of_component in groupby(runs, lambda run: run.own.component):
            held = tuple(of_component)
            classes = []
            for accesses in _CLASSES:
                members = tuple(run for run in held if run.access in accesses)
                if members:
                    classes.append(_Class(self._variant(way, members), members))
                    self._device.prepare(classes[-1].variant)
            variants = {access: one.variant for one in classes for access in {run.access for run in one.runs}}
            lines = [_columns(run, variants[run.access]) for run in held]
            groups = self._device.put(np.array(lines, np.int64))
            yield _Section(number, held, groups, peer_views, tuple(classes))

    def _variant(self, way: int, runs: Sequence[_Run]) -> Variant:
        sums, access = self._recipe.checksum and way != COPY, min(run.access for run in runs)
        unit = max(access, 8) if sums else access
        return Variant(
            WAY=way,
            HEAD_MAJOR=self._table.head_major and way != COPY,
            ACCESS=access,
            SEGS=any(run.own.segs > 1 for run in runs),
            SHARDS=any(run.own.shards > 1 for run in runs),
            LEVELS=any(run.own.outer_rows < run.own.rows_per_item for run in runs),
            PEER_LEVELS=way == COPY and any(run.peer.outer_rows < run.peer.rows_per_item for run in runs),
            CHECKSUM=sums,
            UNIT=unit,
            UNITS=self._device.threads * DEPTH[way, sums] * access // unit,
        )


class _Side(NamedTuple):
    """One plan's lists in a call."""

    plan: TritonPlan
    spans: list[ComponentArgs]
    indexes: Mapping[str, Index]

    def lists(self) -> Iterator[tuple[int, NDArray[Any], int]]:
        """For each list in host memory: the index of its span, the part that is read, and the bytes before it."""
        table = self.plan._table.table
        for name, size, span in zip(table.names, table.sizes, self.spans, strict=True):
            if span.start < span.stop and self.indexes[name].device == "cpu":
                first, stop = span.start // size.tokens_per_item, (span.stop - 1) // size.tokens_per_item + 1
                yield id(span), integers(self.indexes[name])[first:stop], first * span.bits // 8


def _columns(run: _Run, variant: Variant) -> list[int]:
    """A row of the table of groups; triton_kernels.py names its columns."""
    own, units_per_run = run.own, -(-run.own.width // variant.UNIT)
    line = [
        own.first_view, own.n_views, variant.ACCESS, own.tokens_per_row, own.width, own.segs, own.shards,
        own.first_shard, units_per_run, reciprocal(units_per_run), reciprocal(own.segs), reciprocal(own.shards),
    ]  # fmt: skip
    for side in run:
        line += [
            side.n_items, side.item_stride, side.rows_per_item, reciprocal(side.rows_per_item), side.outer_rows,
            reciprocal(side.outer_rows), side.outer_stride, side.inner_stride, side.shard_stride, side.seg_stride,
        ]  # fmt: skip
    return line


def reciprocal(divisor: int) -> int:
    """(2^64 - 1) // divisor, as the bits of an int64."""
    reciprocal = (2**64 - 1) // divisor
    return reciprocal - 2**64 if reciprocal >= 2**63 else reciprocal


def _n_tiles(one: _Class, span: ComponentArgs) -> int:
    """The number of tiles of a launch. Raises `UsageError` if a view has more units than 32 bits count."""
    n_tiles = 0
    for own, _ in one.runs:
        n_units = rows(own.tokens_per_row, span) * own.shards * own.segs * -(-own.width // one.variant.UNIT)
        if n_units > _MAX_UNITS:
            raise UsageError(f"{n_units} pieces of one view in one call", remedy="copy fewer tokens at once")
        n_tiles += own.n_views * -(-n_units // one.variant.UNITS)
    return n_tiles


def _aligned(nbytes: int) -> int:
    return -(-nbytes // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
