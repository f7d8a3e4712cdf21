"""One rank's node: what it owns, what engines ask of it whichever role it plays, and how memory is given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar, cast

from pdstage.control.keys import keys_of
from pdstage.control.zmq import ControlSocket
from pdstage.errors import TransportError, UsageError
from pdstage.manager import status
from pdstage.manager.copy_thread import CopyThread, has_core_to_spare
from pdstage.manager.driver import Driver
from pdstage.manager.handle import Handle
from pdstage.manager.lookup import Directory
from pdstage.manager.nvtx import ranges_of
from pdstage.manager.observer import Observation, Origin
from pdstage.manager.role import AnyCore
from pdstage.manager.rows import LentRows
from pdstage.manager.settings import check_aux, open_checked
from pdstage.protocol.config import Config
from pdstage.protocol.messages import Offer, RowSpan
from pdstage.protocol.room import NO_ROWS, OwnRows
from pdstage.stager import Memory, Stager

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.layout import Region
    from pdstage.manager.observer import Observer
    from pdstage.manager.status import OpenRoom, Status
    from pdstage.metadata import MetadataBuffers
    from pdstage.protocol.room import Room
    from pdstage.topology import Topology
    from pdstage.transport import Transport

log = logging.getLogger(__name__)

_SWITCH_S = 1e-4


_kept_for_ever: list[object] = []
"""Memory of closed nodes that a peer may still write: given to nobody else in this process's life (I2)."""


AnyHandle = TypeVar("AnyHandle", bound=Handle)


