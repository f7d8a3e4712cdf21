"""Makes a `Layout` from an engine's tensors: one named constructor for each shape that engines use.

    layout = build(sglang_mha(k, v, page_size=64, total_heads=8, tp=(4, 0)))
    layout = build(mla(latents), paged_hnd(draft_k, draft_v, total_heads=8, tp=(4, 0), component="draft"))

A constructor takes one tensor per layer (a list, or one tensor stacked over layers), checks them and returns a `Part`.
`build` makes one layout of any number of parts. `tp` is this rank's (size, rank), `total_heads` the whole model's KV
heads; `Naming` lists the arguments common to all constructors. The two sides must agree only on component names and
layer numbers: page sizes, strides and head counts may differ.

| constructor | tensors of one layer | engine |
|---|---|---|
| `sglang_mha` | k, v `[slots, heads, dim]` | SGLang's MHATokenToKVPool |
| `paged_nhd` | k, v `[pages, page_size, heads, dim]` | FlashAttention's order |
| `paged_hnd` | k, v `[pages, heads, page_size, dim]` | FlashInfer's, TensorRT-LLM's and SGLang's HND |
| `vllm_blocks` | `[blocks, heads, block_size, K and V of a head]`, raw bytes | vLLM 0.33 |
| `vllm_cpu_blocks` | `[blocks, heads, block_size, 2 * dim]`, in CPU_ATTN's orders | vLLM on the CPU |
| `mla` | `[pages, rows, dim]`, or `[slots, 1, dim]` given `page_size` | MLA pools, compressed caches |
| `block_pages` | pages of `[field][field]...` blocks | DeepSeek-V4's `[latents][scales][padding]` |
| `dsa_index` | pages of `[keys][scales]` blocks | DeepSeek sparse attention |
| `mamba_conv` | `[slots, channels, rows]` or `[slots, rows, channels]` | SGLang's MambaPool, vLLM's MambaSpec |
| `mamba_ssm` | `[slots, heads, head_dim, state]` | the same |
| `slot_states` | `[slots, ...]` | request rows, pending groups |

Each raises `UsageError`, naming the tensor, for a wrong shape, stride, device or dtype, for page counts or sizes that
differ between layers, and for a head count other than `tp` gives this rank. `addressed` makes parts for engines that
give only addresses and item lengths.

This module only re-exports names of `arrays`, `kv_shapes` and `state_shapes`.
"""

from __future__ import annotations

from pdstage.layout.arrays import Naming, Part, TensorLike, Tensors, build
from pdstage.layout.kv_shapes import (
    Field,
    block_pages,
    dsa_index,
    mla,
    paged_hnd,
    paged_nhd,
    sglang_mha,
    vllm_blocks,
    vllm_cpu_blocks,
)
from pdstage.layout.state_shapes import Section, mamba_conv, mamba_ssm, slot_states

__all__ = [
    "Field",
    "Naming",
    "Part",
    "Section",
    "TensorLike",
    "Tensors",
    "block_pages",
    "build",
    "dsa_index",
    "mamba_conv",
    "mamba_ssm",
    "mla",
    "paged_hnd",
    "paged_nhd",
    "sglang_mha",
    "slot_states",
    "vllm_blocks",
    "vllm_cpu_blocks",
]
