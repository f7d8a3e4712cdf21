"""Triton kernels that convert, for pools on a GPU: plans, whose device half is triton_convert_kernels.py.

Imports neither torch nor triton before a plan is made.

Views that are adjacent in staged order and differ only in address and scale make one launch, and so do copied ones
among them. A checksum, which covers the staged cells, takes another launch.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import UsageError
from ..plan import Staging, rows_of
from ..plan.convert import SCALE, feeding
from ..plan.tables import FAULT_TOO_SMALL, integers
from . import triton_copy
from .device import COPY, HOLDS, KINDS, DeviceTable, check_aligned
from .triton_copy import GATHER, reciprocal
from .triton_device import ConvertVariant, SumVariant, device_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..plan import Tokens
    from ..plan.convert import Coding
    from ..plan.tables import ComponentArgs, Index, Row
    from .backend import Compiled, Launch, Recipe
    from .triton_device import Device, Held

missing = triton_copy.missing
# Values of a tile: 16 bytes of each of 1024 threads.
_TILE_VALUES = 8192
_MAX_VALUES = 1 << 17
_MAX_CELLS = 2**31 - 2**16


def compile_plan(recipe: Recipe) -> ConvertPlan:
    """Uploads tables and compiles kernels, so that no call waits for either."""
    return ConvertPlan(recipe, device_of(recipe.device))


class _Run(NamedTuple):
    """Views `[first, first + n)` of the selection, equal but for address and scale; `views` is their table."""

    first: int
    n: int
    row: Row
    coding: Coding
    variants: tuple[ConvertVariant, ConvertVariant]
    summing: SumVariant
    views: Held


class ConvertPlan:
    """A selection's tables on the device and its kernels."""

    def __init__(self, recipe: Recipe, device: Device) -> None:
        assert recipe.staged is not None
        fed = feeding(recipe.layout, recipe.staged)
        self._device = device
        self._staging = Staging(recipe.staged, recipe.select)
        self._table = DeviceTable(recipe._replace(layout=fed), merged=False)
        self._codings, self._sums = recipe.codings, recipe.checksum
        self._runs = list(self._group())

    def _group(self) -> list[_Run]:
        rows = list(enumerate(zip(self._table.table.rows, self._codings, strict=True)))
        runs = []
        for _, alike in groupby(rows, lambda one: _shape(one[0], *one[1])):
            held = list(alike)
            first, (row, coding) = held[0]
            table = np.array(
                [(r.base, c.encoding.scale_bits if c.encoding is not None else 0, r.seed) for _, (r, c) in held],
                np.int64,
            )
            variants, summing = self._variants([r for _, (r, _) in held], coding), self._summing(coding)
            for variant in variants:
                self._device.prepare(variant)
            if self._sums:
                self._device.prepare(summing)
            runs.append(_Run(first, len(held), row, coding, variants, summing, self._device.put(table)))
        return runs

    def _summing(self, coding: Coding) -> SumVariant:
        access = math.gcd(coding.width, 16)
        unit = max(access, 8)
        return SumVariant(access, unit, self._device.threads * triton_copy.DEPTH[GATHER, True] * access // unit)

    def _variants(self, rows: list[Row], coding: Coding) -> tuple[ConvertVariant, ConvertVariant]:
        row, encoding, n = rows[0], coding.encoding, _n_values(rows[0], coding)
        block = max(32, 1 << (n - 1).bit_length())
        if block > _MAX_VALUES:
            raise UsageError(f"shards of {n} values in a plan that converts", remedy="make a plan without them")
        strides = [row.item_stride, row.outer_stride, row.inner_stride, row.shard_stride, row.seg_stride]
        aligned = math.gcd(*strides, coding.width, n, *(one.base for one in rows)) % 16 == 0
        kind = KINDS[encoding.kind, encoding.rule] if encoding is not None else COPY
        holds = HOLDS[encoding.part] if encoding is not None else 0
        cells = max(1, _TILE_VALUES // block)
        gather, scatter = (ConvertVariant(way, kind, holds, block, cells, aligned) for way in range(2))
        return gather, scatter

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        self._launch(0, dst_ptr, dst_nbytes, indexes, tokens, launch)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        self._launch(1, src_ptr, src_nbytes, indexes, tokens, launch)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        raise AssertionError("plans that convert are refused earlier")

    def _launch(  # noqa: PLR0917  (a call's own arguments)
        self, way: int, ptr: int, nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        checked = self._table.checked(indexes, tokens, self._device.name, unique=way == 1)
        spans = [one.span for one in checked]
        if self._staging.nbytes(tokens) > nbytes:
            self._table.table.refuse(FAULT_TOO_SMALL, 0, self._staging.nbytes(tokens), nbytes)
        check_aligned(ptr, 16, "staging")
        offsets = [*self._staging.offsets(tokens), self._staging.nbytes(tokens)]
        stream = self._device.stream(launch.stream)
        most = launch.max_sms or self._device.n_programs
        sums = list(self._sums_of(ptr, offsets, spans, launch.sum_ptr)) if launch.sum_ptr else []
        names = self._table.table.names
        hosted = [i for i, span in enumerate(spans) if span.start < span.stop and indexes[names[i]].device == "cpu"]
        tables, lists = [run.views for run in self._runs], [integers(indexes[names[i]]) for i in hosted]
        with self._device.call(tables, lists, stream) as placed:
            at = {i: spans[i].ptr for i in range(len(spans))} | dict(zip(hosted, placed, strict=True))
            for run in self._runs:
                row, span, coding = run.row, spans[run.row.component], run.coding
                skipped = way == 1 and coding.encoding is not None and coding.encoding.part == SCALE
                if span.start == span.stop or skipped:
                    continue
                n_cells = rows_of(row.tokens_per_row, span.start, span.stop) * row.shards * row.segs
                if n_cells > _MAX_CELLS:
                    raise UsageError(f"{n_cells} cells of one view in one call", remedy="copy fewer tokens")
                variant = run.variants[way]
                n_tiles = run.n * -(-n_cells // variant.CELLS)
                scales = coding.scales if coding.scales >= 0 else run.first
                arguments = (
                    run.views.ptr, run.n, ptr + offsets[run.first], _step(offsets, run.first), ptr + offsets[scales],
                    _step(offsets, scales), at[row.component], span.bits, span.start, span.stop,
                    self._table.table.sizes[row.component].n_items, row.item_stride, row.rows_per_item, row.outer_rows,
                    row.outer_stride, row.inner_stride, row.shards, row.shard_stride, row.segs, row.seg_stride,
                    _n_values(row, coding), coding.width, row.tokens_per_row,
                )  # fmt: skip
                self._device.launch(variant, min(n_tiles, most), arguments, stream)
            for summing, n_tiles, sum_arguments in sums:
                self._device.launch(summing, min(n_tiles, most), sum_arguments, stream)

    def _sums_of(
        self, ptr: int, offsets: list[int], spans: list[ComponentArgs], sum_ptr: int
    ) -> Iterator[tuple[SumVariant, int, tuple[int, ...]]]:
        """The launches that sum the staged bytes: kernel, tiles, arguments."""
        for run in self._runs:
            row, span, variant = run.row, spans[run.row.component], run.summing
            units_per_cell = -(-run.coding.width // variant.UNIT)
            n_units = rows_of(row.tokens_per_row, span.start, span.stop) * row.shards * row.segs * units_per_cell
            if n_units > _MAX_CELLS:
                raise UsageError(f"{n_units} pieces of one view in one call", remedy="copy fewer tokens")
            arguments = (
                run.views.ptr, run.n, ptr + offsets[run.first], _step(offsets, run.first), span.start, span.stop,
                span.first_token, row.tokens_per_row, row.shards, row.first_shard, row.segs, run.coding.width,
                units_per_cell, reciprocal(units_per_cell), reciprocal(row.segs), reciprocal(row.shards), sum_ptr,
            )  # fmt: skip
            if n_units:
                yield variant, run.n * -(-n_units // variant.UNITS), arguments


def _shape(place: int, row: Row, coding: Coding) -> tuple[object, ...]:
    """What adjacent views of one launch have in common. Separate scales keep their distance from the data."""
    encoding, apart = coding.encoding, coding.scales - place if coding.scales >= 0 else 0
    how = (encoding.kind, encoding.rule, encoding.part) if encoding is not None else ()
    return (*row._replace(base=0, seed=0), apart, *how)


def _n_values(row: Row, coding: Coding) -> int:
    return row.width if coding.encoding is None else row.width // 2


def _step(offsets: list[int], first: int) -> int:
    """Bytes from one staged view to the next of its kind."""
    return offsets[first + 1] - offsets[first]
