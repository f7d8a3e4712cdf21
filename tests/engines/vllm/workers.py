"""One rank of vLLM in a process of its own: all is real but the model, which writes `oracle`'s bytes.

Real are the parallel state (gloo), the connector's making, the cache's allocation and views, and the order in which a
model runner calls the connector (`vllm.v1.worker.gpu.kv_connector`). The model checks what attention would read before
it writes (`model`).
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
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
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.attention.ops.pcp import maybe_gather_mla_latent_cache_inputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.pcp_manager import maybe_build_pcp_manager
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes

from tests.engines import stubs
from tests.engines.vllm import oracle
from tests.engines.vllm.model import Model, Sequence, heads_of, put

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def serve(pipe: Connection, config: VllmConfig, rank: int, meet: str) -> None:
    """The process: answers calls of the executor by name until the pipe closes."""
    worker = Worker(config, rank, meet)
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            worker.shutdown()
            return
        try:
            answer: tuple[bool, Any] = (True, getattr(worker, method)(*args, **kwargs))
        except Exception:  # noqa: BLE001  (carried to the test, which fails with it)
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class Worker(Model):
    """What vLLM's executor calls."""

    def __init__(self, config: VllmConfig, rank: int, meet: str) -> None:
        self.config, self.rank, self.tp = config, rank, config.parallel_config.tensor_parallel_size
        config.parallel_config.rank = rank
        self.sequences: dict[str, Sequence] = {}
        self.admitted: dict[str, int] = {}
        self.late_ms = 2.0
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
            self.pcp = maybe_build_pcp_manager(config, torch.device("cpu"), supports_mm_inputs=False)
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
            layout = self.config.cache_config.get_resolved_kv_cache_layout()
            caches = allocate_kv_cache(kv, self.device, layout)
            views = {name: cache.view(torch.uint8) for name, cache in caches.items()}
            raw = next(iter(views.values())).untyped_storage()
            self.raw = torch.empty(0, dtype=torch.uint8, device=self.device).set_(raw)
            self.raw.copy_(torch.from_numpy(np.random.default_rng(self.rank).integers(0, 256, len(self.raw), np.uint8)))
            self.shadow = self.raw.cpu().clone()
            self.pools = views
            self.shadows = {
                name: self.shadow.as_strided(view.shape, view.stride(), view.storage_offset())
                for name, view in views.items()
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
        self.be_late()
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
            sequence = Sequence(tokens, new.block_ids, new.num_computed_tokens, n_prefill=len(tokens))
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

    def written_by_compute(self) -> tuple[dict[str, torch.Tensor], ...]:
        return super().written_by_compute() if self.pcp is None else (self.shadows,)

    def compute_layer(self, name: str, at: int, spec: KVCacheSpec, batch: list[tuple[Sequence, int]]) -> None:
        """Under prefill context parallelism vLLM's own code says which tokens this rank computes, and which of all
        ranks' tokens it writes where. The shadow holds what this rank must have of all tokens.
        """
        super().compute_layer(name, at, spec, batch)
        if self.pcp is None:
            return
        counts = np.array([n for _, n in batch])
        starts = np.array([sequence.computed for sequence, _ in batch])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        is_prefill = np.array([sequence.computed < sequence.n_prefill for sequence, _ in batch])
        segments, per_rank = self.pcp._build_batch_layout(counts, starts, is_prefill, offsets)
        mine = segments[self.pcp.pcp_rank]
        truth = np.concatenate([
            self.truth(oracle.digests(sequence.tokens)[sequence.computed : sequence.computed + n], name)[:, 0]
            for sequence, n in batch
        ])  # fmt: skip
        latents = torch.zeros(max(per_rank), truth.shape[1], dtype=torch.uint8)
        for one in mine:
            latents[one.rank_local_batch_slice] = torch.from_numpy(truth[one.global_batch_slice])
        slots = np.full((1, offsets[-1]), PAD_SLOT_ID)
        for offset, (sequence, n) in zip(offsets, batch, strict=False):
            held = self.own(spec, np.arange(sequence.computed, sequence.computed + n))
            blocks, rows = self.places(spec, sequence.blocks[at], held)
            slots[0, offset + held - sequence.computed] = blocks * spec.block_size + rows
        (gathered,) = self.pcp._convert_to_gathered_slot_mappings(torch.from_numpy(slots))
        n_decode = sum(one.num_tokens for one in mine if not is_prefill[one.global_batch_req_idx])
        n_rope = self.config.model_config.hf_text_config.qk_rope_head_dim * 2
        kv, rope, where = maybe_gather_mla_latent_cache_inputs(
            latents[:, :-n_rope], latents[:, None, -n_rope:], gathered, n_decode, True, self.pcp.shard_decode_requests
        )
        kept = where != PAD_SLOT_ID
        blocks, rows = where[kept] // spec.block_size, where[kept] % spec.block_size
        put(self.pools[name], blocks, rows, torch.cat([kv, rope[:, 0]], 1)[kept][:, None])

    def computed(self, name: str) -> None:
        """As an attention layer ends, in `maybe_transfer_kv_layer`."""
        connector = kv_transfer.get_kv_transfer_group()
        assert connector.has_connector_metadata()
        connector.save_kv_layer(name, self.pools[name], None)

    def be_late(self) -> None:
        """The model's work on a GPU begins later than the connector is called. On the double all work does."""
        if stubs.on_gpu():
            torch.cuda._sleep(int(self.late_ms * 2e6))

    def forget_events(self) -> None:
        """From now on no copy waits for the model's work."""
        kv_transfer.get_kv_transfer_group().worker_side._event = lambda: None
        self.late_ms = 20.0

    def set_clock(self, offset_s: float) -> None:
        real = time.time
        time.time = lambda: real() + offset_s

    def written(self) -> int:
        side = kv_transfer.get_kv_transfer_group().worker_side
        return int(side.prefill.stats()["bytes_written"]) if side.prefill is not None else 0

    def sending(self) -> int:
        """Rooms that the prefill node has begun and not ended."""
        side = kv_transfer.get_kv_transfer_group().worker_side
        return sum(not sender.released for sender in side.prefill.handles())

    def shutdown(self) -> None:
        kv_transfer.ensure_kv_transfer_shutdown()
