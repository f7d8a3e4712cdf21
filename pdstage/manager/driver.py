"""The driver: one lock, one loop, one core.

A turn is: receive -> lock -> feed the core -> take effects -> unlock -> carry them out. Only one thread turns at a
time. With `progress="inline"` every poll of the engine is a turn; with `progress="thread"` a thread of the node's own
turns, and waits on the control socket and the transport in between. While it waits, an engine's call sends its messages
itself: handing them over would cost a wake-up, and beside a busy thread a switch of the interpreter.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from pdstage.errors import PdstageError, UsageError
from pdstage.log_limit import LogLimit
from pdstage.manager.aio import Look, Pumps, until
from pdstage.manager.carrier import Carrier
from pdstage.manager.handle import Roster
from pdstage.manager.role import AnyCore, Role
from pdstage.manager.sessions import Sessions
from pdstage.manager.sleep import EVERYTHING, Ready, Sleep
from pdstage.protocol.session import Changed, Send

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.manager.handle import Handle
    from pdstage.manager.nvtx import Ranges
    from pdstage.manager.observer import Observation
    from pdstage.manager.role import Effect
    from pdstage.protocol.config import Config
    from pdstage.protocol.room import Room
    from pdstage.transport import Done, Inbound, PostFailed

log = logging.getLogger(__name__)

_LOOK_S = 0.1

_n_forks = 0
"""In this process's line of descent since this module was loaded. Counted, as asking for the pid is a system call."""


