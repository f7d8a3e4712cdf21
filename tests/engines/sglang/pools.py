"""SGLang's own pools on the CPU, and what is in them: every number is a function of where in the model it is.

So what a decode rank must hold is known without asking prefill: the oracle.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from tests.engines import stubs
from tests.engines.sglang.setups import Setup

HEADS, DIM = 4, 32
if not stubs.on_gpu():  # a kernel of Triton's
    os.environ["SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS"] = "1"
GROUPS = (64, 64, 128)  # a conv state's q, k and v channels, each sliced over TP by itself
WINDOW = 40


@dataclass
class Held:
    """One tensor: its entries are tokens, pages or slots; `units` are the model's numbers of what is on its axis 1."""

    role: str
    layer: int
    tensor: torch.Tensor
    entries: Literal["token", "page", "slot"] = "token"
    units: np.ndarray | None = None

    def __post_init__(self):
        self.numbers = self.tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.tensor.element_size()])

    def put(self, at: torch.Tensor, values: torch.Tensor | int):
        values = values.to(self.numbers.device) if isinstance(values, torch.Tensor) else values
        self.numbers[at.to(self.numbers.device)] = values

    def take(self, at: torch.Tensor) -> torch.Tensor:
        return self.numbers[at.to(self.numbers.device)].cpu()

    def expected(self, room, positions: np.ndarray) -> torch.Tensor:
        """The entries at these positions of the room's sequence."""
        shape = self.numbers.shape[1:]
        units = np.arange(shape[0]) if self.units is None else self.units
        inner = np.arange(np.prod(shape[1:], dtype=int)) if len(shape) > 1 else np.zeros(1, int)
        of = (room * 31 + sum(map(ord, self.role))) * 31 + self.layer
        number = (of * 8191 + positions[:, None, None] * 131 + units[:, None] * 17 + inner * 7) % 30011
        if self.numbers.dtype is torch.uint8:
            number %= 251
        return torch.from_numpy(number + 1).to(self.numbers.dtype).view(len(positions), *shape)


def _hisparse(pool: HiSparseDSATokenToKVPool) -> MLATokenToKVPoolHost:
    """As SGLang's `HiSparseCoordinator` makes it, which itself needs CUDA; memory of the CPU cannot be page-locked."""
    return MLATokenToKVPoolHost(
        buffer_info=pool.get_device_pool_infos()[0].buffer_info, device_capacity_tokens=pool.size,
        start_layer=pool.start_layer, end_layer=pool.end_layer, target_layer_num=pool.layer_num,
        host_to_device_ratio=2, host_size=0, page_size=pool.page_size, layout="layer_first",
        override_kv_cache_dim=pool.kv_cache_dim, pin_memory=False,
    )  # fmt: skip


