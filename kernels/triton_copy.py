"""Triton kernels, for NVIDIA and AMD: plans, whose device half is triton_kernels.py.

Layer 3. Imports neither torch nor triton before a plan is made. Must not know rooms or transports.

A plan has its tables on the device. A call uploads its lists of items at most, and makes one launch for each component
and class of widths (16; 8 and 4; 2 and 1 bytes an access), on a grid of as many programs as multiprocessors.
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
from .device import DeviceTable, Group, Span, rows
from .triton_device import Device, Variant, device_of, interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..plan import Tokens
    from ..tables import Index
    from .pool import Compiled, Launch, Recipe

GATHER, SCATTER, COPY = range(3)  # as triton_kernels.py has them
# Units that a thread loads before it stores the first: as many as 64 registers hold, which is 64 KiB a program at best.
_DEPTH = {GATHER: 4, SCATTER: 4, COPY: 1}
_CHECKSUM_DEPTH = {GATHER: 2, SCATTER: 2, COPY: 1}
_CLASSES = ((16,), (8, 4), (2, 1))
# Units and tokens of a call are counted in 32 bits, a last tile beyond them included.
_MOST_UNITS = 2**31 - 2**16
COLUMNS = 31


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

    In Triton's interpreter plans are of host memory, elsewhere of a GPU's; raises `UsageError` for the other.
    """
    problem = missing()
    if not problem and interpreted() != (recipe.device == "cpu"):
        problem = "set TRITON_INTERPRET=1 for host memory, to test; unset it for a GPU's"
    if problem:
        raise UsageError(f"triton does not copy memory on {recipe.device!r} here", remedy=problem, device=recipe.device)
    return TritonPlan(recipe, device_of(recipe.device))


class _Run(NamedTuple):
    """Consecutive views that are alike on every side: `sides[0]` is the plan's own, `sides[1]` a peer's."""

    first_view: int
    n_views: int
    sides: tuple[Group, ...]

    @property
    def access(self) -> int:
        return math.gcd(*(side.access for side in self.sides))


class _Class(NamedTuple):
    """What one launch copies: those `runs` whose column ACCESS_CLASS is `access`, by the kernel `variant`."""

    variant: Variant
    runs: tuple[_Run, ...]


class _Section(NamedTuple):
    """The runs of one component, as a table at the address `groups`; for copies also that of the peer's views."""

    component: int
    runs: tuple[_Run, ...]
    groups: int
    peer_views: int
    classes: tuple[_Class, ...]
    keep: object

    def nbytes(self, span: Span) -> int:
        """Staged bytes of all its views."""
        return sum(run.n_views * _aligned(rows(run.sides[0], span) * run.sides[0].row_nbytes) for run in self.runs)


