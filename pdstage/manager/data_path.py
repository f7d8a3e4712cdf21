"""The way of a chunk's bytes at prefill: staged or direct, its gather, and its write in one post or several."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, assert_never

import numpy as np

from pdstage.errors import PdstageError, UsageError
from pdstage.kernels import Pool
from pdstage.layout import Layout, Region
from pdstage.plan import Rects, Select, Tokens, layers_of, selects
from pdstage.plan.spans import Index, split
from pdstage.plan.token_slices import DirectPlans
from pdstage.protocol.destinations import LEAST_PIECE_NBYTES, Chunk, Destination, clip
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.stager import Copied, Move, Passes, Stager, failed
from pdstage.transport import Done, Mapped, PostFailed, Spans, Traits, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.manager.observer import Observation
    from pdstage.manager.sessions import PeerPlan, Sessions
    from pdstage.metrics import Counters
    from pdstage.plan.cost import CostModel
    from pdstage.protocol.session import Session

log = logging.getLogger(__name__)

_MAX_PLANS = 128  # of a session: ranges of layers, times what its rooms ask for
_LONG_RUN_NBYTES = 64 << 10
"""Runs of so many bytes on average are for a device's copy engines, which need none of its multiprocessors; a guess."""

_IN_A_LANE, _OF_A_DEVICE_IN_A_LANE = 4, 2
"""Chunks that a lane should hold at once: while one is scattered another lands, and others are gathered. A device's
copies are short beside the rest, so two do.
"""


