"""A room at either side: its name, its state, why it failed, and whether its memory is safe to reuse."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pdstage.arguments import shown
from pdstage.errors import PdstageError, UsageError
from pdstage.protocol.messages import MAX_ROOM_NBYTES, RowSpan
from pdstage.protocol.state import ROOM, RoomEvent, State

if TYPE_CHECKING:
    from pdstage.columns import Places

RoomId: TypeAlias = int | str | bytes
"""A room as its engine names it."""


def room_key(room: RoomId) -> bytes:
    """A room's name on the wire; 1, "1" and b"1" are three rooms. Raises `UsageError` for other types and over 256
    bytes.
    """
    key = b""
    with contextlib.suppress(Exception):  # of `operator.index`, and of text that UTF-8 cannot say
        if isinstance(room, str):
            key = b"s" + room.encode()
        elif isinstance(room, bytes):
            key = b"b" + room
        elif not isinstance(room, bool):
            key = b"i%d" % operator.index(room)
    if not 0 < len(key) <= MAX_ROOM_NBYTES:
        raise UsageError(
            f"room {shown(room)} is no room id",
            remedy="use an integer, a str or bytes, of at most 255 bytes",
            room=room,
        )
    return key


def room_id(key: bytes) -> RoomId:
    """The inverse of `room_key`. Bytes that `room_key` never makes are returned as they are."""
    name = key[1:]
    try:
        match key[:1]:
            case b"i":
                return int(name)
            case b"s":
                return name.decode()
            case b"b":
                return name
    except ValueError:
        pass
    return key


_ENDED = (State.SUCCESS, State.FAILED)
_STATES = tuple(State)  # a look-up by value, without Enum's call


class OwnRows(NamedTuple):
    """A node's own side of aux: the columns of its rows; whether rows are to travel by the data transport (else by
    message); and where they lie, if so and if it can reach them.
    """

    columns: Places = ()
    wanted: bool = False
    span: RowSpan | None = None


NO_ROWS = OwnRows()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Room:
    """One room at one node: its state, why it failed, and whether its memory is safe to reuse.

    `status` is `state | released << 7`, one byte for arrays over many rooms. `ended`: its state is Success or Failed.
    """

    key: bytes
    status: int = field(default=State.BOOTSTRAPPING, init=False)
    error: PdstageError | None = field(default=None, init=False)
    ended: bool = field(default=False, init=False)

    @property
    def id(self) -> RoomId:
        """As the engine named it."""
        return room_id(self.key)

    @property
    def state(self) -> State:
        return _STATES[self.status & 0x7F]

    @property
    def released(self) -> bool:
        return self.status >= 0x80

    def on(self, event: RoomEvent, error: PdstageError | None = None) -> bool:
        """Applies `event`; False if it changes nothing."""
        state = ROOM.after(_STATES[self.status & 0x7F], event)
        if state is None:
            return False
        if event is RoomEvent.FAILED:
            self.error = error  # first: another thread that reads the status may ask for the error
        self.status = state | (self.status & 0x80)
        self.ended = state in _ENDED
        return True

    def release(self) -> None:
        """Marks an ended room's memory as safe."""
        self.status |= 0x80
