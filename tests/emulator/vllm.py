"""vLLM 0.33's blocks: one raw int8 tensor `[blocks, page bytes]` a layer, seen through the shapes of each spec.

Specs: vllm/v1/kv_cache_interface.py (MambaSpec, CircularBufferSpec, SlidingWindowMLASpec); states of a Mamba block:
model_executor/layers/mamba/mamba_utils.py; NVFP4 and DeepSeek-V4 pages: utils/torch_utils.py, models/deepseek_v4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from emulator import Engine, Paged, heads_of, truth
from emulator.sglang import Mamba


def strided(raw, offset, shape, strides, dtype):
    """A view of raw bytes, as torch.as_strided makes them."""
    return np.ndarray(shape, dtype, raw, offset, strides)


@dataclass
class MambaBlocks(Mamba):
    """MambaSpec: a block is a page of `[conv][temporal]`, padded. Conv is `(state_len, dim)` ("SD", the default) or
    `(dim, state_len)` ("DS"), `state_len` the kernel's width less one and the speculative tokens.
    """

    kimi: bool = True  # "SD"
    padding: int = 64

    def __post_init__(self):
        super().__post_init__()
        conv, temporal = self.conv.shape[2:], self.temporal.shape[2:]
        n_conv, n_temporal = int(np.prod(conv)) * 2, int(np.prod(temporal)) * 4
        page = -(-(n_conv + n_temporal) // 64) * 64 + self.padding
        self.memory.clear()
        raws = [self.garbage(self.n_slots, page, dtype=np.uint8).reshape(-1) for _ in range(self.n_layers)]
        self.conv, self.temporal = (
            [
                strided(raw, at, (self.n_slots, *inner), (page, *dense(inner, size)), dtype)
                for raw in raws
            ]
            for at, inner, size, dtype in ((0, conv, 2, np.uint16), (n_conv, temporal, 4, np.uint32))
        )  # fmt: skip

    def store(self):
        for layer in range(self.n_layers):
            self.store_layer(layer, self.conv[layer][self.slot], self.temporal[layer][self.slot])


def dense(shape, size):
    """Byte strides of a C-ordered array."""
    return [int(np.prod(shape[axis + 1 :])) * size for axis in range(len(shape))]


@dataclass
class CircularBuffer(Engine):
    """CircularBufferSpec: `[blocks, 1, block_size, content]`, one block a request, in padded pages; `block_size` is the
    ring's capacity and position p is in row `p % block_size`.
    """

    rows: int = 6
    content: int = 32
    padding: int = 16
    n_layers: int = 2
    n_tokens: int = 20
    slot: int = 3
    n_slots: int = 5

    def __post_init__(self):
        page = self.rows * self.content + self.padding
        self.blocks = [
            strided(
                self.garbage(self.n_slots, page, dtype=np.uint8).reshape(-1), 0,
                (self.n_slots, 1, self.rows, self.content), (page, page, self.content, 1), np.uint8,
            )
            for _ in range(self.n_layers)
        ]  # fmt: skip

    def store(self, start, stop):
        for layer, blocks in enumerate(self.blocks):
            for p in range(start, stop):
                value = truth("raw keys", layer, self.n_tokens, self.content, dtype=np.uint8)[p]
                blocks[self.slot, 0, p % self.rows] = value


@dataclass
class WindowMla(Paged):
    """SlidingWindowMLASpec: `[blocks, 1, block_size, content]` in pages padded to a multiple of `alignment`; with
    `packed` content a block is `[rows of 576][rows of 8]`, DeepSeek-V4's fp8_ds_mla.
    """

    content: int = 96
    alignment: int = 512
    packed: bool = False

    def allocate(self):
        row = 584 if self.packed else self.content
        self.page_nbytes = -(-self.page_size * row // self.alignment) * self.alignment
        self.raw = [self.garbage(self.n_pages, self.page_nbytes, dtype=np.uint8) for _ in range(self.n_layers)]

    def blocks(self, layer):
        shape, page = (self.n_pages, 1, self.page_size, self.content), self.page_nbytes
        return strided(self.raw[layer].reshape(-1), 0, shape, (page, page, self.content, 1), np.uint8)

    def store(self, start, stop):
        for layer in range(self.n_layers):
            for p in range(start, stop):
                block, row = divmod(self.token_slots[p], self.page_size)
                if not self.packed:
                    value = truth("window", layer, self.n_tokens, self.content, dtype=np.uint8)[p]
                    self.blocks(layer)[block, 0, row] = value
                    continue
                page, tail = self.raw[layer][block], self.page_size * 576 + row * 8
                page[row * 576 : (row + 1) * 576] = truth("packed", layer, self.n_tokens, 576, dtype=np.uint8)[p]
                page[tail : tail + 8] = truth("packed scale", layer, self.n_tokens, 8, dtype=np.uint8)[p]


@dataclass
class Nvfp4Blocks(Paged):
    """NVFP4: each side of a page is `[data | scales]`, data `[heads, block, dim / 2]` and scales `[heads, block, dim /
    16]` in the cache's order, NHD or HND.
    """

    heads: int = 4
    dim: int = 32
    hnd: bool = True

    def allocate(self):
        self.n = len(heads_of(self.heads, self.tp, self.rank))
        self.n_layers = 1
        side = self.n * self.page_size * (self.dim // 2 + self.dim // 16)
        self.raw = self.garbage(self.n_pages, 2 * side, dtype=np.uint8)
        cells = self.n * self.page_size
        self.parts = {}
        for number, name in enumerate("kv"):
            for what, at, width in (("data", 0, self.dim // 2), ("scale", cells * self.dim // 2, self.dim // 16)):
                inner = (self.n, self.page_size) if self.hnd else (self.page_size, self.n)
                shape, strides = (self.n_pages, *inner, width), (2 * side, inner[1] * width, width, 1)
                self.parts[name, what] = strided(self.raw.reshape(-1), number * side + at, shape, strides, np.uint8)

    def store(self, start, stop):
        for (name, what), part in self.parts.items():
            label = f"fp4 {name}" if what == "data" else f"fp4 scale {name}"
            whole = truth(label, 0, self.n_tokens, self.heads, part.shape[-1], dtype=np.uint8)
            for p in range(start, stop):
                block, row = divmod(self.token_slots[p], self.page_size)
                for local, head in enumerate(heads_of(self.heads, self.tp, self.rank)):
                    part[(block, local, row) if self.hnd else (block, row, local)] = whole[p, head]


@dataclass
class PerTokenHead(Paged):
    """fp8 by token and head: `[blocks, heads, block_size, content]`, content a head's K, its scale, V and its scale."""

    heads: int = 4
    dim: int = 16
    hnd: bool = True

    def allocate(self):
        n, content = len(heads_of(self.heads, self.tp, self.rank)), 2 * (self.dim + 4)
        inner = (n, self.page_size) if self.hnd else (self.page_size, n)
        self.caches = []
        for _ in range(self.n_layers):
            cache = self.garbage(self.n_pages, *inner, content, dtype=np.uint8)
            self.caches.append(cache if self.hnd else cache.transpose(0, 2, 1, 3))

    def store(self, start, stop):
        for layer, cache in enumerate(self.caches):
            whole = truth("token head", layer, self.n_tokens, self.heads, cache.shape[-1], dtype=np.uint8)
            for p in range(start, stop):
                block, row = divmod(self.token_slots[p], self.page_size)
                for local, head in enumerate(heads_of(self.heads, self.tp, self.rank)):
                    cache[block, local, row] = whole[p, head]
