"""SGLang's KVArgs as a pool, and its lists of indices as the items of a room.

KVArgs has only addresses, lengths and item lengths, in the order of the pools' `get_contiguous_buf_infos`: all K before
all V, one buffer per layer, then the draft model's. The kind of the pool says what an item contains. An item is a page
of `page_size` tokens, or a slot of a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVArgs, StateType

from pdstage.arguments import quotient
from pdstage.errors import UsageError
from pdstage.integrations.sglang.pools import Pools, inner, layer_ids
from pdstage.kernels import Pool
from pdstage.layout.addresses import Buffers, Paging, StateComponents, append_state_component, kv_pages
from pdstage.layout.arrays import build
from pdstage.layout.topology import REPLICATED, Axis, shard_axis
from pdstage.manager import Items

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pdstage.layout.arrays import Part
    from pdstage.layout.topology import Topology

_SLOTS = {StateType.MAMBA, StateType.QSA_PENDING, StateType.DSV4_REQUEST_STATE, StateType.REQUEST_ROW}
_SHARDED = {StateType.BLOCK_SCALE, StateType.BLOCK_SCALE_SWA, StateType.MINIMAX_DENSE_KV}
"""Pages whose order of heads KVArgs does not give: they are transferred whole, between ranks of equal TP only."""


def pool_of(args: KVArgs, place: Topology, *, is_mla: bool, total_heads: int, device: str) -> Pool:
    """The rank's pool. `total_heads` are the whole model's KV heads; `device` is torch's name, "cpu" or "cuda".

    Raises `UsageError` for states that this backend does not support.
    """
    where, pools = (device, args.gpu_id if device != "cpu" else 0), Pools.of(args)
    replicated = is_mla or args.is_hybrid_mla_backend
    axis = REPLICATED if replicated else shard_axis("kv_head", total_heads, place.tp_size, place.tp_rank)
    caches = _caches(args, pools, axis, ("cpu", 0) if pools.on_host else where)
    states = StateComponents((place.tp_size, place.tp_rank), where)
    for number in range(len(args.state_types)):
        _append_state(states, args, number, place, total_heads)
    layout = build(caches, *states.parts)
    return Pool.of(layout, device if device == "cpu" else f"{device}:{args.gpu_id}")


def _caches(args: KVArgs, pools: Pools, axis: Axis, where: tuple[str, int]) -> Part:
    """The target model's caches, and the draft model's under other roles of one component: they share pages."""
    names = ("latent",) if axis is REPLICATED else ("k", "v")
    n_target = len(args.kv_data_ptrs) - args.num_draft_entries
    roles = {}
    for prefix, low, high in (("", 0, n_target), ("draft_", n_target, len(args.kv_data_ptrs))):
        each = quotient("the number of KV buffers, K and V of each layer,", high - low, len(names))
        for i, role in enumerate(names):
            held = slice(low + i * each, low + (i + 1) * each)
            layers = args.kv_layer_ids[held] or layer_ids(None if prefix else pools.kv, each)
            roles[prefix + role] = Buffers(
                args.kv_data_ptrs[held], args.kv_data_lens[held], args.kv_item_lens[held], layers
            )
    roles = {role: held for role, held in roles.items() if held.data_ptrs}
    format = _format(inner(pools.kv).dtype)
    return kv_pages(roles, page_size=args.page_size, axis=axis, format=format, device=where)


def _format(*dtypes: torch.dtype) -> str:
    """The format that both sides' bytes must have in common: "auto" in SGLang's arguments is the model's dtype."""
    return "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _append_state(states: StateComponents, args: KVArgs, number: int, place: Topology, total_heads: int) -> None:
    kind = StateType(args.state_types[number])
    if kind is StateType.DSA_TAIL or kind.value in states.names:
        what = f"a second component {kind.value!r}" if kind.value in states.names else f"state {kind.value!r}"
        raise UsageError(f"pdstage does not move {what} of this model yet", remedy="use another transfer backend")
    ptrs, lens, items = args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number]
    layers, pools = args.state_layer_ids[number], Pools.of(args)
    if kind is StateType.SWA and args.swa_kv_cache_layout == "nhd":
        each = quotient("the number of buffers with a window, K and V of each layer,", len(ptrs), 2)
        layers = layers or layer_ids(pools.kv, each, window=True) * 2
        roles = {
            role: Buffers(ptrs[half], lens[half], items[half], layers[half])
            for role, half in (("k", slice(0, each)), ("v", slice(each, 2 * each)))
        }
        held = inner(pools.kv, window=True)
        window = kv_pages(
            roles, page_size=args.page_size, axis=_window_heads(held, place, total_heads),
            format=_format(held.dtype), component=kind.value, device=states.device,
        )  # fmt: skip
        states.add(kind.value, window)
        return
    sharded = kind in _SHARDED or (kind is StateType.SWA and args.swa_kv_cache_layout is not None)
    slicing: dict[str, Any] = {
        "dim_per_tensor": args.state_dim_per_tensor[number] or None,
        "conv_shard_groups": args.state_conv_shard_groups[number] or None,
        "slice_outer_counts": args.state_slice_outer_counts[number] or None,
    }
    format = "bytes"
    if kind is StateType.MAMBA and (pool := pools.states()) is not None:
        layers = layers or pool.get_state_layer_ids()
        format = _format(*(held.dtype for held in (*pool.mamba_cache.conv, pool.mamba_cache.temporal)))
        if place.tp_size > 1 and _is_of_unknown_parts(pool):
            slicing, sharded = {}, True
    append_state_component(
        states, kind.value, ptrs, lens, items,
        **slicing,
        layer_ids=layers or None,
        format=format,
        paging=_paging(kind, args.page_size),
        whole=Axis("rank", place.tp_size, place.tp_rank, 1) if sharded else REPLICATED,
    )  # fmt: skip


