"""The class that vLLM loads. It forwards calls to the side that its role creates; that side documents them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pdstage.integrations.vllm.scheduler import Answer, SchedulerSide
from pdstage.integrations.vllm.settings import Settings
from pdstage.integrations.vllm.stats import PdStagePromMetrics, PdStageStats
from pdstage.integrations.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from pdstage.integrations.vllm.metadata import PdStageMetadata, PdStageWorkerMeta


def _show_log() -> None:
    """vLLM has handlers at its own logger only. From now on they show pdstage's lines too, from vLLM's level on, unless
    logging is configured for pdstage: by its logger, or by the root.
    """
    ours = logging.getLogger("pdstage")
    if not logging.root.handlers and all(isinstance(handler, logging.NullHandler) for handler in ours.handlers):
        ours.parent = logging.getLogger("vllm")
        ours.setLevel(ours.level)  # forgets which levels were enabled


class PdStageConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM's KV connector on pdstage. It accepts every cache layout, so `get_required_kvcache_layout` stays None."""

    _cache_hit_source = CacheHitSource.P2P
    supports_divergent_local_hybrid_hits = True
    """A state is always loaded, and of other groups what each lacks."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _show_log()
        settings = Settings(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = SchedulerSide(vllm_config, kv_cache_config, settings)
        else:
            self.worker_side = WorkerSide(vllm_config, kv_cache_config, settings)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """No: a peer would keep using the address of unmapped memory."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdStageStats:
        return PdStageStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> PdStagePromMetrics:  # noqa: ANN401  (vLLM's own types, passed on)
        return PdStagePromMetrics(*given)

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.arrived(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids  # type: ignore[no-any-return]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PdStageMetadata:
        return self.scheduler_side.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.ended(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> Answer:
        """What MultiConnector calls where one of its connectors knows no groups, such as ExampleConnector."""
        return self.scheduler_side.finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Answer:
        return self.scheduler_side.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return bool(self.scheduler_side.news)

    def reset_cache(self) -> bool:
        return self.scheduler_side.reset()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler_side.serve(metadata)

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.handshake()

    def handle_preemptions(self, kv_connector_metadata: PdStageMetadata) -> None:
        self.worker_side.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: PdStageMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.bound(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        self.worker_side.begin(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only once all its layers have arrived."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing to save: rooms are sent from the caches themselves. Layers computed so far may be sent now."""
        self.worker_side.passed(layer_name)

    def wait_for_save(self) -> None:
        """Nothing to wait for: the blocks stay until the room is released. This step's tokens may be sent now."""
        self.worker_side.computed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker_side.results()

    def build_connector_worker_meta(self) -> PdStageWorkerMeta | None:
        return self.worker_side.told()

    def get_kv_connector_stats(self) -> PdStageStats | None:
        return self.worker_side.stats() if self.role is KVConnectorRole.WORKER else None

    def shutdown(self) -> None:
        side = self.worker_side if self.role is KVConnectorRole.WORKER else self.scheduler_side
        side.close()
