"""One rank's node: what it owns, what engines ask of it whichever role it plays, and how memory is given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeAlias, TypeVar, cast

import msgspec

import pdstage
from pdstage import arguments
from pdstage.control import operate
from pdstage.control.bootstrap import Advert
from pdstage.control.directory import check_advert
from pdstage.control.keys import keys_of
from pdstage.control.zmq import ControlSocket, check_descriptors
from pdstage.errors import PdstageError, TransportError, UsageError
from pdstage.kernels import Pool
from pdstage.layout.topology import Topology, places_of
from pdstage.layout.views import check_heads
from pdstage.manager import status
from pdstage.manager.driver import Driver, changes_rooms
from pdstage.manager.handle import CudaEvent, Handle, Roster
from pdstage.manager.lookup import Directory, this_process
from pdstage.manager.observer import Observation, Origin
from pdstage.manager.options import NodeOptions, check_memory, checked, facts_of, transport_of
from pdstage.manager.status import OpenRoom, Status
from pdstage.protocol.handshake import features
from pdstage.protocol.messages import Offer, RowSpan
from pdstage.protocol.room import NO_ROWS, OwnRows
from pdstage.protocol.wire import VERSION
from pdstage.stager import Copied, Memory, PageLock, Stager
from pdstage.transport import Done, Inbound, PostFailed, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from pdstage.kernels.index_ring import Runtime
    from pdstage.metadata import AuxRow, MetadataBuffers
    from pdstage.protocol.decode import DecodeCore
    from pdstage.protocol.decode_chunks import Scatter
    from pdstage.protocol.prefill import PrefillCore
    from pdstage.protocol.prefill_chunks import ChunkEffect
    from pdstage.protocol.session import Session

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_BUSY_S = 1e-3


_kept_for_ever: list[object] = []
"""Closed nodes whose memory a peer, or the device, may still use: given to nobody else in this process's life (I2)."""


AnyCore = TypeVar("AnyCore", bound="PrefillCore | DecodeCore")
Own = TypeVar("Own", bound="ChunkEffect | Scatter")
AnyHandle = TypeVar("AnyHandle", bound=Handle)


