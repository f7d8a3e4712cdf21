"""Converts tensors to checked arrays with byte strides, and arrays to the views of a `Part`; `build` makes a layout.

The constructors of kv_shapes and state_shapes use it; users import `tensors`. Only methods of tensors are used, and
numpy arrays work too. Regions are whole allocations: caches that alias one allocation, at whatever addresses, share its
region.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout.states import canonical, kind_of
from pdstage.layout.topology import Axis  # noqa: TC001
from pdstage.layout.views import Key, Layout, Region, RowLevel, TokenShard, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray


TensorLike: TypeAlias = "torch.Tensor | NDArray[np.generic]"
Tensors: TypeAlias = "Iterable[TensorLike] | NDArray[np.generic]"


class Naming(TypedDict, total=False):
    """How a part's views are named; everything is optional."""

    component: str  # "kv"
    layers: Sequence[int]  # the tensors' layer numbers, if they are not 0, 1, ...
    format: str  # from the dtype: "bf16", "fp16", "fp8_e4m3", ...


_FORMATS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
    "int8": "int8",
    "uint8": "uint8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
}


@dataclass(frozen=True, slots=True)
class Part:
    """The views of one constructor and the regions they index."""

    regions: tuple[Region, ...]
    views: tuple[View, ...]


def build(
    *parts: Part, slots: Iterable[str] = (), exact: Iterable[str] = (), owned: Mapping[str, TokenShard] | None = None
) -> Layout:
    """One layout of all parts; `slots`, `exact` and `owned` as in `Layout.of`.

    Components of a registered state kind need not be listed: the kind says whether they are slots, and exact.
    Overlapping regions become one. Parts may lie in host memory beside one GPU's. Raises `UsageError` for parts on
    different GPUs, and what `Layout.of` raises.
    """
    given = sorted({region for part in parts for region in part.regions}, key=lambda region: region.base)
    devices = sorted({f"{region.kind}:{region.device}" for region in given})
    if not devices or len([name for name in devices if not name.startswith("cpu:")]) > 1:
        raise UsageError(
            f"the parts of a layout are on {' and '.join(devices) or 'no device'}",
            remedy="give the caches of one rank, on its device or in host memory",
        )
    held: list[Region] = []
    for region in given:
        if held and region.base < held[-1].base + held[-1].nbytes:
            reach = region.base + region.nbytes - held[-1].base
            held[-1] = replace(held[-1], nbytes=max(reach, held[-1].nbytes))
        else:
            held.append(region)
    views = [_moved(view, part.regions[view.region], held) for part in parts for view in part.views]
    kinds = {name: kind for name in dict.fromkeys(view.key.component for view in views) if (kind := kind_of(name))}
    return Layout.of(
        held,
        views,
        slots={*slots, *(name for name, kind in kinds.items() if not kind.positional)},
        exact={*exact, *(name for name, kind in kinds.items() if kind.exact)},
        owned=owned,
    )


