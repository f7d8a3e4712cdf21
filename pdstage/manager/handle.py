"""What an engine holds of one room, on either side: its handle, the waiters for it, and its aux row.

The node keeps handles current; a handle asks its node to make progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from pdstage import arguments
from pdstage.errors import PdstageError, UsageError
from pdstage.protocol.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from pdstage.manager.node import AnyNode
    from pdstage.metadata import AuxRow
    from pdstage.protocol.room import Room, RoomId

_ENDED = (State.SUCCESS, State.FAILED)


class CudaEvent(Protocol):
    """What an engine gives to wait for: `torch.cuda.Event`, or anything that says whether it is done."""

    def query(self) -> bool: ...


def check_event(what: str, event: CudaEvent | None) -> None:
    """Raises `UsageError` for what cannot be asked."""
    try:
        usable = event is None or callable(event.query)
    except Exception:  # noqa: BLE001  (its own method's)
        usable = False
    if not usable:
        raise UsageError(f"{what} is {arguments.shown(event)}", remedy="give an event, which has query(), or None")


Waiter: TypeAlias = "tuple[Callable[[], bool], Callable[[], None]]"
"""Who waits: for what to be so, and how that is woken, in whatever thread."""


class Handle:
    """What an engine holds of one room. `status` is `state | released << 7`, kept by the driver for `poll_many`."""

    __slots__ = ("__weakref__", "_node", "began_at", "error", "room", "row", "status", "waiters")

    room: Room

    def __init__(self, node: AnyNode, room: Room) -> None:
        self._node = node
        self.room = room
        self.status: int = State.BOOTSTRAPPING
        self.error: PdstageError | None = None
        self.began_at = time.monotonic()
        self.waiters: list[Waiter] = []
        self.row: AuxRow | None = None
        """The aux row that its room has until it is released."""

    @property
    def id(self) -> RoomId:
        """The room, as the engine named it to `send` or `receive`."""
        return self.room.id

    @property
    def state(self) -> State:
        """The state as of the last turn."""
        return State(self.status & 0x7F)

    @property
    def released(self) -> bool:
        """Whether, as of the last turn, the room ended and nothing touches its memory any more."""
        return self.status >= 0x80

    def abort(self, reason: str = "aborted by the engine") -> None:
        """Gives the room up: it fails here and at its peers: as soon as each is found and answers, and where it was not
        submitted yet, once it is. `released` tells when its pages are safe.
        """
        self._node.abort(self, reason)

    def poll(self) -> State:
        """One turn in inline mode; then the state. Raises nothing: `error` says why a room failed."""
        self._node.progress_inline()
        return self.state

    def wait(self, timeout_s: float | None = None) -> State:
        """Until the room ended; then its state, or raises its error if it failed. `TimeoutError` after `timeout_s`."""
        self._node.wait_for(self, lambda: self.status & 0x7F in _ENDED, timeout_s)
        return self._outcome()

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Until the room's memory may be reused. `TimeoutError` after `timeout_s`."""
        self._node.wait_for(self, lambda: self.released, timeout_s)

    async def wait_async(self, timeout_s: float | None = None) -> State:
        """`wait` in an event loop, which goes on meanwhile: returns and raises what `wait` does.

        Cancelling it gives up the waiting, not the room: that is what `abort` is for. The node has a thread
        (`progress="thread"`); else `UsageError`. Thousands may wait at a time: a wait costs no thread.
        """
        await self._node.wait_for_async(self, lambda: self.status & 0x7F in _ENDED, timeout_s)
        return self._outcome()

    async def wait_released_async(self, timeout_s: float | None = None) -> None:
        """`wait_released` in an event loop; see `wait_async`."""
        await self._node.wait_for_async(self, lambda: self.released, timeout_s)

    def _outcome(self) -> State:
        if self.error is not None:
            raise self.error
        return self.state


class _Polled(NamedTuple):
    """An answer of `Roster.statuses`, and what it answers: `at` the roster's number of changes."""

    at: int
    handles: Sequence[Handle]
    statuses: npt.NDArray[np.uint8]


MAX_ENDED = 65_536
"""Ended rooms that are kept for `completions`: an engine that never asks for them must not pay for each (I14)."""


