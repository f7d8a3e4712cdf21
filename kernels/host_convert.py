"""Host half of csrc/host/convert.hpp: conversions of pools in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import native
from ..plan.convert import DATA, INLINE, MX, SCALE, TENSOR, TOKEN_HEAD, feeding
from ..plan.tables import Table
from .host_copy import NativePlan, missing

if TYPE_CHECKING:
    from ..plan.convert import Coding
    from .backend import Recipe

__all__ = ["compile_plan", "missing"]

# Numbered as Kind and Holds in csrc/host/convert.hpp.
COPY = 0
KINDS = {(TENSOR, "divide"): 1, (TENSOR, "bf16"): 2, (TOKEN_HEAD, ""): 3, (MX, "floor"): 4, (MX, "ceil"): 5}
HOLDS = {INLINE: 0, DATA: 1, SCALE: 2}


def compile_plan(recipe: Recipe) -> NativePlan:
    """The selection's tables, built once. `Plan.copy_to` refuses plans that convert."""
    assert native.ext is not None
    assert recipe.staged is not None
    table = Table.of(feeding(recipe.layout, recipe.staged), recipe.select)
    codings = np.array([_row(coding) for coding in recipe.codings], dtype=np.int64)
    return NativePlan(table, native.ext.ConvertPlan(*table.arrays(), codings))


def _row(coding: Coding) -> tuple[int, int, int, int, int]:
    encoding = coding.encoding
    if encoding is None:
        return COPY, 0, 0, coding.width, -1
    return KINDS[encoding.kind, encoding.rule], HOLDS[encoding.part], encoding.scale_bits, coding.width, coding.scales