@dataclass(frozen=True, slots=True)
class Array:
    """A checked tensor, strides in bytes."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    itemsize: int
    dtype: str
    region: Region

    def seen(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
        return replace(self, shape=shape, strides=strides)

    def dense_nbytes(self, axis: int) -> int:
        """Bytes of all axes from `axis` on. Raises `UsageError` if there are gaps between them."""
        nbytes = self.itemsize
        for size, stride in zip(reversed(self.shape[axis:]), reversed(self.strides[axis:]), strict=True):
            if size > 1 and stride != nbytes:
                raise refused(
                    self.name, f"has byte strides {self.strides} for shape {self.shape}: its entries are not dense",
                    "pass the pool as the engine allocated it",
                )  # fmt: skip
            nbytes *= size
        return nbytes

    def bytes_from(self, start: int, stop: int) -> Array:
        """Bytes `[start, stop)` of the innermost axis."""
        return replace(
            self,
            shape=(*self.shape[:-1], stop - start),
            strides=(*self.strides[:-1], 1),
            itemsize=1,
            address=self.address + start,
        )


def arrays_of(argument: str, tensors: Tensors, axes: str, *, fewer: bool = False) -> list[Array]:
    """Checks one tensor per layer: number of axes (one less if `fewer`, any after "..."), sizes, strides, device."""
    arrays = []
    names = axes.split(", ")
    least, most = (len(names) - 1, 64) if names[-1] == "..." else (len(names) - fewer, len(names))
    for layer, tensor in enumerate(tensors):
        name = f"{argument}[{layer}]"
        array = _numpy_array(name, tensor) if isinstance(tensor, np.ndarray) else _torch_array(name, tensor)
        if not least <= len(array.shape) <= most or min(array.shape) < 1:
            raise refused(name, f"has shape {list(array.shape)}, not [{axes}]", "pass the pool's tensors, one a layer")
        if "1" in names and array.shape[1] != 1:
            raise refused(name, f"has shape {list(array.shape)}, not [{axes}]", "use sglang_mha for more than one head")
        _check_strides(array)
        arrays.append(array)
    if not arrays:
        raise UsageError(f"{argument} is empty", remedy="give one tensor a layer", argument=argument)
    return arrays


def _torch_array(name: str, tensor: TensorLike) -> Array:
    for method in ("stride", "data_ptr", "element_size", "untyped_storage", "device", "dtype"):
        if not hasattr(tensor, method):
            raise refused(name, f"is a {type(tensor).__name__}, not a tensor", "give a sequence of one tensor a layer")
    assert not isinstance(tensor, np.ndarray)
    kind, size = tensor.device.type, tensor.element_size()
    if kind not in ("cpu", "cuda"):
        raise refused(name, f"is on device {kind!r}", "only cpu and cuda memory can be moved")
    storage = tensor.untyped_storage()
    return Array(
        name,
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        tensor.data_ptr(),
        size,
        str(tensor.dtype).rpartition(".")[2],
        Region(storage.data_ptr(), storage.nbytes(), kind, (tensor.device.index or 0) if kind == "cuda" else 0),
    )


def _numpy_array(name: str, array: NDArray[np.generic]) -> Array:
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    reaches = [(size - 1) * stride for size, stride in zip(owner.shape, owner.strides, strict=True)]
    low = owner.ctypes.data + sum(min(0, reach) for reach in reaches)
    nbytes = owner.itemsize + sum(abs(reach) for reach in reaches)
    return Array(
        name, array.shape, array.strides, array.ctypes.data, array.itemsize, array.dtype.name, Region(low, nbytes)
    )


def _check_strides(array: Array) -> None:
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise refused(
            array.name,
            f"has elements {array.strides[-1]} bytes apart on its last axis, not {array.itemsize}",
            "the last axis must be contiguous; pass the pool as the engine allocated it",
        )
    steps = sorted((stride, size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1)
    reach = array.itemsize
    for stride, size in steps:
        if stride < reach:
            raise refused(
                array.name,
                f"has byte strides {array.strides} for shape {array.shape}: elements overlap or run backwards",
                "pass a tensor whose elements are distinct, without expand() or negative strides",
            )
        reach += (size - 1) * stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an array, from byte `at`, that becomes a view; the fields mean the same as `View`'s."""

    array: Array
    at: int = 0
    n_items: int
    item_stride: int
    tokens_per_item: int = 1
    rows: tuple[RowLevel, ...] = (RowLevel(1, 0),)
    shard_stride: int = 0
    segs: int = 1
    seg_stride: int = 0
    width: int
    axis: Axis
    format: str = ""


def pages(array: Array, axis: Axis, tokens_per_row: int = 1) -> Piece:
    """The piece that covers all of an array `[pages, rows, heads, dim]`; `axis` is this rank's heads."""
    (n_pages, rows, heads, dim), (item_stride, row_stride, head_stride, _) = array.shape, array.strides
    check_heads(array, heads, axis)
    return Piece(
        array=array, n_items=n_pages, item_stride=item_stride, tokens_per_item=rows * tokens_per_row,
        rows=(RowLevel(tokens_per_row, row_stride),), shard_stride=head_stride, width=dim * array.itemsize, axis=axis,
    )  # fmt: skip


