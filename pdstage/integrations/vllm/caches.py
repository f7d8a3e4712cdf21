"""A worker's KV cache tensors as a pdstage layout.

A view's key on both sides is its group's component, its layer's number, and a role made of the rest of the layer's
name, so that a drafter's layer 0 is not the model's. A tensor's shape gives only a guess here: `writers` proves it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum, auto
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from pdstage import Key, TokenShard, Topology, UsageError
from pdstage.arguments import quotient
from pdstage.integrations.vllm.groups import Held, groups_of
from pdstage.integrations.vllm.states import groups_of_states, state_parts
from pdstage.layout.topology import Tp, shard_range
from pdstage.tensors import Naming, Part, build, dsa_index, mla, paged_nhd, vllm_blocks, vllm_cpu_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from vllm.config import VllmConfig


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Pages(Enum):
    """How an attention backend lays out a page."""

    ROWS = auto()  # one row per token: each head's K, then its V; or a latent
    CPU = auto()  # all K of a head, then all its V, ordered for the CPU's instruction set
    SLOTS = auto()  # two "heads": one with all heads' K, one with all heads' V
    INDEX = auto()  # all keys of a page, then all their scales


PAGES = {
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend": Pages.CPU,
    "vllm.v1.attention.backends.b12x.B12xPagedAttentionBackend": Pages.SLOTS,
    "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend": Pages.INDEX,
}
"""By the class's module and name, as several share a `get_name()`, and a subclass may store otherwise. All others are
taken as rows, and proved like these (`writers`). docs/attention-backends.md has every backend of vLLM 0.33.
"""


class Backend(NamedTuple):
    """A layer's backend: vLLM's name for it, and its page layout."""

    name: str
    pages: Pages

    @staticmethod
    def of(layer: Any) -> Backend:  # noqa: ANN401  (a layer of vLLM's `static_forward_context`, or None)
        """Rows, named "unknown", if there is no layer to ask."""
        ask = getattr(layer, "get_attn_backend", None)
        if ask is None:
            return Backend("unknown", Pages.ROWS)
        backend = ask()
        pages = PAGES.get(f"{backend.__module__}.{backend.__qualname__}", Pages.ROWS)
        return Backend(str(backend.get_name()), pages)


class Caches:
    """The layout and its device, beside which some caches may be in host memory; the keys of a layer's views, by layer
    name; and the pages per vLLM block, by component.
    """

    def __init__(
        self, kv_caches: dict[str, torch.Tensor], kv_cache_config: KVCacheConfig, config: VllmConfig, topology: Topology
    ) -> None:
        """Raises `UsageError`, naming the layer, for a cache of another shape than vLLM 0.33's."""
        parallel = config.parallel_config  # heads and states are sharded over TP, whoever shares the tokens
        tp = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
        n_heads = config.model_config.get_total_num_kv_heads()
        n_groups = groups_of_states(config.model_config.hf_text_config)
        layers = config.compilation_config.static_forward_context
        parts: list[Part] = []
        self.keys: dict[str, tuple[Key, ...]] = {}
        self.n_pages: dict[str, int] = {}
        self.paged: dict[str, list[torch.Tensor]] = {}
        """The caches `[pages, ...]` that hold tokens, by component."""
        n_blocks = {
            name: kv_cache_config.num_blocks_of(tensor)
            for tensor in kv_cache_config.kv_cache_tensors
            for name in tensor.layers
        }
        groups = groups_of(kv_cache_config, topology.cp_size)
        for group in groups:
            given = kv_cache_config.kv_cache_groups[group.index]
            seen: set[int] = set()
            for name in given.layer_names:
                cache = kv_caches.get(name)
                if cache is None or cache.data_ptr() in seen:
                    continue  # a layer of another pipeline stage, or one that reads an earlier layer's cache
                seen.add(cache.data_ptr())
                spec = given.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                n = _pages_per_block(name, cache, spec, n_blocks.get(name, 0))
                if self.n_pages.setdefault(group.component, n) != n:
                    raise UsageError(
                        f"layer {name!r} has {n} pages in a block, other layers of its group "
                        f"{self.n_pages[group.component]}",
                        remedy="use one attention backend, and one cache dtype, for all layers of a kind",
                        layer=name,
                    )
                number = _NUMBER.search(name)
                naming: Naming = {"component": group.component, "layers": (int(number[0]) if number else 0,)}
                if isinstance(spec, MambaSpec):
                    made = state_parts(cache, spec, tp=tp, n_groups=n_groups, naming=naming)
                else:
                    self.paged.setdefault(group.component, []).append(cache)
                    naming["format"] = _format(cache, spec, config.cache_config.cache_dtype)
                    heads = _total_heads(spec, n_heads, tp)
                    made = [_attention(name, cache, spec, layers.get(name), total_heads=heads, tp=tp, naming=naming)]
                made = [_named(part, name) for part in made]
                self.keys[name] = tuple(view.key for part in made for view in part.views)
                parts += made
        if not parts:
            raise UsageError("no KV cache of this worker can be handed over", remedy="check the model and its groups")
        held = [group for group in groups if group.component in self.n_pages]  # the others are of other pipeline stages
        states = [group.component for group in held if group.is_state]
        shard = TokenShard.by(topology, parallel.cp_kv_cache_interleave_size)
        dealt = {group.component: shard for group in held if group.n_shards > 1}
        self.layout = build(*parts, slots=states, exact=states, owned=dealt)
        self.device = next((one.device for one in kv_caches.values() if one.device.type != "cpu"), torch.device("cpu"))

    def own(self, held: Mapping[str, Held]) -> dict[str, Held]:
        """`held` without the groups of which this pipeline stage has no layer."""
        return {component: one for component, one in held.items() if component in self.n_pages}

    def pages(self, component: str, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """The pages of vLLM's `blocks`: a block is several pages if a kernel wants smaller ones."""
        n = self.n_pages[component]
        return (np.array(blocks, np.int64)[:, None] * n + np.arange(n)).reshape(-1)

    def nbytes(self, held: Mapping[str, Held]) -> int:
        """Bytes of vLLM's blocks in every layer of their components."""
        return sum(
            cache[0].nbytes * self.n_pages[component] * len(one.blocks)
            for component, one in held.items()
            for cache in self.paged[component]
        )

    def clear(self, component: str, blocks: Sequence[int]) -> None:
        """Zeroes vLLM's `blocks` in every layer of the component."""
        for cache in self.paged[component]:
            for page in self.pages(component, blocks):
                cache[int(page)].zero_()


def _pages_per_block(name: str, cache: torch.Tensor, spec: KVCacheSpec, n_blocks: int) -> int:
    """How many of the cache's pages are one of vLLM's blocks: one, or several if a kernel wants smaller ones.

    There may be more pages than the `n_blocks` blocks, such as memory that is only reserved. Raises `UsageError` for
    fewer, and for pages that do not divide a block.
    """
    n = Fraction(0)
    if cache.ndim == 4:
        n = Fraction(1) if isinstance(spec, MambaSpec) else Fraction(spec.block_size) / cache.shape[2]
        n /= spec.tokens_per_state if isinstance(spec, AttentionSpec) else 1
    if n < 1 or n.denominator > 1 or not 0 < n_blocks * n <= cache.shape[0]:
        raise UsageError(
            f"the cache of layer {name!r} has shape {list(cache.shape)}, not [pages, heads, rows, content] with whole "
            f"pages for {n_blocks} blocks of {spec.block_size} tokens",
            remedy="this is vLLM's layout of 0.33: use the pdstage release for your vLLM",
            layer=name,
        )
    return int(n)


def _attention(
    name: str,
    cache: torch.Tensor,
    spec: AttentionSpec,
    layer: object,
    *,
    total_heads: int,
    tp: Tp,
    naming: Naming,
) -> Part:
    """The layer's views, by its backend's page layout. Raises `UsageError` for pages of a shape that no view has."""
    backend, is_latent = Backend.of(layer), isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    n_slots = 2 if backend.pages is Pages.SLOTS else 1 if is_latent else spec.num_kv_heads
    what = ""
    if cache.shape[1] != n_slots:
        what = f"{cache.shape[1]} slots where {n_slots} heads are"
    elif spec.tokens_per_state < 1 and not is_latent:
        what = f"{spec.tokens_per_state} tokens in a row"
    if what:
        raise UsageError(
            f"layer {name!r} cannot be handed over: attention backend {backend.name} keeps {what}",
            remedy="use another attention backend, or serve this model without a KV connector",
            layer=name,
            backend=backend.name,
        )
    match backend.pages:
        case Pages.CPU:
            typed = cache.view(spec.dtype) if cache.dtype == torch.int8 else cache
            packed = getattr(layer, "isa", "") == "amx"
            return vllm_cpu_blocks([typed], total_heads=total_heads, tp=tp, packed=packed, **naming)
        case Pages.SLOTS:
            k, v = (cache[:, slot].reshape(*cache.shape[::2], spec.num_kv_heads, -1) for slot in (0, 1))
            return paged_nhd([k], [v], total_heads=total_heads, tp=tp, **naming)
        case Pages.INDEX:
            kernel_page = getattr(layer, "kv_cache", cache[:, 0]).shape[-2]
            return dsa_index([cache[:, 0].flatten(1)], page_size=cache.shape[2], block_size=kernel_page, **naming)
    if is_latent:
        per_row = int(spec.tokens_per_state) if spec.tokens_per_state >= 1 else 1
        return mla([cache[:, 0]], tokens_per_row=per_row, **naming)
    content = cache.shape[3] * cache.element_size()
    dense = spec.state_content_bytes is None
    key_nbytes = spec.head_size * cache.element_size() if dense else quotient("the length of a packed row", content, 2)
    return vllm_blocks([cache], total_heads=total_heads, tp=tp, key_nbytes=key_nbytes, **naming)


def _total_heads(spec: AttentionSpec, n_heads: int, tp: Tp) -> int:
    """The KV heads of the whole layer, of which this rank holds the spec's. A drafter may have another number than the
    model.
    """
    first, end = shard_range(n_heads, *tp)
    n_held: int = spec.num_kv_heads
    n_shards: int = min(tp[0], spec.max_tp_shards or tp[0])
    return n_heads if n_held == end - first else n_held * n_shards


def _format(cache: torch.Tensor, spec: AttentionSpec, cache_dtype: str) -> str:
    """The dtype by the name that other engines use too; vLLM's name for its packed formats."""
    packed = getattr(spec, "cache_dtype_str", None) or cache_dtype
    plain = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8_e4m3"}
    if spec.state_content_bytes is None and cache.dtype in plain:
        return plain[cache.dtype]
    return f"vllm.{packed}.{spec.kv_quant_mode.name.lower()}"


def _named(part: Part, name: str) -> Part:
    """The part's views, with the rest of the layer's name (without its number) in their roles."""
    rest = _NUMBER.sub("*", name, count=1)
    views = (replace(view, key=view.key._replace(role=f"{view.key.role}@{rest}")) for view in part.views)
    return replace(part, views=tuple(views))
