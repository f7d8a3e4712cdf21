"""One process as the simulator sees it: its engine's pages, and what every byte of its memory must be.

Must not know the protocol: who owns a page is the engine's word here, so a core that gives memory back too early is
found out by somebody who never asked it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import cache

import numpy as np

from pdstage.layout import Key, View
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.room import Room
from tests.pair import N_ROWS, WIDTH, Decode, Memory, Node, Pages
from tests.sim.seeds import Violation


@cache
def truth(seed: int, number: int, key: Key, tokens: int, heads: int) -> np.ndarray:
    """What a room's cells of one view must hold: bytes [token, head, WIDTH]."""
    name = f"{seed}/{number}/{key.role}/{key.layer}".encode()
    raw = hashlib.shake_128(name).digest(tokens * heads * WIDTH)
    return np.frombuffer(raw, np.uint8).reshape(tokens, heads, WIDTH)


def offsets(view: View, pages: Pages, start: int, stop: int) -> np.ndarray:
    """Region offsets [token, shard, byte] of tokens `[start, stop)` of a room stored in `pages`."""
    tokens = np.arange(start, stop)
    rows = view.offset + np.array(pages)[tokens // view.tokens_per_item] * view.item_stride
    rows += tokens % view.tokens_per_item * view.rows[0].stride
    return rows[:, None, None] + np.arange(view.shards)[:, None] * view.shard_stride + np.arange(WIDTH)


class Side:
    """The engine and the memory of one process."""

    def __init__(self, node: Node, label: str, n_pages: int) -> None:
        self.node = node
        self.label = label
        self.free = list(range(n_pages))
        self.owner: list[Room | None] = [None] * n_pages
        self.image = Memory(len(node.memory.bytes), node.memory.base)
        self.staged = Memory(len(node.staging.bytes), node.staging.base) if isinstance(node, Decode) else None
        self.held: dict[Room, tuple[Pages, tuple[int, ...]]] = {}
        self.live: dict[Room, float] = {}
        """Rooms not ended, and when each must have."""
        self.ended: dict[Room, tuple[object, object]] = {}
        """Rooms that ended: their state and error then."""
        self.delivered: dict[DecodeRoom, dict[Key, np.ndarray]] = {}
        """How often each cell [token, shard] of a room was written."""
        self.stalled_at: float | None = None
        self.late_s = 0.0
        self.closing_at: float | None = None
        self.rows = Memory(len(node.rows.bytes), node.rows.base)
        """What the aux rows must be; which are free, and whose the others are."""
        self.free_rows = list(range(N_ROWS)) if len(node.rows.bytes) else []
        self.row_of: dict[Room, int] = {}
        self._n_scribbles = 0
        for page in range(n_pages):
            self.scribble(page)

    def scribble(self, page: int) -> None:
        """The engine uses the page for something else: whoever reads or writes it now is found out."""
        self._n_scribbles += 1
        byte = random.Random(self._n_scribbles).randrange(256)
        for view in self.node.core.layout.views():
            start = view.offset + page * view.item_stride
            stop = start + view.tokens_per_item * view.shards * WIDTH
            self.node.memory.bytes[start:stop] = byte
            self.image.bytes[start:stop] = byte

    def take(self, room: Room, n: int, rng: random.Random) -> Pages:
        """`n` free pages, in any order; the list is the one the core is given."""
        pages = rng.sample(self.free, n)
        self.free = [page for page in self.free if page not in pages]
        for page in pages:
            self.owner[page] = room
            self.scribble(page)
        self.held[room] = (pages, tuple(pages))
        return pages

    def give_back(self, room: Room) -> None:
        pages, copy = self.held.pop(room, ([], ()))
        if tuple(pages) != copy:
            raise Violation("I9", f"{self.label} changed the pages {copy} of room {room.key!r} to {pages}")
        if room in self.row_of:
            number = self.row_of.pop(room)
            self.free_rows.append(number)
            self.fill_row(number, bytes([self._n_scribbles % 256]) * self.row_nbytes)
        for page in pages:
            self.owner[page] = None
            self.free.append(page)
            self.scribble(page)
        self.delivered.pop(room, None)  # type: ignore[call-overload]

    @property
    def row_nbytes(self) -> int:
        return len(self.rows.bytes) // N_ROWS

    def take_row(self, room: Room) -> int | None:
        """A free row, if one is; else the room goes without."""
        if not self.free_rows:
            return None
        self.row_of[room] = self.free_rows.pop(0)
        return self.row_of[room]

    def fill_row(self, number: int, data: bytes | np.ndarray, offset: int = 0) -> None:
        """The engine itself, or its node, writes a row."""
        for memory in (self.node.rows, self.rows):
            at = memory.base + number * self.row_nbytes + offset
            memory.at(at, len(data))[:] = np.frombuffer(data, np.uint8)

    def must_own_row(self, room: Room, invariant: str, what: str) -> None:
        if room not in self.row_of:
            raise Violation(invariant, f"{what} an aux row of {self.label}, which room {room.key!r} gave back")

    def must_own(self, room: Room, pages: Pages, invariant: str, what: str) -> None:
        for page in pages:
            if self.owner[page] is not room:
                raise Violation(invariant, f"{what} page {page} of {self.label}, which room {room.key!r} gave back")

    def fill(self, seed: int, number: int, tokens: int, heads: int, pages: Pages) -> None:
        """What the model computes: a room's truth into this rank's pool."""
        for view in self.node.core.layout.views():
            data = truth(seed, number, view.key, tokens, heads)
            mine = data[:, view.axis.first : view.axis.first + view.axis.count]
            where = offsets(view, pages, 0, tokens)
            self.node.memory.bytes[where] = mine
            self.image.bytes[where] = mine

    def count(self, room: DecodeRoom, key: Key, tokens: slice | int, shards: slice | int) -> None:
        """Cells of `room` are being written: each once (I7)."""
        counts = self.delivered.setdefault(room, {})
        if key not in counts:
            view = self.node.core.layout.by_key()[key]
            counts[key] = np.zeros((len(self.node.pages[room]) * view.tokens_per_item, view.shards), np.uint8)  # type: ignore[union-attr]
        counts[key][tokens, shards] += 1
        if (counts[key][tokens, shards] > 1).any():
            raise Violation("I7", f"{key} of room {room.key!r} is delivered twice at {self.label}")

    def check_delivered(self, room: DecodeRoom, want: Callable[[Key], np.ndarray], start: int, stop: int) -> None:
        """Success: every cell asked for came once, and is the truth (I5)."""
        counts, pages = self.delivered.get(room, {}), self.node.pages[room]  # type: ignore[union-attr]
        for view in self.node.core.layout.views() if start < stop else ():
            came = counts.get(view.key)
            if came is None or not (came[start:stop] == 1).all():
                raise Violation("I5", f"room {room.key!r} is a Success at {self.label} without all of {view.key}")
            mine = want(view.key)[start:stop, view.axis.first : view.axis.first + view.axis.count]
            if not np.array_equal(self.node.memory.bytes[offsets(view, pages, start, stop)], mine):
                raise Violation("I5", f"room {room.key!r} is a Success at {self.label} with other bytes in {view.key}")

    def check_memory(self) -> None:
        """Every byte of pool and staging is what the last one who might write it wrote (I2)."""
        pairs = [(self.node.memory, self.image, "pool"), (self.node.rows, self.rows, "aux rows")]
        if self.staged is not None:
            pairs.append((self.node.staging, self.staged, "staging"))  # type: ignore[union-attr]
        for memory, image, what in pairs:
            if not np.array_equal(memory.bytes, image.bytes):
                at = int(np.flatnonzero(memory.bytes != image.bytes)[0])
                raise Violation("I2", f"byte {at} of {self.label}'s {what} was changed by nobody who might")
