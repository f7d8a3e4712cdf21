"""Decode's node, what an engine has where tokens are generated, and a room as it holds it there, a `Receiver`."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Unpack

import numpy as np

from pdstage import arguments
from pdstage.errors import PdstageError, PeerError, UsageError
from pdstage.layout import Region
from pdstage.manager.driver import changes_rooms
from pdstage.manager.handle import CudaEvent, Handle, check_event
from pdstage.manager.items import GivenItems, GivenTokens, check
from pdstage.manager.node import Node
from pdstage.manager.options import MAX_PARTS, NodeOptions
from pdstage.manager.sessions import label
from pdstage.manager.status import Status, lanes, with_rooms
from pdstage.metadata import AuxRow
from pdstage.protocol import messages as m
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.room import RoomId, room_key
from pdstage.protocol.state import State
from pdstage.protocol.wire import OLDEST
from pdstage.stager import Copied, Move
from pdstage.transport import Done, Inbound, PostFailed

if TYPE_CHECKING:
    from pdstage.control.bootstrap import Advert
    from pdstage.kernels import Pool
    from pdstage.layout.topology import Topology
    from pdstage.protocol.decode_rooms import DecodeRoom
    from pdstage.protocol.session import Session


class Receiver(Handle):
    """One room at its decode rank. Its pages must stay reserved until `released`."""

    __slots__ = ("aux", "bound", "driver")

    room: DecodeRoom
    _node: DecodeNode
    aux: bytes | AuxRow | None
    """The request's aux as prefill gave it to `finish`, bytes or a row; there once the state is Success.

    A row is the one given to `bind`, of the columns that both sides have; its others hold what they held before.
    """

    def __init__(self, node: DecodeNode, room: DecodeRoom) -> None:
        super().__init__(node, room)
        self.driver, self.bound, self.aux = node.driver, False, None

    @property
    @changes_rooms
    def ready_to_bind(self) -> bool | None:
        """Whether prefill has computed everything and only waits for `bind`, for engines that allocate late. None until
        prefill has answered; one that does not know the room has not. The first look has it asked.
        """
        driver = self.driver
        ended = driver.closed or driver.failure is not None or driver.was_forked
        if not (ended or self.bound or self.room.waits_to_bind):
            with driver.lock:
                self._node.core.endpoint.now = time.monotonic()
                self._node.core.wait_to_bind(self.room)
            self._node.socket.wake()  # an engine asks of all its rooms in turn: one message will do
        return self.room.ready_to_bind

    @changes_rooms
    def bind(
        self,
        items: GivenItems,
        tokens: GivenTokens = None,
        *,
        prefix_tokens: int = 0,
        after: CudaEvent | None = None,
        priority: int = 0,
        aux: AuxRow | None = None,
    ) -> None:
        """Publishes where the room's state goes: `tokens` (start, stop, by component; all that `items` cover if None).
        A rank that holds part of the tokens gives the whole range, and items for its own.

        Of components with positions, tokens below `prefix_tokens` are here already and are not sent. `after` is an
        event; until it is done the engine may still use the pages, and nothing is opened. Lower `priority` goes first.
        `aux` is a row of the node's metadata buffers: the request's row goes there, on whatever way, and until
        `released` a peer may write it. Raises `UsageError` for items out of range, named twice or too few, or a row
        that is free or another room's; the room stays unbound then.
        """
        node, core = self._node, self._node.core
        layout = node.pool.layout
        checked = check(layout, items, tokens, unique=True)
        prefix_tokens = arguments.integer("prefix_tokens", prefix_tokens)
        priority = arguments.integer("priority", priority, low=-arguments.MAX_INTEGER)
        check_event("`after`", after)
        asked = []
        for name, one in checked.items():
            start = max(one.start, prefix_tokens) if layout.component(name).positional else one.start
            asked.append(m.Asked(name, min(start, one.stop), one.stop))
        indexes = {name: one.index for name, one in checked.items()}
        exposed = checked if node.path != "staged" else {}
        wire_items = tuple(
            m.Items(name, one.index.first_token, memoryview(one.pages.data).cast("B")) for name, one in exposed.items()
        )
        with self.driver.use():
            if self.bound:
                raise UsageError(f"room {self.id!r} is bound already", remedy="call bind() once", room=self.id)
            if aux is not None:
                node._lend(self, aux)
            self.bound = True
            if node.observed is not None:
                node.observed.bound(self)
            then = partial(
                core.bind, self.room, tuple(sorted(asked)), indexes, wire_items=wire_items, priority=priority,
                row=aux.number if aux is not None else None,
            )  # fmt: skip
            if after is None:
                core.endpoint.now = time.monotonic()
                then()
            else:
                node._waiting.append((self, after, then))
        self.driver.kick()


class DecodeNode(Node[DecodeCore, Scatter, Receiver]):
    """One decode rank.

    `pool` holds the KV memory, `topology` the rank's place among those that receive a room together. `staging_nbytes`
    are split into `n_lanes` lanes. With `path="staged"` peers may write staging memory only; "direct" and "auto" let
    them write the pool. The other arguments are those of `PrefillNode`.
    """

    role = "decode"

    def __init__(
        self,
        pool: Pool,
        topology: Topology,
        *,
        n_lanes: int = 2,
        **options: Unpack[NodeOptions],
    ) -> None:
        super().__init__(pool, topology, arguments.integer("n_lanes", n_lanes, low=1, high=MAX_PARTS), options)
        self.path = self.options["path"]
        lanes = tuple(m.LaneSpan(part.base, part.nbytes, part.kind, part.device) for part in self.parts)
        hello = m.Hello(lanes=lanes, rows=self.rows.span, **self._said(direct=self.path != "staged"))
        self.core = DecodeCore(self.incarnation, hello, self.config, self.rows)
        # Filled by the directory's thread and emptied by the driver's: one append and one popleft are each whole.
        self._answers: deque[tuple[DecodeRoom, list[Advert] | PdstageError]] = deque()
        try:
            self.driver.start()
        except BaseException:
            self.close()
            raise

    # What receivers call.

    @changes_rooms
    def receive(
        self,
        room: RoomId,
        directory: str,
        *,
        dp_rank: int | None = None,
        instance: str | None = None,
        deadline_s: float = 600.0,
        wait_s: float | None = None,
    ) -> Receiver:
        """Announces that `room` will come from the prefill engine that is listed in `directory`, its address.

        Returns at once; who serves the room is looked up meanwhile. `deadline_s` counts from here. `wait_s` is how long
        prefill may take to its first chunk, from when the room is opened; None is `Config.wait_s`. Raises `UsageError`
        for a bad address, and if the room is being received already.
        """
        deadline_s = arguments.number("deadline_s", deadline_s, above=0.0)
        wait_s = None if wait_s is None else arguments.number("wait_s", wait_s, above=0.0)
        dp_rank = None if dp_rank is None else arguments.integer("dp_rank", dp_rank)
        instance = None if instance is None else arguments.text("instance", instance)
        directory = arguments.text("a directory's address", directory)
        adverts = self.directory.cached(directory, dp_rank, instance)
        client = self.directory.client(directory) if adverts is None else None
        with self.driver.use():
            self.driver.check_begins()
            self.core.endpoint.now = now = time.monotonic()
            announced = self.core.announce(room_key(room), deadline_s=deadline_s, wait_s=wait_s)
            receiver = Receiver(self, announced)
            self._opened(receiver)
            if adverts is not None:
                self._found(announced, adverts)
        if client is not None:

            def answer(found: list[Advert] | PdstageError) -> None:
                self._answers.append((announced, found))
                self.socket.wake()

            self.directory.lookup(client, dp_rank, instance, now + min(deadline_s, self.config.hello_s), answer)
        self.driver.kick()
        return receiver

    def status(self) -> Status:
        with self.driver.lock:
            held = self.core.leases
            leases, now = held.live(), self._status()._replace(n_waiting=len(held.waiting))
            cursors = [(lane.capacity, lane.watermark, lane.head, lane.quarantined_nbytes) for lane in held.lanes]
        return with_rooms(now._replace(lanes=lanes(cursors, leases)), self.handles())

    # What the core asks for.

    def _carry(self, effect: Scatter) -> None:
        writer, session, rects = effect.writer, effect.writer.session, effect.lease.rects
        pair = self.sessions.plan(session).pair
        move = Move(
            writer.shares, rects, session.common.tokens(rects), pair.order, writer.room.items,
            session.checksums, pair.dst, session.staged.taken,
        )  # fmt: skip
        self.stager.scatter(effect.ticket, move, Region(effect.address, effect.nbytes))

    def _on_transport(self, event: Done | PostFailed | Inbound, seen_at: float) -> None:
        if isinstance(event, Inbound):
            self.core.tag(event.tag)

    def _on_staged(self, copied: Copied) -> None:
        self.core.scattered(copied.ticket, copied.error, copied.checksum)

    def _take_asked(self) -> None:
        while self._answers:
            room, found = self._answers.popleft()
            if isinstance(found, PdstageError):
                self.core.fail(room, found)
            else:
                self._found(room, found)
        super()._take_asked()

    def _found(self, room: DecodeRoom, adverts: list[Advert]) -> None:
        """What a directory says is a peer's word: where it is of no use it fails this room, not the driver."""
        writers = {}
        try:
            if len({one.topology.unique_rank for one in adverts}) < len(adverts):
                raise PeerError("a directory names one prefill rank twice", remedy="see what answers at its address")
            for advert in adverts:
                if advert.version < OLDEST:  # a later one than ours may talk with us: it says so when greeted
                    raise PeerError(
                        f"{advert.where} speaks wire version {advert.version}, this node talks {OLDEST} and later",
                        remedy="run a later release at prefill",
                    )
                writers[advert.topology.unique_rank] = self.socket.connect(advert.endpoint)
            self.core.found(room, writers)
        except PdstageError as error:
            self.core.fail(room, error)
        if room.ended:
            for route in writers.values():
                self.sessions.hang_up(route)

    def _on_changed(self, handle: Receiver, status: int) -> None:
        if status & 0x7F == State.SUCCESS and handle.state is not State.SUCCESS:
            self._take_aux(handle)  # before anybody sees the Success
        super()._on_changed(handle, status)

    def _take_aux(self, receiver: Receiver) -> None:
        """What came by message is put into the row; what was written in place is there."""
        room, shared = receiver.room, receiver.room.shared
        if shared is None or self.metadata is None:
            receiver.aux = room.aux
            return
        row = receiver.row or AuxRow((), np.zeros(self.metadata.row_nbytes, np.uint8))
        if room.aux is not None:
            row.take(room.aux, shared)
        receiver.aux = row.of(shared.dst)

    # Its sessions.

    def _identify_peer(self, session: Session, description: bytes) -> None:
        self.transport.identify(label(session), description)

    def _on_refused(self, route: bytes, error: PdstageError) -> None:
        if route:
            self.directory.forget()  # the peer may be at the same address under another key
            self.core.unreachable(route, error)

    def _is_fenced(self, session: Session) -> bool:
        return self.transport.traits_of(label(session)).fences or self.directory.has_ended(session.id.writer)

    def _holds_nothing(self, session: Session) -> bool:
        return not self.core.holds(session)

    # What it waits for.

    def _in_flight(self) -> bool:
        traits = self.transport.traits
        return (traits.notifies or traits.polled) and bool(self.core.by_epoch or self.core.leases.live())
