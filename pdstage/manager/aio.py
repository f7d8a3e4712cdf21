"""Waiting for rooms in an asyncio event loop, which turns an inline node meanwhile.

Nothing here polls. A node with a thread calls the loop. An inline node's descriptors are watched by the loop, and its
next deadline is a timer of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from pdstage.manager.handle import Handle, Roster

_BUSY_S = 1e-3


class Wakeup(NamedTuple):
    """What a node asks for after a turn: the next after `pause_s` seconds, or once one of `fds` is readable."""

    pause_s: float
    fds: Collection[int]


class Turns(Protocol):
    """What waits need of a driver."""

    inline: bool
    pumps: dict[asyncio.AbstractEventLoop, Pump]

    def check(self) -> None: ...

    def look(self) -> Wakeup | None:
        """A turn; None if another thread is in one."""


class Pump:
    """Turns an inline node from one event loop."""

    def __init__(self, turns: Turns, loop: asyncio.AbstractEventLoop) -> None:
        self._turns, self._loop = turns, loop
        self.n_waits = 0
        # The loop is told one descriptor, which is the pump's own: the node's may be closed in any thread.
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self._resume()

    def stop(self) -> None:
        """Turns no more. In the loop's thread, or once the loop is closed."""
        self._next.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _resume(self) -> None:
        self._loop.add_reader(self._epoll.fileno(), self._look)
        self._next: asyncio.Handle = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._next.cancel()
        look = self._turns.look()
        if look is None:  # another thread turns, and reads: watching on would call us again and again
            self._loop.remove_reader(self._epoll.fileno())
            self._next = self._loop.call_later(_BUSY_S, self._resume)
            return
        self._watch(set(look.fds))
        if look.pause_s:
            self._next = self._loop.call_later(look.pause_s, self._look)
        else:  # more to do, but others in the loop come first
            self._next = self._loop.call_soon(self._look)

    def _watch(self, fds: set[int]) -> None:
        for fd in self._watched - fds:
            with contextlib.suppress(OSError):  # closed, and forgotten with that
                self._epoll.unregister(fd)
        for fd in fds:  # all of them: a number may be another descriptor's by now
            with contextlib.suppress(FileExistsError):
                self._epoll.register(fd, select.EPOLLIN)
        self._watched = fds


@contextlib.contextmanager
def running(turns: Turns) -> Iterator[None]:
    """Inside, the running loop turns the node of `turns`."""
    loop = asyncio.get_running_loop()
    pump = turns.pumps.get(loop)
    if pump is None:
        pump = turns.pumps[loop] = Pump(turns, loop)
    pump.n_waits += 1
    try:
        yield
    finally:
        pump.n_waits -= 1
        if not pump.n_waits:
            del turns.pumps[loop]
            pump.stop()


async def until(
    turns: Turns, roster: Roster, handle: Handle | None, done: Callable[[], bool], timeout_s: float | None
) -> None:
    """Until `done()`, which only a change of `handle`'s room (None: of any) makes true.

    Raises `TimeoutError` after `timeout_s`, and `UsageError` if the node ends first.
    """
    if done():
        return
    loop, changed, stack = asyncio.get_running_loop(), asyncio.Event(), contextlib.ExitStack()

    def wake() -> None:
        try:
            loop.call_soon_threadsafe(changed.set)
        except RuntimeError:  # the loop was closed, and nobody will come back here
            stack.close()

    turns.check()
    with stack:
        stack.enter_context(roster.waiting(handle, done, wake))
        if turns.inline:
            stack.enter_context(running(turns))
        try:
            async with asyncio.timeout(timeout_s):
                while not done():
                    turns.check()
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            what = f"room {handle.id!r}" if handle is not None else "any room"
            raise TimeoutError(f"{what} did not get there in {timeout_s:g} s") from None
