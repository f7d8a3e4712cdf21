"""vLLM 0.33's blocks: one raw int8 tensor `[blocks, page bytes]` a layer, seen through the shapes of each spec.

Specs: vllm/v1/kv_cache_interface.py (MambaSpec, SlidingWindowMLASpec); states of a Mamba block:
model_executor/layers/mamba/mamba_utils.py; NVFP4 and DeepSeek-V4 pages: utils/torch_utils.py, models/deepseek_v4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from emulator import Paged, heads_of, sections, strided
from emulator.sglang import Mamba


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
class WindowMla(Paged):
    """SlidingWindowMLASpec: `[blocks, 1, block_size, content]` in pages padded to a multiple of `alignment`; with
    `packed` content a block is `[rows of 576][rows of 8]`, DeepSeek-V4's fp8_ds_mla.
    """

    content: int = 96
    alignment: int = 512
    packed: bool = False

    def allocate(self):
        widths = (576, 8) if self.packed else (self.content,)
        nbytes = -(-self.page_size * sum(widths) // self.alignment) * self.alignment
        self.raw = [self.garbage(self.n_pages, nbytes, dtype=np.uint8) for _ in range(self.n_layers)]
        self.blocks = []
        for layer, raw in enumerate(self.raw):
            for width, view in zip(widths, sections(raw, nbytes, self.page_size, *widths), strict=True):
                self.array(view, f"window of {width}", layer, lambda slot, _: divmod(slot, self.page_size))
                self.blocks.append(view)


@dataclass
class Nvfp4Blocks(Paged):
    """NVFP4: each side of a page is `[data | scales]`, data `[heads, block, dim / 2]` and scales `[heads, block, dim /
    16]` in the cache's order, NHD or HND.
    """

    heads: int = 4
    dim: int = 32
    hnd: bool = True
    n_layers: int = 1

    def allocate(self):
        n = len(heads_of(self.heads, self.tp, self.rank))
        side = n * self.page_size * (self.dim // 2 + self.dim // 16)
        raw = self.garbage(self.n_pages, 2 * side, dtype=np.uint8).reshape(-1)
        inner = (n, self.page_size) if self.hnd else (self.page_size, n)
        self.parts = {}
        for number, name in enumerate("kv"):
            offset = number * side
            for what, width in (("data", self.dim // 2), ("scale", self.dim // 16)):
                shape, strides = (self.n_pages, *inner, width), (2 * side, inner[1] * width, width, 1)
                part = self.parts[name, what] = strided(raw, offset, shape, strides)
                offset += n * self.page_size * width
                self.array(part, f"fp4 {what} {name}", 0, self.cell, heads=self.heads)

    def cell(self, slot, head):
        block, row = divmod(slot, self.page_size)
        return (block, head, row) if self.hnd else (block, row, head)


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
        for layer in range(self.n_layers):
            cache = self.garbage(self.n_pages, *inner, content, dtype=np.uint8)
            self.caches.append(cache if self.hnd else cache.transpose(0, 2, 1, 3))
            self.array(self.caches[-1], "token head", layer, self.cell, heads=self.heads)

    def cell(self, slot, head):
        return slot // self.page_size, head, slot % self.page_size
