"""What an operator says of an engine, and configs of small models without weights: what vLLM lays caches out by."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins
from vllm.v1.worker.utils import allocate_kv_cache

from tests.engines import stubs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 4096, "dtype": "float16",
}  # fmt: skip
GEMMA = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 4,
    "num_key_value_heads": 4, "sliding_window": 70, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "dtype": "bfloat16",
}  # fmt: skip
QWEN = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4,
    "num_key_value_heads": 4, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "moe_intermediate_size": 64,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "dtype": "bfloat16",
}  # fmt: skip


@dataclass
class Side:
    """What an operator chooses for one engine."""

    role: str
    tp: int
    block_size: int
    dcp: int = 1
    pp: int = 1
    pcp: int = 1
    layout: str = "LBNHC"
    n_blocks: int = 64  # of the smallest kind there would be: see `config`
    max_model_len: int = 512
    prefix_caching: bool = False
    mamba_cache_mode: str = "none"
    load_failure_policy: str = "fail"
    limits: dict[str, Any] = field(default_factory=dict)
    interleave: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """More of `kv_connector_extra_config`."""


PRODUCER = Side("kv_producer", 4, 16)
CONSUMER = Side("kv_consumer", 2, 64, layout="LBHNC", n_blocks=24)


def config(side: Side, model) -> VllmConfig:
    """vLLM's own, as its command line would make it."""
    load_general_plugins()
    shape = json.loads((model / "config.json").read_text())
    for name in shape["architectures"]:  # vLLM would load them in a process without our stubs, and keep that on disk
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    heads = max(1, shape["num_key_value_heads"] // side.tp)
    page = side.block_size * heads * shape["head_dim"] * 2 * 2 * -(-shape["num_hidden_layers"] // side.pp)
    made = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, seed=0, max_model_len=side.max_model_len),
        cache_config=CacheConfig(
            block_size=side.block_size,
            enable_prefix_caching=side.prefix_caching,
            mamba_cache_mode=side.mamba_cache_mode,  # type: ignore[arg-type]
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=side.tp,
            pipeline_parallel_size=side.pp,
            prefill_context_parallel_size=side.pcp,
            decode_context_parallel_size=side.dcp,
            distributed_executor_backend="mp",
            cp_kv_cache_interleave_size=side.interleave,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=side.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PdStageConnector",
            kv_role=side.role,  # type: ignore[arg-type]
            kv_connector_extra_config={
                "transport": "nixl",
                "staging_nbytes": 4 << 20,
                "trust_layout": True,
                "config": side.limits,
                **side.options,
            },
            kv_load_failure_policy=side.load_failure_policy,  # type: ignore[arg-type]
        ),
        additional_config={"layout": side.layout, "nbytes": page * side.n_blocks},
    )
    made.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU: vLLM has no hybrid caches on the CPU
    return made


def allocated(
    plan: KVCacheConfig, made: VllmConfig, seed: Sequence[int], sizes: list[int] | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A rank's caches, full of noise, and all their bytes."""
    layout = made.cache_config.get_resolved_kv_cache_layout()
    caches = allocate_kv_cache(plan, torch.device(stubs.DEVICE), layout, sizes)
    storage = next(iter(caches.values())).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=stubs.DEVICE).set_(storage)
    raw.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(raw), np.uint8)))
    return caches, raw
