"""From the tensors an engine has to a `Layout`: one named constructor for each shape engines really use.

    layout = build(sglang_mha(k, v, page_size=64, total_heads=8, tp=(4, 0)))
    layout = build(mla(latents), paged_hnd(draft_k, draft_v, total_heads=8, tp=(4, 0), component="draft"))

A constructor takes one tensor a layer (a list, or one tensor stacked over layers), checks them and returns a `Part`;
`build` makes one layout of any number of parts. `tp` is this rank's (size, rank), `total_heads` the whole model's KV
heads; `Naming` lists what every constructor takes besides. The two sides agree on component names and layer numbers
only: page sizes, strides and head counts may differ.

| constructor | tensors of one layer | engine |
|---|---|---|
| `sglang_mha` | k, v `[slots, heads, dim]` | SGLang's MHATokenToKVPool |
| `paged_nhd` | k, v `[pages, page_size, heads, dim]` | FlashAttention's order |
| `paged_hnd` | k, v `[pages, heads, page_size, dim]` | FlashInfer's, TensorRT-LLM's and SGLang's HND |
| `vllm_blocks` | `[blocks, heads, block_size, K and V of a head]`, raw bytes | vLLM 0.33 |
| `mla` | `[pages, page_size, dim]`, or `[slots, 1, dim]` given `page_size` | MLA pools; vLLM's `cache[:, 0]` |

Each refuses with `UsageError`, naming the tensor, a wrong shape, stride, device or dtype, page counts or sizes that
differ between layers, and a head count that is not what `tp` gives this rank.

Layer 0, pure. Must not know torch (only tensors' methods are used; numpy arrays will do), peers or plans. Regions are
whole allocations: caches that alias one allocation, at whatever addresses, share its region.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import Key, Layout, Region, Row, View
from pdstage.topology import REPLICATED, Axis, shard_axis

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdstage.layout import Owned


class _Device(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class _Storage(Protocol):
    def data_ptr(self) -> int: ...
    def nbytes(self) -> int: ...


class StridedTensor(Protocol):
    """What is used of a torch tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> _Device: ...
    def stride(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def untyped_storage(self) -> _Storage: ...


TensorLike: TypeAlias = "StridedTensor | NDArray[np.generic]"
Tensors: TypeAlias = "Iterable[TensorLike] | NDArray[np.generic]"


class Naming(TypedDict, total=False):
    """How a part's views are named; all may be left out."""

    component: str  # "kv"
    first_layer: int  # 0; the number of the first tensor's layer, as on a later pipeline stage
    layers: Sequence[int]  # the tensors' layer numbers, where they are not consecutive
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
}


@dataclass(frozen=True, slots=True)
class Part:
    """The views of one constructor and the regions they index."""

    regions: tuple[Region, ...]
    views: tuple[View, ...]


def build(
    *parts: Part, slots: Iterable[str] = (), exact: Iterable[str] = (), owned: Mapping[str, Owned] | None = None
) -> Layout:
    """One layout of all parts; `slots`, `exact` and `owned` as in `Layout.of`.

    Regions that overlap become one. Raises `UsageError` for parts on different devices, and what `Layout.of` refuses.
    """
    given = sorted({region for part in parts for region in part.regions}, key=lambda region: region.base)
    devices = sorted({f"{region.kind}:{region.device}" for region in given})
    if len(devices) != 1:
        raise UsageError(
            f"the parts of a layout are on {' and '.join(devices) or 'no device'}",
            remedy="give the caches of one rank, all on its device; state kept elsewhere needs a layout of its own",
        )
    held: list[Region] = []
    for region in given:
        if held and region.base < held[-1].base + held[-1].nbytes:
            reach = region.base + region.nbytes - held[-1].base
            held[-1] = replace(held[-1], nbytes=max(reach, held[-1].nbytes))
        else:
            held.append(region)
    return Layout.of(
        held,
        [_moved(view, part.regions[view.region], held) for part in parts for view in part.views],
        slots=slots,
        exact=exact,
        owned=owned,
    )