class Roster:
    """The handles of one node, by room, until their rooms are released.

    The driver writes, the engine's threads read: a handle's status is one attribute, so a read is whole.
    """

    def __init__(self) -> None:
        self.by_room: dict[Room, Handle] = {}
        self._ended: deque[Handle] = deque(maxlen=MAX_ENDED)
        # Lists and dictionaries whose single calls are each whole: waiters come and go in any thread, and when garbage
        # is collected, where a lock could be held by whom it interrupts.
        self._waiters: dict[Waiter, None] = {}
        self._due: deque[list[Waiter]] = deque()  # of what changed since the last `ring`
        self._n_changes = 0
        self._polled = _Polled(-1, [], np.empty(0, np.uint8))  # replaced as a whole: several threads may poll

    def changed(self, handle: Handle, status: int) -> None:
        """Brings `handle` to `status`, its room's as it was read once; `ring` then wakes who waits for it.

        A room may change in another thread meanwhile; that is told by another call.
        """
        had_ended = handle.status & 0x7F in _ENDED
        if status & 0x7F == State.FAILED:
            handle.error = handle.room.error
        handle.status = status
        if status & 0x7F in _ENDED and not had_ended:
            self._ended.append(handle)
        if handle.waiters:
            self._due.append(handle.waiters)
        if status >= 0x80:
            self.by_room.pop(handle.room, None)
        self._n_changes += 1

    def fail(self, error: PdstageError) -> None:
        """Fails every handle that has not ended; under the node's lock."""
        for handle in self.by_room.values():
            if handle.status & 0x7F not in _ENDED:
                handle.error = error
                handle.status = State.FAILED
        self._n_changes += 1
        self.ring_all()

    def take_ended(self) -> list[Handle]:
        """All that ended since the last call. One by one, since the driver's thread may add another meanwhile."""
        ended = list[Handle]()
        with contextlib.suppress(IndexError):  # another thread took it
            while self._ended:  # asked first, since an engine asks in each step, and mostly there is none
                ended.append(self._ended.popleft())
        return ended

    def statuses(self, handles: Sequence[Handle]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """(states, released) of `handles`; remembered while neither they nor any room changes."""
        changes, polled = self._n_changes, self._polled  # first: a change meanwhile makes the answer old, not wrong
        if changes != polled.at or handles != polled.handles:
            statuses = np.frombuffer(bytes([handle.status for handle in handles]), np.uint8)
            self._polled = polled = _Polled(changes, list(handles), statuses)
        return (polled.statuses & 0x7F).view(np.int8), polled.statuses >> np.uint8(7)

    def ring(self) -> None:
        """Wakes the waiters for rooms that changed, if their condition is true now: waking others would only cost the
        interpreter. Called by who carries out effects, one thread at a time.
        """
        while self._due:
            for done, wake in tuple(self._due.popleft()):
                if done():
                    wake()

    def ring_all(self) -> None:
        """Wakes every waiter: the node ends, and their conditions may never become true."""
        for _, wake in tuple(self._waiters):
            wake()

    @contextlib.contextmanager
    def waiting(self, handle: Handle, done: Callable[[], bool], wake: Callable[[], None]) -> Iterator[None]:
        """Inside, `wake` is called once `handle`'s room changed and `done()`; perhaps again.

        Ask `done()` inside before waiting: it may be so already.
        """
        waiter = done, wake
        self._waiters[waiter] = None
        handle.waiters.append(waiter)
        try:
            yield
        finally:
            handle.waiters.remove(waiter)
            del self._waiters[waiter]

    def wait(self, handle: Handle, done: Callable[[], bool], timeout_s: float) -> None:
        """Until a change of `handle`'s room made `done` true, or `timeout_s` is over. May return early."""
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        with self.waiting(handle, done, lambda: bell.put(None)):
            if not done():
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=timeout_s)

    async def wait_async(self, handle: Handle, done: Callable[[], bool], check: Callable[[], None]) -> None:
        """Until a change of `handle`'s room made `done` true. Raises what `check` does, asked before a wait."""
        loop, changed, stack = asyncio.get_running_loop(), asyncio.Event(), contextlib.ExitStack()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(changed.set)
            except RuntimeError:  # the loop was closed, and nobody will come back here
                stack.close()

        with stack:
            stack.enter_context(self.waiting(handle, done, wake))
            while not done():
                check()
                await changed.wait()
                changed.clear()
