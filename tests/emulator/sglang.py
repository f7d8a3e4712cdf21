"""State kinds of SGLang 0.5.23 that differ in how they lie, from its own pools' shapes and index arithmetic.

Kinds: StateType in srt/disaggregation/base/conn.py. Pools: srt/mem_cache/memory_pool.py (MambaPool, MHATokenToKVPool,
MHATokenToKVPoolMXFP8, MHATokenToKVPoolFP4, DSATokenToKVPool, MiniMaxSparseKVPool), index_key_cache.py, qsa_kv_pool.py,
swa_memory_pool.py, deepseek_v4_memory_pool.py, deepseek_v4_compress_state.py; shapes of states: configs/mamba_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from emulator import Engine, Paged, heads_of, sections, truth


@dataclass
class Mamba(Engine):
    """MambaPool: conv `[layers, slots, C, K-1]` (Kimi: `[layers, slots, K-1, C]`), temporal `[layers, slots, H, D, N]`.

    Channels are those of `sections`, (name, heads, dim), each cut over TP by itself: `[q | k | v]` for gated delta
    nets, `[x | B | C]` for Mamba-2, where a rank without a group of its own shares one. `extra` rows beyond the window
    are speculative scratch; the state is in the leading ones.
    """

    sections: tuple[tuple[str, int, int], ...] = (("q", 4, 8), ("k", 4, 8), ("v", 8, 4))
    heads: int = 8
    head_dim: int = 4
    state: int = 6
    window: int = 3
    extra: int = 0
    kimi: bool = False
    n_layers: int = 2
    n_slots: int = 5
    slot: int = 3

    def __post_init__(self):
        self.channels = [
            (name, head * dim + d, index * dim + d)
            for name, total, dim in self.sections
            for index, head in enumerate(heads_of(total, self.tp, self.rank))
            for d in range(dim)
        ]
        rows = self.window + self.extra
        inner = (rows, len(self.channels)) if self.kimi else (len(self.channels), rows)
        self.conv = self.garbage(self.n_layers, self.n_slots, *inner)
        held = heads_of(self.heads, self.tp, self.rank)
        self.temporal = self.garbage(self.n_layers, self.n_slots, len(held), self.head_dim, self.state, dtype=np.uint32)

    def store(self):
        for layer in range(self.n_layers):
            self.store_layer(layer, self.conv[layer, self.slot], self.temporal[layer, self.slot])

    def store_layer(self, layer, conv, temporal):
        whole = {name: truth(f"conv {name}", layer, total * dim, self.window) for name, total, dim in self.sections}
        for local, (name, channel, _) in enumerate(self.channels):
            for row in range(self.window):
                conv[(row, local) if self.kimi else (local, row)] = whole[name][channel, row]
        states = truth("temporal", layer, self.heads, self.head_dim, self.state, dtype=np.uint32)
        for local, head in enumerate(heads_of(self.heads, self.tp, self.rank)):
            temporal[local] = states[head]


@dataclass
class Mha(Paged):
    """MHATokenToKVPool: k, v `[slots, heads, dim]`, or `[pages, heads, page_size, dim]` if `hnd`."""

    heads: int = 4
    dim: int = 8
    hnd: bool = False

    def allocate(self):
        n = len(heads_of(self.heads, self.tp, self.rank))
        shape = (self.n_pages, n, self.page_size, self.dim) if self.hnd else (self.n_slots, n, self.dim)

        def cell(slot, head):
            return (slot // self.page_size, head, slot % self.page_size) if self.hnd else (slot, head)

        self.k, self.v = (
            [self.array(self.garbage(*shape), name, layer, cell, heads=self.heads) for layer in range(self.n_layers)]
            for name in "kv"
        )


@dataclass
class Swa(Mha):
    """The sliding-window half of SWAKVPool: an MHA pool with slots of its own, found by `full_to_swa`."""

    def __post_init__(self):
        super().__post_init__()
        self.full_slots, n_full = self.token_slots + 3 * self.page_size, self.n_slots + 3 * self.page_size
        self.full_to_swa = np.zeros(n_full, np.int64)
        self.full_to_swa[self.full_slots] = self.token_slots


@dataclass
class Mxfp8(Paged):
    """MHATokenToKVPoolMXFP8: e4m3 k, v beside a UE8M0 scale for every 32 elements, `[slots, heads, dim / 32]`; with
    pages of 128 interleaved, `[pages, heads, 32, 4, dim / 32]`, token t of a page at `[t % 32, t // 32]`.
    """

    heads: int = 4
    dim: int = 64

    def allocate(self):
        n = len(heads_of(self.heads, self.tp, self.rank))
        self.interleaved = self.page_size == 128
        scale = (self.n_pages, n, 32, 4) if self.interleaved else (self.n_slots, n)

        def cell(slot, head):
            page, t = divmod(slot, self.page_size)
            return (page, head, t % 32, t // 32) if self.interleaved else (slot, head)

        self.data, self.scales = (
            {
                name: [
                    self.array(self.garbage(*shape, dtype=np.uint8), f"{what} {name}", layer, at, heads=self.heads)
                    for layer in range(self.n_layers)
                ]
                for name in "kv"
            }
            for what, shape, at in (
                ("fp8", (self.n_slots, n, self.dim), lambda slot, head: (slot, head)),
                ("scale", (*scale, self.dim // 32), cell),
            )
        )


@dataclass
class Nvfp4(Paged):
    """MHATokenToKVPoolFP4: packed k, v `[slots, heads, dim / 2]`, scales `[slots, heads * dim / 16]`."""

    heads: int = 4
    dim: int = 32
    n_layers: int = 1

    def allocate(self):
        n = len(heads_of(self.heads, self.tp, self.rank))
        self.data, self.scales = {}, {}
        for name in "kv":
            for held, what, width in ((self.data, "data", self.dim // 2), (self.scales, "scale", self.dim // 16)):
                array = self.garbage(self.n_slots, n, width, dtype=np.uint8)
                self.array(array, f"fp4 {what} {name}", 0, lambda slot, head: (slot, head), heads=self.heads)
                held[name] = [array if held is self.data else array.reshape(self.n_slots, -1)]


@dataclass
class Dsa(Paged):
    """IndexKeyCache: pages `[pages, bytes]` of kernel pages, each its 128-byte keys and then its 4-byte scales; `pool`
    tokens have one key. Layers in `shared` use the index of the layer before and have no rows.
    """

    page_size: int = 128
    n_tokens: int = 300
    kernel_page: int = 64
    pool: int = 1
    shared: tuple[int, ...] = (1,)
    n_layers: int = 3

    def allocate(self):
        per_page = self.page_size // self.pool * 132
        self.index = []
        for layer in range(self.n_layers):
            n_pages = 0 if layer in self.shared else self.n_pages
            self.index.append(self.garbage(n_pages, per_page, dtype=np.uint8))
            views = sections(self.index[-1], self.kernel_page * 132, self.kernel_page, 128, 4) if n_pages else ()
            for name, view in zip(("key", "scale"), views, strict=False):
                self.array(view, name, layer, lambda row, _: divmod(row, self.kernel_page), per_row=self.pool)


@dataclass
class Ring(Engine):
    """Rings `[requests, rows, dim]`: the row of position p is `p % rows`. DSATokenToKVPool's compress tail has two,
    keys and scores, of pool + extra rows; the unified SWA ring has one in front of a pool's compressed rows, flat.
    """

    rows: int = 8
    names: tuple[str, ...] = ("key", "score")
    dim: int = 16
    flat: bool = False
    behind: int = 0
    n_layers: int = 2
    n_tokens: int = 30
    slot: int = 2
    n_slots: int = 4

    def __post_init__(self):
        shape = (self.n_slots * self.rows + self.behind, self.dim) if self.flat else (self.n_slots, self.rows, self.dim)
        self.buffers = {name: [self.garbage(*shape) for _ in range(self.n_layers)] for name in self.names}

    def store(self, start, stop):
        for name in self.names:
            for layer, buffer in enumerate(self.buffers[name]):
                whole = truth(f"ring {name}", layer, self.n_tokens, self.dim, dtype=buffer.dtype.type)
                for p in range(start, stop):
                    row = self.slot * self.rows + p % self.rows
                    buffer[row if self.flat else (self.slot, p % self.rows)] = whole[p]


@dataclass
class QsaPending(Engine):
    """Raw index keys of the group being compressed: `[requests * ratio, heads, dim]` a layer, and one `[requests *
    ratio, 3]` of positions for all layers; the row of position p is `request * ratio + p % ratio`.
    """

    ratio: int = 4
    n_layers: int = 2
    slot: int = 3
    n_slots: int = 6

    def __post_init__(self):
        self.keys = [self.garbage(self.n_slots * self.ratio, 2, 8) for _ in range(self.n_layers)]
        self.rope = self.garbage(self.n_slots * self.ratio, 3, dtype=np.int64)

    def store(self):
        for r in range(self.ratio):
            row = self.slot * self.ratio + r
            for layer, keys in enumerate(self.keys):
                keys[row] = truth("pending", layer, self.ratio, 2, 8)[r]
            self.rope[row] = truth("rope", 0, self.ratio, 3, dtype=np.int64)[r]


@dataclass
class QsaCompressed(Paged):
    """Compressed index keys `[slots / ratio, heads, dim]`, replicated: the row of a group is `full slot // ratio`."""

    ratio: int = 4
    page_size: int = 8

    def allocate(self):
        self.keys = [self.garbage(self.n_slots // self.ratio, 2, 8) for _ in range(self.n_layers)]
        for layer, keys in enumerate(self.keys):
            self.array(keys.reshape(len(keys), 16), "groups", layer, per_row=self.ratio)


@dataclass
class DeepseekV4(Paged):
    """DeepSeekV4SingleKVPool: pages of `[rows of 448 fp8 + 64 bf16][8 bytes of scales a row]`, padded to 576 bytes; in
    compressed layers a row stands for `ratio` tokens, in pages of `page_size / ratio` rows.
    """

    ratio: int = 4
    page_size: int = 32

    def allocate(self):
        rows = self.page_size // self.ratio
        nbytes = -(-rows * 584 // 576) * 576
        self.pools = [self.garbage(self.n_pages, nbytes, dtype=np.uint8) for _ in range(self.n_layers)]
        for layer, pool in enumerate(self.pools):
            for name, view in zip(("latent", "scale"), sections(pool, nbytes, rows, 576, 8), strict=True):
                self.array(view, name, layer, lambda row, _: divmod(row, rows), per_row=self.ratio)
