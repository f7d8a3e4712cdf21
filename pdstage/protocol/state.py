"""The five state machines of the protocol, each a table: every state, and every way from one to another.

    ROOM          a room, at either side
    DESTINATION   one decode rank's claim on a room, at prefill
    CHUNK         one chunk of one destination, at prefill
    WRITER        one prefill rank's part of a room, at decode
    LEASE         memory lent to a chunk, at decode

A state changes by its table alone (`Machine.move`; a room's by `Room.on`). A table says what follows, or that an event
changes nothing there. What it does not say is a mistake of this library: an error while `strict`, as in tests, else
logged, and the state stays.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from typing import Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

strict = False
"""Whether a move that no table has raises `AssertionError`."""


class _Name(Enum):
    """A state or event: one object each, so that it hashes by identity; Enum's own hash is a Python call."""

    __hash__ = object.__hash__


class State(IntEnum):
    """A room's. The values are those of SGLang's KVPoll, so that the minimum over ranks is the state of all."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)


class RoomEvent(_Name):
    CONNECTED = auto()
    """Every peer of the room is known and agreed."""
    MOVED = auto()
    """A chunk of the room was sent or has arrived."""
    COMPLETED = auto()
    """Everything asked for was delivered (decode) or sent (prefill)."""
    FAILED = auto()


class DestinationPhase(_Name):
    WAITING = auto()
    """Its room was not submitted here yet."""
    LIVE = auto()
    CLOSING = auto()
    """Everything is written; CloseOk is repeated."""
    FAILING = auto()
    """CloseFailed is repeated until Abort."""
    DRAINING = auto()
    """Aborted, or its session is lost; Drained follows the last completion."""


class DestinationEvent(_Name):
    ATTACHED = auto()
    """Its room is submitted."""
    WRITTEN = auto()
    """All that it asked for is written, and no more will come."""
    FAILED = auto()
    """Its room failed, or will not be submitted."""
    ABORTED = auto()
    """It said Abort, came again in another epoch, or its session is lost."""
    DELIVERED = auto()
    """Its Abort says that it has everything."""


class ChunkPhase(_Name):
    """A chunk's. A chunk that turns out to go direct needs no lease: HELD, READY, WRITING, WRITTEN."""

    RESERVING = auto()
    """Reserve is repeated until a lease comes."""
    PARKED = auto()
    """Its lease was recalled before its data existed: asks again when it does."""
    HELD = auto()
    """Has a lease, or goes direct; waits for data, or for its lease's window."""
    READY = auto()
    """Queued: may be gathered and written now."""
    GATHERING = auto()
    """Maybe straight into its lease, so it is not DROPPED before the gather ends."""
    WRITING = auto()
    WRITTEN = auto()
    BROKEN = auto()
    """Its post failed: what landed is unknown, so it is neither repeated nor given back."""
    DROPPED = auto()
    """Its room needs it no more."""


class ChunkEvent(_Name):
    RESERVE = auto()
    """Asks for a lease, maybe again."""
    LEASED = auto()
    REFUSED = auto()
    """No lease will come: it is covered, its room is over, or it was cut into smaller ones."""
    RECALLED = auto()
    """Its lease, had or asked for, goes back before its data exists."""
    GO_DIRECT = auto()
    """It is written straight into pages, from the start or because staging came to nothing."""
    QUEUED = auto()
    """Its data exists and its window is open."""
    GATHER = auto()
    WRITE = auto()
    UNUSED = auto()
    """It was gathered for nothing, or could not be gathered."""
    WRITTEN = auto()
    BROKEN = auto()
    DROP = auto()
    """Its destination needs it no more."""


class WriterPhase(_Name):
    UNOPENED = auto()
    OPENING = auto()
    """Open is repeated."""
    OPENED = auto()
    ABORTING = auto()
    """Abort is repeated until Drained or CloseOk."""
    QUIET = auto()
    """Proved: this writer touches nothing of this room any more."""


class WriterEvent(_Name):
    OPEN = auto()
    ANSWERED = auto()
    """Opened came, or another message that shows that the Open arrived."""
    ABORT = auto()
    """The room is over for this side."""
    QUIET = auto()
    """Closed, Drained, or its session fenced."""


class LeasePhase(StrEnum):
    WAITING = auto()
    """Asked for, and in line."""
    GRANTED = auto()
    """Lent: its writer may write it once it is open."""
    LANDED = auto()
    """Its bytes are there and wait for their scatter."""
    QUARANTINED = auto()
    """Its room failed or its session is lost, and it may still be written."""
    RELEASED = auto()
    """Nothing writes or reads it any more: its bytes may be lent again."""


class LeaseEvent(_Name):
    GRANT = auto()
    LAND = auto()
    """Its tag came."""
    QUARANTINE = auto()
    RELEASE = auto()
    """It was returned or scattered, or its writer cannot write it any more: Drained, CloseOk, or fenced."""


