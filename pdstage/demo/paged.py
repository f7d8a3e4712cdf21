"""A rank's own paged KV pool in one of the memory orders engines use, with its free list shuffled.

Layer 6 (demo). Must not know the model, other ranks or transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

NHD = "nhd"
HND = "hnd"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedShape:
    """`order` "nhd": `[slots, heads, dim]`, as SGLang does; "hnd": `[pages, heads, page_size, dim]`, as FlashInfer."""

    order: str
    n_pages: int
    page_size: int
    layers: int
    heads: int
    head_dim: int


class PagedKV:
    """One K and one V tensor a layer, full of NaN at first: a token read before it came spoils its room."""

    def __init__(self, shape: PagedShape, seed: int) -> None:
        self.shape = shape
        if shape.order == NHD:
            size: tuple[int, ...] = (shape.n_pages * shape.page_size, shape.heads, shape.head_dim)
        else:
            size = (shape.n_pages, shape.heads, shape.page_size, shape.head_dim)
        self.k = [torch.full(size, torch.nan, dtype=torch.float64) for _ in range(shape.layers)]
        self.v = [torch.full(size, torch.nan, dtype=torch.float64) for _ in range(shape.layers)]
        self._free: list[int] = np.random.default_rng(seed).permutation(shape.n_pages).tolist()

    def allocate(self, n_tokens: int) -> NDArray[np.int32]:
        """Pages for `n_tokens`, scattered over the pool."""
        n = pages_for(n_tokens, self.shape.page_size)
        if n > len(self._free):
            raise MemoryError(f"{n} pages wanted, {len(self._free)} free")
        taken, self._free = self._free[:n], self._free[n:]
        return np.array(taken, dtype=np.int32)

    def free(self, pages: NDArray[np.int32]) -> None:
        self._free.extend(pages.tolist())

    def store(self, layer: int, pages: NDArray[np.int32], start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes `[n, heads, dim]` at token positions `start..start+n` of the sequence that `pages` holds."""
        page, row = self._places(pages, start, start + k.shape[0])
        for held, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.shape.order == NHD:
                held[page * self.shape.page_size + row] = new
            else:
                held[page, :, row] = new

    def load(self, layer: int, pages: NDArray[np.int32], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first `n_tokens` tokens, each `[n_tokens, heads, dim]`."""
        page, row = self._places(pages, 0, n_tokens)
        if self.shape.order == NHD:
            slots = page * self.shape.page_size + row
            return self.k[layer][slots], self.v[layer][slots]
        return self.k[layer][page, :, row], self.v[layer][page, :, row]

    def corrupt(self, page: int, seed: int) -> None:
        """Replaces one page, K and V of every layer, by noise of the same size: the negative control."""
        noise = torch.Generator().manual_seed(seed)
        first = page * self.shape.page_size
        where = slice(first, first + self.shape.page_size) if self.shape.order == NHD else slice(page, page + 1)
        for held in (*self.k, *self.v):
            part = held[where]
            drawn = torch.randn(part.shape, generator=noise, dtype=part.dtype)
            part.copy_(drawn * part.nan_to_num().std())

    def _places(self, pages: NDArray[np.int32], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = np.arange(start, stop)
        page = pages[at // self.shape.page_size].astype(np.int64)
        return torch.from_numpy(page), torch.from_numpy(at % self.shape.page_size)


def pages_for(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size)
