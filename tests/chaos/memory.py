"""One rank's KV pool, all of which the engine knows at any time, but for what is lent to a room under way.

What every byte of a room must be is a function of its serial number, layer, role, token and head. A shadow holds what
each known page must be. So a write into a page that was given back is seen, whatever it wrote and whoever has the page
by then: at the next sweep, at the latest before the page is lent again. Pages are reused last in, first out, and
refilled at once.
"""

from __future__ import annotations

import numpy as np

from pdstage import Pool
from pdstage.layout.topology import shard_range
from pdstage.tensors import build, paged_hnd, paged_nhd

LAYERS, HEADS, DIM = 2, 4, 64
ROLES = "kv"
_AUX_NBYTES = 52


def rows_of(serial: int, layer: int, role: int, tokens: range, heads: range) -> np.ndarray:
    """`[tokens, heads, DIM]` uint8 of one room's layer and role."""
    drawn = np.random.default_rng([serial, layer, role]).integers(0, 256, (tokens.stop, HEADS, DIM), np.uint8)
    return drawn[tokens.start :, heads.start : heads.stop]


def aux_of(serial: int) -> bytes:
    return np.random.default_rng(serial).bytes(_AUX_NBYTES)


class Pages:
    """A pool `[layer, role, page, ...]` of one rank of `tp`: pages of `page` tokens, heads first if `hnd`."""

    def __init__(self, tp: int, rank: int, *, page: int, n_pages: int, hnd: bool) -> None:
        self.heads = range(*shard_range(HEADS, tp, rank))
        self.page, self.hnd, self.n_pages = page, hnd, n_pages
        inner = (len(self.heads), page) if hnd else (page, len(self.heads))
        self._mem = np.zeros((LAYERS, len(ROLES), n_pages, *inner, DIM), np.uint8)
        self._must = np.zeros_like(self._mem)
        self._known = np.ones(n_pages, np.bool_)
        self._generation = 0
        self.free: list[int] = []
        make = paged_hnd if hnd else paged_nhd
        k, v = (list(self._mem[:, role]) for role in range(2))
        self.pool = Pool.of(build(make(k, v, total_heads=HEADS, tp=(tp, rank))), keep=(self._mem,))
        self.give_back(list(range(n_pages)))

    def n_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def allocate(self, tokens: int) -> list[int]:
        """The pages last given back; the caller saw to it that there are enough."""
        kept = len(self.free) - self.n_for(tokens)
        taken, self.free = self.free[kept:], self.free[:kept]
        return taken

    def lend(self, pages: list[int]) -> list[str]:
        """From here on a room may write them. What is wrong with them already, in words."""
        wrong = self._differing(pages, "about to be lent")
        self._known[pages] = False
        return wrong

    def delivered(self, serial: int, pages: list[int], start: int, stop: int) -> list[str]:
        """Tokens `start..stop` are said to be in `pages`: what is not so, in words. Other rows must be as they were."""
        wrong = []
        for layer in range(LAYERS):
            for role, name in enumerate(ROLES):
                must = self._by_token(self._must[layer, role, pages])
                must[start:stop] = rows_of(serial, layer, role, range(start, stop), self.heads)
                found = self._by_token(self._mem[layer, role, pages])
                bad = np.flatnonzero((found != must).any(axis=(1, 2)))
                if len(bad):
                    where = "asked for" if start <= bad[0] < stop else "not asked for"
                    n = f"{len(bad)} of {stop - start} tokens"
                    wrong.append(f"room {serial} layer {layer} {name}: {n} are wrong, the first {bad[0]}, {where}")
        self._must[:, :, pages] = self._mem[:, :, pages]
        self._known[pages] = True
        return wrong

    def fill(self, serial: int, pages: list[int], tokens: range) -> None:
        """The engine computes `tokens` of a room whose page 0 is `pages[0]`."""
        low = tokens.start // self.page
        held, first = pages[low : self.n_for(tokens.stop)], low * self.page
        for layer in range(LAYERS):
            for role in range(len(ROLES)):
                by_token = self._by_token(self._mem[layer, role, held])
                rows = rows_of(serial, layer, role, tokens, self.heads)
                by_token[tokens.start - first : tokens.stop - first] = rows
                paged = by_token.reshape(-1, self.page, len(self.heads), DIM)
                self._mem[layer, role, held] = paged.transpose(0, 2, 1, 3) if self.hnd else paged
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
        word = np.random.default_rng(self._generation).integers(0, 1 << 64, dtype=np.uint64)
        for held in (self._mem, self._must):
            held.view(np.uint64)[:, :, pages] = word
        self._known[pages] = True
        self.free += pages
        return wrong

    def sweep(self) -> list[str]:
        """Compares every known page with what it must be."""
        mem, must = self._mem.view(np.uint64), self._must.view(np.uint64)
        changed = (mem != must).any(axis=(0, 1, 3, 4, 5)) & self._known
        return self._differing(np.flatnonzero(changed).tolist(), "free or of another room")

    def _differing(self, pages: list[int], what: str) -> list[str]:
        wrong = []
        for page in pages:
            if n := int(np.count_nonzero(self._mem[:, :, page] != self._must[:, :, page])):
                wrong.append(f"{n} bytes of page {page}, {what}, were written by somebody else")
                self._must[:, :, page] = self._mem[:, :, page]
        return wrong

    def _by_token(self, paged: np.ndarray) -> np.ndarray:
        """`[token, head, dim]`, a copy."""
        if self.hnd:
            paged = paged.transpose(0, 2, 1, 3)
        return paged.reshape(-1, len(self.heads), DIM).copy()
