"""The driver: one lock, one loop, one core.

A turn is: receive -> lock -> feed the core -> take effects -> unlock -> carry them out. Only one thread turns at a
time. With `progress="inline"` every poll of the engine is a turn; with `progress="thread"` a thread of the node's own
turns, and sleeps in between. While it sleeps, an engine's call sends its messages itself: handing them over would
cost a wake-up, and beside a busy thread a switch of the interpreter.

Messages leave at the end of a turn, so that several to one peer travel as one; none waits for a large copy. Large
copies are carried out one at a time, after everything else: what one of them leads to, the write of the chunk just
gathered or the release of the lease just emptied, is under way before the next begins.

A Ctrl-C, or an exception of a signal handler, may come between any two steps and leave something half done. If it
interrupts a turn, or an engine's call that changes rooms, it ends the node (`fail`): the core is not trusted any more,
and its memory is kept. Between turns, and in sleep, it does no harm. No lock stays held: each is taken by `with`, which
CPython does not interrupt, or is a `Turning`.

If the pool is on a device, everything that may call the device runs inside `Driver.device`, the transport's library and
engines' events included. Without a CUDA context in the thread UCX leaves out its fastest transports and NIXL crashes in
its own threads; and a query of an event breaks a graph that another thread captures.

The control socket and transports with descriptors wake a sleeping driver. Engines' events, copies on a device and
transports without descriptors do not: while the driver waits for one of those, its sleeps are short.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, assert_never

from pdstage.control import operate
from pdstage.control.zmq import messages_of
from pdstage.errors import PdstageError, UsageError
from pdstage.manager.sessions import Sessions
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.session import Attach, Changed, Detach, HangUp, PeerWarning, Renew, Send

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from pdstage.kernels.index_ring import Runtime
    from pdstage.manager.node import AnyNode
    from pdstage.protocol.decode import DecodeEffect
    from pdstage.protocol.prefill import PrefillEffect
    from pdstage.transport import Done, Inbound, PostFailed

    Effect: TypeAlias = PrefillEffect | DecodeEffect

log = logging.getLogger(__name__)

_LARGE_NBYTES = 128 << 10
_WAIT_S = 1e-3
_END_S = 5.0
_SWITCH_S = 1e-4
_NAP_S = 100e-6
_GLANCE_S = 10e-6
_ACTIVE_S = 0.02
_MOVED_S = 20e-6
"""A call that takes so much of the processor has moved bytes: NIXL's takes 2 to 5 us when there are none."""
_STREAM_S, _BATCH_S, _GAP_S = 3e-4, 1e-3, 5e-3
"""Pieces that a library takes in only while it is asked cost the more, the fewer lie there: over TCP each is then sent,
acknowledged and read alone, by processors that wait for each other. So once they took `_STREAM_S` of the processor with
no gap, and with no room through, they are left to gather for `_BATCH_S` and half of what they took, for twice
`_BATCH_S` at most. A socket that is read in the right steps stays full, and its writer sends tens of pieces in a
segment; one whose receive buffer the kernel has grown to its largest (tcp_rmem) never is again, and takes each piece
alone. By the clock a short room of a slow processor would be such a stream, and end a rest later.
"""
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_prctl = getattr(ctypes.PyDLL(None), "prctl", lambda *_: 0)  # which keeps the interpreter
_PATIENCE_S = 1e-3
_READING_S = 0.02
"""How long a turn reads frames. The rest is for the next turn. Until then heartbeats are sent, and no peer counts as
silent, since its frame may be among those left. A turn that read longer ago reads again before it judges who is silent.
"""

P = ParamSpec("P")
T = TypeVar("T")

_n_forks = 0
"""In this process's line of descent since this module was loaded. Counted, as asking for the pid is a system call, and
a child in another pid namespace may have its parent's.
"""


@contextlib.contextmanager
def _exact_sleep() -> Iterator[None]:
    """Inside, a sleep of this thread of 10 us does not take 60."""
    before = _prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_TIMERSLACK, before, 0, 0, 0)


def _count_fork() -> None:
    global _n_forks  # noqa: PLW0603  (one number of the process)
    _n_forks += 1


os.register_at_fork(after_in_child=_count_fork)

_started: weakref.WeakSet[Driver] = weakref.WeakSet()
_ends_at: float | None = None
"""Set when the interpreter ends: until then it waits for threads, drivers' and callers', to leave the libraries."""


