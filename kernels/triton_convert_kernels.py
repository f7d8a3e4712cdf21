"""Device half of triton_convert.py: one kernel that encodes bf16 as fp8 in a gather, and decodes in a scatter.

Imports triton, so it is imported only when a plan is made.

A program takes every `programs`-th tile of `CELLS` cells; a cell is one shard of one row, up to `BLOCK` values. Numbers
are converted by integer operations and correctly rounded float32 operations, as in csrc/host/convert.hpp, so that the
bits do not depend on a GPU's own conversions.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0912, PLR0915, PLR0917, SIM108
# (Triton reads annotations as types; capitals are constants, and branches on them are made when compiling.)
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# Numbered as in csrc/host/convert.hpp.
COPY = tl.constexpr(0)
TENSOR_DIVIDE = tl.constexpr(1)
TENSOR_BF16 = tl.constexpr(2)
TOKEN_HEAD = tl.constexpr(3)
MX_FLOOR = tl.constexpr(4)
BOTH = tl.constexpr(0)
DATA = tl.constexpr(1)
SCALES = tl.constexpr(2)
GATHER = tl.constexpr(0)

INFINITY = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _to_bf16(value):
    """The upper half of a float32, rounded to nearest, ties to even, as int32."""
    bits = _bits(value)
    rounded = ((bits.to(tl.uint32, bitcast=True) + 0x7FFF + ((bits >> 16) & 1).to(tl.uint32)) >> 16).to(tl.int32)
    return tl.where((bits & MAGNITUDE) > INFINITY, QUIET_NAN >> 16, rounded)


@triton.jit
def _to_e4m3(value):
    bits = _bits(value)
    magnitude = bits & MAGNITUDE
    clipped = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = ((clipped + 0x7FFFF + ((clipped >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, to which a sum with 2^14 is rounded.
    subnormal = _bits(_float(clipped) + 16384.0) - 0x46800000
    code = tl.where(clipped < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > INFINITY, 0x7F, code).to(tl.uint8)


@triton.jit
def _from_e4m3(code):
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = _bits(magnitude.to(tl.float32) * 0.001953125)
    bits = tl.where(magnitude == 0x7F, QUIET_NAN, tl.where(magnitude < 8, subnormal, normal))
    return _float(bits | ((code & 0x80) << 24))  # Triton's -value is 0 - value, which has no negative zero


@triton.jit
def _power(byte):
    """E8M0 as float32; 255 is NaN."""
    bits = tl.where(byte > 0, byte << 23, 0x00400000)
    return _float(tl.where(byte == 255, QUIET_NAN, bits))


@triton.jit
def _mx_scale(most, KIND: tl.constexpr):
    """127 + a block's exponent, for the bits of its largest magnitude."""
    if KIND == MX_FLOOR:
        byte = tl.maximum((most >> 23) - 8, 0)
    else:
        least = tl.maximum(most, 0x0DA24260)  # 1e-30
        byte = (least >> 23) - 8 + ((least & 0x7FFFFF) > 0x600000).to(tl.int32)
        byte = tl.where(most == INFINITY, 254, byte)
    return tl.where(most > INFINITY, 255, byte)


