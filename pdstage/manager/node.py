"""The driver: one lock, one loop, one core.

Layer 5. Must not know which role its core has: `prefill` and `decode` carry out their own effects.

A turn is: receive -> lock -> feed the core -> take effects -> unlock -> carry them out. Only one thread turns at a
time. With `progress="inline"` every poll of the engine is a turn; with `progress="thread"` a thread of the node's own
turns, and waits on the control socket and the transport in between. While it waits, an engine's call sends its messages
itself: handing them over would cost a wake-up, and beside a busy thread a switch of the interpreter.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

from pdstage.control.keys import keys_of
from pdstage.control.zmq import MAX_FRAMES, ControlSocket
from pdstage.cost import CostModel
from pdstage.errors import PdstageError, UsageError
from pdstage.manager.copier import Copier, has_core_to_spare
from pdstage.manager.handle import Roster
from pdstage.manager.lookup import Directory
from pdstage.protocol.config import Config
from pdstage.protocol.effects import Attach, Changed, Complaint, Detach, Effect, Send
from pdstage.protocol.session import Core
from pdstage.stager import Copied, Memory, Stager
from pdstage.transport import Done, Inbound, PostFailed, Transport, open_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.layout import Region
    from pdstage.manager.handle import Handle
    from pdstage.protocol.room import Room
    from pdstage.protocol.session import Link
    from pdstage.topology import Topology

log = logging.getLogger("pdstage")

PATHS = ("auto", "direct", "staged")
_NAP_S = 100e-6
_PATIENCE_S = 1e-3
_DEAD_CHECK_S = 0.5
_LOOK_S = 0.1
_LARGE_NBYTES = 128 << 10
_SWITCH_S = 1e-4


_kept_for_ever: list[object] = []
"""Memory of closed nodes that a peer may still write: given to nobody else in this process's life (I2)."""

_n_forks = 0
"""In this process's line of descent since this module was loaded. Counted, as asking for the pid is a system call."""


def _count_fork() -> None:
    global _n_forks  # noqa: PLW0603  (one number of the process)
    _n_forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Heard(NamedTuple):
    """Who may have something to say."""

    messages: bool
    transport: bool


_EVERYTHING = Heard(messages=True, transport=True)

AnyCore = TypeVar("AnyCore", bound=Core)


