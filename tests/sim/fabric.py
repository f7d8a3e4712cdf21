"""The modelled data plane: a post reads its source late, lands in pieces at any later moment, and may fail before,
while or after it lands. An abort does not stop it; only the destination's disconnect does, where the transport fences.

Must not know how cores decide: it reads and writes the addresses they give, and asks the engines' books whose they are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdstage.errors import TransportError
from pdstage.plan import selects
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from tests.pair import Decode, Item, Node, Prefill, World, cell, direct_cells
from tests.sim.seeds import Violation
from tests.sim.side import Side, offsets

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from pdstage.layout import Key
    from pdstage.protocol.destinations import Chunk
    from pdstage.protocol.messages import SessionId
    from pdstage.protocol.room import Room
    from pdstage.protocol.session import Session
    from tests.sim.checks import Checks
    from tests.sim.engines import Engines
    from tests.sim.scenario import Scenario

HOW_TO_FAIL = ("lost", "in doubt", "late", "late with its tag")
"""What becomes of the pieces of a failed post that have not landed: nothing, nothing (but the transport cannot tell),
or they land later all the same.
"""


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a post: bytes from `src` to `dst`, and which cells those are on the direct path."""

    copies: list[tuple[np.ndarray, np.ndarray]]
    cells: list[tuple[Key, int, int]] = field(default_factory=list)
    offset: int = 0
    """Within the lease, on the staged path."""
    caught: list[np.ndarray] | None = None
    """Bytes that left their memory already: it may change now."""

    def catch(self) -> None:
        if self.caught is None:
            self.caught = [src.copy() for src, _ in self.copies]


@dataclass(eq=False, slots=True)
class Post:
    """One write under way; it holds its source's `room` until nothing reads it any more."""

    src: Prefill
    dst: Decode
    ticket: int
    chunk: Chunk
    room: Room
    tag: bytes
    buffer: int
    pieces: dict[Item, Piece] = field(default_factory=dict)
    failed: bool = False
    tagged: bool = True

    @property
    def session(self) -> SessionId:
        return self.chunk.destination.session.id

    @property
    def reads(self) -> bool:
        """Whether it will still read its source."""
        return any(piece.caught is None for piece in self.pieces.values())

    def catch(self) -> None:
        """The rest is in the network, and reads no memory of the source any more."""
        for piece in self.pieces.values():
            piece.catch()


