"""SGLang's KVArgs as a pool, and its lists of indices as the items of a room.

KVArgs has only addresses, lengths and item lengths, in the order of the pools' `get_contiguous_buf_infos`: all K before
all V, one buffer per layer, then the draft model's. The kind of the pool says what an item contains. An item is a page
of `page_size` tokens, or a slot of a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.configs.model_config import dsa_layer_skips_topk, is_deepseek_dsa
from sglang.srt.disaggregation.base.conn import KVArgs, StateType

from pdstage import Axis, Items, Pool, Topology, UsageError
from pdstage.arguments import quotient
from pdstage.integrations.sglang.pools import Pools, inner, layer_ids
from pdstage.layout.addresses import Buffers, Paging, StateComponents, append_state_component, kv_pages
from pdstage.layout.arrays import Part, build
from pdstage.layout.topology import REPLICATED, shard_axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


_SLOTS = {StateType.MAMBA, StateType.QSA_PENDING, StateType.DSV4_REQUEST_STATE, StateType.REQUEST_ROW}
_SHARDED = {StateType.BLOCK_SCALE, StateType.BLOCK_SCALE_SWA, StateType.MINIMAX_DENSE_KV}
"""Pages whose order of heads KVArgs does not give: they are transferred whole, between ranks of equal TP only."""


def pool_of(args: KVArgs, place: Topology, model: Any, *, is_mla: bool, device: str) -> Pool:  # noqa: ANN401
    """The rank's pool. `model` is SGLang's ModelConfig; `device` is torch's name, "cpu" or "cuda".

    Raises `UsageError` for states that this backend does not support.
    """
    where, pools = (device, args.gpu_id if device != "cpu" else 0), Pools.of(args)
    replicated = is_mla or args.is_hybrid_mla_backend
    heads = shard_axis("kv_head", 1 if is_mla else model.get_total_num_kv_heads(), place.tp_size, place.tp_rank)
    caches = _caches(args, pools, REPLICATED if replicated else heads, ("cpu", 0) if pools.on_host else where)
    states = StateComponents((place.tp_size, place.tp_rank), where)
    for number in range(len(args.state_types)):
        _append_state(states, args, number, place, heads=heads, model=model)
    layout = build(caches, *states.parts)
    return Pool.of(layout, device if device == "cpu" else f"{device}:{args.gpu_id}")


def _caches(args: KVArgs, pools: Pools, axis: Axis, where: tuple[str, int]) -> Part:
    """The target model's caches, and the draft model's under other roles of one component: they share pages."""
    names = ("latent",) if axis is REPLICATED else ("k", "v")
    n_target = len(args.kv_data_ptrs) - args.num_draft_entries
    lists = args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, args.kv_layer_ids
    target, draft = [one[:n_target] for one in lists], [one[n_target:] for one in lists]
    roles = _by_role(names, "KV buffers", target, pools.kv)
    roles |= _by_role([f"draft_{name}" for name in names], "KV buffers", draft, None)
    return kv_pages(
        roles, page_size=args.page_size, axis=axis, format=_format(inner(pools.kv).dtype), device=where
    )  # fmt: skip


def _by_role(
    roles: Sequence[str],
    what: str,
    given: Sequence[list[int]],
    pool: Any,  # noqa: ANN401  (SGLang's; None: it does not number its layers)
    *,
    window: bool = False,
) -> dict[str, Buffers]:
    """The buffers of each role. `given` are what `Buffers` has, of all roles one after the other."""
    each = quotient(f"the number of {what}, K and V of each layer,", len(given[0]), len(roles))
    found = {}
    for i, role in enumerate(roles if each else ()):
        ptrs, lens, items, layers = (entries[i * each : (i + 1) * each] for entries in given)
        found[role] = Buffers(ptrs, lens, items, layers or layer_ids(pool, each, window=window))
    return found


def _format(*dtypes: torch.dtype) -> str:
    """The format that both sides' bytes must have in common: "auto" in SGLang's arguments is the model's dtype."""
    return "+".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _append_state(
    states: StateComponents,
    args: KVArgs,
    number: int,
    place: Topology,
    *,
    heads: Axis,
    model: Any,  # noqa: ANN401  (SGLang's)
) -> None:
    *earlier, last = args.state_types[: number + 1]
    kind, pools = StateType(last), Pools.of(args)
    if (is_second := last in earlier) or kind is StateType.DSA_TAIL:
        raise UsageError(
            f"pdstage does not move {'a second ' * is_second}state {kind.value!r} of this model yet",
            remedy="use another transfer backend",
        )
    lists = args.state_data_ptrs, args.state_data_lens, args.state_item_lens, args.state_layer_ids
    ptrs, lens, items, layers = given = [entries[number] for entries in lists]
    if kind is StateType.SWA and args.swa_kv_cache_layout == "nhd":
        held = inner(pools.kv, window=True)
        window = kv_pages(
            _by_role(("k", "v"), "buffers with a window", given, pools.kv, window=True), page_size=args.page_size,
            axis=_window_heads(held, place, heads), format=_format(held.dtype), component=kind.value,
            device=states.device,
        )  # fmt: skip
        states.add(kind.value, window)
        return
    sharded = kind in _SHARDED or (kind is StateType.SWA and args.swa_kv_cache_layout is not None)
    sliced, format = args.state_dim_per_tensor[number], "bytes"
    if kind is StateType.DSA:  # SGLang does not number them; behind the target model's are the draft model's
        n, n_layers, config = inner(pools.kv).layer_num, model.num_attention_layers, model.hf_config
        layers = [*layer_ids(pools.kv, n), *range(n_layers, n_layers + len(ptrs))][: len(ptrs)]
        # Some layers go by another's top-k, though HiSparse's pool has memory for their keys.
        if is_deepseek_dsa(config):
            keyed = (layer >= n_layers or not dsa_layer_skips_topk(config, layer) for layer in layers)
            lens = [nbytes * has_keys for nbytes, has_keys in zip(lens, keyed, strict=True)]
    if kind is StateType.MAMBA and (pool := pools.states()) is not None:
        layers = layers or pool.get_state_layer_ids()
        conv, temporal = pool.mamba_cache.conv, pool.mamba_cache.temporal
        format = _format(*(held.dtype for held in (*conv, temporal)))
        if place.tp_size > 1 and temporal.numel() and not pool.conv_shard_groups:
            # Mamba 2's conv states are x, B and C side by side, each sharded separately, and SGLang does not say where
            # they end. Conv states without other states are one part.
            sliced, sharded = None, True
    pages = None if kind in _SLOTS else Paging(args.page_size)
    append_state_component(
        states, kind.value, ptrs, lens, items,
        dim_per_tensor=sliced,
        conv_shard_groups=args.state_conv_shard_groups[number],
        slice_outer_counts=args.state_slice_outer_counts[number],
        layer_ids=layers,
        format=format,
        paging=Paging(1, by_token=True) if kind is StateType.SWA_RING else pages,
        whole=Axis("rank", place.tp_size, place.tp_rank, 1) if sharded else REPLICATED,
    )  # fmt: skip


def _window_heads(pool: Any, place: Topology, heads: Axis) -> Axis:  # noqa: ANN401  (SGLang's)
    """The heads of the layers with a window: `heads`, but a model may have another number of them there."""
    if pool.head_num == heads.count:
        return heads
    if place.tp_size > 1:
        raise UsageError(
            f"layers with a sliding window have {pool.head_num} KV heads on a rank, the others {heads.count}",
            remedy="run this model at TP 1, or use another transfer backend",
        )
    return shard_axis("kv_head", pool.head_num, 1, 0)


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