def sglang_mha(
    k: Tensors, v: Tensors, *, page_size: int, total_heads: int, tp: tuple[int, int], **naming: Unpack[Naming]
) -> Part:
    """SGLang's `[slots, heads, dim]` pools; every `page_size` slots are a page."""
    roles = {
        name: [_paginated(array, page_size) for array in _arrays(name, given, "slots, heads, dim")]
        for name, given in (("k", k), ("v", v))
    }
    return _part(roles, shard_axis("kv_head", total_heads, *tp), naming)


def paged_nhd(k: Tensors, v: Tensors, *, total_heads: int, tp: tuple[int, int], **naming: Unpack[Naming]) -> Part:
    """Pools `[pages, page_size, heads, dim]`; k and v may be halves of one fused tensor."""
    roles = {name: _arrays(name, given, "pages, page_size, heads, dim") for name, given in (("k", k), ("v", v))}
    return _part(roles, shard_axis("kv_head", total_heads, *tp), naming)


def paged_hnd(k: Tensors, v: Tensors, *, total_heads: int, tp: tuple[int, int], **naming: Unpack[Naming]) -> Part:
    """Pools `[pages, heads, page_size, dim]`; k and v may be halves of one fused tensor."""
    roles = {
        name: [_rows_first(array) for array in _arrays(name, given, "pages, heads, page_size, dim")]
        for name, given in (("k", k), ("v", v))
    }
    return _part(roles, shard_axis("kv_head", total_heads, *tp), naming)


def vllm_blocks(
    caches: Tensors,
    *,
    total_heads: int,
    tp: tuple[int, int],
    key_nbytes: int | None = None,
    **naming: Unpack[Naming],
) -> Part:
    """vLLM 0.33's logical `[blocks, heads, block_size, content]` views, in any of its six physical layouts.

    Those are LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and BHLNC (vllm/v1/kv_cache_layout.py, RFC vllm#42082): one shape,
    other strides. Content is a head's K, of `key_nbytes` (half by default), then its V. vLLM registers raw bytes, so
    `format` must be given. Blocks may be padded; groups may alias the same bytes, each a component of its own.
    """
    halves: dict[str, list[_Array]] = {"k": [], "v": []}
    for cache in _arrays("caches", caches, "blocks, heads, block_size, content"):
        array = _rows_first(cache)
        content = array.shape[-1] * array.itemsize
        split = content // 2 if key_nbytes is None else key_nbytes
        if not 0 < split < content or (key_nbytes is None and content % 2):
            raise _refused(
                array.name,
                f"has {content} bytes of K and V a head, which cannot be split at {split}",
                "give key_nbytes, the bytes of one head's K; for a cache without a V use mla(cache[:, 0])",
            )
        if array.itemsize == 1 and "format" not in naming:
            raise _refused(array.name, "is raw bytes", 'name their encoding: format="bf16", say')
        halves["k"].append(array.bytes_from(0, split))
        halves["v"].append(array.bytes_from(split, content))
    return _part(halves, shard_axis("kv_head", total_heads, *tp), naming)


def mla(caches: Tensors, *, page_size: int | None = None, role: str = "latent", **naming: Unpack[Naming]) -> Part:
    """Replicated pools `[pages, page_size, dim]`, or SGLang's `[slots, 1, dim]` if `page_size` is given."""
    if page_size is None:
        arrays = [_one_head(array) for array in _arrays("caches", caches, "pages, page_size, dim")]
    else:
        arrays = [_paginated(array, page_size) for array in _arrays("caches", caches, "slots, 1, dim")]
    return _part({role: arrays}, REPLICATED, naming)