@dataclass(eq=False)
class DataPath:
    """One prefill node's gathers and writes, out of its pool and of `buffers`, its send buffers.

    `path` is "auto" (by `cost_of` the transport that a session has), "direct" or "staged", and may be changed between
    rooms; chunks have at most `chunk_nbytes`. `observed` is told when a write begins; None: nobody observes.
    """

    transport: Transport
    stager: Stager
    sessions: Sessions
    path: str
    cost_of: Callable[[Traits], CostModel]
    buffers: Sequence[Region]
    chunk_nbytes: int
    observed: Observation | None

    def __post_init__(self) -> None:
        self._layout, self._kind = self.stager.pool.layout, self.stager.pool.device.partition(":")[0]
        self.posts = Posts(self.transport)
        self.placed: dict[int, Mapped] = {}
        """Destinations' memory that gathers under way write, by ticket: it stays mapped until they are over."""
        self.copies: dict[int, tuple[str, bytes, object]] = {}
        """The stager's copies that are writes of their own, by ticket: at the end of each `copied` is to be called. To
        whom, its tag, and what keeps that one's memory mapped until then.
        """

    # Which way.

    def prefers_direct(self, chunk: Chunk) -> bool:
        """By what all of its source's chunks to this destination would cost, so that they go the same way."""
        if self.path != "auto":
            return self.path == "direct"
        destination, rects, tokens, nbytes = chunk.destination, chunk.rects, chunk.tokens, chunk.nbytes
        if rects != chunk.source.rects:
            rects = clip(chunk.source.rects, destination)
            tokens = destination.session.common.tokens(rects)
            nbytes = destination.session.stagings.of(destination.shares, rects).nbytes(tokens)
        return self._is_cheaper_direct(destination, rects, tokens, nbytes)

    def _is_cheaper_direct(self, destination: Destination, rects: Rects, tokens: Tokens, nbytes: int) -> bool:
        if self._kind == "cpu" and self._mapped(destination.session):
            return True  # one pass of copies, where staged makes two
        n_descriptors = self._in_place(destination, rects).posts.n_descriptors(tokens)
        n_chunks = -(-nbytes // self._staged_nbytes(destination, nbytes))
        return self._cost(destination).prefers_direct(nbytes, n_descriptors, n_chunks)

    def piece_nbytes(self, destination: Destination, rects: Rects, nbytes: int) -> int:
        """How long the chunks are to be into which `rects`, of `nbytes`, are split: direct ones as long as they may,
        since they have no stages that could overlap.
        """
        if self.path != "staged" and destination.may_direct(rects):
            tokens = destination.session.common.tokens(rects)
            if self.path == "direct" or self._is_cheaper_direct(destination, rects, tokens, nbytes):
                return self.chunk_nbytes
        return self._staged_nbytes(destination, nbytes)

    def _staged_nbytes(self, destination: Destination, nbytes: int) -> int:
        """The length of staged chunks of `nbytes`: by what the transport costs, and so that several fit the peer's
        largest lane, but not below `LEAST_PIECE_NBYTES`, nor above `chunk_nbytes`.
        """
        in_a_lane = _IN_A_LANE if self._kind == "cpu" else _OF_A_DEVICE_IN_A_LANE
        wanted = min(self._cost(destination).piece_nbytes(nbytes), destination.session.largest_lane // in_a_lane)
        return min(max(LEAST_PIECE_NBYTES, wanted), self.chunk_nbytes)

    def _cost(self, destination: Destination) -> CostModel:
        return self.cost_of(self.transport.traits_of(self.sessions.plan(destination.session).label))

    def _in_place(self, destination: Destination, rects: Rects) -> InPlace:
        """Made once for each range of layers."""
        peer, session = self.sessions.plan(destination.session), destination.session
        key = (destination.shares, *map(layers_of, rects))
        found = peer.in_place.get(key)
        if found is None:
            if len(peer.in_place) >= _MAX_PLANS:
                peer.in_place.clear()
            moved = [selects(layout, destination.shares, rects) for layout in (self._layout, session.layout)]
            found = peer.in_place[key] = InPlace(self.stager.pool, peer, moved)
        return found

    # A chunk's gather.

    def gather(self, effect: Gather) -> None:
        """Launches the gather of a chunk; the stager says when it is over.

        Into the chunk's lease, if that is mapped here: then it is gathered and written in one pass.
        """
        ticket, buffer, chunk, address = effect
        session = chunk.destination.session
        peer = self.sessions.plan(session)
        base = self.buffers[buffer].base
        mapped = self.transport.mapped(peer.label, address, chunk.nbytes)
        chunk.placed = mapped is not None and mapped.kind == self._kind
        if mapped is not None and chunk.placed:
            self.placed[ticket] = mapped
            base = mapped.address
        move = Move(
            chunk.destination.shares, chunk.rects, chunk.tokens, peer.pair.order, chunk.source.items, session.checksums,
            peer.pair.src, session.staged.offered,
        )  # fmt: skip
        self.stager.gather(ticket, move, Region(base, chunk.nbytes))

    # Its write.

    def write(self, effect: Write | WriteDirect | WriteRow, counters: Counters) -> PdstageError | None:
        """Begins a write, and counts its descriptors; an error means that it never began."""
        peer = self.sessions.plan(effect.chunk.destination.session)
        try:
            if isinstance(effect, WriteDirect) and (passes := self._passes(peer, effect.chunk)) is not None:
                return self._copy(effect, peer, passes)
            spans = self._spans(effect)
        except Exception as error:  # noqa: BLE001  (only this write fails, such as for want of memory)
            self.stager.check()
            return failed(error)
        if self.observed is not None:
            self.observed.began(effect.ticket)
        refused = self.posts.begin(effect.ticket, peer.label, spans, effect.tag)
        counters.descriptors += len(spans.nbytes) if spans is not None else 0
        return refused

    def _spans(self, effect: Write | WriteDirect | WriteRow) -> Spans | None:
        """From where to where; None: the bytes are where they belong, and only the tag is left to be sent."""
        match effect:
            case Write(_, buffer, chunk, address):
                if chunk.placed:
                    return None
                src = self.buffers[buffer].base
                return Spans(np.array([src]), np.array([address]), np.array([chunk.nbytes]))
            case WriteDirect(_, chunk):
                plan = self._in_place(chunk.destination, chunk.rects).posts
                return Spans(*plan.spans(chunk.tokens, chunk.source.items, _items_of(chunk.destination)))
            case WriteRow(_, _, spans):
                return Spans(*np.ascontiguousarray(np.array(spans, np.int64).T))
            case _:
                assert_never(effect)

    # A write by kernels, or by the host's own copies, where the destination's pages are mapped here.

    def _passes(self, peer: PeerPlan, chunk: Chunk) -> Passes | None:
        """What copies the chunk from pages to pages; None where a post does, for want of such memory or as well."""
        if self._mapped(chunk.destination.session) is None:
            return None
        way = self._in_place(chunk.destination, chunk.rects)
        if self._kind != "cpu" and chunk.nbytes >= _LONG_RUN_NBYTES * way.posts.n_descriptors(chunk.tokens):
            return None
        return way.copies

    def _mapped(self, session: Session) -> Pool | None:
        """The peer's pool at its addresses here, if all of it is mapped, and written by what copies this node's."""
        peer = self.sessions.plan(session)
        regions = session.layout.regions if session.exposes_pool else ()
        if peer.mapped is not None:  # asked again: who unregistered its memory, in this same process say, may free it
            still = self.transport.mapped(peer.label, regions[0].base, regions[0].nbytes)
            return peer.mapped if still is not None else None
        moved, held = [], []
        for region in regions:
            mapped = self.transport.mapped(peer.label, region.base, region.nbytes)
            if mapped is None or mapped.kind != self._kind:
                return None
            moved.append(Region(mapped.address, region.nbytes, region.kind, self._layout.regions[0].device))
            held.append(mapped)
        if moved:
            layout = Layout(tuple(moved), session.layout.components)
            peer.mapped = Pool.of(layout, self.stager.pool.device, held)
        return peer.mapped

    def _copy(self, effect: WriteDirect, peer: PeerPlan, passes: Passes) -> PdstageError | None:
        if self.observed is not None:
            self.observed.began(effect.ticket)
        chunk = effect.chunk
        self.copies[effect.ticket] = peer.label, effect.tag, peer.mapped
        copied = self.stager.copy_to(
            effect.ticket, passes, chunk.tokens, chunk.source.items, _items_of(chunk.destination)
        )
        return self.copied(copied) if copied is not None else None

    def copied(self, copied: Copied) -> PdstageError | None:
        """Such a copy ended: only its tag is left to be sent. With an error its write is over."""
        peer, tag, _ = self.copies.pop(copied.ticket)
        return copied.error or self.posts.begin(copied.ticket, peer, None, tag)


def _items_of(destination: Destination) -> dict[str, Index]:
    """The destination's pages, as it named them."""
    given = destination.open.items
    return {one.component: Index.of(np.frombuffer(one.data, np.int32), one.first_token) for one in given}


@dataclass(eq=False)
class InPlace:
    """Some layers of one session, from pages of `own` straight to decode's. `moved`: what of either side's."""

    own: Pool
    peer: PeerPlan
    moved: Sequence[Sequence[Select]]

    @cached_property
    def posts(self) -> DirectPlans:
        pair = self.peer.pair
        return DirectPlans(pair.src, self.moved[0], pair.dst, self.moved[1])

    @cached_property
    def copies(self) -> Passes | None:
        """This node's own, where decode's pages are mapped; None if one pass cannot turn the one into the other."""
        peer = self.peer
        assert peer.mapped is not None
        try:
            return Passes((self.own, peer.mapped), (peer.pair.src, peer.pair.dst), self.moved)
        except UsageError as error:
            log.info("chunks to %s go as posts: %s", peer.label, error)
            return None


@dataclass(slots=True)
class _Write:
    peer: str
    pieces: list[Spans]
    tag: bytes
    n_posted: int = 0
    error: PdstageError | None = None
    settled: bool = True


class Posts:
    """Writes under way, by the caller's tickets: posts of at most `max_descriptors` each, the tag on the last, which
    waits for the others.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._writes: dict[int, _Write] = {}
        self._tickets: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def to(self, peer: str) -> bool:
        """Whether a write to `peer` is under way."""
        return any(write.peer == peer for write in self._writes.values())

    def begin(self, ticket: int, peer: str, spans: Spans | None, tag: bytes) -> PdstageError | None:
        """Begins one write; an error means that it never began, and `ended` will not name it.

        None: the bytes are where they belong already, and only their tag is sent.
        """
        if spans is None:
            write = _Write(peer, [], tag, n_posted=1)
            try:
                self._tickets[self._transport.notify(peer, tag)] = ticket
            except PdstageError as error:
                return error
        else:
            if not len(spans.nbytes):
                return UsageError("a write of no bytes", remedy="send chunks with at least one token")
            most = self._transport.traits_of(peer).max_descriptors
            write = _Write(peer, [spans] if len(spans.nbytes) <= most else list(split(spans, most)), tag)
            self._post(ticket, write)
            if not write.n_posted:
                return write.error
        self._writes[ticket] = write
        return None

    def ended(self, event: Done | PostFailed) -> tuple[int, PdstageError | None, bool] | None:
        """Of the write that ended with this event its ticket, its error, and whether none of it can land any more."""
        ticket = self._tickets.pop(event.ticket, None)
        if ticket is None:
            return None
        write = self._writes[ticket]
        write.n_posted -= 1
        if isinstance(event, PostFailed):
            write.error = event.error
            write.settled = write.settled and event.settled
            write.pieces.clear()
        if not write.n_posted:
            self._post(ticket, write)
        if write.n_posted:
            return None
        del self._writes[ticket]
        return ticket, write.error, write.settled

    def _post(self, ticket: int, write: _Write) -> None:
        """Posts all but the last piece, or the last once nothing else is under way: posts are not ordered."""
        pieces = write.pieces
        while pieces and (len(pieces) > 1 or not write.n_posted):
            tag = b"" if len(pieces) > 1 else write.tag
            try:
                post = self._transport.post(write.peer, pieces[0], tag)
            except PdstageError as error:
                write.error = error
                pieces.clear()
                return
            del pieces[0]
            self._tickets[post] = ticket
            write.n_posted += 1
