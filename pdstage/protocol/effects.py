"""What a core asks of its driver: a closed union of frozen values.

Layer 2, pure. Must not know sockets, kernels or transports; the driver's match over `Effect` ends in `assert_never`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pdstage.columns import Span
    from pdstage.errors import PdstageError
    from pdstage.protocol.inbox import Landing
    from pdstage.protocol.outbox import Chunk
    from pdstage.protocol.room import Room
    from pdstage.protocol.session import Session


class Send(NamedTuple):
    """Send one control frame; a lost one is asked for again."""

    route: bytes
    frame: bytes


class Attach(NamedTuple):
    """A session began: tell the transport who its peer is. Prefill connects for its writes; decode only meets it, so
    that its death can be proved. `offers`: what the peer told of each of its transports, by name.
    """

    session: Session
    offers: dict[str, bytes]


class Detach(NamedTuple):
    """The session is lost: disconnect the transport; answer `fenced` once nothing of it can land any more."""

    session: Session


class HangUp(NamedTuple):
    """Nobody at `route` is greeted or talked with any more: its connection may go, unless that has changed by then."""

    route: bytes


class Gather(NamedTuple):
    """Gather a chunk into send buffer `buffer`; answer `gathered(ticket)`.

    Or straight into its lease, at `address` in the destination's memory, where that is mapped here. So a gather counts
    as a write from when it is asked for: its lease is not given back, and Drained is not said, before it ended.
    """

    ticket: int
    buffer: int
    chunk: Chunk
    address: int


class Write(NamedTuple):
    """Write send buffer `buffer` to the chunk's lease as one post; answer `completed(ticket)`.

    Only the tag is left to be sent if the gather went straight there.
    """

    ticket: int
    buffer: int
    chunk: Chunk
    address: int
    tag: bytes


class WriteDirect(NamedTuple):
    """Write the chunk's source runs straight into the destination's pages; answer `completed(ticket)`."""

    ticket: int
    chunk: Chunk
    tag: bytes


class WriteRow(NamedTuple):
    """Write the room's aux row straight into the destination's as one post; answer `completed(ticket)`.

    `spans` are addresses here, there, and bytes.
    """

    ticket: int
    chunk: Chunk
    spans: tuple[Span, ...]
    tag: bytes


class Scatter(NamedTuple):
    """Scatter a landed chunk into the room's items; answer `scattered(ticket)`."""

    ticket: int
    landing: Landing


class Changed(NamedTuple):
    """A room's state, its `released` or its `ready_to_bind` changed."""

    room: Room


class PeerWarning(NamedTuple):
    """A peer said something it may not or that surprises, or was refused: for the log. Counted already."""

    route: bytes
    error: PdstageError


# fmt: off
Effect: TypeAlias = (
    Send | Attach | Detach | HangUp | Gather | Write | WriteDirect | WriteRow | Scatter | Changed | PeerWarning
)
# fmt: on