@dataclass(frozen=True, slots=True)
class _Array:
    """A checked tensor, strides in bytes. Every constructor brings it to `[pages, page_size, heads, dim]`."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int
    itemsize: int
    dtype: str
    region: Region

    def seen(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Array:
        return replace(self, shape=shape, strides=strides)

    def bytes_from(self, start: int, stop: int) -> _Array:
        """Bytes `[start, stop)` of the innermost axis."""
        return replace(
            self,
            shape=(*self.shape[:-1], stop - start),
            strides=(*self.strides[:-1], 1),
            itemsize=1,
            address=self.address + start,
        )


def _arrays(argument: str, tensors: Tensors, axes: str) -> list[_Array]:
    """Checks one tensor a layer: number of axes, sizes, strides, device."""
    arrays = []
    for layer, tensor in enumerate(tensors):
        name = f"{argument}[{layer}]"
        array = _numpy_array(name, tensor) if isinstance(tensor, np.ndarray) else _torch_array(name, tensor)
        if len(array.shape) != len(axes.split(", ")) or min(array.shape) < 1:
            raise _refused(name, f"has shape {list(array.shape)}, not [{axes}]", "pass the pool's tensors, one a layer")
        if "1" in axes.split(", ") and array.shape[1] != 1:
            raise _refused(
                name, f"has shape {list(array.shape)}, not [{axes}]", "use sglang_mha for more than one head"
            )
        _check_strides(array)
        arrays.append(array)
    if not arrays:
        raise UsageError(f"{argument} is empty", remedy="give one tensor a layer", argument=argument)
    return arrays


def _torch_array(name: str, tensor: TensorLike) -> _Array:
    for method in ("stride", "data_ptr", "element_size", "untyped_storage", "device", "dtype"):
        if not hasattr(tensor, method):
            raise _refused(name, f"is a {type(tensor).__name__}, not a tensor", "give a sequence of one tensor a layer")
    assert not isinstance(tensor, np.ndarray)
    kind, size = tensor.device.type, tensor.element_size()
    if kind not in ("cpu", "cuda"):
        raise _refused(name, f"is on device {kind!r}", "only cpu and cuda memory can be moved")
    storage = tensor.untyped_storage()
    return _Array(
        name,
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        tensor.data_ptr(),
        size,
        str(tensor.dtype).rpartition(".")[2],
        Region(storage.data_ptr(), storage.nbytes(), kind, (tensor.device.index or 0) if kind == "cuda" else 0),
    )


def _numpy_array(name: str, array: NDArray[np.generic]) -> _Array:
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    reaches = [(size - 1) * stride for size, stride in zip(owner.shape, owner.strides, strict=True)]
    low = owner.ctypes.data + sum(min(0, reach) for reach in reaches)
    nbytes = owner.itemsize + sum(abs(reach) for reach in reaches)
    return _Array(
        name, array.shape, array.strides, array.ctypes.data, array.itemsize, array.dtype.name, Region(low, nbytes)
    )


def _check_strides(array: _Array) -> None:
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise _refused(
            array.name,
            f"has elements {array.strides[-1]} bytes apart on its last axis, not {array.itemsize}",
            "the last axis must be contiguous; pass the pool as the engine allocated it",
        )
    steps = sorted((stride, size) for stride, size in zip(array.strides, array.shape, strict=True) if size > 1)
    reach = array.itemsize
    for stride, size in steps:
        if stride < reach:
            raise _refused(
                array.name,
                f"has byte strides {array.strides} for shape {array.shape}: elements overlap or run backwards",
                "pass a tensor whose elements are distinct, without expand() or negative strides",
            )
        reach += (size - 1) * stride


def _paginated(array: _Array, page_size: int) -> _Array:
    """`[slots, heads, dim]` as pages of `page_size` slots."""
    slots, stride = array.shape[0], array.strides[0]
    if page_size < 1 or slots % page_size:
        raise _refused(
            array.name,
            f"has {slots} slots, not a multiple of page_size={page_size}",
            "give the engine's page size, or pass the tensor without the odd slots at its end",
        )
    return array.seen(
        (slots // page_size, page_size, *array.shape[1:]), (page_size * stride, stride, *array.strides[1:])
    )


def _rows_first(array: _Array) -> _Array:
    """`[pages, heads, page_size, dim]` with its two middle axes exchanged."""
    return array.seen(*((a, c, b, d) for a, b, c, d in (array.shape, array.strides)))


def _one_head(array: _Array) -> _Array:
    """`[pages, page_size, dim]` with an axis of one head."""
    (pages, rows, dim), (a, b, c) = array.shape, array.strides
    return array.seen((pages, rows, 1, dim), (a, b, 0, c))


def _part(roles: dict[str, list[_Array]], axis: Axis, naming: Naming) -> Part:
    """Views of arrays `[pages, page_size, heads, dim]`, one list a role, one array a layer."""
    first_role, first = next(iter(roles.items()))
    start = naming.get("first_layer", 0)
    layers = naming.get("layers", range(start, start + len(first)))
    for what, n_layers in (*((role, len(arrays)) for role, arrays in roles.items()), ("layers", len(layers))):
        if n_layers != len(first):
            raise UsageError(
                f"{what} has {n_layers} entries, {first_role} has {len(first)}",
                remedy="give one entry a layer",
                argument=what,
            )
    regions = list(dict.fromkeys(array.region for arrays in roles.values() for array in arrays))
    views: list[View] = []
    seen: dict[int, _Array] = {}
    for role, arrays in roles.items():
        for layer, array in zip(layers, arrays, strict=True):
            _check_alike(array, first[0], axis)
            twin = seen.setdefault(array.address, array)
            if twin is not array:
                raise _refused(array.name, f"is the same memory as {twin.name}", "pass each cache once")
            key = Key(naming.get("component", "kv"), role, layer)
            view_format = naming.get("format") or _format_of(array)
            views.append(_view(array, key, regions.index(array.region), axis, view_format))
    return Part(tuple(regions), tuple(views))


def _check_alike(array: _Array, first: _Array, axis: Axis) -> None:
    pages, page_size, heads, _ = array.shape
    if heads != axis.count:
        raise _refused(
            array.name,
            f"has {heads} heads, but this rank holds {axis.count} of {axis.total} (from head {axis.first})",
            "pass this rank's tensors, or correct total_heads or tp",
        )
    if (pages, page_size) != first.shape[:2]:
        raise _refused(
            array.name,
            f"has {pages} pages of {page_size} tokens, {first.name} has {first.shape[0]} of {first.shape[1]}",
            "caches indexed by the same pages go into one component; make two components",
        )
    here, there = (f"{a.region.kind}:{a.region.device}" for a in (array, first))
    if here != there:
        raise _refused(
            array.name,
            f"is on {here}, {first.name} on {there}",
            "give the caches of one rank, all on its device",
        )


def _view(array: _Array, key: Key, region: int, axis: Axis, format: str) -> View:
    (pages, page_size, heads, dim), (item_stride, row_stride, head_stride, _) = array.shape, array.strides
    return View(
        key=key,
        region=region,
        offset=array.address - array.region.base,
        n_items=pages,
        item_stride=item_stride,
        tokens_per_item=page_size,
        rows=(Row(1, row_stride),),
        shards=heads,
        shard_stride=head_stride,
        width=dim * array.itemsize,
        axis=axis,
        format=format,
    )


def _format_of(array: _Array) -> str:
    if array.dtype not in _FORMATS:
        raise _refused(array.name, f"has dtype {array.dtype}", "name its encoding with format=, the same on both sides")
    return _FORMATS[array.dtype]


def _moved(view: View, region: Region, held: Sequence[Region]) -> View:
    """`view` of `region`, as a view of the one of `held` that contains it."""
    index = next(i for i, whole in enumerate(held) if whole.base <= region.base < whole.base + whole.nbytes)
    return replace(view, region=index, offset=view.offset + region.base - held[index].base)


def _refused(name: str, what: str, remedy: str) -> UsageError:
    return UsageError(f"{name} {what}", remedy=remedy, argument=name)