@atexit.register
def _end_threads() -> None:
    """For nodes that were not closed: a thread inside a C++ library as the interpreter ends may abort the process."""
    global _ends_at  # noqa: PLW0603  (one moment of the process)
    _ends_at = time.monotonic() + _END_S
    drivers = [driver for driver in _started if not driver.was_forked]
    for driver in drivers:
        driver.leave(0.0)
    for driver in drivers:
        driver.leave(_ends_at - time.monotonic())  # where it is past, `join` takes 0


def _must_leave() -> bool:
    """Whether the interpreter ends, and this thread with it: the main one goes on."""
    return _ends_at is not None and threading.current_thread() is not threading.main_thread()


class HasDriver(Protocol):
    driver: Driver


Driven = TypeVar("Driven", bound=HasDriver)


class Turning:
    """Whose turn it is, sleep included.

    Who takes it makes a token first, and gives the turn back by an assignment. A lock would stay held after a Ctrl-C
    that comes just after `acquire` or just before `release`.
    """

    __slots__ = ("_gate", "holder")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self.holder: tuple[int, object] | None = None
        """The thread, and what tells this turn from its others."""

    def take(self, token: tuple[int, object]) -> bool:
        """Whether it is `token`'s now: then that is to set `holder` to None."""
        with self._gate:
            if self.holder is None:
                self.holder = token
        return self.holder is token

    def alone(self, act: Callable[[], None]) -> None:
        """Waits until nobody turns, and calls `act` before anybody does."""
        token = threading.get_ident(), object()
        try:
            while not self.take(token):
                time.sleep(_WAIT_S)
            act()
        finally:
            if self.holder is token:
                self.holder = None


