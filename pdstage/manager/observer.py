"""What a node tells those who watch it: when its rooms began and ended, and how long each stage of each chunk took.

Traces, metrics and an engine's own observers are all given the same events. A node that nobody observes has no
`Observation`: it times nothing and makes no event.

Times are of `time.monotonic()`, one clock for all processes of a host.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from pdstage.errors import PdstageError, TransportError
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.room import RoomId, room_id
from pdstage.protocol.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdstage.layout.topology import Topology
    from pdstage.manager.handle import Handle
    from pdstage.protocol.destinations import Chunk
    from pdstage.protocol.messages import SessionId
    from pdstage.protocol.session import Session

log = logging.getLogger(__name__)

_LOST = TransportError("the session was lost during the write", remedy="see the peer's end, or the room's error")

Kind: TypeAlias = Literal["lease_wait", "gather", "write", "scatter", "direct", "aux"]


class Origin(NamedTuple):
    """The node an event is of. `role` is "prefill" or "decode", `rank` its number among its engine's ranks,
    `incarnation` its process life, as sessions name it.
    """

    role: str
    rank: int
    topology: Topology
    incarnation: int


class RoomOpened(NamedTuple):
    """The engine named a room. `number` tells a node's rooms apart: the name may be used again after the room's end."""

    room: RoomId
    number: int
    at: float


class RoomBound(NamedTuple):
    """Decode: the engine said where the room's state goes. Prefill: every destination has said so."""

    room: RoomId
    number: int
    at: float


class RoomEnded(NamedTuple):
    """`state` is Success or Failed; `reason` and `error`, the error's class, are empty after Success.

    `bound_at` as `RoomBound` says it, `moved_at` is when the first chunk was sent or came; None: it never was.
    """

    room: RoomId
    number: int
    state: State
    reason: str
    error: str
    opened_at: float
    bound_at: float | None
    moved_at: float | None
    ended_at: float


class RoomReleased(NamedTuple):
    """Nothing touches the room's memory any more. Comes after `RoomEnded`, once; not where the driver failed or a
    close did not wait for it."""

    room: RoomId
    number: int
    at: float


class StageOver(NamedTuple):
    """One stage of one chunk ended.

    At prefill: "lease_wait", from when the chunk's data exists until it has staging memory at decode that it may write,
    and a send buffer; "gather"; "write", of a staged chunk; "direct", a write without staging; "aux", of the room's
    row. At decode: "scatter". A write ends when its end is seen, between two large copies.

    `session` and `epoch` name one destination's claim on the room, and with `chunk` one chunk, alike on both sides;
    `peer` is the other side's rank. `lane` of decode's staging memory is None where there is none. `nbytes` is 0 for a
    write whose gather went straight to where it belongs: only its tag was left to be sent. `error` is empty if it went
    well.
    """

    kind: Kind
    room: RoomId
    session: SessionId
    epoch: int
    peer: int
    lane: int | None
    chunk: int
    began_at: float
    ended_at: float
    nbytes: int
    error: str = ""


Event: TypeAlias = RoomOpened | RoomBound | RoomEnded | RoomReleased | StageOver


class Observer(Protocol):
    """Who watches a node. Several nodes may have the same one, each with a thread of its own.

    It is called on the node's driving thread, without its lock: what it does delays transfers, so it should be quick.
    One that raises is logged once and asked no more.
    """

    def observe(self, origin: Origin, event: Event) -> None: ...


@dataclass(slots=True, eq=False)
class _Seen:
    """A room that is not released yet."""

    room: RoomId
    number: int
    opened_at: float
    bound_at: float | None = None
    moved_at: float | None = None
    ended: bool = False


