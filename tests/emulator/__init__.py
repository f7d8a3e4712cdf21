"""Engines' pools of state, each with its engine's own index arithmetic, in numpy.

Independent of the library: nothing here imports it, and every value is written cell by cell where the engine's kernels
would put it. A test fills the pools of the prefill ranks from one `truth`, moves a request, and compares the memory of
each decode rank's pool, every byte, with that of a twin into which the same truth was written directly.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=256)
def truth(name, layer, *shape, dtype=np.uint16):
    """The model's values under that name in that layer: any bytes, the same for every rank of both sides."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    rng = np.random.default_rng(zlib.crc32(f"{name}/{layer}/{shape}".encode()))
    values = rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
    values.flags.writeable = False
    return values


def heads_of(total, tp, rank):
    """The heads a rank computes: an equal part of them, or one that several ranks share."""
    return range(rank * total // tp, rank * total // tp + max(1, total // tp))


@dataclass
class Engine:
    """One rank of an engine: its place, and memory full of whatever was there before."""

    tp: int = 1
    rank: int = 0
    seed: int = 0
    memory: list[np.ndarray] = field(default_factory=list)

    def garbage(self, *shape, dtype=np.uint16):
        """Fresh memory of random bytes, remembered for comparison."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        rng = np.random.default_rng((self.seed, len(self.memory)))
        raw = rng.integers(0, 256, size, np.uint8)
        self.memory.append(raw)
        return raw.view(dtype).reshape(shape)


def strided(raw, offset, shape, strides, dtype=np.uint8):
    """A view of raw bytes, as torch.as_strided makes them."""
    return np.ndarray(shape, dtype, raw, offset, strides)


def sections(raw, page_nbytes, rows, *widths):
    """Views `[page, row, width]` of pages that hold all rows of the first width, then all of the next."""
    starts = np.cumsum([0, *widths]) * rows
    for offset, width in zip(starts, widths, strict=False):
        yield strided(raw.reshape(-1), offset, (raw.size // page_nbytes, rows, width), (page_nbytes, width, 1))


@dataclass
class Paged(Engine):
    """A token pool: token p of the request is in slot `token_slots[p]`, of page `slot // page_size`.

    `allocate` keeps arrays by `array`. Their last axis is a token's value, or that of `per_row` tokens, and head's.
    """

    page_size: int = 4
    n_tokens: int = 40
    n_layers: int = 2

    def __post_init__(self):
        wanted = -(-self.n_tokens // self.page_size)
        self.n_pages = wanted + 3
        self.n_slots = self.n_pages * self.page_size
        pages = np.random.default_rng((self.seed, 77)).permutation(np.arange(1, self.n_pages))[:wanted]
        positions = np.arange(self.n_tokens)
        self.token_slots = pages[positions // self.page_size] * self.page_size + positions % self.page_size
        self.arrays = []
        self.allocate()

    def allocate(self):
        raise NotImplementedError

    def array(self, array, name, layer, cell=lambda row, head: row, *, heads=1, per_row=1):
        """Keeps `array`: the value called `name` of a row of the pool and a head of this rank is at `cell`."""
        self.arrays.append((array, name, layer, cell, heads, per_row))
        return array

    def store(self, start, stop):
        """Writes the truth of tokens `[start, stop)`."""
        for array, name, layer, cell, heads, per_row in self.arrays:
            whole = truth(name, layer, -(-self.n_tokens // per_row), heads, array.shape[-1], dtype=array.dtype.type)
            for row in range(start // per_row, -(-stop // per_row)):
                at = self.token_slots[row * per_row] // per_row
                for local, head in enumerate(heads_of(heads, self.tp, self.rank)):
                    array[cell(at, local)] = whole[row, head]