@triton.jit
def convert_kernel(
    views, n_views, staged, stride, scales, scales_stride, items, bits, start, stop, n_items, item_stride,
    rows_per_item, outer_rows, outer_stride, inner_stride, shards, shard_stride, segs, seg_stride, n_values, width,
    tokens_per_row,
    WAY: tl.constexpr, KIND: tl.constexpr, HOLDS: tl.constexpr, BLOCK: tl.constexpr, CELLS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Converts tokens `[start, stop)`, counted from the index's first item, of `n_views` views of one shape.

    A cell has `n_values` values and `width` bytes once encoded; in copied cells each value is one byte.

    `views` is the address of each view's (cell base, scale bits, seed of its checksum). View v is staged at `staged +
    v*stride`, and separate scales at `scales + v*scales_stride`, cell after cell. ALIGNED: every cell starts at a
    multiple of 16 bytes on both sides.
    """
    first_row = start // tokens_per_row
    n_rows = (stop + tokens_per_row - 1) // tokens_per_row - first_row
    n_cells = n_rows * shards * segs
    tiles_per_view = (n_cells + CELLS - 1) // CELLS
    value = tl.arange(0, BLOCK)[None, :]
    if ALIGNED:
        there = value // 16 < n_values // 16  # visibly equal for 16 neighbours: otherwise each has a separate access
    else:
        there = value < n_values
    for tile in range(tl.program_id(0), n_views * tiles_per_view, tl.num_programs(0)):
        view = tile // tiles_per_view
        cell = (tile - view * tiles_per_view) * CELLS + tl.arange(0, CELLS)[:, None]
        ok = cell < n_cells
        run = cell // segs
        row = run // shards
        shard = run - row * shards
        row += first_row
        n = row // rows_per_item
        within = row - n * rows_per_item
        if bits == 64:
            item = tl.load(items.to(tl.pointer_type(tl.int64)) + n, mask=ok, other=-1)
        else:
            item = tl.load(items.to(tl.pointer_type(tl.int32)) + n, mask=ok, other=-1).to(tl.int64)
        ok = ok & (item >= 0) & (item < n_items)
        table = views + view.to(tl.int64) * 24
        outer = within // outer_rows
        address = tl.load(table.to(tl.pointer_type(tl.int64))) + item * item_stride + outer.to(tl.int64) * outer_stride
        address += (within - outer * outer_rows).to(tl.int64) * inner_stride + shard.to(tl.int64) * shard_stride
        if KIND == COPY:
            address += (cell - run * segs).to(tl.int64) * seg_stride
            own = address.to(tl.pointer_type(tl.uint8)) + value
        else:
            own = address.to(tl.pointer_type(tl.uint16)) + value
        at = staged + view.to(tl.int64) * stride + cell.to(tl.int64) * width
        data_at = at.to(tl.pointer_type(tl.uint8)) + value
        if ALIGNED:
            # On the pointer, since the cast drops the hint on the integer.
            own = tl.max_contiguous(tl.multiple_of(own, [16, 16]), [1, 16 if KIND == COPY else 8])
            data_at = tl.max_contiguous(tl.multiple_of(data_at, [16, 16]), [1, 16])
        scale = _float(tl.load((table + 8).to(tl.pointer_type(tl.int64))))
        beside = at
        if HOLDS == BOTH:
            beside = at + n_values
        elif WAY != GATHER:
            nbytes = 4 if KIND == TOKEN_HEAD else n_values // 32
            beside = scales + view.to(tl.int64) * scales_stride + cell.to(tl.int64) * nbytes
        block = tl.arange(0, BLOCK // 32)[None, :]
        has_block = ok & (block * 32 < n_values)
        if KIND == COPY:
            if WAY == GATHER:
                tl.store(data_at, tl.load(own, mask=ok & there), mask=ok & there)
            else:
                tl.store(own, tl.load(data_at, mask=ok & there), mask=ok & there)
        elif WAY == GATHER:
            x = _float(tl.load(own, mask=ok & there, other=0).to(tl.int32) << 16)
            if KIND == TENSOR_DIVIDE:
                y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
            elif KIND == TENSOR_BF16:
                y = _float(_to_bf16(x * tl.div_rn(1.0, scale)) << 16)
            elif KIND == TOKEN_HEAD:
                most = tl.max(_bits(x) & MAGNITUDE, axis=1, keep_dims=True)
                least = tl.full(most.shape, 1e-6, tl.float32)
                quotient = tl.div_rn(_float(most), tl.full(most.shape, 448.0, tl.float32))
                head = tl.where(most > INFINITY, _float(tl.full(most.shape, QUIET_NAN, tl.int32)), quotient)
                head = tl.where(quotient < least, least, head)
                y = x * tl.div_rn(tl.full(most.shape, 1.0, tl.float32), head)
                if HOLDS != DATA:
                    byte = tl.arange(0, 4)[None, :]
                    tl.store(
                        beside.to(tl.pointer_type(tl.uint8)) + byte, (_bits(head) >> (byte * 8)).to(tl.uint8), mask=ok
                    )
            else:
                split = tl.reshape(x, [CELLS, BLOCK // 32, 32])
                power = _mx_scale(tl.max(_bits(split) & MAGNITUDE, axis=2), KIND)
                inverse = tl.where(power == 255, _power(power), _power(254 - power))
                y = tl.reshape(split * tl.expand_dims(inverse, 2), [CELLS, BLOCK])
                if HOLDS != DATA:
                    tl.store(beside.to(tl.pointer_type(tl.uint8)) + block, power.to(tl.uint8), mask=has_block)
            if HOLDS != SCALES:
                tl.store(data_at, _to_e4m3(y), mask=ok & there)
        else:
            q = _from_e4m3(tl.load(data_at, mask=ok & there, other=0))
            if KIND == TOKEN_HEAD:
                byte = tl.arange(0, 4)[None, :]
                parts = tl.load(beside.to(tl.pointer_type(tl.uint8)) + byte, mask=ok, other=0).to(tl.int32)
                q = q * _float(tl.sum(parts << (byte * 8), axis=1, keep_dims=True))
            elif KIND >= MX_FLOOR:
                power = tl.load(beside.to(tl.pointer_type(tl.uint8)) + block, mask=has_block, other=0).to(tl.int32)
                split = tl.reshape(q, [CELLS, BLOCK // 32, 32])
                q = tl.reshape(split * tl.expand_dims(_power(power), 2), [CELLS, BLOCK])
            else:
                q = q * scale
            tl.store(own, _to_bf16(q).to(tl.uint16), mask=ok & there)
