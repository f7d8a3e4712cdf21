"""CUDA kernels that convert: the host half of csrc/cuda/convert.cu, and of sum.cu for what it stages.

Imports CuPy only when a plan is made.

A call is launched as in `cuda_copy`: one launch, or two if some views need narrower accesses than others. With a
checksum, which covers the staged cells, there are as many again.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import UsageError
from ..plan import Staging
from ..plan.convert import DATA, SCALE, TOKEN_HEAD, feeding
from ..plan.tables import FAULT_TOO_SMALL
from . import cuda_copy
from .cuda_copy import CTAS_PER_SM, FROM_STAGING, LANES, TO_STAGING, Call, CudaPlan, Fitted, Part, Tables, reach_macros
from .cuda_runtime import held_runtime
from .cuda_tables import UNIT, Counted, access_of, pack_groups, pack_views
from .device import ALIGNMENT, COPY, HOLDS, KINDS, check_aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ..plan import Tokens
    from ..plan.convert import Coding
    from ..plan.tables import Index
    from .backend import Compiled, Launch, Recipe
    from .cuda_runtime import CudaRuntime
    from .device import Group
    from .index_ring import IndexRing

missing = cuda_copy.missing
SOURCE, SUM_SOURCE = "convert.cu", "sum.cu"
# Units of a thread in flight: 64 bytes of the pool when encoding, 48 of staging when decoding, 64 when summing.
UNITS = {TO_STAGING: 2, FROM_STAGING: 3}
SUM_UNITS = 4
_VALUES = 16  # values of a unit
WIDE, WORDS_STAGED, _VALUES_AND_BYTES, BYTES = range(4)
_CODING = np.dtype([(name, "<u4") for name in ("kind", "holds", "n_values", "units", "scales_group", "scales_first")])


def compile_plan(recipe: Recipe) -> ConvertPlan:
    """The selection's tables on the device, and the kernels that read them."""
    return ConvertPlan(recipe, *held_runtime(recipe.device))