class Node(ABC, Generic[AnyCore]):
    """One rank's node. Use as a context manager, or `close()` it: that ends its rooms and gives all memory back."""

    core: AnyCore

    def __init__(
        self,
        pool: Pool,
        topology: Topology,
        *,
        transport: str | Transport,
        path: str,
        staging_nbytes: int,
        n_parts: int,
        staging: object,
        bind: str,
        config: Config | None,
        progress: str,
        switch_interval_s: float | None,
        copy_thread: bool | None,
        insecure: bool,
        keys: Keys | str | os.PathLike[str] | None,
    ) -> None:
        if path not in PATHS:
            raise UsageError(f"path {path!r}", remedy=f"choose one of {', '.join(PATHS)}")
        if progress not in ("inline", "thread"):
            raise UsageError(f"progress {progress!r}", remedy='choose "inline" or "thread"')
        self.keys = keys_of(keys)
        self.pool, self.topology, self.path = pool, topology, path
        self.config = config or Config()
        self.incarnation = secrets.randbits(63) | 1
        self._n_forks = _n_forks
        self._lock = threading.RLock()
        self._turning = threading.Lock()  # whose loop it is, waiting included
        self._acting = threading.Lock()  # who takes effects and carries them out, so that frames leave in their order
        self._kept: list[Effect] = []
        self._sleeps_until = 0.0
        self.roster = Roster()
        self._lost: list[Link] = []
        self._outgoing: dict[bytes, list[bytes]] = {}
        self._early: list[Done | PostFailed | Inbound] = []
        self._dead_check_at = 0.0
        self._closed = False
        self._gave_back = True
        self._failure: BaseException | None = None
        self.memory = Memory(staging_nbytes, staging, pool.device)
        self.parts = self.memory.parts(n_parts)
        self._copier = Copier(self._wake)
        copies_aside = has_core_to_spare() if copy_thread is None else copy_thread
        self.stager = Stager(pool, self._copier.submit if copies_aside else None, pool.runtime())
        self.transport = open_transport(transport) if isinstance(transport, str) else transport
        self.directory = Directory(self.keys)
        exposed = [self.memory.region, *(self._pool_regions() if path != "staged" else ())]
        try:
            self.transport.register(exposed)
            identity = self.incarnation.to_bytes(8, "little")
            self.socket = ControlSocket(bind, identity=identity, insecure=insecure, keys=self.keys)
        except BaseException:
            self.transport.close()
            raise
        traits = self.transport.traits
        self.cost = CostModel(traits.bytes_per_s, traits.descriptor_s, traits.post_s)
        self._thread: threading.Thread | None = None
        self._progress = progress
        self._switch_interval_s = switch_interval_s

    def _wake(self) -> None:
        self.socket.wake()

    def _pool_regions(self) -> tuple[Region, ...]:
        return self.pool.layout.regions

    def _start(self) -> None:
        """Starts the thread, if this node has one; the constructor's last step."""
        if self._progress == "thread":
            if self._switch_interval_s is not None:
                # Beside a busy Python thread a waking one waits for the interpreter's switch interval, 5 ms by default.
                sys.setswitchinterval(min(self._switch_interval_s, sys.getswitchinterval()))
            self._thread = threading.Thread(target=self._run, name="pdstage-node", daemon=True)
            self._thread.start()

    # The loop.

    def turn(self, wait_s: float = 0.0) -> bool:
        """One turn: everything that has arrived, every deadline that has passed. Waits up to `wait_s` for something.

        False if another thread is in one: it is woken, and will do what there is to do.
        """
        self.use()
        if not self._turning.acquire(blocking=False):
            self.socket.wake()
            return False
        try:
            heard = self._wait(wait_s) if wait_s > 0 else _EVERYTHING
            with self._acting:
                while self._turn_once(heard) and not self._closed:
                    heard = _EVERYTHING
                    self.roster.ring()
                self._flush()
                self.roster.ring()  # last: who wakes earlier waits for the interpreter
        except BaseException as error:
            self._fail_everything(error)
            raise
        finally:
            self._turning.release()
        return True

    def _turn_once(self, heard: Heard) -> bool:
        """Asks only those who said that they have something: each call gives the interpreter to a busy main thread."""
        messages = self.socket.recv() if heard.messages else ()
        events, self._early = self._early, []
        if heard.transport:
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
                self._on_staged(copied, now)
            self.core.tick(now)
            effects = self._take_effects()
        again = self._carry_out(effects)
        if self._lost:
            self._check_lost()
        return again

    def _take_effects(self) -> list[Effect]:
        kept, self._kept = self._kept, []
        return kept + self.core.take_effects()

    def _carry_out(self, effects: list[Effect]) -> bool:
        """True if something was done here that the core should hear of at once.

        Messages wait for the end of the turn, so that several to one peer travel as one; none waits for a large copy.
        """
        again = large = False
        for effect in effects:
            if isinstance(effect, Send):
                self._outgoing.setdefault(effect.route, []).append(effect.frame)
            elif not large:
                large = self._nbytes(effect) >= _LARGE_NBYTES
        if large:
            self._flush()
        for effect in effects:
            match effect:
                case Send():
                    pass
                case Changed(room):
                    self._on_changed(room)
                case Complaint(route, error):
                    log.warning("peer %s: %s", route.hex(), error)
                case Attach(link, description):
                    self._attach(link, description)
                    again = True
                case Detach(link):
                    self._detach(link)
                    again = True
                case _:
                    self._carry(effect)
                    again = True
        return again

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for route, frames in outgoing.items():
            for start in range(0, len(frames), MAX_FRAMES):
                self.socket.send(route, frames[start : start + MAX_FRAMES])

    def _run(self) -> None:
        try:
            while not self._closed:
                self.turn(self._patience_s())
        except BaseException:
            log.exception("the node's thread ended")

    def _patience_s(self) -> float:
        """How long nothing can happen that neither the socket nor the transport would announce."""
        longest_s = min(1.0, self.config.retry_s)  # so that the question an engine's call asks needs no wake-up
        with self._lock:
            now, next_at = time.monotonic(), self.core.next_at()
            until_s = longest_s if next_at is None else min(max(next_at - now, 1e-4), longest_s)
            self._sleeps_until = now + until_s
        return until_s

    def _wait(self, wait_s: float) -> Heard:
        fds = self.transport.filenos()
        if self._expects():
            wait_s = min(wait_s, _NAP_S)
        if fds:
            ready = self.socket.wait(wait_s, fds)
            return Heard(ready.messages, bool(ready.fds))
        if not self._must_ask():
            return Heard(self.socket.wait(wait_s).messages, True)
        ready = self.socket.wait(0.0)
        if not (ready.messages or ready.woken):  # the transport has no descriptor to wait on: short naps instead
            if self._in_flight():
                time.sleep(min(wait_s, _NAP_S))
            else:
                ready = self.socket.wait(min(wait_s, _PATIENCE_S))
        return Heard(ready.messages, True)

    # What the roles say.

    @abstractmethod
    def _carry(self, effect: Effect) -> None:
        """Carries out an effect of this role; ends in `assert_never`."""

    @abstractmethod
    def _nbytes(self, effect: Effect) -> int:
        """Bytes that carrying out an effect copies or writes before it returns."""

    @abstractmethod
    def _on_staged(self, copied: Copied, now: float) -> None: ...

    @abstractmethod
    def _on_transport(self, event: Done | PostFailed | Inbound, now: float) -> None: ...

    @abstractmethod
    def _in_flight(self) -> bool:
        """Whether bytes are under way here: then a transport without descriptors is asked more often."""

    @abstractmethod
    def _must_ask(self) -> bool:
        """Whether a transport without descriptors may have something to say."""

    @abstractmethod
    def _expects(self) -> bool:
        """Whether an engine's event, which nobody announces, is waited for."""

    # Sessions and the transport.

    @abstractmethod
    def _meet(self, link: Link, description: bytes) -> None:
        """Tells the transport who a session's peer is; raises `PdstageError` if that cannot be."""

    def _on_refused(self, route: bytes, error: PdstageError, now: float) -> None:
        """A connection came to nothing for want of keys; `route` is empty where the other side tried it."""

    def _attach(self, link: Link, description: bytes) -> None:
        try:
            self._meet(link, description)
        except PdstageError as error:
            log.warning("peer %s: %s", link.route.hex(), error)
            with self._lock:
                self.core.lose(link, error, time.monotonic())

    def _detach(self, link: Link) -> None:
        self.directory.forget()
        self.transport.disconnect(label(link))
        self._lost.append(link)
        self._dead_check_at = 0.0

    def _check_lost(self) -> None:
        now = time.monotonic()
        if now < self._dead_check_at:
            return
        self._dead_check_at = now + _DEAD_CHECK_S
        for link in list(self._lost):
            if self._is_fenced() or self.transport.proved_dead(label(link)):
                with self._lock:
                    self.core.fenced(link, now)
            elif not self._holds_nothing(link):
                continue
            self._lost.remove(link)
            self.transport.forget(label(link))

    @abstractmethod
    def _is_fenced(self) -> bool:
        """Whether the transport's disconnect alone makes a lost session harmless to this role."""

    def _holds_nothing(self, link: Link) -> bool:
        return False

    # Rooms.

    def _on_changed(self, room: Room) -> None:
        self.roster.changed(room)

    def poll_many(self, handles: Sequence[Handle]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """One turn in inline mode; then (states, released) of `handles`, to be MIN-reduced over TP ranks.

        states: int8 `State` values; released: uint8, 1 once the room's memory may be reused. Both in the order given.
        """
        self.progress_inline()
        return self.roster.statuses(handles)

    def completions(self) -> list[Handle]:
        """The handles whose rooms ended since the last call; of more than 65,536 the latest."""
        self.progress_inline()
        with self._lock:
            return self.roster.take_ended()

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
        if wake:
            self.socket.wake()

    def _push(self) -> bool:
        """True if something is left for a turn: with a thread, all but messages, and a moment before it would wake."""
        with self._lock:
            effects = self._take_effects()
            next_at = self.core.next_at()
            early = next_at is not None and next_at < self._sleeps_until
        if self._progress == "thread" and not all(isinstance(effect, Send | Changed) for effect in effects):
            self._kept = effects
            return True
        if effects:
            self._carry_out(effects)
            self._flush()
            self.roster.ring()
        return early

    def wait_for(self, done: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Turns (or lets the thread turn) until `done()`; raises `TimeoutError` after `timeout_s`."""
        deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            self.use()
            left_s = 1.0 if deadline_at is None else deadline_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{what} did not get there in {timeout_s} s")
            if self._progress == "inline":
                self.turn(min(left_s, self._patience_s()))
            else:
                self.roster.wait(done, min(left_s, _LOOK_S))

    def unfenced(self) -> dict[str, int]:
        """Peers whose lost sessions still keep memory of this node out of use, and how many such sessions each has.

        By control endpoint. A peer leaves this list when it comes back, when its death is proved, or by `fence`.
        """
        with self._lock:
            return dict(Counter(self.socket.endpoint_of(link.route) for link in self._lost))

    def fence(self, endpoint: str) -> int:
        """The operator's word that the process behind each lost session of `endpoint` has ended; returns their number.

        `endpoint` as `unfenced` names it.
        For peers whose death cannot be seen from here, on other hosts: fence a node before you trust it is gone, as
        in any cluster (its host is down, or its process was ended and waited for). A wrong word lets it write into
        memory that has a new owner.
        """
        with self.use():
            lost = [link for link in self._lost if self.socket.endpoint_of(link.route) == endpoint]
            for link in lost:
                self._lost.remove(link)
                self.core.fenced(link, time.monotonic())
                self.transport.forget(label(link))
        self.kick()
        return len(lost)

    def stats(self) -> dict[str, int]:
        """Totals since the start, by name; see `pdstage.metrics.Counters`."""
        with self._lock:
            return self.core.counters.as_dict()

    def _fail_everything(self, error: BaseException) -> None:
        """The driver's last resort: no room may hang because the driver broke."""
        self._failure = error
        failed = PdstageError(f"the node's driver failed: {error!r}", remedy="see the cause; make a new node")
        failed.__cause__ = error
        self.roster.fail(failed)

    # The end.

    def close(self, timeout_s: float = 5.0) -> bool:
        """Fails the rooms still open, waits up to `timeout_s` for their peers to be quiet, and gives everything back.

        True: the memory is free for anything else, another node in the other role included. False: a peer, named in
        the log, may still write to it or read it. Then the staging memory and the pool's tensors are kept until this
        process ends, and the pool must not be used before those peers' processes have ended. May be repeated.
        """
        if self._closed:
            return self._gave_back
        self.directory.close()
        if self._failure is None and _n_forks == self._n_forks:
            self._close_rooms(timeout_s)
        self._closed = True
        self.socket.wake()
        if self._thread is not None:
            self._thread.join()
        self._copier.close()
        self._gave_back = self.core.memory_is_free or _n_forks != self._n_forks
        if not self._gave_back:
            _kept_for_ever.append((self.memory, self.pool))
            peers = sorted({self.socket.endpoint_of(link.route) for link in (*self.core.links.values(), *self._lost)})
            log.error("closed while %s may still use this node's memory: it is kept", ", ".join(peers))
        self.transport.close()
        self.socket.close()
        return self._gave_back

    def _close_rooms(self, timeout_s: float) -> None:
        deadline_at = time.monotonic() + timeout_s
        with self._lock:
            self.core.close(time.monotonic())
        self.kick()
        while not self.core.idle and time.monotonic() < deadline_at:
            if self._progress == "inline":
                self.turn(0.01)
            else:
                time.sleep(0.001)
        if self.core.quiet:
            with self._lock:
                self.core.bye(time.monotonic())
            self.kick()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def label(link: Link) -> str:
    """A session's name at the transport; a lost session's successor has another."""
    return f"{link.session.decode:016x}-{link.session.writer:016x}"


DEFAULT_SWITCH_S = _SWITCH_S
