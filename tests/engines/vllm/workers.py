"""One rank of vLLM in a process of its own: all is real but the model, which writes `oracle`'s bytes.

Real are the parallel state (gloo), the connector's making, the cache's allocation and views, and the order in which a
model runner calls the connector (`vllm.v1.worker.gpu.kv_connector`). The model checks what attention would read before
it writes. Beside each pool is its shadow, which pdstage never sees: what the pool must hold, byte for byte. It is in
host memory. Where the pool is on a device, work on it is launched in the device's current stream, as a model's is.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, is_conv_state_dim_first
from vllm.utils import torch_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace
from vllm.v1.worker.worker_base import CompilationTimes

from tests.engines import stubs
from tests.engines.vllm import oracle
from tests.engines.vllm.models import allocated

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    Bytes = NDArray[np.uint8]


@dataclass
class Sequence:
    """A request as a model runner knows it."""

    tokens: list[int]
    blocks: tuple[list[int], ...]
    computed: int


def heads_of(total, tp, rank) -> list[int]:
    """The KV heads of a rank, as vLLM shards them: replicated where there are fewer than ranks."""
    each = max(1, total // tp)
    first = rank * each if total >= tp else rank * total // tp
    return list(range(first, first + each))


def layer_number(name):
    return int(name.split(".")[2])


def take(view: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> Bytes:
    return view[blocks.to(view.device), :, rows.to(view.device)].cpu().numpy()  # type: ignore[no-any-return]


class Worker:
    """What vLLM's executor calls, and the model's share of this rank."""

    def __init__(self, config: VllmConfig, rank, meet):
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
        # Under decode context parallelism: how many ranks, which one this is, how many tokens each has in turn.
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

    def state_spec(self, page_nbytes) -> MambaSpec:
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

    def set_kv_cache_layout(self, layout, interleave):
        self.config.cache_config.kv_cache_layout = layout
        self.config.parallel_config.cp_kv_cache_interleave_size = interleave

    def determine_available_memory(self):
        return int(self.config.additional_config["nbytes"])

    def initialize_from_config(self, configs: list[KVCacheConfig]):
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

    def admit(self, scheduled: SchedulerOutput):
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

    def computed(self, name):
        """As an attention layer ends, in `maybe_transfer_kv_layer`."""
        connector = kv_transfer.get_kv_transfer_group()
        assert connector.has_connector_metadata()
        connector.save_kv_layer(name, self.pools[name], None)

    def written(self):
        side = kv_transfer.get_kv_transfer_group().worker_side
        return int(side.prefill.stats()["bytes_written"]) if side.prefill is not None else 0

    def sending(self):
        """Rooms that the prefill node has begun and not ended."""
        side = kv_transfer.get_kv_transfer_group().worker_side
        return sum(not sender.released for sender in side.prefill.handles())

    def shutdown(self):
        kv_transfer.ensure_kv_transfer_shutdown()

    # The model.

    def prepare_blocks(self, scheduled: SchedulerOutput):
        for block in scheduled.new_block_ids_to_zero or ():
            for view in (*self.pools.values(), *self.shadows.values()):
                view[block] = 0
        for views in (self.pools, self.shadows):
            copy_kv_cache_blocks_inplace(views.values(), self.kv.num_blocks, scheduled.kv_cache_block_copies or ())

    def forward(self, batch: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Layer by layer: reads all before, writes n positions of each; then samples where these were the last known
        tokens.
        """
        for sequence, _ in batch:
            self.read(sequence, self.check)
        layers = [(name, at, spec) for at, (spec, names) in enumerate(self.groups) for name in names]
        for name, at, spec in sorted(layers, key=lambda layer: layer_number(layer[0])):
            for sequence, n in batch:
                self.compute(name, at, spec, sequence, n)
            self.computed(name)
        sampled: list[list[int]] = []
        for sequence, n in batch:
            ends = sequence.computed + n >= len(sequence.tokens)
            sampled.append([oracle.next_token(sequence.tokens)] if ends else [])
            sequence.tokens += sampled[-1]
        return sampled

    def compute(self, name, at, spec: KVCacheSpec, sequence: Sequence, n):
        """One layer's, of the group with number `at`."""
        digest = oracle.digests(sequence.tokens)
        start, stop = sequence.computed, sequence.computed + n
        if isinstance(spec, MambaSpec):
            state = torch.from_numpy(self.state(digest[stop - 1], spec, name))
            block = sequence.blocks[at][(stop - 1) // spec.block_size]
            for views in (self.pools, self.shadows):
                views[name][block, 0, 0] = state.to(views[name].device)
            return
        mine = self.own(spec, np.arange(start, stop))
        truth = torch.from_numpy(self.truth(digest[mine], name))
        blocks, rows = self.places(spec, sequence.blocks[at], mine)
        for view in (self.pools[name], self.shadows[name]):
            view[blocks.to(view.device), :, rows.to(view.device)] = truth.to(view.device)

    def truth(self, digest: NDArray[np.uint64], name) -> Bytes:
        return oracle.cells(digest, layer_number(name), self.heads, self.pools[name].shape[3])

    def state(self, digest: np.uint64, spec: MambaSpec, name) -> Bytes:
        """This rank's `[conv state][recurrent state]` after all tokens of the digest: its share of Q, K and V each."""
        rows = spec.shapes[0][1 if is_conv_state_dim_first() else 0]
        n_heads, *inner = spec.shapes[1]
        v = n_heads * inner[0]
        q = (spec.shapes[0][0 if is_conv_state_dim_first() else 1] - v) // 2
        sections = (0, q), (q * self.tp, q), (2 * q * self.tp, v)
        channels = [base + self.tp_rank * n + at for base, n in sections for at in range(n)]
        one, layer = np.array([digest]), layer_number(name)
        conv = oracle.cells(one, layer, channels, rows * 2).reshape(len(channels), rows, 2)
        if not is_conv_state_dim_first():
            conv = conv.transpose(1, 0, 2)
        heads = [10_000 + self.tp_rank * n_heads + at for at in range(n_heads)]
        recurrent = oracle.cells(one, layer, heads, inner[0] * inner[1] * 4)
        return np.concatenate([conv.ravel(), recurrent.ravel()])

    def own(self, spec: KVCacheSpec, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of them that this rank has (vllm/v1/worker/block_table.py, ComputeSlotMappingKernel)."""
        size, rank, interleave = self.dealt
        return positions[positions // interleave % size == rank] if spec.dcp_sharded else positions

    def places(
        self, spec: KVCacheSpec, blocks: list[int], positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and row of each position of this rank's."""
        size, _, interleave = self.dealt if spec.dcp_sharded else (1, 0, 1)
        within = positions % (spec.block_size * size)
        rows = within // (size * interleave) * interleave + within % interleave
        table = np.asarray(blocks)
        return torch.from_numpy(table[positions // (spec.block_size * size)]), torch.from_numpy(rows)

    def read(self, sequence: Sequence, check):
        """What attention reads of the computed positions, layer by layer."""
        digest = oracle.digests(sequence.tokens)
        for at, (spec, names) in enumerate(self.groups):
            if isinstance(spec, MambaSpec):
                for name in names if sequence.computed else ():
                    where = torch.tensor([sequence.blocks[at][(sequence.computed - 1) // spec.block_size]])
                    state = self.state(digest[sequence.computed - 1], spec, name)
                    check(name, where, torch.zeros_like(where), state[None, None], 0)
                continue
            first = max(0, sequence.computed - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
            start = first
            if check == self.adopt:  # whole blocks may come: what is in none of a window's blocks is not looked at
                start = first // spec.block_size * spec.block_size
            positions = self.own(spec, np.arange(start, sequence.computed))
            if not len(positions):
                continue
            blocks, rows = self.places(spec, sequence.blocks[at], positions)
            for name in names:
                check(name, blocks, rows, self.truth(digest[positions], name), first - start)

    def adopt(self, name, blocks: torch.Tensor, rows: torch.Tensor, truth: Bytes, outside):
        """Computed positions of a new request were loaded, or hit: from now on the pool must hold them.

        The first `outside` of them are before a window: they may be there.
        """
        found = take(self.pools[name], blocks[:outside], rows[:outside])
        here = np.concatenate([(found == truth[:outside]).all((1, 2)), np.full(len(truth) - outside, True)])
        self.shadows[name][blocks[here], :, rows[here]] = torch.from_numpy(truth[here])

    def adopt_cleared(self, sequence: Sequence):
        """Where groups reinterpret each other's blocks, what no token of a loaded block fills is zero: a NaN there
        would be one in attention too.
        """
        for at, (spec, names) in enumerate(self.groups if self.kv.needs_kv_cache_zeroing else ()):
            size = spec.block_size * (self.dealt[0] if spec.dcp_sharded else 1)
            block, n_rest = divmod(sequence.computed, size)
            if isinstance(spec, MambaSpec) or not n_rest:
                continue
            empty = torch.ones(spec.block_size, dtype=torch.bool)
            held = self.own(spec, np.arange(block * size, sequence.computed))
            empty[self.places(spec, sequence.blocks[at], held)[1]] = False
            for name in names:
                self.shadows[name][sequence.blocks[at][block]][:, empty] = 0

    def check(self, name, blocks: torch.Tensor, rows: torch.Tensor, truth: Bytes, _):
        found = take(self.pools[name], blocks, rows)
        wrong = np.argwhere(found != truth)
        assert not len(wrong), (
            f"rank {self.rank} continues on wrong bytes: {len(wrong)} of {truth.size} in {name}, the first at position"
            f" {wrong[0][0]} of {len(truth)}, block {int(blocks[wrong[0][0]])}, head {wrong[0][1]}, byte {wrong[0][2]}"
        )

    def spoil(self, blocks: list[int], seed):
        """Free blocks are filled with other noise: nobody may read or write them any more."""
        draw = np.random.default_rng([seed, self.rank])
        for block in blocks:
            for name, view in self.pools.items():
                noise = torch.from_numpy(draw.integers(0, 256, view.shape[1:], np.uint8))
                view[block] = noise.to(view.device)
                self.shadows[name][block] = noise

    def compare(self):
        """Every byte of the pool; their number."""
        raw = self.raw.cpu()
        wrong = torch.nonzero(raw != self.shadow).flatten()
        if len(wrong):
            where = [
                f"{name} block {block}"
                for name, view in self.pools.items()
                for block in range(len(view))
                if not torch.equal(view[block].cpu(), self.shadows[name][block])
            ]
            raise AssertionError(f"rank {self.rank}: {len(wrong)} of {len(raw)} bytes are wrong, in {where[:12]}")
        return len(raw)
