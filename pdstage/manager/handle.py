"""What an engine holds of one room, whichever side it is on.

Layer 5. Must not know cores or sockets: the node keeps it current, and is asked to make progress.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdstage.protocol.room import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pdstage.errors import PdstageError
    from pdstage.protocol.room import Room

_ENDED = (State.SUCCESS, State.FAILED)


class Driver(Protocol):
    """What a handle asks of its node."""

    def progress_inline(self) -> None: ...

    def wait_for(self, done: Callable[[], bool], timeout_s: float | None, what: str) -> None: ...


class CudaEvent(Protocol):
    """What an engine gives to wait for: `torch.cuda.Event`, or anything that says whether it is done."""

    def query(self) -> bool: ...


class Handle:
    """What an engine holds of one room. `status` is `state | released << 7`, kept by the driver for `poll_many`."""

    __slots__ = ("__weakref__", "_node", "began_at", "error", "key", "room", "status")

    def __init__(self, node: Driver, room: object, key: bytes) -> None:
        self._node = node
        self.room = room
        self.key = key
        self.status: int = State.BOOTSTRAPPING
        self.error: PdstageError | None = None
        self.began_at = time.monotonic()

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
        self._node.wait_for(lambda: self.status & 0x7F in _ENDED, timeout_s, f"room {self.key!r}")
        if self.error is not None:
            raise self.error
        return self.state

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Until the room's memory may be reused. `TimeoutError` after `timeout_s`."""
        self._node.wait_for(lambda: self.status >= 0x80, timeout_s, f"room {self.key!r}")


MOST_ENDED = 65_536
"""Ended rooms that are kept for `completions`: an engine that never asks for them must not pay for each (I14)."""


class Roster:
    """The handles of one node, by room, until their rooms are released.

    The driver writes, the engine's threads read: a handle's status is one attribute, so a read is whole.
    """

    def __init__(self) -> None:
        self._handles: dict[Room, Handle] = {}
        self._ended: deque[Handle] = deque(maxlen=MOST_ENDED)
        self._waiters: list[tuple[Callable[[], bool], queue.SimpleQueue[None]]] = []
        self._n_changes = 0
        self._polled_at = -1
        self._polled: Sequence[Handle] = []
        self._statuses = np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, room: Room, handle: Handle) -> None:
        self._handles[room] = handle
        handle.status = room.status
        self._n_changes += 1

    def of(self, room: Room) -> Handle | None:
        """The room's handle, until the room is released."""
        return self._handles.get(room)

    def handles(self) -> list[Handle]:
        """All of them, as they are now; any thread may ask."""
        return list(self._handles.copy().values())  # copied in one step, whoever changes it meanwhile

    def changed(self, room: Room) -> None:
        """Brings the room's handle up to date; `ring` then wakes who waits for it."""
        handle = self._handles.get(room)
        if handle is None:
            return
        had_ended = handle.status & 0x7F in _ENDED
        handle.error = room.error
        handle.status = room.status
        if room.ended and not had_ended:
            self._ended.append(handle)
        if room.released:
            del self._handles[room]
        self._n_changes += 1

    def end(self, handle: Handle, error: PdstageError) -> None:
        """Fails a handle whose room never reached the core: nothing was said, so nothing is held."""
        handle.error = error
        handle.status = State.FAILED | 0x80
        self._ended.append(handle)
        self._n_changes += 1
        self.ring()

    def fail(self, error: PdstageError) -> None:
        """Fails every handle that has not ended."""
        for handle in self._handles.values():
            if handle.status & 0x7F not in _ENDED:
                handle.error = error
                handle.status = State.FAILED
        self._n_changes += 1
        self.ring()

    def take_ended(self) -> list[Handle]:
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def statuses(self, handles: Sequence[Handle]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """(states, released) of `handles`; remembered while neither they nor any room changes."""
        changes = self._n_changes  # read first: a change meanwhile makes the answer old, not wrong for long
        if changes != self._polled_at or handles != self._polled:
            self._polled_at, self._polled = changes, list(handles)
            self._statuses = np.frombuffer(bytes([handle.status for handle in handles]), np.uint8)
        return (self._statuses & 0x7F).view(np.int8), self._statuses >> np.uint8(7)

    def ring(self) -> None:
        """Wakes each waiting thread whose `done` is true: asked here, as any other would only take the interpreter."""
        for done, bell in tuple(self._waiters):
            if done():
                bell.put(None)

    def wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Until a change made `done` true, or `timeout_s` is over. May return early."""
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        waiter = (done, bell)
        self._waiters.append(waiter)
        try:
            if not done():
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=timeout_s)
        finally:
            self._waiters.remove(waiter)