def changes_rooms(call: Callable[Concatenate[Driven, P], T]) -> Callable[Concatenate[Driven, P], T]:
    """An engine's call of a node. If it is broken off, as by a Ctrl-C, it may have been half done: the node ends."""

    @wraps(call)
    def whole(node: Driven, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(node, *args, **kwargs)
        except Exception:
            raise  # the call's own, with nothing changed
        except BaseException as error:
            node.driver.fail(error)
            raise

    return whole


_OF_A_CHUNK = Gather, Write, WriteDirect, WriteRow


class Driver:
    """Drives the core of `node`. `lock` is held whenever the core is touched; `runtime` is that of a pool on a device.

    `device` is around whatever may call that, and all use of the transport: `Runtime.current`.
    """

    def __init__(self, node: AnyNode, inline: bool, runtime: Runtime | None) -> None:
        self._node = node
        self.inline = inline
        self.device: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self._flush_device: Callable[[], None] | None = None
        if runtime is not None:
            self.device = runtime.current
            if node.role == "decode" and runtime.flushes:
                self._flush_device = runtime.flush
        self.lock = threading.RLock()
        self.sessions = Sessions(node)
        self.turning = Turning()
        self.acting = threading.Lock()  # who takes effects and carries them out, so that frames leave in their order
        self.ending = False  # no room begins any more; under the lock, as `closed`
        self.closed = False
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._n_forks = _n_forks
        self._moved_at = 0.0
        self._moving_s = self._look_at = 0.0  # what pieces took so far; until when they are left to gather
        self._kept: list[Effect] = []
        self._outgoing: dict[bytes, list[bytes]] = {}
        self._copies: deque[Gather | Scatter] = deque()  # large ones that wait for their turn
        self._goes_on = False  # the last turn has more to do
        self._unread: deque[tuple[bytes, bytes]] = deque()  # (route, frame) that no turn has read yet
        self._early: list[tuple[Done | PostFailed | Inbound, float]] = []  # what was polled for the next turn, and when
        self._read_at = 0.0  # when it was last asked what peers sent
        self._until_at = 0.0  # when the sleep ends if nothing is announced; under the lock

    @property
    def was_forked(self) -> bool:
        """Whether this is a child's copy of a node."""
        return self._n_forks != _n_forks

    def start(self) -> None:
        """Starts the thread, if there is to be one; the last step of the node's constructor."""
        log.info("a %s node listens at %s", self._node.role, self._node.socket.endpoint)
        _started.add(self)
        if not self.inline:
            # Beside a busy Python thread a waking one waits for the interpreter's switch interval, 5 ms by default.
            sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
            self._thread = threading.Thread(target=self._run, name="pdstage-node", daemon=True)
            self._thread.start()

    def leave(self, timeout_s: float) -> None:
        """The interpreter ends: waits so long for the thread to do so, and for whoever makes a turn."""
        self._node.socket.wake()
        self._join(timeout_s)
        until = time.monotonic() + timeout_s
        while self.turning.holder is not None and time.monotonic() < until:
            time.sleep(_WAIT_S)

    def _join(self, timeout_s: float | None) -> None:
        if self._thread is not None:
            # Not begun, where a Ctrl-C came as it was started: it will end at once.
            with contextlib.suppress(RuntimeError):
                self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self.closed and self.failure is None and _ends_at is None:
                self.turn(self.longest_s())
        except BaseException as error:
            if self.failure is not None or not self.closed:  # else closed just before a turn, which refused
                log.exception("the node's thread ended")
                self.fail(error)

    # A turn.

    def turn(self, wait_s: float = 0.0) -> bool:
        """One turn: everything that has arrived, every deadline that has passed. Waits up to `wait_s` for something.

        False if another thread is in one: it is woken, and will do what there is to do.
        """
        self.check()
        if _ends_at is not None and _must_leave():
            time.sleep(_WAIT_S)
            return False
        token = threading.get_ident(), object()
        try:
            if not self.turning.take(token):
                self._node.socket.wake()
                return False
            if not self.closed:
                busy = self._copies or self._unread or self._goes_on
                self._turn(*(self._sleep(wait_s) if wait_s > 0 and not busy else (True, True)))
        finally:
            if self.turning.holder is token:
                self.turning.holder = None
        return True

    def _turn(self, messages: bool = True, transport: bool = True) -> None:
        """Reads at first what is ready of the two."""
        node, moved, began_at = self._node, False, time.monotonic()
        self._goes_on = False
        try:
            with self.device(), self.acting:
                while True:
                    came, effects = self._feed(messages, transport)
                    moved = moved or came or bool(effects)
                    again = self._carry_out(effects)
                    again |= self.sessions.check_lost()
                    if not again or self.closed:
                        break
                    if time.monotonic() - began_at > _READING_S:
                        # Peers are heard first, however long it copies: none is silent, nor written to in vain.
                        self._goes_on = True
                        break
                    messages, transport = False, True  # what the effects led to is at the transport
                    node.roster.ring()
                self._flush()
                node.roster.ring()  # last: who wakes earlier waits for the interpreter
            if node.observed is not None:
                node.observed.tell()
        except BaseException as error:
            self.fail(error)
            raise
        if moved:
            self._moved_at = time.monotonic()

    def _feed(self, messages: bool, transport: bool) -> tuple[bool, list[Effect]]:
        """Whether anything came, and what is to be done.

        Reads only what is ready: each call gives the interpreter to a busy main thread.
        """
        node = self._node
        asked = messages and self._receive()
        if transport:
            self.poll()
        events, self._early = self._early, []
        staged = node.stager.poll()
        refusals = node.socket.take_refusals()
        with self.lock:
            endpoint = node.core.endpoint
            endpoint.now = time.monotonic()
            if endpoint.now - self._read_at > _READING_S:  # else who spoke meanwhile may seem silent
                asked |= self._receive()
            came = bool(self._unread or events or staged or refusals or asked)
            node._take_asked()
            for route, error in refusals:
                node.core.counters.peers_refused += 1
                node._on_refused(route, error)
            until = endpoint.now + _READING_S
            while self._unread:
                route, frame = self._unread.popleft()
                endpoint.receive(route, frame)
                if time.monotonic() > until:
                    break
            for event, seen_at in events:
                node._on_transport(event, seen_at)
            for copied in staged:
                if node.observed is not None:
                    node.observed.over(copied.ticket, copied.error, copied.began_at, copied.ended_at)
                node._on_staged(copied)
            if self._unread:
                endpoint.keep_alive()
            else:
                endpoint.tick()
            return came, self._take_effects()

    def poll(self) -> None:
        """Asks the transport, in a turn or between two: large copies may come before its events are taken up."""
        node, polled = self._node, self._node.transport.traits.polled
        began_at, began_s = time.monotonic(), polled and time.thread_time()
        if began_at < self._look_at:
            return
        self._early += [(event, time.monotonic()) for event in node.transport.poll()]
        if self._early or began_at - self._look_at > _GAP_S:  # a room is through, or another begins: it may be short
            self._moving_s = 0.0
        took_s = polled and time.thread_time() - began_s
        if took_s > _MOVED_S:
            self._moved_at = self._look_at = time.monotonic()
            self._moving_s += took_s
            if self._moving_s > _STREAM_S and node.role == "decode" and not node.core.leases.live():
                self._look_at += min(_BATCH_S + self._moving_s / 2, 2 * _BATCH_S)  # all is written in place

    def _receive(self) -> bool:
        """Takes in what peers sent, once what came before is read, and answers operators. Whether there was one."""
        node, operators = self._node, []
        if self._unread:
            return False
        self._read_at = time.monotonic()
        for route, frames in node.socket.recv():
            if frames[0].startswith(operate.REQUESTS):
                operators.append((route, frames[0]))
                continue
            self._unread += [(route, frame) for frame in frames]
        for route, request in operators:
            node.socket.send(route, [operate.encode(node._asked(request))])
        return bool(operators)

    def _take_effects(self) -> list[Effect]:
        kept, self._kept = self._kept, []
        fresh: list[Effect] = self._node.core.endpoint.take_effects()
        if self._node.observed is not None:
            self._node.observed.asked(fresh)
        return kept + fresh

    # Effects.

    def _carry_out(self, effects: Sequence[Effect]) -> bool:
        """True if something was done here of which the core should learn at once.

        On some devices what a NIC wrote is flushed, once for all, before anybody reads it: a scatter's kernel, or an
        engine that is told of success.
        """
        if self._flush_device is not None and any(isinstance(effect, Scatter | Changed) for effect in effects):
            self._flush_device()
        large, again, others = bool(self._copies), False, []
        for effect in effects:
            if isinstance(effect, Send):
                self._outgoing.setdefault(effect.route, []).append(effect.frame)
                continue
            nbytes = effect.chunk.nbytes if isinstance(effect, _OF_A_CHUNK) else 0
            if isinstance(effect, Scatter):
                nbytes = effect.nbytes
            one_large = nbytes >= _LARGE_NBYTES
            others.append((effect, one_large))
            large = large or one_large
        if large:
            self._flush()
        for effect, one_large in others:
            if one_large and isinstance(effect, Gather | Scatter):
                self._copies.append(effect)
            else:
                again |= self._carry(effect)
        if self._copies:
            self._node._carry(self._copies.popleft())
            again = True
        return again

    def _carry(self, effect: Effect) -> bool:
        """As `_carry_out`."""
        node = self._node
        match effect:
            case Changed(room):
                with self.lock:
                    handle = node.roster.by_room.get(room)
                    if handle is not None and self.failure is None:  # else it has failed, whatever its room's status
                        node._on_changed(handle, room.status)
            case Gather() | Scatter() | Write() | WriteDirect() | WriteRow():
                node._carry(effect)
                return True
            case PeerWarning(route, error):
                self.sessions.warn(route, error)
            case HangUp(route):
                self.sessions.hang_up(route)
            case Renew(route):
                node.socket.renew(route)
            case Attach(session, offers):
                self.sessions.attach(session, offers)
                return True
            case Detach(session):
                while self._copies:  # what they need of the session goes with it
                    node._carry(self._copies.popleft())
                self.sessions.detach(session)
                return True
            case Send():
                pass  # was put with what goes to its route
            case _:
                assert_never(effect)
        return False

    def _flush(self) -> None:
        """Sends what was held back."""
        outgoing, self._outgoing = self._outgoing, {}
        for route, frames in outgoing.items():
            for message in messages_of(frames):
                self._node.socket.send(route, message)

    # Sleep.

    def longest_s(self) -> float:
        """How long the driver may sleep, if neither the socket nor the transport wakes it."""
        longest_s = min(1.0, self._node.config.retry_s)  # so that the question an engine's call asks needs no wake-up
        with self.lock:
            now, next_at = time.monotonic(), self._node.core.endpoint.timers.next_at()
            until_s = longest_s if next_at is None else min(max(next_at - now, 1e-4), longest_s)
            self._until_at = now + until_s
        return until_s

    def _sleep(self, wait_s: float) -> tuple[bool, bool]:
        """Sleeps until something may be ready, `wait_s` at most: messages, or what the transport has to say.

        What announces itself to nobody, copies on a device and a transport without descriptors, is asked again and
        again. Some libraries move bytes only while they are asked, on both sides.
        """
        node = self._node
        fds = node.transport.filenos()
        if node._waiting or not (node.stager.launched or (not fds and node._in_flight())):
            ready = node.socket.wait(min(wait_s, _NAP_S) if node._waiting else wait_s, fds)
            return ready.messages, bool(ready.fds) or not fds
        until = time.monotonic() + wait_s
        with self.device(), _exact_sleep():
            while True:
                ready = node.socket.wait(min(self._patience_s(), max(0.0, until - time.monotonic())), fds)
                with self.acting:  # an engine's call in another thread may post, or launch
                    try:
                        if not fds:
                            self.poll()
                        over = bool(self._early) or node.stager.over
                    except Exception as error:
                        self.fail(error)
                        raise
                if any(ready) or over or time.monotonic() >= until or _must_leave():
                    return ready.messages, bool(ready.fds)

    def _patience_s(self) -> float:
        """How long that may be left unasked: an eighth of the time since anything came or was done, as most of it is
        short; and pieces until they may be asked for.
        """
        now = time.monotonic()
        still_s = now - self._moved_at
        longest_s = _NAP_S if self._node.stager.launched or still_s < _ACTIVE_S else _PATIENCE_S
        return max(min(max(_GLANCE_S, still_s / 8), longest_s), self._look_at - now)

    # What engines' calls do.

    def use(self) -> AbstractContextManager[object]:
        """The lock, for a call of the engine; raises as `check` does."""
        self.check()
        return self.lock

    def check(self) -> None:
        """Raises `UsageError` once the node is closed, has failed, or in a fork."""
        if _n_forks != self._n_forks:
            raise UsageError("a node was used in a forked child", remedy="make the node after the fork")
        if self.closed:
            raise UsageError("this node is closed", remedy="make a new one")
        if self.failure is not None:
            raise UsageError("this node failed before", remedy="close it and make a new one") from self.failure

    def check_begins(self) -> None:
        """Under the lock, as a room begins: raises as `check` does, and once the node drains or closes."""
        self.check()
        if self.ending:
            raise UsageError("this node takes no new rooms: it drains, or closes", remedy="use another")

    def kick(self) -> None:
        """After the engine gave the core something: carries that out now, or wakes the thread that does.

        What peers have said meanwhile waits for the next poll: an engine makes many calls between two of them.
        """
        wake = True
        if not self.acting.locked():  # who takes it meanwhile, in another thread, is waited for
            try:
                with self.device(), self.acting:
                    wake = not self.closed and self._push()  # else what is left is the last turn's
            except BaseException as error:
                self.fail(error)
                raise
        if wake:
            self._node.socket.wake()

    def _push(self) -> bool:
        """True if something is left for a turn: with a thread, all but messages, a deadline before it would wake, and
        what was done here of which the core should learn at once.
        """
        node = self._node
        with self.lock:
            effects = self._take_effects()
            next_at = node.core.endpoint.timers.next_at()
            early = bool(node._waiting) or (next_at is not None and next_at < self._until_at)
        if not self.inline and not all(isinstance(effect, Send | Changed) for effect in effects):
            self._kept = effects
            return True
        if effects:
            # A write that blocks has ended by now, and announces itself to nobody.
            early |= self._carry_out(effects)
            self._flush()
            node.roster.ring()
            self._moved_at = time.monotonic()
        return early

    # The end.

    def end(self) -> None:
        """Ends the thread, then turns once more: what closing asked for and a thread about to end left undone. May be
        repeated.
        """
        with self.lock:
            self.closed = True
        self._node.socket.wake()
        self._join(None)
        if self.failure is not None or self._node.socket.closed:
            return
        try:
            self.turning.alone(self._turn)
        except Exception as error:
            log.exception("the node's last turn failed")
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The last resort: no room may hang because the driver broke."""
        failed = PdstageError(f"the node's driver failed: {error!r}", remedy="see the cause; make a new node")
        failed.__cause__ = error
        with self.lock:
            if self.failure is not None:
                return
            self.failure = error
            self._node.roster.fail(failed)
        if (observed := self._node.observed) is not None:
            observed.broke(failed)
            observed.tell()  # no turn follows
