"""vLLM's own cache writes, which prove a worker's layout at start (`pdstage.probe`).

An attention layer's writer is its backend's `do_kv_cache_update`, called as in a forward pass: by
`unified_kv_cache_update` (vllm/model_executor/layers/attention/attention.py) and `MLAAttention`. A recurrent layer
keeps its states in views that it makes (`MambaBase.bind_kv_cache`): its writer is a store into these. Both exist when
vLLM registers its caches, since metadata builders and caches are bound to the layers before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from pdstage.integrations.vllm.caches import Backend, Caches, Pages
from pdstage.probe import Cell, Encoding, LayerProbe, Writer, into, rows_by, slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.config import VllmConfig

    from pdstage import View

_PLACE = re.compile(r"\d+")
_PLAIN = {"auto", "bfloat16", "float16", "half", "float32", "float"}


def probes_of(caches: Caches, config: VllmConfig) -> Iterator[LayerProbe]:
    """One probe for each layer of `caches`."""
    layers = config.compilation_config.static_forward_context
    views = caches.layout.by_key()
    for name, keys in caches.keys.items():
        layer, held = layers.get(name), [views[key] for key in keys]
        write = _writer(layer, held, caches.device, config.model_config.dtype)
        yield LayerProbe(name, Backend.of(layer).name, keys, write)


def _writer(
    layer: Any,  # noqa: ANN401  (vLLM's, or None)
    views: Sequence[View],
    device: torch.device,
    dtype: torch.dtype,
) -> Writer | None:
    """The layer's own writer; None if it has none that can be called alone. That of attention is the backend's
    `do_kv_cache_update`: of K and V of every KV head, or of MLA's latent and rotary key. Packed rows (fp8_ds_mla) are
    not plain.
    """
    if isinstance(getattr(layer, "kv_cache", None), list | tuple):
        return _states(layer.kv_cache, views)
    if Backend.of(layer).pages is Pages.INDEX:
        return _index_keys(layer, views[0], device) if device.type == "cuda" else None
    if getattr(getattr(layer, "impl", None), "do_kv_cache_update", None) is None:
        return None
    encoding, by_role = _encoding_of(layer, dtype), {_role(view): view for view in views}
    is_kv = encoding is not None and "k" in by_role and all(view.shards == layer.num_kv_heads for view in views)
    if is_kv:
        sizes = layer.head_size, getattr(layer, "head_size_v", layer.head_size)
        heads, parts = layer.num_kv_heads, "kv"
    elif by_role.keys() == {"latent"}:
        heads, sizes, parts = 1, (layer.kv_lora_rank, layer.qk_rope_head_dim), "kk"
    else:
        return None
    k_scale, v_scale = (float(getattr(layer, f"_{part}_scale_float", 1.0)) for part in parts)

    def store(at: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if is_kv:
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, at)
        else:
            layer.impl.do_kv_cache_update(k[:, 0], v, layer.kv_cache, at, layer.kv_cache_dtype, layer._k_scale)

    return rows_by(
        store, by_role, encoding or Encoding(dtype, dtype), heads=heads, sizes=sizes, device=device,
        n_tokens=views[0].tokens_per_item, scales=(k_scale, v_scale), is_plain=encoding is not None,
    )  # fmt: skip


def _role(view: View) -> str:
    """A view's role without the layer's name."""
    return view.key.role.partition("@")[0]


def _encoding_of(layer: Any, dtype: torch.dtype) -> Encoding | None:  # noqa: ANN401
    """For a model of `dtype`; None for encodings whose stored form this module does not know."""
    name, held = str(getattr(layer, "kv_cache_dtype", "auto")), layer.kv_cache.dtype
    if name in _PLAIN and held.is_floating_point:
        return Encoding(held, held)
    if name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return Encoding(dtype, torch.float8_e5m2 if name == "fp8_e5m2" else current_platform.fp8_dtype())
    return None


def _index_keys(layer: Any, view: View, device: torch.device) -> Writer:  # noqa: ANN401
    """The sparse indexer's keys, by `indexer_k_quant_and_cache` as its forward pass calls it. Proved by position."""

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> None:
        keys = torch.from_numpy(rng.standard_normal((len(cells), view.width)) * 2.0 ** np.arange(len(cells))[:, None])
        ops.indexer_k_quant_and_cache(
            keys.to(device, torch.bfloat16), layer.kv_cache, slots(cells, view.tokens_per_item, device),
            view.width, "ue8m0",
        )  # fmt: skip

    return write


def _states(given: Sequence[torch.Tensor], views: Sequence[View]) -> Writer:
    """A recurrent layer's states, stored where the layer itself indexes them; of a conv state its window."""
    numbers = [_number_of_state(_role(view)) for view in views]
    starts = {n: min(view.offset for view, other in zip(views, numbers, strict=True) if other == n) for n in numbers}
    return into([(view, given[n], view.offset - starts[n]) for view, n in zip(views, numbers, strict=True)])


def _number_of_state(role: str) -> int:
    return 0 if role.startswith("conv") else 1 if role.startswith("ssm") else int(_PLACE.findall(role)[0])
