"""A write as posts: at most `max_descriptors` each, the tag on the last, which waits for the others.

Layer 5. Must not know rooms or cores: tickets and tags mean nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import PdstageError, UsageError
from pdstage.spans import split
from pdstage.transport import PostFailed, Spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.transport import Done, Transport


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
    """Writes under way, by the caller's tickets."""

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
