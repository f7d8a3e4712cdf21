"""vLLM's caches without its engine: real configs, real allocation, real connectors, one a rank, all in this process.

There are no layers, so no backend's writer proves the layouts (`trust_layout`): test_writers.py and tests/e2e do that.

A `Side` is one engine's workers and its scheduler's connector. What their caches hold is compared as values of a whole
model, by layer: `[token, head, content]`, or a request's state.
"""

from __future__ import annotations

import json
import time
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
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import allocate_kv_cache

from pdstage.integrations.vllm.groups import groups_of
from pdstage.integrations.vllm.metadata import PdStageMetadata, Receive, Remote, Send
from tests.engines import stubs
from tests.engines.vllm.models import look_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from pdstage.integrations.vllm import PdStageConnector

N_HEADS, HEAD_SIZE, N_LAYERS = 8, 16, 2
PATIENCE_S = 240.0
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": N_HEADS,
    "head_dim": HEAD_SIZE, "vocab_size": 512, "max_position_embeddings": 4096, "dtype": "float16",
}  # fmt: skip


def config(
    folder: Path, role: str, *, tp: int = 1, rank: int = 0, block_size: int = 16, layout: str = "LBHNC",
    replica: int | None = None, external_lb: bool = False, **extra: Any,
) -> VllmConfig:  # fmt: skip
    """As vLLM's command line would make it; a `replica` as its process for that data-parallel rank has it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    look_at(MODEL["architectures"])
    made = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0, max_model_len=512
        ),
        cache_config=CacheConfig(block_size=block_size),
        parallel_config=ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PdStageConnector", kv_connector_module_path="pdstage.integrations.vllm", kv_role=role,
            kv_buffer_device=stubs.DEVICE.partition(":")[0],
            engine_id=f"{role}-engine" if replica is None else f"{role}-engine_dp{replica}",
            kv_connector_extra_config={
                "transport": "local", "staging_nbytes": 1 << 20, "trust_layout": True, **extra,
            },
        ),
    )  # fmt: skip
    made.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU: vLLM has no hybrid caches on the CPU
    made.parallel_config.rank = rank
    made.parallel_config.data_parallel_index = replica or 0
    made.parallel_config.data_parallel_external_lb = external_lb
    made.cache_config.kv_cache_layout = layout
    return made


Specs = "Callable[[int, int], dict[str, KVCacheSpec]]"  # (tp size, block size) -> a rank's specs, by layer


@dataclass
class Side:
    """One engine: `specs` says what a rank's layers hold."""

    path: Path
    role: str
    specs: Callable[[int, int], dict[str, KVCacheSpec]]
    tp: int = 1
    block_size: int = 16
    layout: str = "LBHNC"
    kernel_block_size: int | None = None
    replica: int | None = None
    external_lb: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    bind: Callable[[VllmConfig, dict[str, torch.Tensor]], None] | None = None
    """Puts layers with these caches where vLLM's model runner has them."""

    def __post_init__(self) -> None:
        given = {
            "tp": self.tp,
            "block_size": self.block_size,
            "layout": self.layout,
            "replica": self.replica,
            "external_lb": self.external_lb,
            **self.extra,
        }
        self.configs = [config(self.path, self.role, rank=rank, **given) for rank in range(self.tp)]
        specs = [self.specs(self.tp, self.block_size)] * self.tp
        groups = get_global_kv_cache_groups(self.configs[0], specs)
        plans = get_kv_cache_configs(self.configs[0], specs, [4 << 20] * self.tp, groups)
        self.plan = plans[0]
        sizes = [self.kernel_block_size or self.block_size] * len(groups) if self.kernel_block_size else None
        self.n_heads = self.configs[0].model_config.get_total_num_kv_heads()
        self.caches: list[dict[str, torch.Tensor]] = []
        self.memory: list[torch.Tensor] = []  # all bytes of each rank's caches
        for rank, plan in enumerate(plans):
            layout = self.configs[rank].cache_config.get_resolved_kv_cache_layout()
            caches = allocate_kv_cache(plan, torch.device(stubs.DEVICE), layout, sizes)
            storage = next(iter(caches.values())).untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=stubs.DEVICE).set_(storage)
            noise = np.random.default_rng([rank, self.role == "kv_producer"]).integers(0, 256, len(raw), np.uint8)
            raw.copy_(torch.from_numpy(noise))
            self.caches.append(caches)
            self.memory.append(raw)
        self.groups = groups_of(self.plan)
        self.scheduler = self.connector(KVConnectorRole.SCHEDULER, 0)
        self.workers = [self.connector(KVConnectorRole.WORKER, rank) for rank in range(self.tp)]
        try:
            self._register()
        except BaseException:
            self.close()
            raise

    def _register(self) -> None:
        for made, worker, caches in zip(self.configs, self.workers, self.caches, strict=True):
            if self.bind is not None:
                self.bind(made, caches)
            worker.register_kv_caches(caches)
        told = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware({k: one for k, one in told.items() if one is not None})

    def connector(self, role: KVConnectorRole, rank: int) -> PdStageConnector:
        return KVConnectorFactory.create_connector(self.configs[rank], role, self.plan)

    def close(self) -> None:
        for one in (*self.workers, self.scheduler):
            one.shutdown()

    def held(self, blocks: Sequence[Sequence[int]], n_tokens: int, start: int = 0) -> dict[str, Any]:
        return {one.component: one.held(blocks[one.index], n_tokens, start) for one in self.groups}

    def step(self, told: PdStageMetadata | None = None) -> Any:
        """A step of each worker without a forward pass, in vLLM's order; what they say, one a rank."""
        results = []
        for worker in self.workers:
            worker.bind_connector_metadata(told or PdStageMetadata())
            worker.start_load_kv(None)
            worker.wait_for_save()
            results.append(worker.get_transfer_results(set()))
            worker.clear_connector_metadata()
        return results

    def layer(self, rank: int, name: str, blocks: Sequence[int], tokens: range) -> npt.NDArray[np.uint8]:
        """`[token, head, byte]` of one rank's layer."""
        cache = self.caches[rank][name].view(torch.uint8).cpu().numpy()
        size = cache.shape[2] * (cache.shape[0] // self.plan.num_blocks)
        spec = self.spec(name)
        assert spec.block_size == size * getattr(spec, "tokens_per_state", 1), "a block of several pages"
        rows = [divmod(token, size) for token in tokens]
        pages = cache.shape[0] // self.plan.num_blocks
        return np.stack([
            cache[blocks[at] * pages + row // cache.shape[2], :, row % cache.shape[2]] for at, row in rows
        ]) if rows else np.zeros((0, *cache.shape[1::2]), np.uint8)  # fmt: skip

    def spec(self, name: str) -> KVCacheSpec:
        spec = next(one.kv_cache_spec for one in self.plan.kv_cache_groups if name in one.layer_names)
        return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def transfer(src: Side, dst: Side, name: str, sent: dict[str, Any], wanted: dict[str, Any]) -> set[str]:
    """A request's life between the two engines' workers; the request ids that decode says failed."""
    room = f"{src.configs[0].kv_transfer_config.engine_id}:{name}"
    remote = Remote(room, src.scheduler.scheduler_side._address, src.configs[0].kv_transfer_config.engine_id)
    src.step(PdStageMetadata(sends={name: Send(room, sent)}))
    first = dst.step(PdStageMetadata(receives={name: Receive(remote, wanted)}))
    waiting = {"sending": set(range(src.tp)), "recving": set(range(dst.tp))}
    failed: set[str] = set()
    until = time.monotonic() + PATIENCE_S
    while any(waiting.values()):
        assert time.monotonic() < until, f"still {waiting}"
        for rank, result in enumerate(first or dst.step()):
            failed |= result.failed_recving
            if result.finished_recving:
                waiting["recving"].remove(rank)
        first = None
        for rank, result in enumerate(src.step()):
            if result.finished_sending:
                waiting["sending"].remove(rank)
        time.sleep(0.001)
    return failed
