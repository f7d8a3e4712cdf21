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

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pdstage.integrations import stores
from pdstage.integrations.sglang.pools import HOSTS, LATENTS, inner, name_of
from pdstage.probe import LayerProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pdstage.integrations.sglang.pools import Pools
    from pdstage.layout import Key, Layout, View
    from pdstage.probe import Cell, Writer

_DRAFT = "draft_"


def probes_of(layout: Layout, pools: Pools) -> list[LayerProbe]:
    """One probe for each layer of each component; the draft model's layers have their own."""
    layers: dict[tuple[str, bool, int], list[View]] = defaultdict(list)
    for view in layout.views():
        layers[view.key.component, view.key.role.startswith(_DRAFT), view.key.layer].append(view)
    drafts = sorted(layer for _, is_draft, layer in layers if is_draft)
    probes = []
    for (component, is_draft, layer), views in layers.items():
        pool = pools.draft if is_draft else pools.kv
        number = drafts.index(layer) + getattr(pool, "start_layer", 0) if is_draft else layer
        if pools.on_host and component == "kv" and not is_draft:
            pool = pools.owner
            write = _host_rows(pool, number, views)
        else:
            write = _attention(component, pool, number, views) or _stored(component, views, pools, layout)
        name = f"{component} of {_DRAFT * is_draft}layer {layer}"
        probes.append(LayerProbe(name, name_of(pool), tuple(view.key for view in views), write, first_item=1))
    return probes


def _attention(
    component: str,
    pool: Any,  # noqa: ANN401  (SGLang's)
    layer: int,
    views: Sequence[View],
) -> Writer | None:
    """None if the pool's class has no known writer."""
    roles = {view.key.role.removeprefix(_DRAFT) for view in views}
    held = inner(pool, window=component == "swa")
    if roles == {"k", "v"} and type(held) is MHATokenToKVPool and not held.is_quantized_kv_cache:
        return _rows(pool.set_kv_buffer, held, held.head_num, (held.head_dim, held.v_head_dim), layer, views)
    if isinstance(pool, SWAKVPool):  # over latents, whose index keys SGLang does not name
        return None
    if roles == {"latent"} and type(held) in LATENTS and not getattr(held, "dsa_kv_cache_store_fp8", False):
        return _rows(pool.set_mla_kv_buffer, held, 1, (held.kv_lora_rank, held.qk_rope_head_dim), layer, views)
    return None


def _stored(component: str, views: Sequence[View], pools: Pools, layout: Layout) -> Writer | None:
    """None if the views are in no tensor in which a pool stores states or index keys."""
    tensors, found = list(_tensors(component, pools)), []
    for view in views:
        at = layout.regions[view.region].base + view.offset
        for tensor in tensors:
            if len(tensor) and 0 <= at - tensor.data_ptr() < tensor[0].nbytes:
                found.append((view, tensor, at - tensor.data_ptr()))
    return stores.into(found) if len(found) == len(views) else None


def _rows(  # noqa: PLR0917
    store: Callable[..., None],
    held: Any,  # noqa: ANN401  (the pool with the buffers)
    heads: int,
    sizes: tuple[int, int],
    layer: int,
    views: Sequence[View],
) -> Writer:
    """Both parts of a token, `[head, element]`: K and V, or a latent and its rotary key, which are one row."""

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Mapping[Key, NDArray[np.uint8]]:
        k, v = (_draw(rng, (len(cells), heads, size), held.dtype) for size in sizes)
        store(SimpleNamespace(layer_id=layer), _slots(cells, held), k.to(held.device), v.to(held.device))
        stored = {"k": k, "v": v, "latent": torch.cat([k, v], -1)}
        return {view.key: _bytes(stored[view.key.role.removeprefix(_DRAFT)]) for view in views}

    return write


def _host_rows(pool: Any, layer: int, views: Sequence[View]) -> Writer | None:  # noqa: ANN401
    """Rows of a layer, `[slot, head, element]`, in one of `pools.HOSTS`; None if they are in another order."""
    if type(pool) not in HOSTS or pool.layout != "layer_first":
        return None
    names = {"k": "k_data_refs", "v": "v_data_refs", "latent": "data_refs"}
    rows = [(view, getattr(pool, names[view.key.role])[layer - pool.start_layer], 0) for view in views]
    return stores.into(rows, n_tokens=pool.page_size)


def _tensors(component: str, pools: Pools) -> Iterator[torch.Tensor]:
    """The tensors of a state's layers, `[item, ...]`."""
    if component == "dsa":
        yield from getattr(inner(pools.kv), "index_k_with_scale_buffer", ())
    elif component == "mamba":
        entries = getattr(pools.states(), "_iter_transfer_state_entries", None)
        for _, tensor, _, _ in () if entries is None else entries():
            yield tensor


def _draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Distinct values, of a dtype that is stored unchanged."""
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def _bytes(values: torch.Tensor) -> NDArray[np.uint8]:
    """`[..., byte]`"""
    held: NDArray[np.uint8] = values.contiguous().view(torch.uint8).numpy()
    return held


def _slots(cells: Sequence[Cell], held: Any) -> KVWriteLoc:  # noqa: ANN401
    """SGLang's slot numbers: page number times page size, plus the token; a window's pool has its own."""
    slots = torch.tensor([cell.item * held.page_size + cell.token for cell in cells], device=held.device)
    return KVWriteLoc(slots, swa_loc=slots)