class Memory:
    """The pool of a kind, and its tensors by component. `host` has the pages that decode with HiSparse receives."""

    host: MLATokenToKVPoolHost | None = None

    def __init__(self, setup: Setup):
        page, size = setup.page_size, (setup.n_pages - 1) * setup.page_size
        count, first = max(1, HEADS // setup.tp_size), setup.tp_rank * HEADS // setup.tp_size
        heads = np.arange(first, first + count)
        dtype = torch.float8_e4m3fn if "fp8_e4m3" in setup.options else torch.bfloat16
        common = {"dtype": dtype, "device": stubs.DEVICE, "enable_memory_saver": False}
        self.page_size = page

        def mha(pool, layers: list[int]) -> list[Held]:
            return [
                Held(role, layer, tensor, units=heads)
                for role, tensors in (("k", pool.k_buffer), ("v", pool.v_buffer))
                for layer, tensor in zip(layers, tensors, strict=True)
            ]

        if setup.pool == "mha":
            first_layer, stop = (2 * rank // setup.pp_size for rank in (setup.pp_rank, setup.pp_rank + 1))
            self.pool = MHATokenToKVPool(
                size, page, head_num=count, head_dim=DIM, layer_num=stop - first_layer, start_layer=first_layer,
                enable_alt_stream=False, **common,
            )  # fmt: skip
            self.held = {"kv": mha(self.pool, list(range(first_layer, stop)))}
        elif setup.pool == "mla":
            self.pool = MLATokenToKVPool(size, page, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=2, **common)
            self.held = {"kv": [Held("latent", i, tensor) for i, tensor in enumerate(self.pool.kv_buffer)]}
        elif setup.pool in ("dsa", "hisparse"):
            sparse = setup.pool == "hisparse" and setup.mode == "decode"
            self.pool = (HiSparseDSATokenToKVPool if sparse else DSATokenToKVPool)(
                size // 2 if sparse else size, page, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=2,
                index_head_dim=128, kv_cache_dim=80, skip_topk_layers=[False, True], **common,
            )  # fmt: skip
            index, latents = self.pool.index_k_with_scale_buffer[0], self.pool.kv_buffer
            if sparse:
                self.host = _hisparse(self.pool)
                latents = self.host.data_refs
            self.held = {"kv": [Held("latent", i, tensor) for i, tensor in enumerate(latents)]}
            self.held["dsa"] = [Held("index", 0, index.view(len(index), -1), "page")]
        elif setup.pool == "swa":
            self.pool = SWAKVPool(
                size, size, page, head_num=count, head_dim=DIM, swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0], enable_alt_stream=False, **common,
            )  # fmt: skip
            self.held = {"kv": mha(self.pool.full_kv_pool, [0]), "swa": mha(self.pool.swa_kv_pool, [1])}
        else:
            self.held = self._hybrid(setup, size, count, mha)

    def _hybrid(self, setup: Setup, size, count, mha) -> dict[str, list[Held]]:
        tp, rank = setup.tp_size, setup.tp_rank
        shape = Mamba2StateShape.create(
            tp_world_size=tp, intermediate_size=128, n_groups=8, num_heads=8, head_dim=4, state_size=8, conv_kernel=4,
            conv_shard_groups=list(GROUPS),
        )  # fmt: skip
        states = MambaPool(
            size=8, spec_state_size=0, cache_params=Mamba2CacheParams(shape=shape, layers=[1, 2]),
            mamba_layer_ids=[1, 2], device=stubs.DEVICE,
        )  # fmt: skip
        self.pool = HybridLinearKVPool(
            size, torch.bfloat16, setup.page_size, count, DIM, [0, 3], stubs.DEVICE, states, enable_memory_saver=False
        )
        starts = np.cumsum([0, *GROUPS[:-1]])
        channels = np.concatenate(
            [start + np.arange(n // tp) + rank * n // tp for start, n in zip(starts, GROUPS, strict=True)]
        )
        heads = np.arange(8 // tp) + rank * 8 // tp
        cache = states.mamba_cache
        slots = [Held("conv", layer, cache.conv[0][i], "slot", channels) for i, layer in enumerate([1, 2])]
        slots += [Held("ssm", layer, cache.temporal[i], "slot", heads) for i, layer in enumerate([1, 2])]
        return {"kv": mha(self.pool.full_kv_pool, [0, 3]), "mamba": slots}

    def allocate(self, room, salt, n_tokens, prefix) -> dict[str, tuple[np.ndarray, int]]:
        """Items of each component and the number of the first of them: pages from a shuffled pool, and a slot.

        Four rooms in a row have different ones.
        """
        page, rng = self.page_size, np.random.default_rng(salt)
        n_pages = len(self.held["kv"][0].tensor) // page
        stop, items = -(-n_tokens // page), {}
        for component in self.held:
            first = max(prefix, n_tokens - WINDOW) // page if component == "swa" else prefix // page
            quarter = (n_pages - 1) // 4
            taken = 1 + rng.permutation(n_pages - 1)[room % 4 * quarter :][:quarter]
            items[component] = (taken[: stop - first].astype(np.int32), first)
        if "mamba" in items:
            items["mamba"] = (np.array([1 + (room * 3 + salt) % 8]), 0)
        return items

    def entries(self, held: Held, items: np.ndarray, first, tokens: range) -> tuple[torch.Tensor, np.ndarray]:
        """Which entries of a tensor hold `tokens` of a room, and their positions."""
        if held.entries == "slot":
            return torch.from_numpy(items.astype(np.int64)), np.zeros(1, np.int64)
        page = self.page_size
        if held.entries == "page":
            at = np.arange(max(tokens.start // page, first), -(-tokens.stop // page))
            return torch.from_numpy(items[at - first].astype(np.int64)), at
        at = np.arange(max(tokens.start, first * page), tokens.stop)
        return torch.from_numpy(items[at // page - first].astype(np.int64) * page + at % page), at