def split(copies: list, n: int) -> list[list]:
    """`copies` in `n` runs of about one size, none empty."""
    n = min(n, len(copies))
    return [copies[len(copies) * i // n : len(copies) * (i + 1) // n] for i in range(n)]


class FabricWorld(World):
    """A world whose posts, gathers and scatters are checked against the engines' books as they touch memory."""

    scenario: Scenario
    engines: Engines
    checks: Checks

    def __init__(self, **shape: object) -> None:
        self.sides: dict[Node, Side] = {}
        self.labels: dict[Node, str] = {}
        self.waiting: dict[str, Item] = {}
        self.posts: list[Post] = []
        self.altered: set[tuple[int, int, int]] = set()
        self.failing = ""
        """What happens to the gather, scatter or completion that is delivered now."""
        super().__init__(**shape)  # type: ignore[arg-type]

    def must(self, holds: bool, invariant: str, what: str) -> None:
        if not holds:
            raise Violation(invariant, what)

    def _post(
        self, node: Prefill, dst: Decode, effect: Write | WriteDirect | WriteRow, land: Callable[..., None]
    ) -> None:
        del land
        chunk = effect.chunk
        assert chunk.destination.room is not None
        buffer = effect.buffer if isinstance(effect, Write) else -1
        post = Post(node, dst, effect.ticket, chunk, chunk.destination.room, effect.tag, buffer)
        self.posts.append(post)
        for piece in self._pieces(post, effect):
            item = Item("land", node, dst, lambda: None, tag=effect.tag)
            item.run = lambda item=item: self._land(post, item)
            post.pieces[item] = piece
            self.put(item)
        if isinstance(effect, Write) and self.placed:
            self._end_post(post)
        elif not chunk.direct:
            self._write_once(dst, chunk)

    def _write_once(self, dst: Decode, chunk: Chunk) -> None:
        where = (self.labels[dst], chunk.destination.session.id, chunk.lane, chunk.cursor)
        self.must(where not in self.written, "I15", f"{where} is written twice")
        self.written.add(where)

    def _place(self, dst: Decode, effect: Gather, data: np.ndarray) -> None:
        self._write_once(dst, effect.chunk)
        if dst.alive:
            self.check_lease(dst, effect.chunk)
            for memory in (dst.staging, self.sides[dst].staged):
                memory.at(effect.address, len(data))[:] = data  # type: ignore[union-attr]

    def _pieces(self, post: Post, effect: Write | WriteDirect | WriteRow) -> list[Piece]:
        n = self.scenario.n_pieces
        if isinstance(effect, Write) and self.placed:
            return []
        if isinstance(effect, WriteRow):
            memory, rows = post.src.rows, post.dst.rows
            return [
                Piece([(memory.at(src, nbytes), rows.at(dst, nbytes))], offset=dst - rows.base)
                for src, dst, nbytes in effect.spans
            ]
        if isinstance(effect, WriteDirect):
            return [
                Piece([(c.src, c.dst) for c in run], [(c.key, c.token, c.shard) for c in run])
                for run in split(list(direct_cells(post.src, post.dst, post.chunk)), n)
            ]
        nbytes, buffer = post.chunk.nbytes, post.src.buffers[effect.buffer]
        bounds = [nbytes * i // n for i in range(n + 1)]
        return [
            Piece([(buffer[low:high], post.dst.staging.at(effect.address + low, high - low))], offset=low)
            for low, high in itertools.pairwise(bounds)
        ]

    def _post_of(self, item: Item) -> Post:
        return next(post for post in self.posts if item in post.pieces)

    def _land(self, post: Post, item: Item) -> None:
        piece = post.pieces.pop(item)
        if not post.dst.alive or post.session in self.fenced:
            post.pieces[item] = piece
            self._fail_post(post, "lost")
            return
        self._read(post, piece)
        self._put_down(post, piece)
        if not post.pieces:
            self._end_post(post)

    def _read(self, post: Post, piece: Piece) -> None:
        """The source is read as it is now (I8), if it was not before."""
        if piece.caught is not None:
            return
        side = self.sides[post.src]
        self.must(not post.room.released, "I8", f"a write of room {post.room.key!r} reads released source memory")
        if post.chunk.row:
            side.must_own_row(post.room, "I8", "a write reads")
        elif post.chunk.direct:
            side.must_own(post.room, post.chunk.source.items["kv"], "I8", "a write reads")  # type: ignore[arg-type]
        piece.catch()

    def _put_down(self, post: Post, piece: Piece) -> None:
        assert piece.caught is not None
        side, chunk = self.sides[post.dst], post.chunk
        if chunk.row:
            self.check_pages(post.dst, chunk)
            side.must_own_row(post.dst.core.by_epoch[chunk.destination.epoch], "I2", "a write into")
            ((_, dst),), (data,) = piece.copies, piece.caught
            dst[:] = data
            side.rows.at(side.rows.base + piece.offset, len(data))[:] = data
            return
        if chunk.direct:
            self.check_pages(post.dst, chunk)
            room = post.dst.core.by_epoch[chunk.destination.epoch]
            side.must_own(room, post.dst.pages[room], "I2", "a direct write into")
            views = post.dst.core.layout.by_key()
            for (key, token, shard), (_, dst), data in zip(piece.cells, piece.copies, piece.caught, strict=True):
                side.count(room, key, token, shard)
                dst[:] = data
                true = self.engines.truth_of(room, key)[token, views[key].axis.first + shard]
                cell(views[key], side.image, post.dst.pages[room], token, shard)[:] = true
            return
        self.check_lease(post.dst, chunk)
        ((_, dst),), (data,) = piece.copies, piece.caught
        dst[:] = data
        side.staged.at(self._address(post, piece), len(data))[:] = data  # type: ignore[union-attr]

    def _address(self, post: Post, piece: Piece) -> int:
        """Where in staging memory a piece lands."""
        span = post.dst.core.leases.spans[post.chunk.lane]
        return span.base + post.chunk.cursor % self.lane_nbytes + piece.offset

    def alter(self, post: Post, piece: Piece) -> None:
        """Flips a bit of a piece that has landed in staging memory."""
        chunk, side = post.chunk, self.sides[post.dst]
        self.altered.add((id(post.dst), chunk.lane, chunk.cursor))
        for memory in (post.dst.staging, side.staged):
            memory.at(self._address(post, piece), 1)[0] ^= 1  # type: ignore[union-attr]

    def _end_post(self, post: Post) -> None:
        self.posts.remove(post)
        if post.tagged and self.notifies:
            self.put(Item("tag", post.src, post.dst, lambda: self._tell_tag(post), tag=post.tag))
        if not post.failed:
            self.put(Item("done", post.src, post.src, lambda: self._tell_done(post), tag=post.tag))

    def _tell_tag(self, post: Post) -> None:
        if post.dst.alive:
            with self.checks.stale_tag_changes_nothing(post.dst, post.tag):
                post.dst.core.tag(post.tag)
                self.carry(post.dst)

    def _tell_done(self, post: Post, error: TransportError | None = None, settled: bool = True) -> None:
        if self.failing:
            error = TransportError("the completion is an error, the bytes are there")
        if post.src.alive:
            post.src.core.chunks.completed(post.ticket, error, settled=settled)
            self.carry(post.src)

    def _fail_post(self, post: Post, how: str) -> bool:
        """The source is told that it failed; what has not landed never will, or will later."""
        gone = how in ("lost", "in doubt")
        if post.failed and not gone:
            return False
        if gone:
            for item in post.pieces:
                self.waiting.pop(item.key, None)
            post.pieces.clear()
            if post in self.posts:
                self.posts.remove(post)
        else:
            for piece in post.pieces.values():
                self._read(post, piece)
            post.tagged = how == "late with its tag"
        if not post.failed:
            post.failed = True
            error, settled = TransportError("the post failed"), how == "lost"
            self.put(Item("done", post.src, post.src, lambda: self._tell_done(post, error, settled), tag=post.tag))
        return True

    def fence(self, node: Node, session: Session) -> None:
        """Decode's disconnect: nothing of the session lands any more. Prefill's: nothing of it reads any more."""
        if not node.alive:
            return
        if isinstance(node, Decode):
            self.fenced.add(session.id)
        for post in [post for post in self.posts if post.session == session.id and node in (post.src, post.dst)]:
            self._fail_post(post, "lost" if isinstance(node, Decode) or not post.dst.alive else "late")
        node.core.fenced(session)
        self.carry(node)

    def _gather(self, node: Prefill, effect: Gather) -> None:
        chunk: Chunk = effect.chunk
        for post in self.posts:
            busy = post.src is node and post.buffer == effect.buffer and post.reads
            self.must(not busy, "I8", f"send buffer {effect.buffer} is gathered into while a post reads it")
        if self.failing:
            node.core.chunks.gathered(effect.ticket, TransportError("the gather failed"))
            self.carry(node)
            return
        self.sides[node].must_own(chunk.destination.room, chunk.source.items["kv"], "I8", "a gather reads")  # type: ignore[arg-type]
        super()._gather(node, effect)

    def _scatter(self, node: Decode, effect: Scatter) -> None:
        if self.failing:
            node.core.scattered(effect.ticket, TransportError("the scatter failed"))
            self.carry(node)
        else:
            super()._scatter(node, effect)

    def copy_in(self, node: Decode, chunk: Scatter) -> int:
        room, side = chunk.writer.room, self.sides[node]
        side.must_own(room, node.pages[room], "I2", "a scatter into")
        for rect in chunk.lease.rects:
            for key, first, count in selects(node.core.layout, chunk.writer.shares, (rect,)):
                side.count(room, key, slice(rect.start, rect.stop), slice(first, first + count))
        checksum = super().copy_in(node, chunk)
        self._image(node, side, chunk)
        return checksum

    def _image(self, node: Decode, side: Side, chunk: Scatter) -> None:
        """What those cells must hold from now on: the truth, unless the network changed it on purpose."""
        altered = (id(node), chunk.lease.lane, chunk.lease.cursor) in self.altered
        room, views = chunk.writer.room, node.core.layout.by_key()
        for rect in chunk.lease.rects:
            for key, first, count in selects(node.core.layout, chunk.writer.shares, (rect,)):
                view = views[key]
                where = offsets(view, node.pages[room], rect.start, rect.stop)[:, first : first + count]
                shards = slice(view.axis.first + first, view.axis.first + first + count)
                true = self.engines.truth_of(room, key)[rect.start : rect.stop, shards]
                side.image.bytes[where] = node.memory.bytes[where] if altered else true
