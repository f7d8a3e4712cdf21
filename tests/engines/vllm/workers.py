"""One rank of vLLM in a process of its own: all is real but the model, which writes `oracle`'s bytes.

Real are the parallel state (gloo), the connector's making, the cache's allocation and views, and the order in which a
model runner calls the connector (`vllm.v1.worker.gpu.kv_connector`). The model checks what attention would read before
it writes (`model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import kv_transfer
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    get_dcp_world_size_and_rank,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
    init_distributed_environment,
)
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.utils import torch_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.worker_base import CompilationTimes

from tests.engines import stubs
from tests.engines.vllm.model import Model, Sequence, heads_of
from tests.engines.vllm.models import allocated

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class Worker(Model):
    """What vLLM's executor calls."""

    def __init__(self, config: VllmConfig, rank: int, meet: str) -> None:
        self.config, self.rank, self.tp = config, rank, config.parallel_config.tensor_parallel_size
        config.parallel_config.rank = rank
        self.sequences: dict[str, Sequence] = {}
        self.admitted: dict[str, int] = {}
        self.device = torch.device(stubs.DEVICE)
        if self.device.type != "cpu":
            torch.cuda.set_device(self.device)
        torch_utils.PIN_MEMORY = False  # there is no accelerator, whatever vLLM's wheel was built for
        with set_current_vllm_config(config):
            parallel = config.parallel_config
            init_distributed_environment(parallel.world_size, rank, meet, rank, "gloo")
            ensure_model_parallel_initialized(
                self.tp, parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )  # fmt: skip
        self.tp_rank = get_tp_group().rank_in_group
        self.dealt = *get_dcp_world_size_and_rank(), config.parallel_config.cp_kv_cache_interleave_size

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """One spec a layer of this pipeline stage, of the model's own config."""
        model, text = self.config.model_config, self.config.model_config.hf_text_config
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        shape = {
            "block_size": self.config.cache_config.block_size,
            "num_kv_heads": model.get_num_kv_heads(self.config.parallel_config),
            "head_size": model.get_head_size(),
            "dtype": model.dtype,
        }
        window = getattr(text, "sliding_window", None)
        full = MLAAttentionSpec(**shape) if model.use_mla else FullAttentionSpec(**shape)
        specs: dict[str, KVCacheSpec] = {}
        stage = get_pp_group()
        for number in range(*get_pp_indices(len(kinds), stage.rank_in_group, stage.world_size)):
            kind = kinds[number]
            if kind == "linear_attention":
                specs[f"model.layers.{number}.linear_attn"] = self.state_spec(full.page_size_bytes)
            else:
                spec = full if "full" in kind else SlidingWindowSpec(**shape, sliding_window=window)
                specs[f"model.layers.{number}.self_attn.attn"] = spec
        return specs

    def state_spec(self, page_nbytes: int) -> MambaSpec:
        """A gated delta net's states, as its layer would say, in pages as large as attention's."""
        text = self.config.model_config.hf_text_config
        heads, sizes = (text.linear_num_key_heads, text.linear_num_value_heads), (
            text.linear_key_head_dim, text.linear_value_head_dim,
        )  # fmt: skip
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            self.tp, *heads, *sizes, text.linear_conv_kernel_dim
        )
        cache = self.config.cache_config
        is_aligned = cache.mamba_cache_mode == "align"
        return MambaSpec(
            block_size=cache.block_size if is_aligned else self.config.model_config.max_model_len,
            mamba_cache_mode=cache.mamba_cache_mode,
            shapes=shapes,
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page_nbytes,
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [self.config.additional_config["layout"]]

    def set_kv_cache_layout(self, layout: str, interleave: int) -> None:
        self.config.cache_config.kv_cache_layout = layout
        self.config.parallel_config.cp_kv_cache_interleave_size = interleave

    def determine_available_memory(self) -> int:
        return int(self.config.additional_config["nbytes"])

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        """Allocates and fills the pool with noise, and gives it to the connector."""
        kv = self.kv = configs[self.rank]
        self.config.cache_config.num_gpu_blocks = kv.num_blocks
        self.config.cache_config.hash_block_size = kv.hash_block_size
        self.config.cache_config.cache_hit_alignment_tokens = kv.cache_hit_alignment_tokens
        with set_current_vllm_config(self.config):
            kv_transfer.ensure_kv_transfer_initialized(self.config, kv)
            caches, self.raw = allocated(kv, self.config, [self.rank])
            self.shadow = self.raw.cpu().clone()
            self.pools = {name: cache.view(torch.uint8) for name, cache in caches.items()}
            self.shadows = {
                name: self.shadow.as_strided(view.shape, view.stride(), view.storage_offset())
                for name, view in self.pools.items()
            }
            self.groups = [(group.kv_cache_spec, group.layer_names) for group in kv.kv_cache_groups]
            model = self.config.model_config
            self.heads = [0] if model.use_mla else heads_of(model.get_total_num_kv_heads(), self.tp, self.tp_rank)
            self.connector = ActiveKVConnector(self.config, caches)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        metadata = kv_transfer.get_kv_transfer_group().get_handshake_metadata()
        tp_rank, parallel = get_tp_group().rank_in_group, self.config.parallel_config
        if parallel.prefill_context_parallel_size > 1 and parallel.decode_context_parallel_size > 1:
            tp_rank += get_pcp_group().rank_in_group * self.tp
        return None if metadata is None else {(get_pp_group().rank_in_group, tp_rank): metadata}

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """A step, in the order of vLLM's model runner."""
        for name in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self.sequences.pop(name, None)
        self.admit(scheduled)
        self.prepare_blocks(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return self.connector.no_forward(scheduled)
        with set_current_vllm_config(self.config):
            self.connector.pre_forward(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        if stubs.on_gpu():  # the model's work begins later than the connector is called; on the double all work does
            torch.cuda._sleep(4_000_000)
        sampled = self.forward([(self.sequences[name], scheduled.num_scheduled_tokens[name]) for name in names])
        self.connector.finish_forward()
        transfers = self.connector.post_forward(scheduled.finished_req_ids)
        if not get_pp_group().is_last_rank:
            return ModelRunnerOutput.with_kv_conn_output_only(transfers)
        output = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        output.kv_connector_output = transfers
        return output

    def admit(self, scheduled: SchedulerOutput) -> None:
        for new in scheduled.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids or [])
            sequence = Sequence(tokens, new.block_ids, new.num_computed_tokens)
            self.sequences[new.req_id] = sequence
            self.admitted.setdefault(new.req_id, sequence.computed)
            self.read(sequence, self.adopt)
            self.adopt_cleared(sequence)
        cached = scheduled.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "the second model runner is told of resumed requests as of new ones"
        for name, computed, more in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            sequence = self.sequences[name]
            sequence.computed = computed
            for held, new_blocks in zip(sequence.blocks, more or (), strict=False):
                held.extend(new_blocks)

    def admissions(self) -> dict[str, int]:
        """How many tokens each request had computed, here or elsewhere, when it was first scheduled."""
        return self.admitted

    def computed(self, name: str) -> None:
        """As an attention layer ends, in `maybe_transfer_kv_layer`."""
        connector = kv_transfer.get_kv_transfer_group()
        assert connector.has_connector_metadata()
        connector.save_kv_layer(name, self.pools[name], None)

    def written(self) -> int:
        side = kv_transfer.get_kv_transfer_group().worker_side
        return int(side.prefill.stats()["bytes_written"]) if side.prefill is not None else 0

    def sending(self) -> int:
        """Rooms that the prefill node has begun and not ended."""
        side = kv_transfer.get_kv_transfer_group().worker_side
        return sum(not sender.released for sender in side.prefill.handles())

    def shutdown(self) -> None:
        kv_transfer.ensure_kv_transfer_shutdown()