def _count_fork() -> None:
    global _n_forks  # noqa: PLW0603  (one number of the process)
    _n_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Driver(Role[AnyCore]):
    """Drives one core. Subclasses supply the transport and the stager."""

    def __init__(self, config: Config, progress: str, switch_interval_s: float | None) -> None:
        if progress not in ("inline", "thread"):
            raise UsageError(f"progress {progress!r}", remedy='choose "inline" or "thread"')
        self.config = config
        self.roster = Roster()
        self.pumps = Pumps()
        self._progress = progress
        self._switch_interval_s = switch_interval_s
        self._thread: threading.Thread | None = None
        self._n_forks = _n_forks
        self._lock = threading.RLock()
        self._turning = threading.Lock()  # whose loop it is, waiting included
        self._acting = threading.Lock()  # who takes effects and carries them out, so that frames leave in their order
        self._kept: list[Effect] = []
        self._carrier = Carrier(self)
        self._sleep = Sleep(self)
        self.sessions = Sessions(self)
        self._log_limit = LogLimit()
        self._early: list[Done | PostFailed | Inbound] = []
        self._closed = False
        self._failure: BaseException | None = None
        self._observed: Observation | None = None  # None: nobody observes, and nothing is timed
        self._ranges: Ranges | None = None

    @property
    def was_forked(self) -> bool:
        """Whether this is a child's copy of a node."""
        return self._n_forks != _n_forks

    def _start(self) -> None:
        """Starts the thread, if this node has one; the constructor's last step."""
        if self._progress == "thread":
            if self._switch_interval_s is not None:
                # Beside a busy Python thread a waking one waits for the interpreter's switch interval, 5 ms by default.
                sys.setswitchinterval(min(self._switch_interval_s, sys.getswitchinterval()))
            self._thread = threading.Thread(target=self._run, name="pdstage-node", daemon=True)
            self._thread.start()

    # A turn.

    def turn(self, wait_s: float = 0.0) -> bool:
        """One turn: everything that has arrived, every deadline that has passed. Waits up to `wait_s` for something.

        False if another thread is in one: it is woken, and will do what there is to do.
        """
        self.use()
        if not self._turning.acquire(blocking=False):
            self.socket.wake()
            return False
        try:
            if not self._closed:
                self._turn(self._sleep.wait(wait_s) if wait_s > 0 and not self._carrier.copies else EVERYTHING)
        except BaseException as error:
            self._fail_everything(error)
            raise
        finally:
            self._turning.release()
        if self.pumps:
            self.socket.wake()  # for what was sent the socket may have taken in the word of an arrival
        return True

    def _turn(self, ready: Ready) -> None:
        with self._acting:
            while self._turn_once(ready) and not self._closed:
                ready = EVERYTHING
                self.roster.ring()
            self._carrier.flush()
            self.roster.ring()  # last: who wakes earlier waits for the interpreter
        if self._observed is not None:
            self._observed.tell()

    def _turn_once(self, ready: Ready) -> bool:
        """Asks only those who said that they have something: each call gives the interpreter to a busy main thread."""
        messages = self.socket.recv() if ready.messages else ()
        events, self._early = self._early, []
        if ready.transport:
            events += self.transport.poll()
        staged = self.stager.poll()
        refusals = self.socket.take_refusals()
        with self._lock:
            now = time.monotonic()
            for route, error in refusals:
                self.core.counters.peers_refused += 1
                self._on_refused(route, error, now)
            for route, frames in messages:
                for frame in frames:
                    self.core.receive(route, frame, now)
            for event in events:
                self._on_transport(event, now)
            for copied in staged:
                if self._observed is not None:
                    self._observed.copied(copied)
                self._on_staged(copied, now)
            self.core.tick(now)
            effects = self._take_effects()
        again = self._carrier.carry_out(effects)
        if self.sessions.lost:
            self.sessions.check_lost()
        return again

    def _take_effects(self) -> list[Effect]:
        kept, self._kept = self._kept, []
        fresh = self.core.take_effects()
        if self._observed is not None:
            self._observed.asked(fresh)
        return kept + fresh

    # Whoever turns.

    def look(self) -> Look | None:
        """A turn for an event loop, which watches instead of this node's waiting; None if another thread is in one.

        Raises nothing: whoever waits in the loop is woken, and asks.
        """
        if not self._turning.acquire(blocking=False):
            return None
        try:
            if self._closed or self._failure is not None:
                return Look(_LOOK_S, ())
            fds = self.transport.filenos()
            self.socket.wait(0.0)  # wakings until here are answered by this turn
            self._turn(EVERYTHING)
            ready = self.socket.wait(0.0, fds)  # libzmq's descriptor tells of an arrival once: none may be left
            pause_s = 0.0 if any(ready) else self._sleep.pause_s(fds)
            return Look(pause_s, (*self.socket.filenos(), *fds))
        except Exception as error:
            log.exception("the node's turn in an event loop failed")
            self._fail_everything(error)
            return Look(_LOOK_S, ())
        finally:
            self._turning.release()

    def _run(self) -> None:
        try:
            while not self._closed:
                self.turn(self._sleep.longest_s())
        except BaseException:
            log.exception("the node's thread ended")

    def _finish(self) -> None:
        """The last turn, with no thread left: what closing asked for and a thread about to end left undone."""
        if self._failure is not None or self.was_forked:
            return
        try:
            with self._turning:
                self._turn(EVERYTHING)
        except Exception as error:
            log.exception("the node's last turn failed")
            self._fail_everything(error)

    # What engines' calls do.

    def use(self) -> threading.RLock:
        """The lock, for a call of the engine; raises `UsageError` once the node is closed, has failed, or in a fork."""
        if _n_forks != self._n_forks:
            raise UsageError("a node was used in a forked child", remedy="make the node after the fork")
        if self._closed:
            raise UsageError("this node is closed", remedy="make a new one")
        if self._failure is not None:
            raise UsageError("this node failed before", remedy="close it and make a new one") from self._failure
        return self._lock

    def progress_inline(self) -> None:
        """A turn, if turns are the engine's to make."""
        self.use()
        if self._progress == "inline":
            self.turn()

    def kick(self) -> None:
        """After the engine gave the core something: carries that out now, or wakes the thread that does.

        What peers have said meanwhile waits for the next poll: an engine makes many calls between two of them.
        """
        wake = True
        if self._acting.acquire(blocking=False):
            try:
                wake = self._push()
            except BaseException as error:
                self._fail_everything(error)
                raise
            finally:
                self._acting.release()
        if wake or self.pumps:
            self.socket.wake()

    def _push(self) -> bool:
        """True if something is left for a turn: with a thread, all but messages, a moment before it would wake, and
        what was done here that the core should hear of at once.
        """
        with self._lock:
            effects = self._take_effects()
            next_at = self.core.next_at()
            early = next_at is not None and next_at < self._sleep.until_at
        if self._progress == "thread" and not all(isinstance(effect, Send | Changed) for effect in effects):
            self._kept = effects
            return True
        if effects:
            # A write that blocks has ended by now, and announces itself to nobody.
            early |= self._carrier.carry_out(effects)
            self._carrier.flush()
            self.roster.ring()
        return early

    def wait_for(self, handle: Handle, done: Callable[[], bool], timeout_s: float | None) -> None:
        """Turns (or lets the thread turn) until `done()`, which only a change of `handle`'s room makes true.

        Raises `TimeoutError` after `timeout_s`, and `UsageError` if the node ends first.
        """
        deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            self.use()
            left_s = 1.0 if deadline_at is None else deadline_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"room {handle.id!r} did not get there in {timeout_s} s")
            if self._progress == "inline":
                self.turn(min(left_s, self._sleep.longest_s()))
            else:
                self.roster.wait(handle, done, min(left_s, _LOOK_S))

    async def wait_for_async(self, handle: Handle | None, done: Callable[[], bool], timeout_s: float | None) -> None:
        """`wait_for` in an event loop, which turns an inline node; None: what a change of any room makes true."""
        await until(self, handle, done, timeout_s, inline=self._progress == "inline")

    # What happens to rooms and peers.

    def _on_changed(self, room: Room) -> None:
        handle = self.roster.of(room)
        self.roster.changed(room)
        if self._observed is not None and handle is not None:  # last: an observer may ask the handle
            self._observed.changed(handle, room)

    def _complain(self, route: bytes, error: PdstageError) -> None:
        peer = self.socket.name_of(route)
        if text := self._log_limit.due(peer, str(error), time.monotonic()):
            log.warning("peer %s: %s", peer, text)

    def _fail_everything(self, error: BaseException) -> None:
        """The driver's last resort: no room may hang because the driver broke."""
        self._failure = error
        failed = PdstageError(f"the node's driver failed: {error!r}", remedy="see the cause; make a new node")
        failed.__cause__ = error
        self.roster.fail(failed)
        if self._observed is not None:
            self._observed.broke(failed)
            self._observed.tell()  # no turn follows
