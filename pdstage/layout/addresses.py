"""Caches and states of engines that give only addresses, as SGLang's KVArgs does for its own transfer code.

    states = StateComponents(tp=(4, rank))
    append_state_component(states, "mamba", data_ptrs, data_lens, item_lens)
    layout = build(sglang_mha(k, v, ...), *states.parts)
    layout = build(kv_pages({"k": k_buffers, "v": v_buffers}, page_size=64, axis=axis, format="bf16"), *states.parts)

If an engine has tensors, the constructors of `tensors` describe
them better and catch more mistakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pdstage.errors import UsageError
from pdstage.layout.arrays import Array, Part, Piece, pages, part, refused
from pdstage.layout.states import StateType
from pdstage.layout.topology import REPLICATED, Axis, Tp, shard_axis
from pdstage.layout.views import Key, Region, RowLevel


class Buffers(NamedTuple):
    """Buffers of one role, one per layer: addresses, lengths, and bytes per item. `layers` are the layers' numbers."""

    data_ptrs: Sequence[int]
    data_lens: Sequence[int]
    item_lens: Sequence[int]
    layers: Sequence[int]


def kv_pages(
    roles: Mapping[str, Buffers],
    *,
    page_size: int,
    axis: Axis,
    format: str,
    component: str = "kv",
    device: tuple[str, int] = ("cpu", 0),
) -> Part:
    """Caches whose items are pages `[page_size, heads, dim]`. `axis` is this rank's heads. Each buffer's item length
    gives the size of a head. Bytes after the last whole page are left out.

    Raises `UsageError` for an item length that is not a multiple of tokens and heads.
    """
    parts = []
    for role, held in roles.items():
        pieces = []
        for i, (ptr, nbytes, item) in enumerate(zip(*held[:3], strict=True)):
            if not item or item % (page_size * axis.count):
                raise refused(
                    f"{role}[{i}]", f"has pages of {item} bytes for {page_size} tokens of {axis.count} heads",
                    "give the engine's page size, and this rank's heads",
                )  # fmt: skip
            row, head = item // page_size, item // page_size // axis.count
            shape, strides = (nbytes // item, page_size, axis.count, head), (item, row, head, 1)
            region = Region(ptr, nbytes, *device)
            pieces.append(pages(Array(f"{role}[{i}]", shape, strides, ptr, 1, format, region), axis))
        parts.append(part({role: pieces}, {"component": component, "layers": held.layers, "format": format}))
    regions = list(dict.fromkeys(region for one in parts for region in one.regions))
    views = (replace(view, region=regions.index(one.regions[view.region])) for one in parts for view in one.views)
    return Part(tuple(regions), tuple(views))


class Paging(NamedTuple):
    """Items that are pages of `tokens` tokens. Pages with one row per token (`by_token`) match pages of any size;
    others, such as `[keys][scales]`, are transferred whole.
    """

    tokens: int
    by_token: bool = False


@dataclass
class StateComponents:
    """Collects the state components of one rank. `tp` is its (size, rank), `device` is where its pools are; `parts` go
    into `build`.
    """

    tp: Tp
    device: tuple[str, int] = ("cpu", 0)
    parts: list[Part] = field(default_factory=list)
    _held: dict[Key, int] = field(default_factory=dict)
    _addresses: set[tuple[str, int]] = field(default_factory=set)

    def add(self, name: str, given: Part) -> None:
        """Adds the views of `given` that are new: a pool that is reached by two paths is registered once.

        Raises `UsageError` for a view that is known at another address.
        """
        views = []
        for view in given.views:
            address = given.regions[view.region].base + view.offset
            if (name, address) in self._addresses:
                continue
            known = self._held.get(view.key)
            if known is not None:
                raise UsageError(
                    f"{view.key} is at {known:#x} and at {address:#x}",
                    remedy="two pools claim this layer's state: give each layer one pool",
                    key=view.key,
                )
            self._held[view.key] = address
            self._addresses.add((name, address))
            views.append(view)
        if views:
            self.parts.append(Part(given.regions, tuple(views)))


def append_state_component(
    states: StateComponents,
    kind: StateType | str,
    data_ptrs: Sequence[int],
    data_lens: Sequence[int],
    item_lens: Sequence[int],
    *,
    dim_per_tensor: Sequence[int] | None = None,
    conv_shard_groups: Sequence[Sequence[int] | None] | None = None,
    slice_outer_counts: Sequence[int] | None = None,
    layer_ids: Sequence[int] | None = None,
    paging: Paging | None = None,
    format: str = "bytes",
    whole: Axis = REPLICATED,
) -> None:
    """Appends a component of `kind`, one buffer per layer and tensor. The arguments are SGLang's of the same names.

    No buffers, or only empty ones, mean a component with nothing to send. The order of buffers of one layer
    distinguishes them; without `layer_ids` a buffer's index is its layer. Kinds with positions need `paging`. Only
    `format` says that the two sides' bytes mean the same. `whole` is the axis of states that are not sliced:
    replicated, or this rank's place if every rank holds another part in an unknown order. Raises `UsageError` for an
    unknown kind and for lengths that do not fit.
    """
    known = StateType.of(kind)
    if known is StateType.NONE:
        return
    n = len(data_ptrs)
    layers = list(layer_ids) if layer_ids else list(range(n))
    dims, outers = dim_per_tensor or [0] * n, slice_outer_counts or [1] * n
    groups = conv_shard_groups or [None] * n
    for what, entries in {
        "data_lens": data_lens, "item_lens": item_lens, "layer_ids": layers, "dim_per_tensor": dims,
        "slice_outer_counts": outers, "conv_shard_groups": groups,
    }.items():  # fmt: skip
        if len(entries) != n:
            raise UsageError(
                f"{what} has {len(entries)} entries, data_ptrs has {n}", remedy="give one entry a buffer", argument=what
            )
    if known.positional and paging is None:
        raise UsageError(f"state kind {known.name!r} has token positions", remedy="say how its pages are: paging=...")
    seen: Counter[int] = Counter()
    for i, (ptr, nbytes, item) in enumerate(zip(data_ptrs, data_lens, item_lens, strict=True)):
        role = f"state.{seen[layers[i]]}"
        seen[layers[i]] += 1
        if not nbytes or not item:  # a layer that shares another's state has an empty entry in the engine's lists
            continue
        if nbytes % item:
            raise refused(f"data_ptrs[{i}]", f"has items of {item} bytes in {nbytes}", "correct the lengths")
        region = Region(ptr, nbytes, *states.device)
        array = Array(f"data_ptrs[{i}]", (nbytes // item, item), (item, 1), ptr, 1, format, region)
        pieces = _pieces(array, dims[i], outers[i], groups[i], tp=states.tp, paging=paging, whole=whole)
        for name, piece in pieces.items():
            made = part({role + name: [piece]}, {"component": known.component, "layers": [layers[i]]})
            states.add(known.component, made)


_MAX_UNITS = 128


def _pieces(
    array: Array, dim: int, outer: int, groups: Sequence[int] | None, *, tp: Tp, paging: Paging | None,
    whole: Axis,
) -> dict[str, Piece]:  # fmt: skip
    """The pieces of a buffer's items by the suffixes of their roles: one, or one per group.

    `dim` is this rank's size of the sliced dimension; 0 for a state that every rank holds whole. `outer` is how many
    rows precede that dimension. `groups` are the whole model's sizes of its parts, each sliced separately.
    """
    n_items, item = array.shape
    tokens, by_token = paging or (1, False)
    if by_token and item % tokens:
        raise refused(array.name, f"has pages of {item} bytes for {tokens} tokens", "correct paging")
    row = item // tokens if by_token else item
    rows = (RowLevel(1, row),) if by_token else (RowLevel(tokens, 0),)
    if not dim:
        return {"": Piece(array=array, n_items=n_items, item_stride=item, tokens_per_item=tokens, rows=rows, width=row,
                          axis=whole, format=array.dtype)}  # fmt: skip
    totals = list(groups or [dim * tp[0]])
    if row % (dim * outer) or sum(totals) != dim * tp[0]:
        raise refused(
            array.name, f"has {row} bytes for {outer} rows of {dim}, a part of {totals} over TP {tp[0]}",
            "give this rank's dimension, the rows before it, and the whole model's groups; or give tensors instead",
        )  # fmt: skip
    each, at, pieces = row // (dim * outer), 0, {}
    for number, total in enumerate(totals):
        axis = shard_axis("unit", _units(total), *tp)
        unit = total // axis.total * each
        if axis.total % tp[0]:
            raise refused(array.name, f"cannot slice {total} over TP {tp[0]} evenly", "give tensors instead")
        pieces[f".{number}" if len(totals) > 1 else ""] = Piece(
            array=array, at=at, n_items=n_items, item_stride=item, tokens_per_item=tokens, rows=rows,
            shard_stride=unit, segs=outer, seg_stride=dim * each, width=unit, axis=axis, format=array.dtype,
        )  # fmt: skip
        at += axis.count * unit
    return pieces


def _units(total: int) -> int:
    """The number of equal pieces into which both sides cut a dimension, whatever their TP sizes. It is halved towards
    128, but keeps odd factors and 32 of the even ones: every TP size up to 32 that divides the dimension divides it.
    """
    while total > _MAX_UNITS and total % 64 == 0:
        total //= 2
    return total