class _Coded(NamedTuple):
    """Views that differ only in address and scale. `width` is that of a staged cell; copied views have no values."""

    group: Group
    coding: Coding

    def accessed(self, nbytes: int) -> _Coded:
        """The same, limited to accesses of `nbytes` at a time."""
        return self._replace(group=self.group._replace(access=nbytes))

    @property
    def kind(self) -> int:
        encoding = self.coding.encoding
        return COPY if encoding is None else KINDS[encoding.kind, encoding.rule]

    @property
    def width(self) -> int:
        return self.coding.width

    @property
    def n_values(self) -> int:
        return 0 if self.coding.encoding is None else self.group.width // 2

    @property
    def units(self) -> int:
        return -(-self.n_values // _VALUES) if self.n_values else -(-self.width // UNIT)

    @property
    def numbered(self) -> int:
        """Units of a cell, including idle ones that keep a token's head within the lanes of one warp."""
        encoding = self.coding.encoding
        if encoding is None or encoding.kind != TOKEN_HEAD:
            return self.units
        return 1 << (self.units - 1).bit_length() if self.units <= LANES else -(-self.units // LANES) * LANES

    @property
    def access(self) -> int:
        """How units are loaded and stored: the numbers of csrc/cuda/convert.cu, each of which allows what those before
        it allow.
        """
        pool, encoding = access_of(self.group, self.group), self.coding.encoding
        if encoding is None:
            return WIDE if pool >= UNIT else WORDS_STAGED if pool >= 4 else BYTES
        staged = UNIT if encoding.part == SCALE else math.gcd(UNIT, self.width, self.n_values)
        if pool >= UNIT and staged >= 4:
            return WIDE if staged == UNIT else WORDS_STAGED
        return _VALUES_AND_BYTES if pool >= 2 else BYTES


class ConvertPlan(CudaPlan):
    """A selection some of whose views are bf16 in the pool and fp8 in staging."""

    merges = False

    def __init__(self, recipe: Recipe, machine: CudaRuntime, ring: IndexRing) -> None:
        assert recipe.staged is not None
        self._codings = recipe.codings
        self._staging = Staging(recipe.staged, recipe.select)
        super().__init__(recipe._replace(layout=feeding(recipe.layout, recipe.staged)), machine, ring, bulk_from=0)

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        self._convert(TO_STAGING, dst_ptr, dst_nbytes, indexes, tokens, launch)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        self._convert(FROM_STAGING, src_ptr, src_nbytes, indexes, tokens, launch)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        raise AssertionError("plans that convert are refused earlier")

    def _convert(  # noqa: PLR0917  (a call's own arguments)
        self, way: int, ptr: int, nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        side = self.table.checked(indexes, tokens, self._recipe.device, unique=way == FROM_STAGING)
        needed = self._staging.nbytes(tokens)
        if needed > nbytes:
            self.table.table.refuse(FAULT_TOO_SMALL, 0, needed, nbytes)
        check_aligned(ptr, ALIGNMENT, "staging")
        self._run(self._tables, way, ptr, (side,), launch._replace(sum_ptr=0))
        if launch.sum_ptr:
            self._run(self._sums, way, ptr, (side,), launch)

    def _new_tables(self) -> Tables:
        coded = list(self._coded())
        self._sums = self._loaded(
            [one.accessed(math.gcd(UNIT, one.width)) for one in coded], [-(-one.width // UNIT) for one in coded],
            lambda _: sum_macros(self._machine),
        )  # fmt: skip

        def macros_of(mine: Sequence[int]) -> dict[str, int]:
            return convert_macros(
                self._machine, [coded[number].kind for number in mine], max(coded[number].access for number in mine)
            )

        return self._loaded(
            [one.accessed(UNIT if one.access == WIDE else min(one.group.access, UNIT // 2)) for one in coded],
            [one.numbered for one in coded], macros_of, _pack_codings(coded),
        )  # fmt: skip

    def _loaded(
        self,
        coded: Sequence[_Coded],
        units: Sequence[int],
        macros_of: Callable[[Sequence[int]], dict[str, int]],
        *behind: NDArray[np.uint8],
    ) -> Tables:
        """Groups of cells of `units` units each; `behind` are further tables that the kernel reads per group.

        Groups of 16-byte access have one launch, all others another; each is compiled for its groups, by their numbers.
        """
        machine = self._machine
        if len(coded) > machine.threads:
            raise UsageError(
                f"a selection of {len(coded)} differently shaped or converted groups of views",
                remedy=f"make plans of at most {machine.threads}",
            )
        groups = [one.group._replace(width=n * UNIT) for one, n in zip(coded, units, strict=True)]
        packed = pack_groups(groups, groups, head_major=False, widths=[one.width for one in coded])
        bits = [coding.encoding.scale_bits if coding.encoding is not None else 0 for coding in self._codings]
        scales = np.array([bits, [0] * len(bits)], np.int64).T
        of_groups = np.concatenate([packed, *behind])
        table = machine.tables.put(np.concatenate([of_groups, pack_views(self.table.views, scales)]))
        parts = []
        for narrow in (0, 1):
            mine = [number for number, group in enumerate(groups) if (access_of(group, group) < UNIT) == bool(narrow)]
            if mine:
                macros = reach_macros((groups[number] for number in mine), narrow)
                macros |= {"PDSTAGE_FLAT": 0, "PDSTAGE_HEAD_MAJOR": 0}
                macros |= macros_of(mine)
                parts.append(Part([Counted.of(groups[number]) for number in mine], macros, False, UNIT, {}))
        return Tables((table.ptr, table.ptr + of_groups.nbytes, len(coded)), parts, table)

    def _coded(self) -> Iterator[_Coded]:
        for group in self.table.group_list:
            every = range(group.first_view, group.first_view + group.n_views)
            for _, alike in groupby(every, self._how):
                views = list(alike)
                yield _Coded(group._replace(first_view=views[0], n_views=len(views)), self._codings[views[0]])

    def _how(self, place: int) -> tuple[object, ...]:
        """What views of one group share besides their shape; separate scales keep their distance from the data."""
        coding = self._codings[place]
        if coding.encoding is None:
            return ()
        encoding = coding.encoding
        return encoding.kind, encoding.rule, encoding.part, coding.scales - place if coding.scales >= 0 else 0

    def _ahead(self) -> Iterator[tuple[Tables, Call]]:
        for tables, call in super()._ahead():
            yield self._sums if call.summed else tables, call

    def _fitted(self, tables: Tables, part: Part, call: Call) -> Fitted:
        # One sum kernel for both directions, which reads no list.
        way, room = (TO_STAGING, 0) if call.summed else (call.way, call.room)
        n_units = SUM_UNITS if call.summed else UNITS[way]
        macros = {**part.macros, "PDSTAGE_WAY": way, "PDSTAGE_LISTED": room, "PDSTAGE_UNITS": n_units}
        return self._resized(SUM_SOURCE if call.summed else SOURCE, macros, tables, few=call.few)


def convert_macros(machine: CudaRuntime | type[CudaRuntime], kinds: Sequence[int], access: int) -> dict[str, int]:
    """For groups of these kinds and accesses: with several kinds, half the threads may have twice the registers."""
    bits = sum(1 << kind for kind in set(kinds))
    return {
        "PDSTAGE_KINDS": bits, "PDSTAGE_CELLS": access,
        "PDSTAGE_THREADS": machine.threads * (CTAS_PER_SM if bits.bit_count() == 1 else 1),
    }  # fmt: skip


def sum_macros(machine: CudaRuntime | type[CudaRuntime]) -> dict[str, int]:
    return {"PDSTAGE_THREADS": machine.threads * CTAS_PER_SM}


def _pack_codings(coded: Sequence[_Coded]) -> NDArray[np.uint8]:
    """`Coding[n]` of csrc/cuda/convert.cu."""
    packed = np.zeros(len(coded), _CODING)
    for at, one in enumerate(coded):
        encoding = one.coding.encoding
        scales = _scales_of(one, coded) if encoding is not None and encoding.part == DATA else (0, 0)
        holds = HOLDS[encoding.part] if encoding is not None else 0
        packed[at] = (one.kind, holds, one.n_values, one.units, *scales)
    return packed.view(np.uint8)


def _scales_of(one: _Coded, coded: Sequence[_Coded]) -> tuple[int, int]:
    """The group with the scales of a group's views, and the index of the view for the first of them."""
    place = one.coding.scales
    for number, other in enumerate(coded):
        first = place - other.group.first_view
        if 0 <= first < other.group.n_views:
            # They come from the same views of the pool, so they are as equal as their data.
            assert first + one.group.n_views <= other.group.n_views
            return number, first
    return 0, 0