def _window_heads(pool: Any, place: Topology, total_heads: int) -> Axis:  # noqa: ANN401  (SGLang's)
    """The heads of the layers with a window; a model may have another number of them there."""
    heads = shard_axis("kv_head", total_heads, place.tp_size, place.tp_rank)
    if pool.head_num == heads.count:
        return heads
    if place.tp_size > 1:
        raise UsageError(
            f"layers with a sliding window have {pool.head_num} KV heads on a rank, the others {heads.count}",
            remedy="run this model at TP 1, or use another transfer backend",
        )
    return shard_axis("kv_head", pool.head_num, 1, 0)


def _is_of_unknown_parts(pool: Any) -> bool:  # noqa: ANN401  (SGLang's MambaPool)
    """Whether conv states are x, B and C side by side, each sharded separately, without SGLang saying where they end.

    That is so with Mamba 2. Conv states without other states are one part.
    """
    return bool(pool.mamba_cache.temporal.numel()) and not pool.conv_shard_groups


def _paging(kind: StateType, page_size: int) -> Paging | None:
    if kind in _SLOTS:
        return None
    return Paging(1, by_token=True) if kind is StateType.SWA_RING else Paging(page_size)


def state_items(args: KVArgs, indices: Sequence[Any] | None, n_pages: int) -> dict[str, Items]:
    """The states' items, one list per component in the order of `state_types`, for a sequence of `n_pages` pages.

    Every list of pages ends at the sequence's last page, on both sides. Rows of a ring are in position order, and both
    sides give the same number of them.
    """
    items = {}
    for kind, given in zip(map(StateType, args.state_types), indices or (), strict=False):
        if given is None:
            continue
        held = np.concatenate([np.empty(0, np.int64), *(np.ravel(one) for one in given)]).astype(np.int64)
        if len(held) or kind in _SLOTS:
            paged = kind not in _SLOTS and kind is not StateType.SWA_RING
            items[kind.value] = Items(held, (n_pages - len(held)) * args.page_size if paged else 0)
    return items
