"""Tensors as a pool: checks and describes the arguments of the package's `gather` and `scatter`.

Imports no torch: it only uses tensors' addresses and strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ..errors import UsageError
from ..layout import Key, Layout, Region, RowLevel, View
from ..layout.topology import Axis
from ..plan import TOKEN_MAJOR, Select, Staging
from ..plan.tables import FAULT_TOO_SMALL, Index, Table
from .pool import Plan, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch
    from numpy.typing import NDArray


Bounds: TypeAlias = "tuple[int | None, int | None, int | None]"  # a slice, which has no hash before Python 3.12


def _bounds(chosen: slice) -> Bounds:
    return chosen.start, chosen.stop, chosen.step


class Geometry(NamedTuple):
    """One buffer `[item, row, shard, byte]`: address, device, and sizes and strides in bytes."""

    ptr: int
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def geometry_of(buffers: Sequence[torch.Tensor]) -> tuple[Geometry, ...]:
    """Raises `UsageError` for a buffer that is not `[item, row, shard, width]` with contiguous width, naming it."""
    described = []
    for number, buffer in enumerate(buffers):
        if buffer.dim() != 4 or buffer.numel() == 0:
            raise UsageError(
                f"buffer {number} has shape {tuple(buffer.shape)}",
                remedy="give [item, row, shard, width]",
                buffer=number,
            )
        if buffer.stride(3) != 1 and buffer.shape[3] > 1:
            raise UsageError(
                f"buffer {number} has width in steps of {buffer.stride(3)}",
                remedy="make width contiguous",
                buffer=number,
            )
        size = buffer.element_size()
        shape = (*buffer.shape[:3], buffer.shape[3] * size)
        described.append(
            Geometry(buffer.data_ptr(), str(buffer.device), shape, tuple(s * size for s in buffer.stride()))
        )
    if not described:
        raise UsageError("there are no buffers", remedy="give at least one")
    return tuple(described)


@lru_cache(maxsize=32)
def _layout_of(geometry: tuple[Geometry, ...], chosen: Bounds) -> tuple[Layout, tuple[Select, ...]]:
    regions, views, select = [], [], []
    component, shape = 0, geometry[0].shape[:2]
    for number, (ptr, device, (items, rows, shards, width), strides) in enumerate(geometry):
        # A component's views share items and rows. Keys start with its number: staged order is buffer order.
        if (items, rows) != shape:
            component, shape = component + 1, (items, rows)
        first, end, by = slice(*chosen).indices(shards)
        if by != 1 or first >= end:
            raise UsageError(
                f"shards {':'.join(map(str, chosen))} of the {shards} in buffer {number}",
                remedy="give a slice of at least one shard with step 1",
                buffer=number,
            )
        nbytes = sum((n - 1) * s for n, s in zip((items, rows, shards), strides, strict=False)) + width
        kind, _, ordinal = device.partition(":")
        regions.append(Region(ptr, nbytes, kind, int(ordinal or 0)))
        key = Key(f"{component:06d}", "", number)
        views.append(
            View(
                key=key,
                region=number,
                offset=0,
                n_items=items,
                item_stride=strides[0],
                tokens_per_item=rows,
                rows=(RowLevel(1, strides[1]),),
                shards=shards,
                shard_stride=strides[2],
                width=width,
                axis=Axis("shard", shards, 0, shards),
                format="bytes",
            )
        )
        select.append(Select(key, first, end - first))
    return Layout.of(regions, views), tuple(select)


def layout_of(geometry: tuple[Geometry, ...], shards: slice) -> tuple[Layout, tuple[Select, ...]]:
    """Buffers as a layout, and `shards` of each selected. Raises `UsageError` for no shards or a step other than 1."""
    return _layout_of(geometry, _bounds(shards))


@lru_cache(maxsize=32)
def _plan_of(geometry: tuple[Geometry, ...], shards: Bounds, backend: str, checksum: bool) -> Plan:
    layout, select = _layout_of(geometry, shards)
    return Pool.of(layout, geometry[0].device).plan(select, TOKEN_MAJOR, backend, checksum=checksum)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The arguments of one call: buffers, the list of items, shards and tokens."""

    geometry: tuple[Geometry, ...]
    index: Index
    shards: slice
    tokens: tuple[int, int] | None

    @classmethod
    def of(
        cls,
        buffers: Sequence[torch.Tensor],
        items: torch.Tensor | NDArray[Any],
        shards: slice,
        tokens: tuple[int, int] | None,
    ) -> Buffers:
        """Raises `UsageError` for buffers, items or tokens that do not fit each other."""
        geometry = geometry_of(buffers)
        devices = sorted({g.device for g in geometry})
        if len(devices) > 1:
            raise UsageError(f"buffers are on {', '.join(devices)}", remedy="make one call for each device")
        if tokens is not None and len({g.shape[1] for g in geometry}) > 1:
            raise UsageError(
                "a token range of buffers with different rows means different tokens in each",
                remedy="make one call for each number of rows",
            )
        return cls(geometry, _index_of(items, geometry[0].device), shards, tokens)

    @property
    def device(self) -> str:
        return self.geometry[0].device

    def plan(self, backend: str, *, checksum: bool) -> Plan:
        return _plan_of(self.geometry, _bounds(self.shards), backend, checksum)

    def ranges(self) -> dict[str, tuple[int, int]]:
        """The token range of each component."""
        layout, _ = layout_of(self.geometry, self.shards)
        return {c.name: self.tokens or (0, self.index.n * c.tokens_per_item) for c in layout.components}

    def indexes(self) -> dict[str, Index]:
        """The one list of items, for each component."""
        return dict.fromkeys(self.ranges(), self.index)

    def staging(self, dense: torch.Tensor, name: str) -> tuple[int, int]:
        """Address and size of `out` or `src`. Raises `UsageError` unless it is contiguous uint8 beside the buffers."""
        problem = ""
        if str(dense.dtype) != "torch.uint8" or not dense.is_contiguous():
            problem = f"{name} is {'' if dense.is_contiguous() else 'non-contiguous '}{dense.dtype}"
        elif str(dense.device) != self.device:
            problem = f"{name} is on {dense.device}, the buffers are on {self.device}"
        if problem:
            raise UsageError(problem, remedy="give contiguous uint8 on the same device", name=name)
        return dense.data_ptr(), dense.numel()

    def sum_ptr(self, sum_out: torch.Tensor | None) -> int:
        """Where the checksum is added; 0 for nowhere. Raises `UsageError` unless it is one 64-bit integer."""
        if sum_out is None:
            return 0
        kind = str(sum_out.dtype).removeprefix("torch.")
        if kind not in ("int64", "uint64") or sum_out.numel() != 1 or str(sum_out.device) != self.device:
            raise UsageError(
                f"sum_out is {sum_out.numel()} of {kind} on {sum_out.device}",
                remedy=f"give one int64 or uint64 on {self.device}",
                name="sum_out",
            )
        return sum_out.data_ptr()

    def check(self, dense: torch.Tensor, name: str, *, unique: bool) -> None:
        """Makes the checks of plans, for the reference, which has none."""
        _, nbytes = self.staging(dense, name)
        layout, select = layout_of(self.geometry, self.shards)
        table, ranges = Table.of(layout, select), self.ranges()
        table.resolve(table.parts(self.indexes(), ranges), unique=unique)
        needed = Staging(layout, select).nbytes(ranges)
        if needed > nbytes:
            table.refuse(FAULT_TOO_SMALL, 0, needed, nbytes)