class Observation:
    """Makes one node's events as its driver says what happens, and hands them out when the driver has time."""

    def __init__(self, origin: Origin, observers: Sequence[Observer]) -> None:
        self.origin = origin
        self._observers = list(observers)
        # Filled by the engine's threads and the driver's, emptied by the driver's: one append and one popleft are each
        # whole.
        self._events: deque[Event] = deque()
        self._rooms: dict[Handle, _Seen] = {}
        self._n_rooms = 0
        self._stages: dict[int, StageOver] = {}

    # Rooms.

    def opened(self, handle: Handle) -> None:
        """Under the node's lock."""
        self._n_rooms += 1
        seen = self._rooms[handle] = _Seen(handle.id, self._n_rooms, time.monotonic())
        self._events.append(RoomOpened(seen.room, seen.number, seen.opened_at))

    def bound(self, handle: Handle) -> None:
        seen = self._rooms.get(handle)
        if seen is not None and seen.bound_at is None:
            seen.bound_at = time.monotonic()
            self._events.append(RoomBound(seen.room, seen.number, seen.bound_at))

    def changed(self, handle: Handle) -> None:
        seen, state = self._rooms.get(handle), handle.state
        if seen is None:
            return
        if state not in (State.BOOTSTRAPPING, State.FAILED) and self.origin.role == "prefill":
            self.bound(handle)
        if state in (State.TRANSFERRING, State.SUCCESS) and seen.moved_at is None:
            seen.moved_at = time.monotonic()
        if state in (State.SUCCESS, State.FAILED) and not seen.ended:
            self._ended(seen, state, handle.error)
        if handle.released:
            del self._rooms[handle]
            self._events.append(RoomReleased(seen.room, seen.number, time.monotonic()))

    def broke(self, error: PdstageError) -> None:
        """The driver failed, and with it all rooms that had not ended."""
        seen, self._rooms = list(self._rooms.values()), {}
        for one in seen:
            if not one.ended:
                self._ended(one, State.FAILED, error)

    def _ended(self, seen: _Seen, state: State, error: PdstageError | None) -> None:
        seen.ended = True
        reason, name = (str(error), type(error).__name__) if error is not None else ("", "")
        times = seen.opened_at, seen.bound_at, seen.moved_at, time.monotonic()
        self._events.append(RoomEnded(seen.room, seen.number, state, reason, name, *times))

    # Stages. What is under way is kept by its ticket, as it will be reported but for its times and its error.

    def asked(self, effects: Iterable[object]) -> None:
        """The core asked for these just now."""
        now = time.monotonic()
        for effect in effects:
            match effect:
                case Gather(ticket, _, chunk):
                    self._waited(chunk, now)
                    stage = _of_chunk("gather", chunk, now)
                case Write(ticket, _, chunk):
                    stage = _of_chunk("write", chunk, now, 0 if chunk.placed else chunk.nbytes)
                case WriteDirect(ticket, chunk):
                    if chunk.attempt:  # it fell back from waiting
                        self._waited(chunk, now)
                    stage = _of_chunk("direct", chunk, now)
                case WriteRow(ticket, chunk):
                    stage = _of_chunk("aux", chunk, now)
                case Scatter(ticket, writer, lease):
                    stage = StageOver(
                        "scatter", writer.room.id, writer.session.id, lease.epoch, writer.number, lease.lane,
                        lease.chunk, now, now, effect.nbytes,
                    )  # fmt: skip
                case _:
                    continue
            self._stages[ticket] = stage

    def _waited(self, chunk: Chunk, now: float) -> None:
        waited = _of_chunk("lease_wait", chunk, min(chunk.waits_since, now))
        self._events.append(waited._replace(ended_at=now))

    def began(self, ticket: int) -> None:
        """The write that was asked for begins; copies are timed where they are made."""
        stage = self._stages.get(ticket)
        if stage is not None:
            self._stages[ticket] = stage._replace(began_at=time.monotonic())

    def over(self, ticket: int, error: PdstageError | None, began_at: float, ended_at: float) -> None:
        """A copy or a write ended; `began_at` is 0 for a write, and for a copy that never began."""
        stage = self._stages.pop(ticket, None)
        if stage is not None:
            began_at, reason = began_at or stage.began_at, "" if error is None else str(error)
            self._events.append(stage._replace(began_at=began_at, ended_at=max(began_at, ended_at), error=reason))

    def lost(self, session: Session) -> None:
        """The session is over: of its writes nobody may hear again. Copies report themselves."""
        for ticket, stage in list(self._stages.items()):
            if stage.session == session.id and stage.kind in ("write", "direct", "aux"):
                self.over(ticket, _LOST, 0.0, time.monotonic())

    # Telling.

    def tell(self) -> None:
        """Hands out what has happened. On the driving thread, without its lock."""
        while self._events:
            try:
                event = self._events.popleft()
            except IndexError:  # another thread closes the node meanwhile
                return
            for observer in tuple(self._observers):
                try:
                    observer.observe(self.origin, event)
                except Exception:
                    self._observers.remove(observer)
                    log.exception("observer %r failed and is asked no more", observer)


def _of_chunk(kind: Kind, chunk: Chunk, at: float, nbytes: int | None = None) -> StageOver:
    destination, session = chunk.destination, chunk.destination.session
    return StageOver(
        kind, room_id(destination.open.room), session.id, destination.epoch, session.topology.unique_rank,
        None if chunk.direct else chunk.lane, chunk.number, at, at, chunk.nbytes if nbytes is None else nbytes,
    )  # fmt: skip
