"""The model of the tests' engines: it writes `oracle`'s bytes where attention would, and checks what it would read.

Beside each pool is its shadow, which pdstage never sees: what the pool must hold, byte for byte. The shadow is in host
memory. Where the pool is on a device, work on it is launched in the device's current stream, as a model's is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from tests.engines.vllm import oracle

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass
class Sequence:
    """A request as a model runner knows it."""

    tokens: list[int]
    blocks: tuple[list[int], ...]
    computed: int


def heads_of(total: int, tp: int, rank: int) -> list[int]:
    """The KV heads of a rank, as vLLM shards them: replicated where there are fewer than ranks."""
    each = max(1, total // tp)
    first = rank * each if total >= tp else rank * total // tp
    return list(range(first, first + each))


def layer_number(name: str) -> int:
    return int(name.split(".")[2])


def put(view: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    view[blocks.to(view.device), :, rows.to(view.device)] = values.to(view.device)


def take(view: torch.Tensor, blocks: torch.Tensor, rows: torch.Tensor) -> NDArray[np.uint8]:
    return view[blocks.to(view.device), :, rows.to(view.device)].cpu().numpy()  # type: ignore[no-any-return]


class Model:
    """One rank's share of it. `groups` are vLLM's cache groups: the spec, and the layers by name."""

    rank: int
    tp: int
    tp_rank: int
    kv: KVCacheConfig
    heads: list[int]
    groups: list[tuple[KVCacheSpec, list[str]]]
    dealt: tuple[int, int, int]
    """Under decode context parallelism: how many ranks, which one this is, and how many tokens each has in turn."""
    raw: torch.Tensor
    shadow: torch.Tensor
    pools: dict[str, torch.Tensor]
    shadows: dict[str, torch.Tensor]

    def prepare_blocks(self, scheduled: SchedulerOutput) -> None:
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

    def computed(self, name: str) -> None:
        """One layer of the forward pass is done."""

    def compute(self, name: str, at: int, spec: KVCacheSpec, sequence: Sequence, n: int) -> None:
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
        where = self.places(spec, sequence.blocks[at], mine)
        for views in (self.pools, self.shadows):
            put(views[name], *where, truth)

    def truth(self, digest: NDArray[np.uint64], name: str) -> NDArray[np.uint8]:
        return oracle.cells(digest, layer_number(name), self.heads, self.pools[name].shape[3])

    def state(self, digest: np.uint64, spec: MambaSpec, name: str) -> NDArray[np.uint8]:
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

    def read(self, sequence: Sequence, check: Any) -> None:
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

    def adopt(
        self, name: str, blocks: torch.Tensor, rows: torch.Tensor, truth: NDArray[np.uint8], outside: int
    ) -> None:
        """Computed positions of a new request were loaded, or hit: from now on the pool must hold them.

        The first `outside` of them are before a window: they may be there.
        """
        found = take(self.pools[name], blocks[:outside], rows[:outside])
        here = np.concatenate([(found == truth[:outside]).all((1, 2)), np.full(len(truth) - outside, True)])
        self.shadows[name][blocks[here], :, rows[here]] = torch.from_numpy(truth[here])

    def adopt_cleared(self, sequence: Sequence) -> None:
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

    def check(self, name: str, blocks: torch.Tensor, rows: torch.Tensor, truth: NDArray[np.uint8], _: int) -> None:
        found = take(self.pools[name], blocks, rows)
        wrong = np.argwhere(found != truth)
        assert not len(wrong), (
            f"rank {self.rank} continues on wrong bytes: {len(wrong)} of {truth.size} in {name}, the first at position"
            f" {wrong[0][0]} of {len(truth)}, block {int(blocks[wrong[0][0]])}, head {wrong[0][1]}, byte {wrong[0][2]}"
        )

    def spoil(self, blocks: list[int], seed: int) -> None:
        """Free blocks are filled with other noise: nobody may read or write them any more."""
        draw = np.random.default_rng([seed, self.rank])
        for block in blocks:
            for name, view in self.pools.items():
                noise = torch.from_numpy(draw.integers(0, 256, view.shape[1:], np.uint8))
                view[block] = noise.to(view.device)
                self.shadows[name][block] = noise

    def compare(self) -> int:
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
