"""The way of a chunk's bytes at prefill: staged or direct, its gather, and its write in one post or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import numpy as np

from pdstage.errors import PdstageError, UsageError
from pdstage.layout import Region
from pdstage.manager.items import indexes
from pdstage.manager.sessions import label
from pdstage.plan import layers_of, selects
from pdstage.protocol.destinations import clip
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.spans import Index, split
from pdstage.token_slices import DirectPlans
from pdstage.transport import Mapped, PostFailed, Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdstage.cost import CostModel
    from pdstage.manager.observer import Observation
    from pdstage.manager.sessions import PeerPlan, Sessions
    from pdstage.metrics import Counters
    from pdstage.plan import Rect
    from pdstage.protocol.destinations import Chunk, Destination
    from pdstage.protocol.session import Session
    from pdstage.stager import Stager
    from pdstage.transport import Done, Traits, Transport

_MAX_PLANS = 128  # of a session: ranges of layers, times what its rooms ask for


class DataPath:
    """One prefill node's gathers and writes, out of its pool and of `buffers`, its send buffers.

    `path` is "auto" (by `cost_of` the transport that a session has), "direct" or "staged", and may be changed between
    rooms; chunks have at most `chunk_nbytes`. `observed` is told when a write begins; None: nobody observes.
    """

    def __init__(
        self,
        transport: Transport,
        stager: Stager,
        sessions: Sessions,
        *,
        path: str,
        cost_of: Callable[[Traits], CostModel],
        buffers: Sequence[Region],
        chunk_nbytes: int,
        observed: Observation | None,
    ) -> None:
        self.path = path
        self._transport, self._stager, self._sessions = transport, stager, sessions
        self._cost_of, self._buffers, self._chunk_nbytes = cost_of, buffers, chunk_nbytes
        self._layout, self._kind, self._observed = stager.pool.layout, stager.pool.device.partition(":")[0], observed
        self._posts = Posts(transport)
        self._placed: dict[int, Mapped] = {}
        """Destinations' memory that gathers under way write, by ticket: it stays mapped until they are over."""

    # Which way.

    def prefers_direct(self, chunk: Chunk) -> bool:
        """By what all of its source's chunks to this destination would cost, so that they go the same way."""
        if self.path != "auto":
            return self.path == "direct"
        destination, rects, tokens, nbytes = chunk.destination, chunk.rects, chunk.tokens, chunk.nbytes
        n_chunks = 1
        if rects != chunk.source.rects:
            rects = clip(chunk.source.rects, destination)
            tokens = destination.session.common.tokens(rects)
            nbytes = destination.session.stagings.of(destination.shares, rects).nbytes(tokens)
            n_chunks = -(-nbytes // self._chunk_nbytes)
        n_descriptors = self._direct(destination, rects).n_descriptors(tokens)
        traits = self._transport.traits_of(self._sessions.plan(destination.session).label)
        return self._cost_of(traits).prefers_direct(nbytes, n_descriptors, n_chunks)

    def _direct(self, destination: Destination, rects: tuple[Rect, ...]) -> DirectPlans:
        peer, session = self._sessions.plan(destination.session), destination.session
        key = (destination.shares, *layers_of(rects))
        plan = peer.direct.get(key)
        if plan is None:
            if len(peer.direct) >= _MAX_PLANS:
                peer.direct.clear()
            ours, theirs = (selects(layout, destination.shares, rects) for layout in (self._layout, session.layout))
            plan = peer.direct[key] = DirectPlans(peer.pair.src, ours, peer.pair.dst, theirs)
        return plan

    # A chunk's gather.

    def gather(self, effect: Gather) -> None:
        """Launches a chunk's gather: the stager says when it is over, and then `gathered` is to be called."""
        ticket, chunk = effect.ticket, effect.chunk
        session = chunk.destination.session
        peer = self._sessions.plan(session)
        self._stager.gather(
            ticket, chunk.destination.shares, chunk.rects, order=peer.pair.order, items=indexes(chunk.source.items),
            dst=self._place(ticket, peer, chunk, effect.address) or self._buffer(effect.buffer, chunk.nbytes),
            checksum=session.checksums, tokens=chunk.tokens, cut=peer.pair.src,
            staged=session.staged.offered,
        )  # fmt: skip

    def gathered(self, ticket: int) -> None:
        self._placed.pop(ticket, None)

    def _place(self, ticket: int, peer: PeerPlan, chunk: Chunk, address: int) -> Region | None:
        """The chunk's lease, if it is mapped here: then it is gathered and written in one pass."""
        mapped = self._transport.mapped(peer.label, address, chunk.nbytes)
        chunk.placed = mapped is not None and mapped.kind == self._kind
        if mapped is None or not chunk.placed:
            return None
        self._placed[ticket] = mapped
        return Region(mapped.address, chunk.nbytes)

    def _buffer(self, number: int, nbytes: int) -> Region:
        held = self._buffers[number]
        return Region(held.base, min(held.nbytes, nbytes), held.kind, held.device)

    # Its write.

    def write(self, effect: Write | WriteDirect | WriteRow, counters: Counters) -> PdstageError | None:
        """Begins a write, and counts its descriptors; an error means that it never began."""
        try:
            spans = self._spans(effect)
        except UsageError as error:
            return error
        if self._observed is not None:
            self._observed.began(effect.ticket)
        peer = self._sessions.plan(effect.chunk.destination.session)
        failed = self._posts.begin(effect.ticket, peer.label, spans, effect.tag)
        counters.descriptors += len(spans.nbytes) if spans is not None else 0
        return failed

    def _spans(self, effect: Write | WriteDirect | WriteRow) -> Spans | None:
        """From where to where; None: the bytes are where they belong, and only the tag is left to be sent."""
        match effect:
            case Write(_, buffer, chunk, address):
                if chunk.placed:
                    return None
                src = self._buffers[buffer].base
                return Spans(np.array([src]), np.array([address]), np.array([chunk.nbytes]))
            case WriteDirect(_, chunk):
                destination = chunk.destination
                theirs = {
                    given.component: Index.of(np.frombuffer(given.data, np.int32), given.first_token)
                    for given in destination.open.items
                }
                plan = self._direct(destination, chunk.rects)
                return Spans(*plan.spans(chunk.tokens, indexes(chunk.source.items), theirs))
            case WriteRow(_, _, spans):
                return Spans(*np.ascontiguousarray(np.array(spans, np.int64).T))
            case _:
                assert_never(effect)

    def ended(self, event: Done | PostFailed) -> Iterator[tuple[int, PdstageError | None, bool]]:
        """The write that ended with this event, if one did, its error, and whether none of it can land any more."""
        return self._posts.ended(event)

    @property
    def writing(self) -> bool:
        """Whether a write is under way."""
        return bool(self._posts)

    def writes_to(self, session: Session) -> bool:
        """Whether a write to the session's peer is under way."""
        return self._posts.to(label(session))

    def forget_gathers(self) -> None:
        """None is under way, and nobody asks any more what one did."""
        self._placed.clear()


class _Write:
    __slots__ = ("error", "n_posted", "peer", "pieces", "settled", "tag")

    def __init__(self, peer: str, pieces: list[Spans], tag: bytes) -> None:
        self.peer = peer
        self.pieces = pieces
        self.tag = tag
        self.n_posted = 0
        self.error: PdstageError | None = None
        self.settled = True


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
            return self._tell(ticket, peer, tag)
        if not len(spans.nbytes):
            return UsageError("a write of no bytes", remedy="send chunks with at least one token")
        most = self._transport.traits_of(peer).max_descriptors
        pieces = [spans] if len(spans.nbytes) <= most else [Spans(*part) for part in split(spans, max_descriptors=most)]
        write = self._writes[ticket] = _Write(peer, pieces, tag)
        self._post(ticket, write)
        if write.n_posted:
            return None
        del self._writes[ticket]
        return write.error

    def _tell(self, ticket: int, peer: str, tag: bytes) -> PdstageError | None:
        try:
            post = self._transport.notify(peer, tag)
        except PdstageError as error:
            return error
        write = self._writes[ticket] = _Write(peer, [], tag)
        write.n_posted, self._tickets[post] = 1, ticket
        return None

    def ended(self, event: Done | PostFailed) -> Iterator[tuple[int, PdstageError | None, bool]]:
        """The write that ended with this event, if one did, its error, and whether none of it can land any more."""
        ticket = self._tickets.pop(event.ticket, None)
        if ticket is None:
            return
        write = self._writes[ticket]
        write.n_posted -= 1
        if isinstance(event, PostFailed):
            write.error = event.error
            write.settled = write.settled and event.settled
            write.pieces.clear()
        if write.n_posted == 0:
            self._post(ticket, write)
            if write.n_posted == 0:
                del self._writes[ticket]
                yield ticket, write.error, write.settled

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
