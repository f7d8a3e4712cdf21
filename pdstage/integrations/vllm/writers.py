"""vLLM's own cache writes, which prove a worker's layout at start (`pdstage.probe`).

An attention layer's writer is its backend's `do_kv_cache_update`, called as in a forward pass: by
`unified_kv_cache_update` (vllm/model_executor/layers/attention/attention.py) and `MLAAttention`. A recurrent layer
keeps its states in views that it makes (`MambaBase.bind_kv_cache`): its writer is a store into these. Both exist when
vLLM registers its caches, since metadata builders and caches are bound to the layers before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from pdstage.integrations import stores
from pdstage.integrations.vllm.caches import Backend, Pages
from pdstage.probe import LayerProbe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.config import VllmConfig

    from pdstage.integrations.vllm.caches import Caches
    from pdstage.layout import Key, View
    from pdstage.probe import Cell, Writer

_PLACE = re.compile(r"\d+")
_PLAIN = {"auto", "bfloat16", "float16", "half", "float32", "float"}
_NUDGE = 1 + 1 / 64
"""vLLM's CPU operators truncate to fp8. Values slightly above a code give the same code rounded and truncated."""


def probes_of(caches: Caches, config: VllmConfig) -> list[LayerProbe]:
    """One probe for each layer of `caches`."""
    layers = config.compilation_config.static_forward_context
    views = caches.layout.by_key()
    probes = []
    for name, keys in caches.keys.items():
        layer, held = layers.get(name), [views[key] for key in keys]
        write = None if layer is None else _writer(layer, held, caches.device, config.model_config.dtype)
        probes.append(LayerProbe(name, Backend.of(layer).name, keys, write))
    return probes


def _writer(
    layer: Any,  # noqa: ANN401  (vLLM's)
    views: Sequence[View],
    device: torch.device,
    dtype: torch.dtype,
) -> Writer | None:
    """The layer's own writer; None if it has none that can be called alone."""
    if isinstance(getattr(layer, "kv_cache", None), list | tuple):
        return _states(layer.kv_cache, views)
    if Backend.of(layer).pages is Pages.INDEX:
        return _index_keys(layer, views[0], device) if device.type == "cuda" else None
    if getattr(getattr(layer, "impl", None), "do_kv_cache_update", None) is None:
        return None
    encoding, roles = _Encoding.of(layer, dtype), {_role(view) for view in views}
    if roles == {"latent"}:
        return _rows(layer, views, encoding or _Encoding(dtype, dtype), device, is_plain=encoding is not None)
    if encoding is not None and "k" in roles and all(view.shards == layer.num_kv_heads for view in views):
        return _rows(layer, views, encoding, device, is_plain=True)
    return None


def _role(view: View) -> str:
    """A view's role without the layer's name."""
    return view.key.role.partition("@")[0]


class _Encoding(NamedTuple):
    """The dtype of the values given to a layer, and the dtype they are stored in."""

    given: torch.dtype
    stored: torch.dtype

    @staticmethod
    def of(layer: Any, dtype: torch.dtype) -> _Encoding | None:  # noqa: ANN401
        """For a model of `dtype`; None for encodings whose stored form this module does not know."""
        name, held = str(getattr(layer, "kv_cache_dtype", "auto")), layer.kv_cache.dtype
        if name in _PLAIN and held.is_floating_point:
            return _Encoding(held, held)
        if name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            return _Encoding(dtype, torch.float8_e5m2 if name == "fp8_e5m2" else current_platform.fp8_dtype())
        return None

    def draw(
        self, rng: np.random.Generator, shape: tuple[int, ...], scale: float
    ) -> tuple[torch.Tensor, NDArray[np.uint8]]:
        """Values for the writer, and the bytes they are stored as, `[..., byte]`."""
        drawn = torch.from_numpy(rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape))
        stored = drawn.to(self.given).to(self.stored)
        given = stored if self.stored == self.given else (stored.float() * (_NUDGE * scale)).to(self.given)
        return given, stored.view(torch.uint8).numpy()


def _rows(
    layer: Any,  # noqa: ANN401  (vLLM's)
    views: Sequence[View],
    encoding: _Encoding,
    device: torch.device,
    *,
    is_plain: bool,
) -> Writer:
    """K and V of every KV head, or MLA's latent and rotary key, by the backend's `do_kv_cache_update`. Packed rows
    (fp8_ds_mla), which are not plain, are proved by position.
    """
    is_latent = _role(views[0]) == "latent"
    if is_latent:
        heads, sizes, scaled_as = 1, (layer.kv_lora_rank, layer.qk_rope_head_dim), "kk"
    else:
        sizes = layer.head_size, getattr(layer, "head_size_v", layer.head_size)
        heads, scaled_as = layer.num_kv_heads, "kv"

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Mapping[Key, NDArray[np.uint8]] | None:
        scales = [float(getattr(layer, f"_{part}_scale_float", 1.0)) for part in scaled_as]
        drawn = [encoding.draw(rng, (len(cells), heads, n), scale) for n, scale in zip(sizes, scales, strict=True)]
        k, v = (given.to(device) for given, _ in drawn)
        slots = _slots(cells, views[0], device)
        if is_latent:
            layer.impl.do_kv_cache_update(k[:, 0], v, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        (_, k_bytes), (_, v_bytes) = drawn
        stored = {"k": k_bytes, "v": v_bytes, "latent": np.concatenate([k_bytes, v_bytes], -1)}
        return {view.key: _share(stored, view) for view in views} if is_plain else None

    return write


def _share(stored: Mapping[str, NDArray[np.uint8]], view: View) -> NDArray[np.uint8]:
    """The bytes of `stored` that are in a view: all of a role's or, for role "v.3", the fourth piece of that length."""
    role, _, part = _role(view).partition(".")
    first = int(part or 0) * view.shard_nbytes
    return stored[role][..., first : first + view.shard_nbytes]


def _index_keys(layer: Any, view: View, device: torch.device) -> Writer:  # noqa: ANN401
    """The sparse indexer's keys, by `indexer_k_quant_and_cache` as its forward pass calls it. Proved by position."""

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> None:
        keys = torch.from_numpy(rng.standard_normal((len(cells), view.width)) * 2.0 ** np.arange(len(cells))[:, None])
        ops.indexer_k_quant_and_cache(
            keys.to(device, torch.bfloat16), layer.kv_cache, _slots(cells, view, device),
            view.width, "ue8m0",
        )  # fmt: skip

    return write


def _states(given: Sequence[torch.Tensor], views: Sequence[View]) -> Writer:
    """A recurrent layer's states, stored where the layer itself indexes them; of a conv state its window."""
    numbers = [_number_of_state(_role(view)) for view in views]
    starts = {n: min(view.offset for view, other in zip(views, numbers, strict=True) if other == n) for n in numbers}
    return stores.into([(view, given[n], view.offset - starts[n]) for view, n in zip(views, numbers, strict=True)])


def _number_of_state(role: str) -> int:
    return 0 if role.startswith("conv") else 1 if role.startswith("ssm") else int(_PLACE.findall(role)[0])


def _slots(cells: Sequence[Cell], view: View, device: torch.device) -> torch.Tensor:
    """vLLM's slot numbers: a block's number times its tokens, and the token."""
    return torch.tensor([cell.item * view.tokens_per_item + cell.token for cell in cells], device=device)
