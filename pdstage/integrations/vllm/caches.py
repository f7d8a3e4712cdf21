"""A worker's KV cache tensors as a pdstage layout.

Layer 6. Must not know requests or nodes. A view's key on both sides is its group's component, its layer's number, and a
role made of the rest of the layer's name, so that a drafter's layer 0 is not the model's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from pdstage.errors import UsageError
from pdstage.integrations.vllm.groups import Group, groups_of
from pdstage.integrations.vllm.states import groups_of_states, state_parts
from pdstage.layout import Key
from pdstage.tensors import build, mla, vllm_blocks
from pdstage.topology import shard_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdstage.layout import Layout
    from pdstage.tensors import Naming, Part
    from pdstage.topology import Topology

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Caches:
    """The layout, where it lies, and of each component how many of its pages are one of vLLM's blocks."""

    layout: Layout
    device: torch.device
    n_pages: dict[str, int]

    @staticmethod
    def of(
        kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig, config: VllmConfig, topology: Topology
    ) -> Caches:
        """Raises `UsageError`, naming the layer, for a cache that is not as vLLM 0.33 makes them."""
        tp = topology.tp_size, topology.tp_rank
        n_heads = config.model_config.get_total_num_kv_heads()
        n_groups = groups_of_states(config.model_config.hf_text_config)
        parts: list[Part] = []
        n_pages: dict[str, int] = {}
        for group in groups_of(kv_cache_config):
            given = kv_cache_config.kv_cache_groups[group.index]
            for name in given.layer_names:
                if name not in kv_caches:
                    continue  # of another pipeline stage
                cache, spec = kv_caches[name], _spec_of(given.kv_cache_spec, name)
                if isinstance(spec, MambaSpec):
                    naming: Naming = {"component": group.component, "layers": (_number(name),)}
                    made = state_parts(cache, spec, tp, n_groups, naming)
                else:
                    _check_pages(group, name, cache, kv_cache_config.num_blocks, n_pages)
                    encoding = _format(cache, spec, config.cache_config.cache_dtype)
                    heads = _total_heads(spec, cache.shape[1], n_heads, tp)
                    made = [_attention(cache, spec, heads, tp, _naming(group, name, encoding))]
                parts += [_named(part, name) for part in made]
        if not parts:
            raise UsageError("no KV cache of this worker can be handed over", remedy="check the model and its groups")
        states = [group.component for group in groups_of(kv_cache_config) if group.is_state]
        layout = build(*parts, slots=states, exact=states)
        return Caches(layout, next(iter(kv_caches.values())).device, n_pages)

    def pages(self, component: str, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """The pages of vLLM's `blocks`: where a kernel wants smaller ones, a block is several."""
        held, n = np.array(blocks, np.int64), self.n_pages.get(component, 1)
        return held if n == 1 else (held[:, None] * n + np.arange(n)).reshape(-1)


def _check_pages(group: Group, name: str, cache: torch.Tensor, n_blocks: int, n_pages: dict[str, int]) -> None:
    ratio = cache.shape[0] // n_blocks
    if cache.ndim != 4 or ratio < 1 or n_pages.setdefault(group.component, ratio) != ratio:
        raise UsageError(
            f"the cache of layer {name!r} has shape {list(cache.shape)}, not [blocks, heads, block_size, content] with "
            f"as many blocks as the other layers of its group",
            remedy="this is vLLM's layout of 0.33: use the pdstage release for your vLLM",
            layer=name,
        )


def _attention(cache: torch.Tensor, spec: AttentionSpec, heads: int, tp: tuple[int, int], naming: Naming) -> Part:
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        per_row = int(spec.tokens_per_state) if spec.tokens_per_state >= 1 else 1
        return mla([cache[:, 0]], tokens_per_row=per_row, **naming)
    content = cache.shape[3] * cache.element_size()
    dense = spec.state_content_bytes is None
    key_nbytes = spec.head_size * cache.element_size() if dense else content // 2
    return vllm_blocks([cache], total_heads=heads, tp=tp, key_nbytes=key_nbytes, **naming)


def _naming(group: Group, name: str, encoding: str) -> Naming:
    return {"component": group.component, "layers": (_number(name),), "format": encoding}


def _total_heads(spec: AttentionSpec, n_held: int, n_heads: int, tp: tuple[int, int]) -> int:
    """The whole model's head slots of a layer of which this rank holds `n_held`: of the model's KV heads, or of another
    number as a drafter has.
    """
    first, end = shard_range(n_heads, *tp)
    n_here: int = spec.num_kv_heads
    if n_here == end - first and n_held % n_here == 0:
        return n_heads * (n_held // n_here)
    n_shards: int = min(tp[0], spec.max_tp_shards or tp[0])
    return n_held * n_shards


def _format(cache: torch.Tensor, spec: AttentionSpec, cache_dtype: str) -> str:
    """The dtype, as other engines name it too; what vLLM packs is named as vLLM does."""
    packed = getattr(spec, "cache_dtype_str", None) or cache_dtype
    plain = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8_e4m3"}
    if spec.state_content_bytes is None and cache.dtype in plain:
        return plain[cache.dtype]
    return f"vllm.{packed}.{spec.kv_quant_mode.name.lower()}"


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _number(name: str) -> int:
    found = _NUMBER.search(name)
    return int(found[0]) if found else 0


def _named(part: Part, name: str) -> Part:
    """The part's views, with what makes the layer's name besides its number in their roles."""
    rest = _NUMBER.sub("*", name, count=1)
    keys = (Key(v.key.component, f"{v.key.role}@{rest}", v.key.layer) for v in part.views)
    return replace(part, views=tuple(replace(v, key=key) for v, key in zip(part.views, keys, strict=True)))