class TritonPlan:
    """A selection's tables on the device and its kernels."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        self._recipe = recipe
        self._device = device
        self._table = DeviceTable(recipe, merged=not recipe.checksum)
        self._views, self._keep = device.put(self._table.views)
        self._sections = {way: list(self._compile(way, self._table)) for way in (GATHER, SCATTER)}
        self._peers: WeakKeyDictionary[TritonPlan, list[_Section]] = WeakKeyDictionary()

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        self._staged(GATHER, dst_ptr, dst_nbytes, indexes, tokens, launch)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        self._staged(SCATTER, src_ptr, src_nbytes, indexes, tokens, launch)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, TritonPlan)
        sections = self._peers.get(peer)
        if sections is None:
            ours, theirs = (DeviceTable(plan._recipe, merged=False) for plan in (self, peer))
            sections = self._peers[peer] = list(self._compile(COPY, ours, theirs))
        src = self._spans(indexes, tokens, unique=False)
        dst = peer._spans(peer_indexes, tokens, unique=True)
        self._launch(sections, src, indexes, 0, launch, (peer, dst, peer_indexes))

    def _staged(
        self, way: int, ptr: int, nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        spans = self._spans(indexes, tokens, unique=way == SCATTER)
        self._table.check_staging(ptr, nbytes, spans)
        self._launch(self._sections[way], spans, indexes, ptr, launch)

    def _spans(self, indexes: Mapping[str, Index], tokens: Tokens, *, unique: bool) -> list[Span]:
        spans = self._table.spans(indexes, tokens, unique=unique)
        for name, span in zip(self._table.table.names, spans, strict=True):
            if span.start == span.stop:
                continue
            if indexes[name].device not in ("cpu", self._device.name):
                raise UsageError(
                    f"the index of component {name!r} is on {indexes[name].device!r}",
                    remedy=f"give it in host memory or on {self._device.name!r}",
                    component=name,
                )
            if span.stop > _MOST_UNITS:
                raise UsageError(f"an index of more than {_MOST_UNITS} tokens", remedy="give a shorter one")
        return spans

    def _lists(self, spans: Sequence[Span], indexes: Mapping[str, Index]) -> list[tuple[int, int, int]]:
        """Of each component's list what a call reads: address, bytes, and bytes skipped; zero bytes if on a device."""
        found = []
        for (name, size), span in zip(zip(self._table.table.names, self._table.table.sizes, strict=True), spans, strict=True):
            first, stop = span.start // size.tokens_per_item, -(-span.stop // size.tokens_per_item)
            on_host = span.start != span.stop and indexes[name].device == "cpu"
            skipped = first * span.bits // 8 if on_host else 0
            found.append((span.ptr + skipped, (stop - first) * span.bits // 8 if on_host else 0, skipped))
        return found

    def _launch(
        self,
        sections: Sequence[_Section],
        spans: Sequence[Span],
        indexes: Mapping[str, Index],
        at: int,
        launch: Launch,
        peer: tuple[TritonPlan, Sequence[Span], Mapping[str, Index]] | None = None,
    ) -> None:
        """One launch for each class of each section that has tokens."""
        others = peer[1] if peer else spans
        work = []
        for section in sections:
            span = spans[section.component]
            work += [(section, one, at, n) for one in section.classes if (n := _n_tiles(one, span))]
            at += section.nbytes(span)
        if not work:
            return
        lists = self._lists(spans, indexes) + (peer[0]._lists(others, peer[2]) if peer else [])
        stream = self._device.stream(launch.stream)
        most = launch.max_sms or self._device.n_programs
        with self._device.lists([(ptr, nbytes) for ptr, nbytes, _ in lists if nbytes], stream) as placed:
            copies = iter(placed)
            items = [(next(copies) if nbytes else ptr) - skipped for ptr, nbytes, skipped in lists]
            for section, one, staged, n_tiles in work:
                number = section.component
                span, other = spans[number], others[number]
                variant = one.variant if launch.sum_ptr else one.variant._replace(CHECKSUM=False)
                arguments = (
                    section.groups, len(section.runs), staged, self._views, items[number], span.bits, span.start,
                    span.stop, span.first_token, section.peer_views, items[number - len(spans)] if peer else 0,
                    other.bits, other.start, launch.sum_ptr,
                )  # fmt: skip
                self._device.launch(variant, min(n_tiles, most), arguments, stream)

    def _compile(self, way: int, *tables: DeviceTable) -> Iterator[_Section]:
        """The sections of a way of copying, tables uploaded and kernels ready."""
        peer_views, keep_views = self._device.put(tables[-1].views) if way == COPY else (0, None)
        for number, same in groupby(_runs(tables), lambda run: run.sides[0].component):
            runs = tuple(same)
            found, table = [], np.zeros((len(runs), COLUMNS), np.int64)
            for accesses in _CLASSES:
                members = tuple(run for run in runs if run.access in accesses)
                if members:
                    variant = self._variant(way, members)
                    found.append(_Class(variant, members))
                    self._device.prepare(variant)
            for line, run in zip(table, runs, strict=True):
                variant = next(one.variant for one in found if run in one.runs)
                line[:] = _columns(run, variant)
            groups, keep = self._device.put(table)
            yield _Section(number, runs, groups, peer_views, tuple(found), (keep, keep_views))

    def _variant(self, way: int, runs: Sequence[_Run]) -> Variant:
        access = min(run.access for run in runs)
        unit = max(access, 8) if self._recipe.checksum else access
        depth = (_CHECKSUM_DEPTH if self._recipe.checksum else _DEPTH)[way]
        levels = [any(run.sides[i].outer_rows < run.sides[i].rows_per_item for run in runs) for i in (0, -1)]
        return Variant(
            WAY=way,
            HEAD_MAJOR=self._table.head_major and way != COPY,
            ACCESS=access,
            SEGS=any(run.sides[0].segs > 1 for run in runs),
            SHARDS=any(run.sides[0].shards > 1 for run in runs),
            LEVELS=levels[0],
            PEER_LEVELS=levels[1] and way == COPY,
            CHECKSUM=self._recipe.checksum,
            UNIT=unit,
            UNITS=self._device.threads * depth * access // unit,
        )


def _runs(tables: Sequence[DeviceTable]) -> Iterator[_Run]:
    """Views in staged order, those together that are alike in every table."""
    sides = [[group for group in table.group_list for _ in range(group.n_views)] for table in tables]
    first = 0
    for same, views in groupby(zip(*sides, strict=True)):
        n_views = len(list(views))
        yield _Run(first, n_views, same)
        first += n_views


def _columns(run: _Run, variant: Variant) -> list[int]:
    """A line of the table of groups; triton_kernels.py names its columns."""
    own = run.sides[0]
    line = [
        run.first_view, run.n_views, variant.ACCESS, own.tokens_per_row, own.width, own.segs, own.shards,
        own.first_shard, _reciprocal(-(-own.width // variant.UNIT)), _reciprocal(own.segs), _reciprocal(own.shards),
    ]  # fmt: skip
    for side in run.sides:
        line += [
            side.n_items, side.item_stride, side.rows_per_item, _reciprocal(side.rows_per_item), side.outer_rows,
            _reciprocal(side.outer_rows), side.outer_stride, side.inner_stride, side.shard_stride, side.seg_stride,
        ]  # fmt: skip
    return line + [0] * (COLUMNS - len(line))


def _reciprocal(divisor: int) -> int:
    """(2^64 - 1) // divisor, as the bits of an int64."""
    reciprocal = (2**64 - 1) // divisor
    return reciprocal - 2**64 if reciprocal >= 2**63 else reciprocal


def _n_tiles(one: _Class, span: Span) -> int:
    """Tiles that a launch has; raises `UsageError` where a view has more units than 32 bits count."""
    n_tiles = 0
    for run in one.runs:
        own = run.sides[0]
        n_units = rows(own, span) * own.shards * own.segs * -(-own.width // one.variant.UNIT)
        if n_units > _MOST_UNITS:
            raise UsageError(f"{n_units} pieces of one view in one call", remedy="copy fewer tokens at once")
        n_tiles += run.n_views * -(-n_units // one.variant.UNITS)
    return n_tiles


def _aligned(nbytes: int) -> int:
    return -(-nbytes // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
