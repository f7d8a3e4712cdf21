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
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from pdstage.integrations.vllm.groups import groups_of
from pdstage.integrations.vllm.metadata import PdStageMetadata, Receive, Remote, Send
from tests.engines.calls import PATIENCE_S
from tests.engines.vllm import models
from tests.engines.vllm.models import LLAMA, config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from pdstage.integrations.vllm import PdStageConnector

N_HEADS, HEAD_SIZE = LLAMA["num_key_value_heads"], LLAMA["head_dim"]


def full(tp, block_size, **more) -> dict[str, KVCacheSpec]:
    """A rank's two layers of attention."""
    return {f"model.layers.{i}.self_attn.attn": attention(tp, block_size, **more) for i in range(2)}


def attention(tp, block_size, kind=FullAttentionSpec, **more) -> KVCacheSpec:
    heads = more.pop("num_kv_heads", max(1, N_HEADS // tp))
    given = {"head_size": HEAD_SIZE, "dtype": torch.float16, **more}
    return kind(block_size=block_size, num_kv_heads=heads, **given)


def until(done: Callable[[], object], says=""):
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, says
        time.sleep(0.001)


@dataclass
class Side:
    """One engine: `specs` says what a rank's layers hold, by TP size and block size. A `replica` has what vLLM's
    process for that data-parallel rank has.
    """

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
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    bind: Callable[[VllmConfig, dict[str, torch.Tensor]], None] | None = None
    """Puts layers with these caches where vLLM's model runner has them."""

    def __post_init__(self):
        self.configs = [self.config(rank) for rank in range(self.tp)]
        specs = [self.specs(self.tp, self.block_size)] * self.tp
        groups = get_global_kv_cache_groups(self.configs[0], specs)
        plans = get_kv_cache_configs(self.configs[0], specs, [4 << 20] * self.tp, groups)
        self.plan = plans[0]
        sizes = [self.kernel_block_size] * len(groups) if self.kernel_block_size else None
        self.n_heads = self.configs[0].model_config.get_total_num_kv_heads()
        self.caches: list[dict[str, torch.Tensor]] = []
        self.memory: list[torch.Tensor] = []  # all bytes of each rank's caches
        for rank, plan in enumerate(plans):
            caches, raw = models.allocated(plan, self.configs[rank], [rank, self.role == "kv_producer"], sizes)
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

    def config(self, rank) -> VllmConfig:
        self.path.mkdir(exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.model))
        told = {"transport": "local", "staging_nbytes": 1 << 20, **self.extra}
        made = config(models.Side(self.role, self.tp, self.block_size, options=told), self.path)
        number = "" if self.replica is None else f"_dp{self.replica}"
        made.kv_transfer_config.engine_id = f"{self.role}-engine{number}"
        made.parallel_config.rank = rank
        made.parallel_config.data_parallel_index = self.replica or 0
        made.parallel_config.data_parallel_external_lb = self.external_lb
        made.cache_config.kv_cache_layout = self.layout
        return made

    def _register(self):
        for made, worker, caches in zip(self.configs, self.workers, self.caches, strict=True):
            if self.bind is not None:
                self.bind(made, caches)
            worker.register_kv_caches(caches)
        told = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware({k: one for k, one in told.items() if one is not None})

    def connector(self, role: KVConnectorRole, rank) -> PdStageConnector:
        return KVConnectorFactory.create_connector(self.configs[rank], role, self.plan)

    def close(self):
        for one in (*self.workers, self.scheduler):
            one.shutdown()

    def held(self, blocks: Sequence[Sequence[int]], n_tokens, start=0) -> dict[str, Any]:
        return {one.component: one.held(blocks[one.index], n_tokens, start) for one in self.groups}

    def step(self, told: PdStageMetadata | None = None):
        """A step of each worker without a forward pass, in vLLM's order; what they say, one a rank."""
        results = []
        for worker in self.workers:
            worker.bind_connector_metadata(PdStageMetadata() if told is None else told)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results.append(worker.get_transfer_results(set()))
            worker.clear_connector_metadata()
        return results

    def turn(self):
        """A step of what the scheduler tells."""
        return self.step(self.scheduler.build_connector_meta(None))

    def view(self, rank, name, memory: torch.Tensor | None = None) -> torch.Tensor:
        """`[page, head, row, byte]` of one rank's layer, of `memory` if that is given, which lies as its caches do."""
        cache = self.caches[rank][name].view(torch.uint8)
        return cache if memory is None else memory.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    def places(self, name, blocks: Sequence[int], tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and row of each token."""
        cache = self.caches[0][name]
        pages, rows = cache.shape[0] // self.plan.num_blocks, cache.shape[2]
        spec = self.spec(name)
        assert spec.block_size == pages * rows * getattr(spec, "tokens_per_state", 1), "a block of several pages"
        block, row = np.divmod(np.asarray(tokens, np.int64), pages * rows)
        at = np.asarray(blocks, np.int64)[block] * pages + row // rows
        return torch.from_numpy(at), torch.from_numpy(row % rows)

    def spec(self, name) -> KVCacheSpec:
        spec = next(one.kv_cache_spec for one in self.plan.kv_cache_groups if name in one.layer_names)
        return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def transfer(src: Side, dst: Side, name, sent: dict[str, Any], wanted: dict[str, Any]) -> set[str]:
    """A request's life between the two engines' workers; the request ids that decode says failed."""
    room = f"{src.configs[0].kv_transfer_config.engine_id}:{name}"
    remote = Remote(room, src.scheduler.scheduler_side._address, src.configs[0].kv_transfer_config.engine_id)
    src.step(PdStageMetadata(sends={name: Send(room, sent)}))
    told = dst.step(PdStageMetadata(receives={name: Receive(remote, wanted)}))
    failed: set[str] = set()
    left = src.tp + dst.tp

    def is_over():
        nonlocal told, left
        for result in (*told, *src.step()):
            failed.update(result.failed_recving)
            left -= len(result.finished_sending) + len(result.finished_recving)
        told = dst.step()
        return not left

    until(is_over, "a rank does not say that its room is over")
    return failed
