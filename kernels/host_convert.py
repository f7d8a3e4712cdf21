"""Host half of csrc/host/convert.hpp: conversions of pools in host memory.

Layer 3. Must not know tensors, rooms or transports. Needs the extension: without it there is `reference`, far slower.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from .. import native
from ..convert import DATA, INLINE, MX, SCALE, TENSOR, TOKEN_HEAD, feeding
from ..errors import UsageError
from ..tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..convert import Coding
    from ..plan import Tokens
    from ..tables import Index
    from .pool import Compiled, Launch, Recipe

# Numbered as Kind and Holds in csrc/host/convert.hpp.
COPY = 0
KINDS = {(TENSOR, "divide"): 1, (TENSOR, "bf16"): 2, (TOKEN_HEAD, ""): 3, (MX, "floor"): 4, (MX, "ceil"): 5}
HOLDS = {INLINE: 0, DATA: 1, SCALE: 2}

SUMS = True


def missing() -> str:
    """Why host code cannot convert here; empty if it can."""
    return "" if native.ext is not None else "needs the extension: build it with a C++ compiler"


def compile_plan(recipe: Recipe) -> ConvertPlan:
    """The selection's tables, built once."""
    return ConvertPlan(recipe)


class ConvertPlan:
    """A plan held by the extension, as `host_copy.NativePlan`."""

    def __init__(self, recipe: Recipe) -> None:
        assert native.ext is not None
        assert recipe.staged is not None
        self._table = Table.of(feeding(recipe.layout, recipe.staged), recipe.select)
        rows, sizes = self._table.arrays()
        codings = np.array([_row(coding) for coding in recipe.codings], dtype=np.int64)
        self._decodes = all(c.encoding is None or c.encoding.part != DATA or c.scales >= 0 for c in recipe.codings)
        self._plan = native.ext.ConvertPlan(rows, sizes, codings, recipe.threads)

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        fault, *where = self._plan.gather(dst_ptr, dst_nbytes, self._table.parts(indexes, tokens), launch.sum_ptr)
        if fault:
            self._table.refuse(fault, *where)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        if not self._decodes:
            raise UsageError("data is selected without its scales", remedy="select both to scatter them")
        fault, *where = self._plan.scatter(src_ptr, src_nbytes, self._table.parts(indexes, tokens), launch.sum_ptr)
        if fault:
            self._table.refuse(fault, *where)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        raise AssertionError("plans that convert are refused before")


def _row(coding: Coding) -> tuple[int, int, int, int, int]:
    encoding = coding.encoding
    if encoding is None:
        return COPY, 0, 0, coding.width, -1
    (bits,) = struct.unpack("<I", struct.pack("<f", encoding.scale))
    return KINDS[encoding.kind, encoding.rule], HOLDS[encoding.part], bits, coding.width, coding.scales