def check_heads(array: Array, heads: int, axis: Axis) -> None:
    """Raises `UsageError` unless this rank holds `heads` of `axis`."""
    if heads != axis.count:
        raise refused(
            array.name,
            f"has {heads} heads, but this rank holds {axis.count} of {axis.total} (from head {axis.first})",
            "pass this rank's tensors, or correct total_heads or tp",
        )


def part(roles: Mapping[str, Sequence[Piece]], naming: Naming, component: str = "kv") -> Part:
    """The views of `roles`, each a list of one piece per layer; `component` is the default name.

    A format is the piece's, else the naming's, else the dtype's.
    """
    first_role, first = next(iter(roles.items()))
    layers = naming.get("layers", range(len(first)))
    for what, n_layers in (*((role, len(pieces)) for role, pieces in roles.items()), ("layers", len(layers))):
        if n_layers != len(first):
            raise UsageError(
                f"{what} has {n_layers} entries, {first_role} has {len(first)}",
                remedy="give one entry a layer",
                argument=what,
            )
    name = canonical(naming.get("component", component))
    regions = list(dict.fromkeys(piece.array.region for pieces in roles.values() for piece in pieces))
    views = []
    seen: dict[int, Array] = {}
    for role, pieces in roles.items():
        for layer, piece in zip(layers, pieces, strict=True):
            _check_alike(piece, first[0])
            twin = seen.setdefault(piece.array.address + piece.at, piece.array)
            if twin is not piece.array:
                raise refused(piece.array.name, f"is the same memory as {twin.name}", "pass each cache once")
            encoding = piece.format or naming.get("format") or format_of(piece.array)
            views.append(_view(piece, Key(name, role, layer), regions.index(piece.array.region), encoding))
    return Part(tuple(regions), tuple(views))


def _check_alike(piece: Piece, first: Piece) -> None:
    sizes, of = (piece.n_items, piece.tokens_per_item), (first.n_items, first.tokens_per_item)
    if sizes != of:
        raise refused(
            piece.array.name,
            f"has {sizes[0]} pages of {sizes[1]} tokens, {first.array.name} has {of[0]} of {of[1]}",
            "caches indexed by the same pages go into one component; make two components",
        )
    here, there = (f"{a.region.kind}:{a.region.device}" for a in (piece.array, first.array))
    if here != there:
        raise refused(
            piece.array.name,
            f"is on {here}, {first.array.name} on {there}",
            "give the caches of one rank, all on its device",
        )


def _view(piece: Piece, key: Key, region: int, encoding: str) -> View:
    return View(
        key=key, region=region, offset=piece.array.address + piece.at - piece.array.region.base, n_items=piece.n_items,
        item_stride=piece.item_stride, tokens_per_item=piece.tokens_per_item, rows=piece.rows, shards=piece.axis.count,
        shard_stride=piece.shard_stride, segs=piece.segs, seg_stride=piece.seg_stride, width=piece.width,
        axis=piece.axis, format=encoding,
    )  # fmt: skip


def format_of(array: Array) -> str:
    if array.dtype not in _FORMATS:
        raise refused(array.name, f"has dtype {array.dtype}", "name its encoding with format=, the same on both sides")
    return _FORMATS[array.dtype]


def _moved(view: View, region: Region, held: Sequence[Region]) -> View:
    """`view` of `region`, as a view of the one of `held` that contains it."""
    index = next(i for i, whole in enumerate(held) if whole.base <= region.base < whole.base + whole.nbytes)
    return replace(view, region=index, offset=view.offset + region.base - held[index].base)


def refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"{name} {what}", remedy=remedy, argument=name)
