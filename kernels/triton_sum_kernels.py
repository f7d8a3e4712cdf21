"""Device half of triton_convert.py's checksums: the sum over staged cells, as in csrc/cuda/sum.cu.

Imports triton, so it is imported only when a plan is made.

A conversion addresses its cells by values, a checksum by words of staged bytes, which are the same for every backend.
So the words are summed in staging, after the gather that wrote them or beside the scatter that reads them.
"""

# ruff: noqa: ANN001, ANN201, N803, N806, PLR0917
# (Triton reads annotations as types; capitals are constants, and branches on them are made when compiling.)
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import _key, _over, _terms


@triton.jit
def sum_kernel(
    views, n_views, staged, stride, start, stop, first_token, tokens_per_row, shards, first_shard, segs, width,
    units_per_cell, per_cell, per_segs, per_shards, sum_ptr,
    ACCESS: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Adds the checksum of tokens `[start, stop)`, counted from the index's first item, of `n_views` equal views.

    Their cells of `width` bytes are staged token-major at `staged + v*stride`; `views` is the table of
    `convert_kernel`. `per_` are reciprocals, see `triton_kernels._over`. A unit is UNIT bytes of a cell, a load is
    ACCESS bytes.
    """
    if ACCESS == 8:
        DTYPE: tl.constexpr = tl.uint64
    elif ACCESS == 2:
        DTYPE: tl.constexpr = tl.uint16
    elif ACCESS == 1:
        DTYPE: tl.constexpr = tl.uint8
    else:
        DTYPE: tl.constexpr = tl.uint32
    NBYTES: tl.constexpr = 4 if ACCESS == 16 else ACCESS
    LANES: tl.constexpr = UNIT // NBYTES
    first_row = start // tokens_per_row
    n_rows = (stop + tokens_per_row - 1) // tokens_per_row - first_row
    n_units = (n_rows.to(tl.int64) * shards * segs * units_per_cell).to(tl.int32)
    tiles_per_view = (n_units + UNITS - 1) // UNITS
    lane = tl.arange(0, LANES)[None, :]
    total = tl.zeros([UNITS, 1], tl.int64)
    for tile in range(tl.program_id(0), n_views * tiles_per_view, tl.num_programs(0)):
        view = tile // tiles_per_view
        unit = (tile - view * tiles_per_view) * UNITS + tl.arange(0, UNITS)[:, None]
        ok = unit < n_units
        cell = _over(unit, per_cell.to(tl.int64))
        number = unit - cell * units_per_cell.to(tl.int32)
        run = _over(cell, per_segs.to(tl.int64))
        row = _over(run, per_shards.to(tl.int64))
        seed = tl.load((views + view.to(tl.int64) * 24 + 16).to(tl.pointer_type(tl.int64)))
        token = first_token + (first_row + row).to(tl.int64) * tokens_per_row
        key = _key(seed, token, first_shard, run - row * shards, cell - run * segs, True, True)
        at = staged + view.to(tl.int64) * stride + cell.to(tl.int64) * width + number * UNIT
        data_at = at.to(tl.pointer_type(DTYPE)) + lane
        if ACCESS == 16:
            # On the pointer, since the cast drops the hint on the integer, and accesses become scalar.
            data_at = tl.max_contiguous(tl.multiple_of(data_at, [16, 16]), [1, 4])
        whole = ok
        if UNIT > ACCESS:
            whole = ok & (number * UNIT + lane * NBYTES < width)
        data = tl.load(data_at, mask=whole, other=0)
        total += _terms(data, key, number, ok, UNIT, LANES, UNITS)
    one = tl.sum(tl.sum(total, axis=1), axis=0)
    tl.atomic_add(sum_ptr.to(tl.pointer_type(tl.int64)), one, sem="relaxed")