S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
_Rows = dict[S, dict[E, S | None]]


class Moving(Protocol[S]):
    phase: S


@dataclass(eq=False)
class Machine(Generic[S, E]):
    """A table by state: each event's next state, or None for an event that changes nothing there."""

    name: str
    rows: _Rows[S, E]

    def move(self, thing: Moving[S], event: E) -> bool:
        """Brings `thing` into the state that follows; False if none does."""
        row = self.rows[thing.phase]
        state = row[event] if event in row else self.after(thing.phase, event)
        if state is None:
            return False
        thing.phase = state
        return True

    def after(self, state: S, event: E) -> S | None:
        try:
            return self.rows[state][event]
        except KeyError:
            what = f"{self.name}: {event.name} in {state.name}, which no table has"
            if strict:
                raise AssertionError(what) from None
            log.error("the state stays: %s", what)  # noqa: TRY400  (no exception of anybody's)
            return None


def _room() -> _Rows[State, RoomEvent]:
    e, s = RoomEvent, State
    over: dict[RoomEvent, State | None] = dict.fromkeys(e)
    begun = over | {e.FAILED: s.FAILED}
    return {
        s.BOOTSTRAPPING: begun | {e.CONNECTED: s.WAITING_FOR_INPUT},
        s.WAITING_FOR_INPUT: begun | {e.MOVED: s.TRANSFERRING, e.COMPLETED: s.SUCCESS},
        s.TRANSFERRING: begun | {e.COMPLETED: s.SUCCESS},
        s.SUCCESS: over,
        s.FAILED: over,
    }


def _destination() -> _Rows[DestinationPhase, DestinationEvent]:
    e, p = DestinationEvent, DestinationPhase
    over = {e.FAILED: None, e.ABORTED: p.DRAINING, e.DELIVERED: p.CLOSING}
    begun = over | {e.FAILED: p.FAILING}
    return {
        p.WAITING: {e.ATTACHED: p.LIVE, **begun},
        p.LIVE: begun | {e.WRITTEN: p.CLOSING},
        p.CLOSING: over,
        p.FAILING: over,
        p.DRAINING: over,
    }


def _chunk() -> _Rows[ChunkPhase, ChunkEvent]:
    e, p = ChunkEvent, ChunkPhase
    waits = {e.RESERVE: p.RESERVING, e.RECALLED: p.PARKED, e.GO_DIRECT: p.HELD, e.DROP: p.DROPPED}
    return {
        p.RESERVING: {e.RESERVE: p.RESERVING, e.LEASED: p.HELD, e.REFUSED: p.DROPPED, **waits},
        p.PARKED: {e.RESERVE: p.RESERVING, e.DROP: p.DROPPED},
        p.HELD: {**waits, e.QUEUED: p.READY},
        p.READY: {e.GATHER: p.GATHERING, e.WRITE: p.WRITING, e.DROP: p.DROPPED},
        p.GATHERING: {e.WRITE: p.WRITING, e.GO_DIRECT: p.HELD, e.UNUSED: p.DROPPED, e.DROP: None},
        p.WRITING: {e.WRITTEN: p.WRITTEN, e.BROKEN: p.BROKEN, e.DROP: None},
        p.WRITTEN: {e.DROP: None},
        p.BROKEN: {e.DROP: None},
        p.DROPPED: {e.DROP: None},
    }


def _writer() -> _Rows[WriterPhase, WriterEvent]:
    e, p = WriterEvent, WriterPhase
    over = {e.ANSWERED: None, e.ABORT: None, e.QUIET: p.QUIET}
    opened = over | {e.ABORT: p.ABORTING}
    return {
        p.UNOPENED: {e.OPEN: p.OPENING, **over, e.ABORT: p.QUIET},
        p.OPENING: opened | {e.ANSWERED: p.OPENED},
        p.OPENED: opened,
        p.ABORTING: over,
        p.QUIET: over,
    }


def _lease() -> _Rows[LeasePhase, LeaseEvent]:
    e, p = LeaseEvent, LeasePhase
    return {
        p.WAITING: {e.GRANT: p.GRANTED},
        p.GRANTED: {e.LAND: p.LANDED, e.QUARANTINE: p.QUARANTINED, e.RELEASE: p.RELEASED},
        p.LANDED: {e.RELEASE: p.RELEASED},
        p.QUARANTINED: {e.RELEASE: p.RELEASED},
        p.RELEASED: {},
    }


ROOM = Machine("room", _room())
"""Success and Failed are terminal (I1). The first MOVED makes a room TRANSFERRING; later ones change nothing."""
DESTINATION = Machine("destination", _destination())
CHUNK = Machine("chunk", _chunk())
WRITER = Machine("writer", _writer())
LEASE = Machine("lease", _lease())
