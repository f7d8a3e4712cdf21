"""One rank's KV pool, every page of which the engine knows at any time, but for those lent to a room under way.

A shadow holds what each known page must be. So a write into a page that was given back is seen, whatever it wrote and
whoever has the page by then: at the next sweep, at the latest before the page is lent again. Pages are reused last in,
first out, and refilled at once.
"""

from __future__ import annotations

import numpy as np

from pdstage import Pool
from pdstage.layout.topology import shard_range
from pdstage.tensors import build, paged_hnd, paged_nhd
from tests.chaos import truth


class Pages:
    """A pool `[layer, role, page, ...]` of one rank of `tp`: pages of `page` tokens, heads first if `hnd`."""

    def __init__(self, tp: int, rank: int, *, page: int, n_pages: int, hnd: bool) -> None:
        self.heads = range(*shard_range(truth.HEADS, tp, rank))
        self.page, self.hnd, self.n_pages = page, hnd, n_pages
        inner = (len(self.heads), page) if hnd else (page, len(self.heads))
        self._mem = np.zeros((truth.LAYERS, len(truth.ROLES), n_pages, *inner, truth.DIM), np.uint8)
        self._must = np.zeros_like(self._mem)
        self._known = np.ones(n_pages, np.bool_)
        self._generation = 0
        self._free: list[int] = []
        make = paged_hnd if hnd else paged_nhd
        k, v = ([self._mem[layer, role] for layer in range(truth.LAYERS)] for role in range(2))
        self.pool = Pool.of(build(make(k, v, total_heads=truth.HEADS, tp=(tp, rank))), keep=(self._mem,))
        self.give_back(list(range(n_pages)))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def n_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def allocate(self, tokens: int) -> list[int]:
        """The pages last given back; the caller saw to it that there are enough."""
        n = self.n_for(tokens)
        taken = self._free[len(self._free) - n :]
        del self._free[len(self._free) - n :]
        return taken

    def lend(self, pages: list[int]) -> list[str]:
        """From here on a room may write them. What is wrong with them already, in words."""
        wrong = self._differing(pages, "about to be lent")
        self._known[pages] = False
        return wrong

    def delivered(self, serial: int, pages: list[int], start: int, stop: int) -> list[str]:
        """Tokens `start..stop` are said to be in `pages`: what is not so, in words. Other rows must be as they were."""
        wrong = []
        must = self._must[:, :, pages]
        for layer in range(truth.LAYERS):
            for role, name in enumerate(truth.ROLES):
                by_token = self._by_token(must[layer, role])
                by_token[start:stop] = truth.rows(serial, layer, role, range(start, stop), self.heads)
                must[layer, role] = self._by_page(by_token)
                found = self._by_token(self._mem[layer, role, pages])
                bad = np.flatnonzero((found != by_token).any(axis=(1, 2)))
                if len(bad):
                    where = "asked for" if start <= bad[0] < stop else "not asked for"
                    n = f"{len(bad)} of {stop - start} tokens"
                    wrong.append(f"room {serial} layer {layer} {name}: {n} are wrong, the first {bad[0]}, {where}")
        self._must[:, :, pages] = self._mem[:, :, pages]
        self._known[pages] = True
        return wrong

    def fill(self, serial: int, pages: list[int], tokens: range) -> None:
        """The engine computes `tokens` of a room whose page 0 is `pages[0]`."""
        low, high = tokens.start // self.page, self.n_for(tokens.stop)
        held = pages[low:high]
        for layer in range(truth.LAYERS):
            for role in range(len(truth.ROLES)):
                by_token = self._by_token(self._mem[layer, role, held])
                first = low * self.page
                rows = truth.rows(serial, layer, role, tokens, self.heads)
                by_token[tokens.start - first : tokens.stop - first] = rows
                self._mem[layer, role, held] = self._by_page(by_token)
        self._must[:, :, held] = self._mem[:, :, held]

    def append(self, page: int) -> None:
        """The engine decodes on: writes the last row of a page that it owns."""
        self._generation += 1
        for held in (self._mem, self._must):
            rows = held[:, :, page, :, -1] if self.hnd else held[:, :, page, -1]
            rows[...] = self._generation & 0xFF

    def give_back(self, pages: list[int]) -> list[str]:
        """Refills pages at once and frees them. What had changed meanwhile in those that were known, in words."""
        wrong = self._differing([page for page in pages if self._known[page]], "about to be freed")
        self._generation += 1
        word = truth.filler(self._generation)
        for held in (self._mem, self._must):
            held.view(np.uint64)[:, :, pages] = word
        self._known[pages] = True
        self._free += pages
        return wrong

    def untouched(self, page: int) -> bool:
        """Whether a page is as the engine left it."""
        return bool(np.array_equal(self._mem[:, :, page], self._must[:, :, page]))

    def sweep(self) -> list[str]:
        """Compares every known page with what it must be."""
        return self._differing(np.flatnonzero(self._changed() & self._known).tolist(), "free or of another room")

    def _changed(self) -> np.ndarray:
        mem, must = self._mem.view(np.uint64), self._must.view(np.uint64)
        return (mem != must).any(axis=(0, 1, 3, 4, 5))

    def _differing(self, pages: list[int], what: str) -> list[str]:
        if not pages or np.array_equal(self._mem[:, :, pages], self._must[:, :, pages]):
            return []
        wrong = []
        for page in pages:
            n = int(np.count_nonzero(self._mem[:, :, page] != self._must[:, :, page]))
            if n:
                wrong.append(f"{n} bytes of page {page}, {what}, were written by somebody else")
                self._must[:, :, page] = self._mem[:, :, page]
        return wrong

    def _by_token(self, paged: np.ndarray) -> np.ndarray:
        if self.hnd:
            paged = paged.transpose(0, 2, 1, 3)
        return paged.reshape(-1, len(self.heads), truth.DIM).copy()

    def _by_page(self, by_token: np.ndarray) -> np.ndarray:
        paged = by_token.reshape(-1, self.page, len(self.heads), truth.DIM)
        return paged.transpose(0, 2, 1, 3) if self.hnd else paged