class Node(Driver[AnyCore], Generic[AnyCore, AnyHandle]):
    """One rank's node. Use as a context manager, or `close()` it: that ends its rooms and gives all memory back.

    With `async with` the event loop goes on while the node closes, and turns it, if it is inline, until then.
    """

    _writes: ClassVar[bool]  # whether it is the one that writes to its peers

    def __init__(
        self,
        pool: Pool,
        topology: Topology,
        *,
        transport: str | Mapping[str, object] | Transport,
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
        aux: str,
        metadata: MetadataBuffers | None,
        observers: Sequence[Observer],
    ) -> None:
        config = config or Config()
        check_aux(aux, metadata, config)
        super().__init__(config, progress, switch_interval_s)
        self.keys = keys_of(keys)
        self.pool, self.topology, self.path = pool, topology, path
        self.incarnation = secrets.randbits(63) | 1
        self.observers = tuple(observers)
        if observers:
            origin = Origin(self.role, topology.unique_rank, topology, self.incarnation)
            self._observed = Observation(origin, observers)
        self._gave_back = True
        self.metadata = metadata
        self.lent = LentRows(metadata)
        self.transport = open_checked(pool, path, config, transport, writes=self._writes)
        with contextlib.ExitStack() as opened:  # all of it is given back if the rest cannot be had
            opened.callback(self.transport.close)
            mappable = not self._writes and self.transport.traits.maps
            self.memory = Memory(staging_nbytes, staging, pool.device, mappable=mappable)
            opened.callback(self.memory.release)
            self.parts = self.memory.parts(n_parts)
            self._copier = CopyThread(self._wake)
            copies_aside = has_core_to_spare() if copy_thread is None else copy_thread
            clock = time.monotonic if observers else None
            runtime = pool.runtime()
            self._ranges = ranges_of(runtime)
            self.stager = Stager(pool, self._copier.submit if copies_aside else None, runtime, clock)
            self.directory = Directory(self.keys)
            self.transport.register([self.memory.region, *(self._pool_regions() if path != "staged" else ())])
            self.rows = self._own_rows(aux)
            identity = self.incarnation.to_bytes(8, "little")
            self.socket = ControlSocket(bind, identity=identity, insecure=insecure, keys=self.keys)
            opened.pop_all()
        self._turned: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def _own_rows(self, aux: str) -> OwnRows:
        """This node's side of aux. Rows that the transport cannot reach go by control message, whatever was asked."""
        held, span = self.metadata, None
        if held is None:
            return NO_ROWS
        if aux != "tcp":
            base, nbytes, kind, device = held.region.base, held.row_nbytes, held.region.kind, held.region.device
            try:
                self.transport.register([held.region])
                span = RowSpan(base, nbytes, held.n_rows, kind, device)
            except (UsageError, TransportError) as error:
                log.warning("aux rows go by control message, not by %r: %s", aux, error)
        return OwnRows(held.columns.placed, aux != "tcp", span)

    def _wake(self) -> None:
        self.socket.wake()

    def _pool_regions(self) -> tuple[Region, ...]:
        return self.pool.layout.regions

    def _offers(self) -> list[Offer]:
        """What this node tells its peers of its transports, best first."""
        return [Offer(name, description) for name, description in self.transport.offers().items()]

    def _on_changed(self, room: Room) -> None:
        handle = self.roster.of(room)
        if handle is not None and room.released:  # first: who sees `released` may free the row at once
            self.lent.give_back(handle)
        super()._on_changed(room)

    # What engines ask.

    def poll_many(self, handles: Sequence[Handle]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """One turn in inline mode; then (states, released) of `handles`, to be MIN-reduced over TP ranks.

        states: int8 `State` values; released: uint8, 1 once the room's memory may be reused. Both in the order given.
        """
        self.progress_inline()
        return self.roster.statuses(handles)

    def completions(self) -> list[AnyHandle]:
        """The handles whose rooms ended since the last call; of more than 65,536 the latest."""
        self.progress_inline()
        return cast("list[AnyHandle]", self.roster.take_ended())

    async def completions_async(self) -> AsyncIterator[AnyHandle]:
        """The handles of rooms as they end, in an event loop, until the node is closed: `async for` goes through them.

        Each is given once, here or by `completions`. An inline node gets turns while the next one is awaited.
        """
        while True:
            handle = self.roster.pop_ended()
            if handle is not None:
                yield cast("AnyHandle", handle)
            elif self._closed:
                return
            else:
                await self.wait_for_async(None, lambda: self.roster.has_ended or self._closed, None)

    def unfenced(self) -> dict[str, int]:
        """Peers whose lost sessions still keep memory of this node out of use, and how many such sessions each has.

        By control endpoint. A peer leaves this list when it comes back, when its death is proved, or by `fence`.
        """
        with self._lock:
            return self.sessions.unfenced()

    def fence(self, endpoint: str) -> int:
        """The operator's word that the process behind each lost session of `endpoint` has ended; returns their number.

        `endpoint` as `unfenced` names it.
        For peers whose death cannot be seen from here, on other hosts: fence a node before you trust it is gone, as
        in any cluster (its host is down, or its process was ended and waited for). A wrong word lets it write into
        memory that has a new owner.
        """
        with self.use():
            n_fenced = self.sessions.fence(endpoint)
        self.kick()
        return n_fenced

    def stats(self) -> dict[str, int]:
        """Totals since the start, by name; see `pdstage.metrics.Counters`.

        And `sessions_over_NAME` of each transport: a decode node counts those that its writer may choose, as "a+b".
        """
        with self._lock:
            over = {f"sessions_over_{name}": n for name, n in self.sessions.over.items()}
            return self.core.counters.as_dict() | over

    def status(self) -> Status:
        """What this node does and holds at this moment, in plain numbers; any thread may ask."""
        return status.read(self)

    def oldest_rooms(self, n: int = 10) -> list[OpenRoom]:
        """The `n` rooms that began first and still hold something here, the oldest first; any thread may ask."""
        return status.oldest(self, n)

    def handles(self) -> list[Handle]:
        """Every room that holds something here, ended ones until they are released; any thread may ask."""
        return self.roster.handles()

    @property
    def role(self) -> str:
        """ "prefill" or "decode"."""
        return "prefill" if self._writes else "decode"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

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
        if self._failure is None and not self.was_forked:
            self._close_rooms(timeout_s)
        self._closed = True
        self.socket.wake()
        if self._thread is not None:
            self._thread.join()
        self._finish()
        self._copier.close()
        self._gave_back = self.core.memory_is_free or self.was_forked
        if self._gave_back:
            self.lent.give_all_back()
        else:
            _kept_for_ever.append((self.memory, self.pool, self.metadata))
            sessions = *self.core.sessions.values(), *self.sessions.lost
            peers = sorted({self.socket.endpoint_of(session.route) for session in sessions})
            log.error("closed while %s may still use this node's memory: it is kept", ", ".join(peers))
        with self._turning:  # another thread's turn ends, and none begins
            self.transport.close()
            self.socket.close()
        self.roster.ring_all()
        if self._observed is not None and not self.was_forked:
            self._observed.tell()
        if self._gave_back:
            self.memory.release()
        return self._gave_back

    async def close_async(self, timeout_s: float = 5.0) -> bool:
        """`close` in an event loop, which goes on meanwhile; once begun it runs to its end, cancelled or not."""
        return await asyncio.to_thread(self.close, timeout_s)

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

    async def __aenter__(self) -> Self:
        """Inside, the running loop turns an inline node, whether anybody waits or not."""
        if self._progress == "inline":
            self._turned = self.pumps.running(self)
            self._turned.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        turned, self._turned = self._turned, contextlib.nullcontext()
        turned.__exit__(None, None, None)
        await self.close_async()


DEFAULT_SWITCH_S = _SWITCH_S
