"""What an engine holds of one room, whichever side it is on.

Layer 5. Must not know cores or sockets: the node keeps it current, and is asked to make progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdstage.protocol.room import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.errors import PdstageError


class Driver(Protocol):
    """What a handle asks of its node."""

    def progress_inline(self) -> None: ...

    def wait_for(self, done: Callable[[], bool], timeout_s: float | None, what: str) -> None: ...


class Handle:
    """What an engine holds of one room. `status` is `state | released << 7`, kept by the driver for `poll_many`."""

    __slots__ = ("__weakref__", "_node", "error", "key", "room", "status")

    def __init__(self, node: Driver, room: object, key: bytes) -> None:
        self._node = node
        self.room = room
        self.key = key
        self.status: int = State.BOOTSTRAPPING
        self.error: PdstageError | None = None

    @property
    def state(self) -> State:
        """The state as of the last turn."""
        return State(self.status & 0x7F)

    @property
    def released(self) -> bool:
        """Whether, as of the last turn, the room ended and nothing touches its memory any more."""
        return self.status >= 0x80

    def poll(self) -> State:
        """One turn in inline mode; then the state. Raises nothing: `error` says why a room failed."""
        self._node.progress_inline()
        return self.state

    def wait(self, timeout_s: float | None = None) -> State:
        """Until the room ended; then its state, or raises its error if it failed. `TimeoutError` after `timeout_s`."""
        self._node.wait_for(
            lambda: self.status & 0x7F in (State.SUCCESS, State.FAILED), timeout_s, f"room {self.key!r}"
        )
        if self.error is not None:
            raise self.error
        return self.state

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Until the room's memory may be reused. `TimeoutError` after `timeout_s`."""
        self._node.wait_for(lambda: self.status >= 0x80, timeout_s, f"room {self.key!r}")