def _index_of(items: torch.Tensor | NDArray[Any], device: str) -> Index:
    """Items as an index: in host memory, or in a tensor beside the buffers, which the host does not read."""
    if isinstance(items, np.ndarray):
        array = items
    elif items.device.type == "cpu":
        array = items.numpy()
    else:
        return _device_index(items, device)
    if array.dtype not in (np.int32, np.int64) or array.ndim != 1:
        raise UsageError(
            f"items are a {array.ndim}-dimensional array of {array.dtype}", remedy="give one list of int32 or int64"
        )
    return Index.of(np.ascontiguousarray(array))


def _device_index(items: torch.Tensor, device: str) -> Index:
    kind = str(items.dtype).removeprefix("torch.")
    if kind not in ("int32", "int64") or items.dim() != 1 or not items.is_contiguous():
        dense = "" if items.is_contiguous() else "non-contiguous "
        raise UsageError(
            f"items are a {items.dim()}-dimensional {dense}tensor of {kind}",
            remedy="give one contiguous list of int32 or int64",
        )
    if str(items.device) != device:
        raise UsageError(
            f"items are on {items.device}, the buffers are on {device}",
            remedy="give items in host memory or beside the buffers",
        )
    return Index(items.data_ptr(), items.element_size() * 8, items.numel(), 0, items, device)