class Node(ABC, Generic[AnyCore, Own, AnyHandle]):
    """One rank's node. Use as a context manager, or `close()` it: that ends its rooms and gives all memory back.

    With `async with` the event loop goes on while the node closes. `Own` are the effects of its role's core only.
    """

    role: ClassVar[str]
    """ "prefill" or "decode"."""
    core: AnyCore
    path: str
    """ "auto", "direct" or "staged"."""
    observed: Observation | None = None
    """None where nobody observes: then nothing is timed."""

    def __init__(self, pool: Pool, topology: Topology, n_parts: int, given: NodeOptions) -> None:
        """`n_parts`: send buffers at prefill, lanes at decode."""
        options, self.config = checked(given)
        self.options = options
        arguments.instance("pool", pool, Pool)
        arguments.instance("topology", topology, Topology)
        check_heads(pool.layout, topology)
        if pool.on_host and "path" not in given:  # bytes land on the device, and a kernel scatters them
            options["path"] = "staged"
        self.roster = Roster()
        self.incarnation = secrets.randbits(63) | 1
        transport, inline = options["transport"], options["progress"] == "inline"
        try:
            runtime = pool.runtime()  # before a transport looks at the device
        except UsageError:
            if isinstance(transport, Transport):
                transport.close()
            raise
        self.driver = Driver(self, inline, runtime)
        self.sessions = self.driver.sessions
        self.keys = keys_of(options["keys"])
        self.pool, self.topology = pool, topology
        self.observers = tuple(options["observers"])
        if self.observers:
            origin = Origin(self.role, topology.unique_rank, topology, self.incarnation)
            self.observed = Observation(origin, self.observers)
        self._waiting: list[tuple[Handle, CudaEvent, Callable[[], None]]] = []
        """Whose event is waited for, and what follows: asked in turns, not in each of an engine's calls."""
        self.expects_rooms: Callable[[], bool] = lambda: False
        """An engine's: whether it may have named a room to others that it has not begun here. Until it has, an
        operator's drain waits.
        """
        self._drain_asked = False
        self._closing = threading.RLock()
        self._gave_back: bool | None = None
        """What `close` came to, once it is over."""
        self.metadata = options["metadata"]
        check_descriptors()
        with self.driver.device():
            self._open(n_parts, runtime)

    def _open(self, n_parts: int, runtime: Runtime | None) -> None:
        pool, options, writes = self.pool, self.options, self.role == "prefill"
        with contextlib.ExitStack() as opened:  # all is given back if the rest cannot be had
            if isinstance(options["transport"], Transport):
                opened.callback(options["transport"].close)
            transport = self.transport = transport_of(options, self.config, pool, writes=writes)
            opened.callback(transport.close)
            check_memory(options, pool, transport.traits)
            self.memory = Memory(
                options["staging_nbytes"], pool.device,
                mappable=not writes and transport.traits.maps, runtime=runtime, staging_on=options["staging_on"],
            )  # fmt: skip
            opened.callback(self.memory.release)
            self.page_lock = PageLock("the pool", pool.on_host, runtime)
            opened.callback(self.page_lock.release)
            self.parts = self.memory.parts(n_parts)
            self.stager = Stager(pool, runtime, max_sms=options["max_sms"], only="gather" if writes else "scatter")
            if not (writes and options["path"] == "direct"):
                self.stager.warm(checksum=self.config.checksums)
            self.directory = Directory(self.keys)
            pages = pool.layout.regions if options["path"] != "staged" else ()
            transport.register([self.memory.region, *pages])
            self.rows = self._own_rows()
            self.offers = [Offer(name, description) for name, description in transport.offers().items()]
            identity = self.incarnation.to_bytes(8, "little")
            self.socket = ControlSocket(
                options["bind"], identity=identity, insecure=options["insecure"], keys=self.keys
            )
            opened.callback(self.socket.close)
            opened.pop_all()

    # What the driver asks, under its lock.

    def _take_asked(self) -> None:
        """In a turn: gives the core what engines asked for, once what it waited for is there."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for handle, event, then in waiting:
            if handle.room.ended:
                continue
            try:
                done = bool(event.query())
            except Exception as error:  # noqa: BLE001  (the event's own, whatever it is)
                wrong = f"the event that was given raised {arguments.shown(error)}"
                self.core.abort(handle.room, wrong)  # type: ignore[arg-type]
                continue
            if done:
                then()
            else:
                self._waiting.append((handle, event, then))

    @abstractmethod
    def _on_staged(self, copied: Copied) -> None: ...

    @abstractmethod
    def _on_transport(self, event: Done | PostFailed | Inbound, seen_at: float) -> None: ...

    def _on_refused(self, route: bytes, error: PdstageError) -> None:
        """A connection came to nothing for want of keys; `route` is empty where the other side tried it."""

    def _on_changed(self, handle: AnyHandle, status: int) -> None:
        """Brings `handle` to `status`, its room's as it was read once: an engine's call may end the room
        meanwhile, and tells that by another effect.
        """
        if status >= 0x80:  # first: who sees `released` may free the row at once
            self._give_row_back(handle)
        self.roster.changed(handle, status)
        if self.observed is not None:
            self.observed.changed(handle)

    # And without it.

    @abstractmethod
    def _carry(self, effect: Own) -> None:
        """Copies or writes."""

    @abstractmethod
    def _in_flight(self) -> bool:
        """Whether a transport without descriptors may have something to say, or bytes to move."""

    # What its sessions ask.

    @abstractmethod
    def _identify_peer(self, session: Session, description: bytes) -> None:
        """Tells the transport who a session's peer is; raises `PdstageError` if that cannot be."""

    @abstractmethod
    def _is_fenced(self, session: Session) -> bool:
        """Whether a lost session is harmless to this role: by the transport's disconnect alone, or since the directory
        says that the peer has ended.
        """

    @abstractmethod
    def _holds_nothing(self, session: Session) -> bool:
        """Whether a lost session keeps no memory of this node from use. No copies to it are under way."""

    def _copies_to(self, session: Session) -> bool:
        """Whether copies of this node's own are under way to the session's peer: nothing but their end ends them."""
        del session
        return False

    # What its rooms ask.

    def _own_rows(self) -> OwnRows:
        """This node's side of aux. Rows that the transport cannot reach go by control message, whatever was asked."""
        aux, held, span = self.options["aux"], self.metadata, None
        if held is None:
            return NO_ROWS
        if aux != "tcp":
            region = held.region
            try:
                self.transport.register([region])
                span = RowSpan(region.base, held.row_nbytes, held.n_rows, region.kind, region.device)
            except (UsageError, TransportError) as error:
                log.warning("aux rows go by control message, not by %r: %s", aux, error)
        return OwnRows(held.columns.placed, aux != "tcp", span)

    def _said(self, *, direct: bool = False) -> dict[str, Any]:
        """What either role's greeting says: what this node tells its peers of itself."""
        (transport, description), *others = self.offers
        return {
            "layout": self.pool.layout, "topology": self.topology, "transport": transport, "description": description,
            "others": tuple(others), "max_silence_s": self.config.max_silence_s, "columns": self.rows.columns,
            "features": features(self.config, tags=not self.transport.traits.notifies, direct=direct),
            "model": facts_of(self.options["model"]),
        }  # fmt: skip

    @changes_rooms
    def abort(self, handle: Handle, reason: str) -> None:
        """`Handle.abort`."""
        with self.driver.use():
            self.core.endpoint.now = time.monotonic()
            self.core.abort(handle.room, arguments.sayable(reason))  # type: ignore[arg-type]
        self.driver.kick()

    def _lend(self, handle: Handle, row: AuxRow) -> MetadataBuffers:
        """The handle's room has `row` until it is released; under the lock. Raises `UsageError` for a row that is not
        its to have.
        """
        if self.metadata is None:
            raise UsageError(
                f"an aux row for room {handle.id!r} at a node without rows", remedy="give the node its `metadata`"
            )
        if not handle.room.released:
            self.metadata.lend(row)
            handle.row = row
        return self.metadata

    def _opened(self, handle: Handle) -> None:
        """A room that is new at the core, under the lock: what it has come to already is told by its next change."""
        self.roster.by_room[handle.room] = handle
        if self.observed is not None:
            self.observed.opened(handle)

    def _give_row_back(self, handle: Handle) -> None:
        row, handle.row = handle.row, None
        if row is not None and self.metadata is not None:
            self.metadata.give_back(row)

    def _advert(self, instance: str) -> Advert:
        """What a directory is told of this node."""
        return Advert(
            instance=instance, topology=self.topology, endpoint=self.socket.endpoint, incarnation=self.incarnation,
            layout=self.pool.layout.digest(), transports=tuple(offer.transport for offer in self.offers),
            version=VERSION, process=this_process(), role=self.role,
        )  # fmt: skip

    # What engines ask.

    def list_in(self, directory: str, *, instance: str, engine: str = "", metrics: str = "") -> None:
        """Lists this node in a directory until it drains or closes, so that `pdstage instances`, `drain`, `fence` and
        `top` find it there: as a rank of `instance`, in `engine`, with the address of its `metrics`.

        `directory` is the address of `pdstage bootstrap`, of a prefill node's own directory, or of one in etcd. It may
        start later. A name that another process has is said in the log, in both. Raises `UsageError` for an address
        that is none.
        """
        facts = {fact.name: fact.value for fact in facts_of(self.options["model"])}
        model = facts.get("name", "")
        advert = msgspec.structs.replace(self._advert(instance), engine=engine, metrics=metrics, model=model)
        check_advert(advert, None)
        self.directory.publish(directory, lambda: [advert], eventually=True)

    def turn(self, wait_s: float = 0.0) -> bool:
        """One turn: everything that has arrived, every deadline that has passed. Waits up to `wait_s` for something,
        not beyond the next deadline.

        False if another thread is in one: it is woken, and will do what there is to do.
        """
        wait_s = arguments.number("wait_s", wait_s)
        return self.driver.turn(min(wait_s, self.driver.longest_s()) if wait_s > 0 else 0.0)

    def progress_inline(self) -> None:
        """A turn, if turns are the engine's to make."""
        self.driver.check()
        if self.driver.inline:
            self.driver.turn()

    def wait_for(
        self, handle: Handle, done: Callable[[], bool], timeout_s: float | None, *, every_s: float = _LOOK_S
    ) -> None:
        """Turns (or lets the thread turn) until `done()`, asked when `handle`'s room changed and `every_s` beside.

        Raises `TimeoutError` after `timeout_s`, and `UsageError` if the node ends first.
        """
        timeout_s = arguments.timeout("timeout_s", timeout_s)
        deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
        while not done():
            self.driver.check()
            left_s = 1.0 if deadline_at is None else deadline_at - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"room {handle.id!r} did not get there in {timeout_s:g} s")
            if not self.driver.inline:
                self.roster.wait(handle, done, min(left_s, every_s))
            elif not self.driver.turn(min(left_s, self.driver.longest_s())):
                self.roster.wait(handle, done, min(left_s, _BUSY_S))  # another thread turns, and may leave off

    async def wait_for_async(self, handle: Handle, done: Callable[[], bool], timeout_s: float | None) -> None:
        """`wait_for` in an event loop."""
        timeout_s = arguments.timeout("timeout_s", timeout_s)
        if self.driver.inline:
            raise UsageError("an inline node is awaited in an event loop", remedy='make it with progress="thread"')
        try:
            async with asyncio.timeout(timeout_s):
                await self.roster.wait_async(handle, done, self.driver.check)
        except TimeoutError:
            raise TimeoutError(f"room {handle.id!r} did not get there in {timeout_s:g} s") from None

    def poll_many(self, handles: Sequence[Handle]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """One turn in inline mode; then (states, released) of `handles`, to be MIN-reduced over TP ranks.

        states: int8 `State` values; released: uint8, 1 once the room's memory may be reused. Both in the order given.
        """
        self.progress_inline()
        try:
            return self.roster.statuses(handles)
        except Exception as error:
            raise UsageError(f"handles are {arguments.shown(handles)}", remedy="give a list of handles") from error

    def completions(self) -> list[AnyHandle]:
        """The handles whose rooms ended since the last call; of more than 65,536 the latest."""
        self.progress_inline()
        return cast("list[AnyHandle]", self.roster.take_ended())

    def unfenced(self) -> dict[str, int]:
        """Peers whose lost sessions still keep memory of this node out of use, and how many such sessions each has.

        By control endpoint. A peer leaves this list when it comes back, when its death is proved, or by `fence`.
        """
        with self.driver.lock:
            return dict(Counter(self.socket.endpoint_of(session.route) for session in self.sessions.lost))

    def fence(self, endpoint: str) -> int:
        """The operator's word that the process behind each lost session of `endpoint` has ended; returns their number.
        The next turn gives back what they kept.

        `endpoint` as `unfenced` names it, or a host. `pdstage fence` says so to every node in a directory.
        For peers whose death cannot be seen from here, on other hosts: fence a node before you trust it is gone, as
        in any cluster (its host is down, or its process was ended and waited for). A wrong word lets it write into
        memory that has a new owner.
        """
        endpoint = arguments.text("endpoint", endpoint)
        with self.driver.use():
            n_fenced = self.sessions.fence(endpoint)
        self.socket.wake()
        return n_fenced

    def stats(self) -> dict[str, int]:
        """Totals since the start, by name; see `pdstage.metrics.Counters`.

        And `sessions_over_NAME` of each transport: a decode node counts those that its writer may choose, as "a+b".
        """
        with self.driver.lock:
            over = {f"sessions_over_{name}": n for name, n in self.sessions.over.items()}
            return asdict(self.core.counters) | over

    @abstractmethod
    def status(self) -> Status:
        """What this node does and holds at this moment, in plain numbers; any thread may ask, of a closed node too.

        The lock is held only while a few numbers are copied: what grows with the rooms open is counted outside.
        """

    def _status(self) -> Status:
        """What both roles say, but for what handles do. Under the lock."""
        core, sessions = self.core, self.sessions
        dp, pp, cp, tp = (f"{rank}/{size}" for _, rank, size in places_of(self.topology))
        info = (pdstage.__version__, self.transport.traits.name, self.path, tp, pp, cp, dp)
        return Status(
            info, asdict(core.counters), asdict(self.socket.counters), dict(sessions.over), {}, len(core.sessions),
            len(sessions.lost), len(core.chunks.flights), failed=self.driver.failure is not None,
            draining=self.draining, directory=self.directory.status(),
        )  # fmt: skip

    def oldest_rooms(self, n: int = 10) -> list[OpenRoom]:
        """The `n` rooms that began first and still hold something here, the oldest first; any thread may ask."""
        return status.oldest(self.handles(), arguments.integer("n", n))

    def handles(self) -> list[Handle]:
        """Every room that holds something here, ended ones until they are released; any thread may ask."""
        return list(self.roster.by_room.copy().values())  # copied in one step, whoever changes it meanwhile

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.driver.closed

    # The end.

    def drain(self, timeout_s: float | None = None) -> bool:
        """From now on no room begins here (`UsageError`); waits until those begun are `released`, up to `timeout_s`.

        Returns whether they are. The node still serves its peers; `close` ends it. A prefill node's advert is withdrawn
        once decode has opened all that it began, and decode ranks that wait for rooms that have not begun there, or ask
        for them meanwhile, hear at once that they do not. `pdstage drain` does the same from outside.
        """
        timeout_s = arguments.timeout("timeout_s", timeout_s)
        with self.driver.use():
            self._drain_asked = True
            self._begin_drain()
            self._go_on_draining()
        self.driver.kick()
        deadline_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        for handle in self.handles():
            try:
                handle.wait_released(max(0.0, deadline_at - time.monotonic()))
            except TimeoutError:
                return False
        self.directory.withdraw()
        return True

    def _begin_drain(self) -> None:
        """Under the lock."""
        self.driver.ending = True

    def _go_on_draining(self) -> None:
        """Under the lock, again and again until nobody needs to find this node any more."""
        if not self.driver.ending and not self.expects_rooms():
            self._begin_drain()
        if self.driver.ending and not self._is_sought():
            self.directory.withdraw(0.0)
        else:
            self.core.endpoint.repeat(self._go_on_draining)

    def _is_sought(self) -> bool:
        """Whether peers that have not found this node yet will look for it, for a room that has begun."""
        return False

    @property
    def draining(self) -> bool:
        """Whether it drains, or closes, or an operator has asked it to."""
        return self._drain_asked or self.driver.ending

    def _asked(self, request: bytes) -> operate.NodeState:
        """In a turn: does what an operator asks, and says how this node is."""
        n_fenced, ended = 0, operate.ended_of(request)
        if ended:
            with self.driver.lock:
                n_fenced = self.sessions.fence(*ended)
            if n_fenced:
                log.warning("%s: an operator says that %s has ended", self.socket.endpoint, ", ".join(ended))
        elif request == operate.DRAIN:
            if not self.draining:
                log.warning("%s: an operator asks this node to drain: no room begins any more", self.socket.endpoint)
                self._drain_asked = True
            with self.driver.lock:
                self._go_on_draining()
        handles = self.handles()
        rooms = {state: n for state, n in status.by_state(handles).items() if n}
        oldest_s = max((time.monotonic() - handle.began_at for handle in handles), default=0.0)
        return operate.NodeState(
            role=self.role, rank=self.topology.unique_rank, rooms=rooms, oldest_s=oldest_s,
            draining=self.draining, drained=self.driver.ending and self.directory.withdrawn and not rooms,
            failed=self.driver.failure is not None, unfenced=len(self.sessions.lost) - n_fenced, fenced=n_fenced,
        )  # fmt: skip

    def close(self, timeout_s: float = 5.0) -> bool:
        """Fails the rooms still open, waits up to `timeout_s` for their peers to be quiet, and gives everything back.

        True: the memory is free for anything else, another node in the other role included. False: a peer, named in
        the log, may still write to it or read it. Then the staging memory and the pool's tensors are kept until this
        process ends, and the pool must not be used before those peers' processes have ended. May be repeated, and is
        to be where a Ctrl-C broke it off.
        In a forked child it ends nothing, since all of it is the parent's, and is True.
        """
        patience_s = arguments.timeout("timeout_s", timeout_s)
        if self.driver.was_forked:
            return True
        if (turn := self.driver.turning.holder) is not None and turn[0] == threading.get_ident():
            raise UsageError(
                "a node was closed inside of its own turn, as by a signal handler",
                remedy="raise SystemExit in the handler, and close the node afterwards",
            )
        with self._closing:  # another thread that closes it waits for the same answer
            if self._gave_back is None:
                self._gave_back = self._close(math.inf if patience_s is None else patience_s)
            return self._gave_back

    def _close(self, patience_s: float) -> bool:
        """Goes on where an earlier call was interrupted."""
        driver = self.driver
        self.directory.close()
        if driver.failure is None and not driver.closed:
            self._close_rooms(patience_s)
        driver.end()
        free = self._give_back()
        self.roster.ring_all()
        if self.observed is not None:
            self.observed.tell()
        return free

    def _give_back(self) -> bool:
        """Whether nobody uses this node's memory any more: then it is given back, and all else in any case."""
        free = self.core.memory_is_free and not self.stager.launched
        if free:
            for handle in self.handles():
                self._give_row_back(handle)
        else:
            sessions = *self.core.sessions.values(), *self.sessions.lost
            users = ", ".join(sorted({self.socket.endpoint_of(session.route) for session in sessions})) or "the device"
            log.error("closed while %s may still use this node's memory: it is kept", users)
            _kept_for_ever.append(self)
        self.driver.turning.alone(self._disconnect)
        if free:
            self.stager.give_back()
            self.memory.release()
            self.page_lock.release()
        return free

    def _disconnect(self) -> None:
        with self.driver.acting, self.driver.device():  # what another thread does ends, and nothing begins
            self.transport.close()
            self.socket.close()

    async def close_async(self, timeout_s: float = 5.0) -> bool:
        """`close` in an event loop, which goes on meanwhile; once begun it runs to its end, cancelled or not."""
        return await asyncio.to_thread(self.close, timeout_s)

    def _close_rooms(self, timeout_s: float) -> None:
        deadline_at, driver, core = time.monotonic() + timeout_s, self.driver, self.core
        with driver.lock:
            driver.ending = True
            core.endpoint.now = time.monotonic()
            core.close()
        driver.kick()
        while not core.idle and time.monotonic() < deadline_at:
            if driver.inline:
                driver.turn(0.01)
            else:
                time.sleep(0.001)
        if not core.chunks.flights:  # nothing is in flight, so that Bye may be said
            with driver.lock:
                core.endpoint.now = time.monotonic()
                core.endpoint.bye()
            driver.kick()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()


AnyNode: TypeAlias = Node[Any, Any, Any]
