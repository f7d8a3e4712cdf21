"""The pages and slots of a server's pools: who holds which, what is kept for prompts to come, what is evicted.

Layer 6 (demo). Must not know tensors, ranks or transfers: all ranks of a server use the same numbers.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdstage.demo.families import PAGES, SLOT
from pdstage.demo.pools import Room, Table, pages_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Kind(NamedTuple):
    """How a component is kept (`families.PAGES` and so on), tokens a page (1 for slots), pages, and the window."""

    kept: str
    page_size: int
    n_items: int
    window: int = 0


class Blocks:
    """The items of one component. Each is free, held by one room or more, or kept: nobody's, with a known prefix in it.

    Kept pages are evicted least recently used first, the ends of prompts before their beginnings.
    """

    def __init__(self, n_items: int, seed: int) -> None:
        # Shuffled: page numbers that happened to rise would hide mistakes.
        self._free: list[int] = np.random.default_rng(seed).permutation(n_items).tolist()
        self._holders: Counter[int] = Counter()
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}
        self.evicted = 0

    @property
    def available(self) -> int:
        """Those that `take` can give, by eviction too."""
        return len(self._free) + len(self._kept)

    @property
    def n_kept(self) -> int:
        return len(self._kept)

    def take(self, n: int) -> list[int]:
        """`n` items; there must be as many `available`."""
        while len(self._free) < n:
            page, prefix = self._kept.popitem(last=False)
            del self._page_of[prefix], self._prefix_of[page]
            self._free.append(page)
            self.evicted += 1
        taken, self._free = self._free[:n], self._free[n:]
        self._holders.update(taken)
        return taken

    def find(self, prefixes: Sequence[bytes]) -> list[int]:
        """The pages that hold the longest run of `prefixes`, from the first on; nobody holds them for it yet."""
        found: list[int] = []
        for prefix in prefixes:
            if prefix not in self._page_of:
                break
            found.append(self._page_of[prefix])
        return found

    def share(self, pages: Sequence[int]) -> None:
        """One more room holds `pages`."""
        for page in pages:
            self._holders[page] += 1
            self._kept.pop(page, None)

    def know(self, page: int, prefix: bytes) -> None:
        """`page`, which is held, has the last page of `prefix` in it now."""
        if prefix not in self._page_of and page not in self._prefix_of:
            self._page_of[prefix], self._prefix_of[page] = page, prefix

    def drop(self, items: Sequence[int]) -> None:
        """One room less holds `items`."""
        for item in reversed(items):
            self._holders[item] -= 1
            if self._holders[item]:
                continue
            del self._holders[item]
            if item in self._prefix_of:
                self._kept[item] = self._prefix_of[item]
            else:
                self._free.append(item)


class Ledger:
    """All components of a server. `shares`: whether prompts with the same beginning share its pages."""

    def __init__(self, kinds: Mapping[str, Kind], seed: int, *, shares: bool) -> None:
        self.kinds = kinds
        self.blocks = {name: Blocks(kind.n_items, seed + i) for i, (name, kind) in enumerate(kinds.items())}
        self._shares = shares and all(kind.kept == PAGES for kind in kinds.values())

    def needs(self, n_tokens: int, room_for: int = 0) -> dict[str, int]:
        """Items of each component for a prompt of `n_tokens` and `room_for` tokens more."""
        return {name: pages_for(n_tokens + room_for, k.page_size) - self._first(k, n_tokens) if k.kept != SLOT else 1
                for name, k in self.kinds.items()}  # fmt: skip

    def has(self, *needs: Mapping[str, int]) -> bool:
        """Whether all of `needs` could be taken now, one after the other."""
        return all(sum(n.get(name, 0) for n in needs) <= blocks.available for name, blocks in self.blocks.items())

    def admit(self, prompt: Sequence[int], room_for: int = 0) -> tuple[Room, int] | None:
        """Tables for a prompt, and how many tokens of it are in its pages already: at least one is left to compute.

        None where there is no place now; nothing is held then.
        """
        needs, cached = self.needs(len(prompt), room_for), 0
        found = {name: self._known(name, prompt) for name in self.blocks} if self._shares else {}
        if found:
            cached = min(len(pages) * self.kinds[name].page_size for name, pages in found.items())
        held: dict[str, list[int]] = {}
        for name, pages in found.items():
            held[name] = pages[: cached // self.kinds[name].page_size]
            self.blocks[name].share(held[name])
        left = {name: n - len(held.get(name, ())) for name, n in needs.items()}
        if not self.has(left):
            for name, pages in held.items():
                self.blocks[name].drop(pages)
            return None
        taken = {name: held.get(name, []) + self.blocks[name].take(n) for name, n in left.items()}
        return {name: self._table(name, len(prompt), items) for name, items in taken.items()}, cached

    def learn(self, room: Room, prompt: Sequence[int], n_tokens: int) -> None:
        """The first `n_tokens` of `prompt` are computed: whole pages of them may serve others."""
        if not self._shares:
            return
        for name, table in room.items():
            size = self.kinds[name].page_size
            for at, prefix in enumerate(_prefixes(prompt, size, n_tokens // size)):
                self.blocks[name].know(int(table.items[at]), prefix)

    def free(self, room: Room) -> None:
        for name, table in room.items():
            self.blocks[name].drop(table.items.tolist())

    def _known(self, name: str, prompt: Sequence[int]) -> list[int]:
        size = self.kinds[name].page_size
        return self.blocks[name].find(_prefixes(prompt, size, (len(prompt) - 1) // size))

    def _table(self, name: str, n_tokens: int, items: list[int]) -> Table:
        kind, pages = self.kinds[name], np.array(items, np.int32)
        if kind.kept == SLOT:
            return Table(pages, 0, 0, 1)
        start = max(0, n_tokens - kind.window + 1) if kind.kept != PAGES else 0
        return Table(pages, self._first(kind, n_tokens) * kind.page_size, start, n_tokens)

    @staticmethod
    def _first(kind: Kind, n_tokens: int) -> int:
        """The page in which what is kept of a prompt starts: of a window the next token sees window - 1 others."""
        return 0 if kind.kept == PAGES else max(0, n_tokens - kind.window + 1) // kind.page_size


def _prefixes(prompt: Sequence[int], size: int, n: int) -> list[bytes]:
    """Of each of the first `n` pages the whole prompt up to its end: two pages are the same only if all before is."""
    whole = array("H", prompt).tobytes()
    return [whole[: 2 * size * (i + 1)] for i in range(n)]
