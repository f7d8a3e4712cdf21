"""The way of a chunk's bytes at prefill: its gather, and its write as spans of addresses in one post or several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdstage.cut import DirectPlans
from pdstage.errors import PdstageError, UsageError
from pdstage.layout import Region
from pdstage.manager.sessions import label
from pdstage.plan import selects
from pdstage.protocol.destinations import clip
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.spans import Index, split
from pdstage.transport import Mapped, PostFailed, Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdstage.cost import CostModel
    from pdstage.cut import Pair
    from pdstage.layout import Layout
    from pdstage.manager.observer import Observation
    from pdstage.metrics import Counters
    from pdstage.plan import Rect, Stagings
    from pdstage.protocol.destinations import Chunk, Destination
    from pdstage.protocol.session import Session
    from pdstage.stager import Stager
    from pdstage.transport import Done, Transport

_MAX_PLANS = 1024


class DataPath:
    """One node's gathers and writes, out of its pool and of `parts`, its send buffers.

    `paths` says which way a chunk goes, `posts` how a write is posted. `pair_of` says how a session's layouts meet.
    `observed` is told when a write begins; None: nobody observes.
    """

    def __init__(
        self,
        transport: Transport,
        stager: Stager,
        paths: Paths,
        *,
        parts: Sequence[Region],
        device: str,
        pair_of: Callable[[Session], Pair],
        observed: Observation | None,
    ) -> None:
        self._transport, self._stager, self.paths, self.posts = transport, stager, paths, Posts(transport)
        self._parts, self._kind, self._pair_of, self._observed = parts, device.partition(":")[0], pair_of, observed
        self.placed: dict[int, Mapped] = {}
        """Destinations' memory that gathers under way write, by ticket: it stays mapped until they are over."""

    def gather(self, effect: Gather) -> None:
        """Launches a chunk's gather: the stager says when it is over, and then `gathered` is to be called."""
        ticket, chunk = effect.ticket, effect.chunk
        session, pair = chunk.destination.session, self._pair_of(chunk.destination.session)
        dst = self._place(ticket, chunk, effect.address) or self._part(effect.buffer, chunk.nbytes)
        self._stager.gather(
            ticket, chunk.destination.shares, chunk.rects, wire=pair.wire, items=_indexes(chunk), dst=dst,
            checksum=session.checksums, tokens=chunk.tokens, cut=pair.src,
            staged=session.converted and session.converted.offered,
        )  # fmt: skip

    def gathered(self, ticket: int) -> None:
        self.placed.pop(ticket, None)

    def write(self, effect: Write | WriteDirect | WriteRow, counters: Counters) -> PdstageError | None:
        """Begins a write, and counts its descriptors; an error means that it never began."""
        try:
            spans = self._spans(effect)
        except UsageError as error:
            return error
        if self._observed is not None:
            self._observed.began(effect.ticket)
        failed = self.posts.begin(effect.ticket, label(effect.chunk.destination.session), spans, effect.tag)
        counters.descriptors += len(spans.nbytes) if spans is not None else 0
        return failed

    def _spans(self, effect: Write | WriteDirect | WriteRow) -> Spans | None:
        """From where to where; None: the bytes are where they belong, and only the tag is left to be sent."""
        match effect:
            case Write(_, buffer, chunk, address):
                if chunk.placed:
                    return None
                src = self._parts[buffer].base
                return Spans(np.array([src]), np.array([address]), np.array([chunk.nbytes]))
            case WriteDirect(_, chunk):
                destination = chunk.destination
                plan = self.paths.direct(destination, chunk.rects)
                theirs = {
                    given.component: Index.of(np.frombuffer(given.data, np.int32), given.first_token)
                    for given in destination.open.items
                }
                return Spans(*plan.spans(chunk.tokens, _indexes(chunk), theirs))
            case WriteRow(_, _, spans):
                return Spans(*np.ascontiguousarray(np.array(spans, np.int64).T))

    def _place(self, ticket: int, chunk: Chunk, address: int) -> Region | None:
        """The chunk's lease, if it is mapped here: then it is gathered and written in one pass."""
        mapped = self._transport.mapped(label(chunk.destination.session), address, chunk.nbytes)
        chunk.placed = mapped is not None and mapped.kind == self._kind
        if mapped is None or not chunk.placed:
            return None
        self.placed[ticket] = mapped
        return Region(mapped.address, chunk.nbytes)

    def _part(self, buffer: int, nbytes: int) -> Region:
        held = self._parts[buffer]
        return Region(held.base, min(held.nbytes, nbytes), held.kind, held.device)


def _indexes(chunk: Chunk) -> Mapping[str, Index]:
    return {name: given.index for name, given in chunk.source.items.items()}  # type: ignore[attr-defined]


class Paths:
    """Which path a chunk takes, and the plans of the direct one.

    `path` is "auto", "direct" or "staged", and may be changed between rooms; chunks have at most `chunk_nbytes`."""

    def __init__(
        self,
        path: str,
        cost_of: Callable[[Session], CostModel],
        *,
        layout: Layout,
        stagings: Stagings,
        pair_of: Callable[[Session], Pair],
        chunk_nbytes: int,
    ) -> None:
        self.path, self._cost_of = path, cost_of
        self._layout, self._stagings, self._pair_of, self._chunk_nbytes = layout, stagings, pair_of, chunk_nbytes
        self._plans: dict[tuple[object, ...], DirectPlans] = {}

    def prefers_direct(self, chunk: Chunk) -> bool:
        """By what all of its source's chunks to this destination would cost, so that they go the same way."""
        if self.path != "auto":
            return self.path == "direct"
        destination, rects, tokens, nbytes = chunk.destination, chunk.rects, chunk.tokens, chunk.nbytes
        n_chunks = 1
        if rects != chunk.source.rects:
            stagings = destination.staged_by(self._stagings)
            rects = clip(chunk.source.rects, destination, stagings)
            tokens = destination.session.common.tokens(rects)
            nbytes = stagings.of(destination.shares, rects).nbytes(tokens)
            n_chunks = -(-nbytes // self._chunk_nbytes)
        n_descriptors = self.direct(destination, rects).n_descriptors(tokens)
        return self._cost_of(destination.session).prefers_direct(nbytes, n_descriptors, n_chunks)

    def direct(self, destination: Destination, rects: tuple[Rect, ...]) -> DirectPlans:
        layers = ((rect.component, rect.layer_start, rect.layer_stop) for rect in rects)
        key = (destination.session, destination.shares, *layers)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            pair = self._pair_of(destination.session)
            ours, theirs = (
                selects(layout, destination.shares, rects) for layout in (self._layout, destination.session.layout)
            )
            plan = self._plans[key] = DirectPlans(pair.src, ours, pair.dst, theirs)
        return plan

    def forget(self, session: Session) -> None:
        """The session is over."""
        for key in [key for key in self._plans if key[0] is session]:
            del self._plans[key]


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
