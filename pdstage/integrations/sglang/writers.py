"""SGLang's own cache writes, which prove a rank's layout at start (`pdstage.probe`).

The writers are what attention backends call in a forward pass: a pool's `set_kv_buffer` and `set_mla_kv_buffer`
(sglang/srt/mem_cache/memory_pool.py), by the model's layer number. States and index keys are written by kernels that
need a GPU and store where a tensor of the pool says. Their writer is a store into that tensor. It proves an item's
place and order; `memory` defines what the parts of a state mean. So it is with HiSparse's pages in host memory: their
writer stores into the tensors that SGLang's kernels get, by slot.

Nothing has been served when the manager is made. Page 0 and slot 0 are padding, which writers may skip.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pdstage.integrations.sglang.pools import HOSTS, LATENTS, Pools, inner, name_of
from pdstage.probe import Encoding, LayerProbe, Writer, into, rows_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from pdstage import Layout, View

_DRAFT = "draft_"


def probes_of(layout: Layout, pools: Pools) -> Iterator[LayerProbe]:
    """One probe for each layer of each component; the draft model's layers have their own."""
    layers = defaultdict(list)
    for view in layout.views():
        layers[view.key.component, view.key.role.startswith(_DRAFT), view.key.layer].append(view)
    drafts = sorted(layer for _, is_draft, layer in layers if is_draft)
    for (component, is_draft, layer), views in layers.items():
        pool = pools.draft if is_draft else pools.kv
        number = drafts.index(layer) + getattr(pool, "start_layer", 0) if is_draft else layer
        if pools.on_host and component == "kv" and not is_draft:
            pool = pools.owner
            write = _host_rows(pool, number, views)
        else:
            write = _attention(component, pool, number, views) or _stored(component, views, pools, layout)
        name = f"{component} of {_DRAFT * is_draft}layer {layer}"
        yield LayerProbe(name, name_of(pool), tuple(view.key for view in views), write, first_item=1)


def _attention(
    component: str,
    pool: Any,  # noqa: ANN401  (SGLang's)
    layer: int,
    views: Sequence[View],
) -> Writer | None:
    """None if the pool's class has no known writer."""
    by_role, held = {view.key.role.removeprefix(_DRAFT): view for view in views}, inner(pool, window=component == "swa")
    if by_role.keys() == {"k", "v"} and type(held) is MHATokenToKVPool and not held.is_quantized_kv_cache:
        store, heads, sizes = pool.set_kv_buffer, held.head_num, (held.head_dim, held.v_head_dim)
    elif isinstance(pool, SWAKVPool):  # over latents, whose index keys SGLang does not name
        return None
    elif by_role.keys() == {"latent"} and type(held) in LATENTS and not getattr(held, "dsa_kv_cache_store_fp8", False):
        store, heads, sizes = pool.set_mla_kv_buffer, 1, (held.kv_lora_rank, held.qk_rope_head_dim)
    else:
        return None

    def write(at: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        store(SimpleNamespace(layer_id=layer), KVWriteLoc(at, swa_loc=at), k, v)  # a window's pool has its own

    encoding, n_tokens = Encoding(held.dtype, held.dtype), held.page_size
    return rows_by(write, by_role, encoding, heads=heads, sizes=sizes, n_tokens=n_tokens, device=held.device)


def _stored(component: str, views: Sequence[View], pools: Pools, layout: Layout) -> Writer | None:
    """None if the views are in no tensor in which a pool stores states or index keys."""
    tensors, found = list(_tensors(component, pools)), []
    for view in views:
        at = layout.regions[view.region].base + view.offset
        for tensor in tensors:
            if len(tensor) and 0 <= at - tensor.data_ptr() < tensor[0].nbytes:
                found.append((view, tensor, at - tensor.data_ptr()))
    return into(found) if len(found) == len(views) else None


def _host_rows(pool: Any, layer: int, views: Sequence[View]) -> Writer | None:  # noqa: ANN401
    """Rows of a layer, `[slot, head, element]`, in one of `pools.HOSTS`; None if they are in another order."""
    if type(pool) not in HOSTS or pool.layout != "layer_first":
        return None
    names = {"k": "k_data_refs", "v": "v_data_refs", "latent": "data_refs"}
    rows = [(view, getattr(pool, names[view.key.role])[layer - pool.start_layer], 0) for view in views]
    return into(rows, n_tokens=pool.page_size)


def _tensors(component: str, pools: Pools) -> Iterator[torch.Tensor]:
    """The tensors of a state's layers, `[item, ...]`."""
    if component == "dsa":
        for pool in (pools.kv, pools.draft):
            yield from getattr(inner(pool), "index_k_with_scale_buffer", ())
    elif component == "mamba":
        entries = getattr(pools.states(), "_iter_transfer_state_entries", tuple)
        for _, tensor, _, _ in entries():
            yield tensor
