"""Groups, views and calls as the structures of csrc/cuda/copy.cuh, packed on the host."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..errors import UsageError
from .device import MAX_COMPONENTS, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..plan.tables import ComponentArgs, Int64s
    from .device import Group

UNIT = 16
_DIVISOR = np.dtype([("by", "<u4"), ("multiplier", "<u4"), ("shift", "<u4")])
_SIDE = np.dtype(
    [
        *((name, "<i8") for name in ("item_stride", "outer_stride", "inner_stride", "shard_stride", "seg_stride")),
        *((name, _DIVISOR) for name in ("rows_per_item", "outer_rows", "joined_rows", "units_per_block")),
        *((name, "<u4") for name in ("component", "n_items")),
    ]
)
_GROUP = np.dtype(
    [
        *((name, _SIDE) for name in ("pool", "peer")),
        *((name, _DIVISOR) for name in ("units_per_run", "segs", "shards", "runs_per_item")),
        *((name, "<u4") for name in ("first_view", "n_views", "width", "access", "tokens_per_row", "first_shard")),
    ]
)
# staging, sum, groups, views, n_groups; then spans for the pool, and as many for its peer.
_HEAD = struct.Struct("<QQQQQ")
_SPAN = struct.Struct("<Qqqqq")
PARAMS_NBYTES = _HEAD.size + 2 * MAX_COMPONENTS * _SPAN.size
# Items that parameters hold: every driver takes 4 KiB of parameters; that of CUDA 12.1 or later, on Volta or later,
# takes 32,764 bytes (NVIDIA, "CUDA 12.1 Supports Large Kernel Parameters"). `Params` is a multiple of 8 bytes long.
LISTED, LISTED_LARGE = ((most - PARAMS_NBYTES) // 8 * 2 for most in (4096, 32764))
EXTENT_NBYTES = 88
"""Shared memory of a CTA per group."""
MAX_UNITS = 2**31
MAX_STEPS = 2**32


def divisor(by: int) -> tuple[int, int, int]:
    """`by` in [1, 2^31) as the kernel divides by it: n // by == (2*n * multiplier >> 32) >> shift for n < 2^31."""
    shift = (by - 1).bit_length()
    return by, -(-(1 << 31 + shift) // by), shift


def pack_groups(
    pool: Sequence[Group], peer: Sequence[Group], *, head_major: bool, widths: Sequence[int] = ()
) -> NDArray[np.uint8]:
    """`Group[n]`. Both sequences describe the same views; without a second pool pass the first twice.

    `widths`: the bytes of each group's staged cells, if they differ from its own.
    """
    packed = np.zeros(len(pool), _GROUP)
    for at, (mine, other) in enumerate(zip(pool, peer, strict=True)):
        access = access_of(mine, other)
        step = UNIT if access >= UNIT else 1
        packed[at] = (
            _side(mine, step, head_major=head_major), _side(other, step, head_major=head_major),
            divisor(-(-mine.width // UNIT)), divisor(mine.segs), divisor(mine.shards),
            divisor(mine.rows_per_item * mine.shards), mine.first_view, mine.n_views, mine.width, access,
            mine.tokens_per_row, mine.first_shard,
        )  # fmt: skip
    if widths:
        packed["width"] = widths
    return packed.view(np.uint8)


def _side(group: Group, step: int, *, head_major: bool) -> tuple[object, ...]:
    joined = joined_rows(group) if head_major or group.shards * group.segs == 1 else 1
    units_per_block = joined * group.shards * group.segs * -(-group.width // UNIT)
    return (
        *(stride // step for stride in _strides(group)),
        divisor(group.rows_per_item), divisor(group.outer_rows), divisor(joined),
        divisor(units_per_block), group.component, group.n_items,
    )  # fmt: skip


def _strides(group: Group) -> tuple[int, ...]:
    return group.item_stride, group.outer_stride, group.inner_stride, group.shard_stride, group.seg_stride


def access_of(mine: Group, other: Group) -> int:
    """Bytes of one access to views of both pools: 16 or more only if kernels can count within an item in 32 bits."""
    access = min(mine.access, other.access)
    return access if access < UNIT or (counts(mine, UNIT) and counts(other, UNIT)) else UNIT // 2


def counts(group: Group, step: int) -> bool:
    """Whether an item's stride and all offsets within an item are below 2^32 steps of so many bytes."""
    last = (-(-group.rows_per_item // group.outer_rows), group.outer_rows, group.shards, group.segs)
    used = [stride * (n - 1) for stride, n in zip(_strides(group)[1:], last, strict=True)]
    steps = (sum(used) + group.width) // step
    return min(used) >= 0 and steps < MAX_STEPS and 0 <= group.item_stride // step < MAX_STEPS


def joined_rows(group: Group) -> int:
    """Rows of a shard that form one run: as many as are contiguous and divide an item."""
    apart = group.inner_stride != group.width and group.outer_rows > 1
    if group.segs > 1 or apart:
        return 1
    if group.outer_rows == group.rows_per_item or group.outer_stride == group.outer_rows * group.width:
        return group.rows_per_item
    return group.outer_rows if group.rows_per_item % group.outer_rows == 0 else 1


def run_nbytes(group: Group, *, head_major: bool) -> int:
    """Bytes of a group's whole runs that are contiguous in both pool and staging; 0 if bulk copies are impossible.

    Token-major staging holds rows of one run each, one after the other; head-major staging holds whole items of each
    shard.
    """
    joined = joined_rows(group)
    if head_major and group.shards * group.segs > 1:
        return joined * group.width if joined == group.rows_per_item else 0
    return group.width * (joined if group.shards * group.segs == 1 else 1)


def pack_views(pool: Int64s, peer: Int64s) -> NDArray[np.uint8]:
    """`View[n]` of two `DeviceTable.views`."""
    packed = np.column_stack([pool[:, 0], peer[:, 0], pool[:, 1]])
    return np.ascontiguousarray(packed, dtype=np.int64).view(np.uint8).reshape(-1)


def pack_params(
    out: object, staging: int, sum_ptr: int, groups: tuple[int, int, int], spans: Sequence[Sequence[ComponentArgs]]
) -> None:
    """Writes `Params` to the buffer `out`. `groups` are the addresses of groups and views, and the number of groups.

    `spans` are the pool's and, with two pools, the peer's.
    """
    _HEAD.pack_into(out, 0, staging, sum_ptr, *groups)  # type: ignore[arg-type]
    for side, held in enumerate(spans):
        at = _HEAD.size + side * MAX_COMPONENTS * _SPAN.size
        for ptr, bits, _, first_token, start, stop in held:
            _SPAN.pack_into(out, at, ptr, first_token, start, stop, bits)  # type: ignore[arg-type]
            at += _SPAN.size


class Counted(NamedTuple):
    """The numbers of a group of which tiles are counted."""

    component: int
    tokens_per_row: int
    row_units: int
    n_views: int

    @classmethod
    def of(cls, group: Group) -> Counted:
        row_units = group.shards * group.segs * -(-group.width // UNIT)
        return cls(group.component, group.tokens_per_row, row_units, group.n_views)


def n_tiles(groups: Sequence[Counted], spans: Sequence[ComponentArgs], tile_units: int) -> int:
    """The number of tiles of a call, each processed by one warp at a time; 0 if there is nothing to copy.

    Raises `UsageError` for a view of 2^31 units or more: the kernel numbers them in 32 bits.
    """
    total = 0
    for component, tokens_per_row, row_units, n_views in groups:
        span = spans[component]
        units = rows(tokens_per_row, span) * row_units
        if units >= MAX_UNITS or span.stop >= MAX_UNITS:
            raise UsageError(
                f"tokens 0..{span.stop} of one index in one call",
                remedy="split the call: a view moves fewer than 2^31 tokens and 2^31 pieces of 16 bytes",
            )
        total += n_views * -(-units // tile_units)
    return total
