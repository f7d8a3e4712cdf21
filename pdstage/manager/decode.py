"""Decode's node, what an engine has where tokens are generated, and a room as it holds it there, a `Receiver`."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from pdstage import arguments
from pdstage.errors import PdstageError, PeerError, UsageError
from pdstage.layout import Region
from pdstage.manager.driver import changes_rooms
from pdstage.manager.handle import Handle, ask_event, check_event
from pdstage.manager.items import Checked, GivenItems, GivenTokens, check, indexes
from pdstage.manager.node import Node
from pdstage.manager.options import DEFAULT_SWITCH_S, NodeOptions
from pdstage.manager.sessions import label, place
from pdstage.manager.status import Status, by_state, lanes
from pdstage.metadata import AuxRow
from pdstage.protocol import messages as m
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.room import RoomId, room_key
from pdstage.protocol.state import State
from pdstage.protocol.wire import OLDEST
from pdstage.stager import DEFAULT_MAX_SMS
from pdstage.transport import Done, Inbound, PostFailed, Transport

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from pdstage.control.bootstrap import Advert
    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.layout import Layout
    from pdstage.layout.topology import Topology
    from pdstage.manager.effects import Carried
    from pdstage.manager.handle import CudaEvent
    from pdstage.manager.observer import Observer
    from pdstage.metadata import MetadataBuffers
    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session
    from pdstage.stager import Copied


class Bound(NamedTuple):
    """What `bind` was given, until the core may have it."""

    checked: dict[str, Checked]
    asked: tuple[m.Asked, ...]
    priority: int
    after: CudaEvent | None
    row: AuxRow | None


class Receiver(Handle):
    """One room at its decode rank. Its pages must stay reserved until `released`."""

    __slots__ = ("_aux", "bound")

    room: DecodeRoom
    _node: DecodeNode

    def __init__(self, node: DecodeNode, room: DecodeRoom) -> None:
        super().__init__(node, room)
        self.bound: Bound | None = None
        self._aux: bytes | AuxRow | None = None

    @property
    def aux(self) -> bytes | AuxRow | None:
        """The request's aux as prefill gave it to `finish`, bytes or a row; there once the state is Success.

        A row is the one given to `bind`, of the columns that both sides have; its others hold what they held before.
        """
        return self._aux

    @property
    def ready_to_bind(self) -> bool | None:
        """Whether prefill has computed everything and only waits for `bind`, for engines that allocate late. None until
        prefill has answered; one that does not know the room has not. The first look has it asked.
        """
        if not self.room.waits_to_bind and self.bound is None:
            self._node.wait_to_bind(self)
        return self.room.ready_to_bind

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
        self._node.bind(self, items, tokens, prefix_tokens=prefix_tokens, after=after, priority=priority, aux=aux)

    def abort(self, reason: str = "aborted by the engine") -> None:
        """Gives the room up: it fails here, and at every writer: as soon as that is found and answers, and where it was
        not submitted yet, once it is. `released` tells when its pages are safe.
        """
        self._node.abort(self, reason)


class DecodeNode(Node[DecodeCore, Scatter, Receiver]):
    """One decode rank.

    `pool` holds the KV memory, `topology` the rank's place among those that receive a room together. `staging_nbytes`
    are split into `n_lanes` lanes. With `path="staged"` peers may write staging memory only; "direct" and "auto" let
    them write the pool. The other arguments are those of `PrefillNode`.
    """

    role: ClassVar[str] = "decode"

    def __init__(
        self,
        pool: Pool,
        topology: Topology,
        *,
        transport: str | Mapping[str, object] | Transport = "auto",
        path: str = "auto",
        staging_nbytes: int = 256 << 20,
        staging: object = None,
        staging_on: str = "pool",
        n_lanes: int = 2,
        bind: str = "tcp://127.0.0.1:0",
        config: Config | None = None,
        progress: str = "inline",
        switch_interval_s: float | None = DEFAULT_SWITCH_S,
        copy_thread: bool | None = None,
        max_sms: int | None = DEFAULT_MAX_SMS,
        insecure: bool = False,
        keys: Keys | str | os.PathLike[str] | None = None,
        aux: str = "tcp",
        metadata: MetadataBuffers | None = None,
        observers: Sequence[Observer] = (),
        journal: str | os.PathLike[str] | None = None,
        model: Mapping[str, str] | None = None,
    ) -> None:
        options = NodeOptions(
            transport=transport, path=path, staging_nbytes=staging_nbytes, n_parts=n_lanes, staging=staging,
            staging_on=staging_on, bind=bind, config=config, progress=progress, switch_interval_s=switch_interval_s,
            copy_thread=copy_thread, max_sms=max_sms, insecure=insecure, keys=keys, aux=aux, metadata=metadata,
            observers=observers, journal=journal, model=model,
        )  # fmt: skip
        super().__init__(pool, topology, options)
        self.path = path
        lanes = tuple(m.LaneSpan(part.base, part.nbytes, part.kind, part.device) for part in self.parts)
        offer, *others = self._offers()
        self.core = DecodeCore(
            self.incarnation, layout=pool.layout, topology=topology, transport=offer.transport,
            description=offer.description, lanes=lanes, config=self.config, direct=path != "staged",
            others=tuple(others), notifies=self.transport.traits.notifies, rows=self.rows,
            model=options.facts(),
        )  # fmt: skip
        self._binding: list[Receiver] = []
        # Filled by the directory's thread and emptied by the driver's: one append and one popleft are each whole.
        self._answers: deque[tuple[DecodeRoom, list[Advert] | None, PdstageError | None]] = deque()
        try:
            with self.driver.device():
                self.stager.warm(checksum=self.config.checksums)
            self.driver.start()
        except BaseException:
            self.close()
            raise

    # What receivers call.

    @changes_rooms
    def receive(
        self,
        room: RoomId,
        prefill: str,
        *,
        dp_rank: int | None = None,
        instance: str | None = None,
        deadline_s: float = 600.0,
        wait_s: float | None = None,
    ) -> Receiver:
        """Announces that `room` will come from the prefill engine that `prefill`, a bootstrap's `host:port`, names.

        Returns at once; who serves the room is looked up meanwhile. `deadline_s` counts from here. `wait_s` is how long
        prefill may take to its first chunk, from when the room is opened; None is `Config.wait_s`. Raises `UsageError`
        for a bad address, and if the room is being received already.
        """
        deadline_s = arguments.number("deadline_s", deadline_s, above=0.0)
        wait_s = None if wait_s is None else arguments.number("wait_s", wait_s, above=0.0)
        dp_rank = None if dp_rank is None else arguments.integer("dp_rank", dp_rank)
        instance = None if instance is None else arguments.text("instance", instance)
        prefill = arguments.text("a bootstrap address", prefill)
        adverts = self.directory.cached(prefill, dp_rank, instance)
        client = self.directory.client(prefill) if adverts is None else None
        with self.driver.use():
            self.driver.check_begins()
            now = time.monotonic()
            announced = self.core.announce(room_key(room), None, now, deadline_s=deadline_s, wait_s=wait_s)
            receiver = Receiver(self, announced)
            self.roster.add(announced, receiver)
            if self.observed is not None:
                self.observed.opened(receiver)
            if adverts is not None:
                self._found(announced, adverts, now)
        if client is not None:

            def answer(found: list[Advert] | None, error: PdstageError | None) -> None:
                self._answers.append((announced, found, error))
                self.socket.wake()

            self.directory.lookup(client, dp_rank, instance, now + min(deadline_s, self.config.hello_s), answer)
        self.driver.kick()
        return receiver

    @changes_rooms
    def bind(
        self,
        receiver: Receiver,
        items: GivenItems,
        tokens: GivenTokens,
        *,
        prefix_tokens: int,
        after: CudaEvent | None,
        priority: int,
        aux: AuxRow | None,
    ) -> None:
        """`Receiver.bind`."""
        layout = self.pool.layout
        checked = check(layout, items, tokens, unique=True)
        prefix_tokens = arguments.integer("prefix_tokens", prefix_tokens)
        priority = arguments.integer("priority", priority, low=-arguments.MAX_INTEGER)
        check_event("`after`", after)
        asked = []
        for name, one in checked.items():
            start = max(one.start, prefix_tokens) if layout.component(name).positional else one.start
            asked.append(m.Asked(name, min(start, one.stop), one.stop))
        with self.driver.use():
            if receiver.bound is not None:
                raise UsageError(f"room {receiver.id!r} is bound already", remedy="call bind() once", room=receiver.id)
            if aux is not None:
                self.lent.lend(receiver, aux)
            receiver.bound = Bound(checked, tuple(sorted(asked)), priority, after, aux)
            if self.observed is not None:
                self.observed.bound(receiver)
            self._binding.append(receiver)
        self.driver.kick()

    @changes_rooms
    def wait_to_bind(self, receiver: Receiver) -> None:
        """`Receiver.ready_to_bind`."""
        if self.driver.closed or self.driver.failure is not None or self.driver.was_forked:
            return
        with self.driver.lock:
            self.core.wait_to_bind(receiver.room, time.monotonic())
        self.driver.kick()

    @changes_rooms
    def abort(self, receiver: Receiver, reason: str) -> None:
        """`Receiver.abort`."""
        with self.driver.use():
            self.core.abort(receiver.room, arguments.sayable(reason), time.monotonic())
        self.driver.kick()

    def status(self) -> Status:
        with self.driver.lock:
            held = self.core.leases
            leases, now = held.live(), self._status()._replace(n_waiting=held.queue.n_waiting)
            cursors = [(lane.capacity, lane.watermark, lane.head, lane.quarantined_nbytes) for lane in held.lanes]
        return now._replace(rooms=by_state(self.handles()), lanes=lanes(cursors, leases))

    # What the core asks for.

    def _joined(self, effects: Sequence[Carried]) -> Sequence[Carried]:
        return effects

    def _carry(self, effect: Scatter) -> None:
        landing, writer = effect.landing, effect.landing.writer
        pair, session = self.sessions.plan(writer.session).pair, writer.session
        self.stager.scatter(
            effect.ticket, writer.shares, landing.rects, order=pair.order, items=writer.room.items,
            src=Region(landing.address, landing.nbytes), checksum=session.checksums,
            tokens=session.common.tokens(landing.rects), cut=pair.dst,
            staged=session.staged.taken,
        )  # fmt: skip

    def _nbytes(self, effect: Scatter) -> int:
        return effect.landing.nbytes

    def _on_transport(self, event: Done | PostFailed | Inbound, now: float) -> None:
        if isinstance(event, Inbound):
            self.core.tag(event.tag, now)

    def _on_staged(self, copied: Copied, now: float) -> None:
        self.core.scattered(copied.ticket, now, copied.error, copied.checksum)

    def _take_asked(self, now: float) -> None:
        while self._answers:
            room, adverts, error = self._answers.popleft()
            if adverts is not None:
                self._found(room, adverts, now)
            else:
                self.core.fail(room, error or PeerError("the directory gave no answer"), now)
        if self._binding:
            self._take_given(now)

    def _found(self, room: DecodeRoom, adverts: list[Advert], now: float) -> None:
        """What a directory says is a peer's word: where it is of no use it fails this room, not the driver."""
        # A later version than ours may talk with us: it says so when greeted.
        old = next((a for a in adverts if a.version < OLDEST), None)
        try:
            if old is not None:
                what = f"{old.where} speaks wire version {old.version}, this node talks with {OLDEST} and later"
                raise PeerError(what, remedy="run a later release at prefill")
            writers = {a.topology.unique_rank: self.socket.connect(a.endpoint) for a in adverts}
        except PdstageError as error:
            self.core.fail(room, error, now)
        else:
            self.core.found(room, writers, now)

    def _take_given(self, now: float) -> None:
        binding, self._binding = self._binding, []
        for receiver in binding:
            bound = receiver.bound
            if bound is None or receiver.status & 0x7F == State.FAILED:
                continue
            done, wrong = ask_event("`after`", bound.after)
            if wrong:
                self.core.abort(receiver.room, wrong, now)
                continue
            if not done:
                self._binding.append(receiver)
                continue
            exposed = bound.checked if self.path != "staged" else {}
            wire_items = tuple(
                m.Items(name, one.first_token, memoryview(one.pages.data).cast("B")) for name, one in exposed.items()
            )
            self.core.bind(
                receiver.room, bound.asked, indexes(bound.checked), now, wire_items=wire_items,
                priority=bound.priority, row=bound.row.number if bound.row is not None else None,
            )  # fmt: skip

    def _on_changed(self, handle: Handle, status: int) -> None:
        room = handle.room
        if status & 0x7F == State.SUCCESS and isinstance(room, DecodeRoom) and isinstance(handle, Receiver):
            self._take_aux(handle, room)  # before anybody sees the Success
        super()._on_changed(handle, status)

    def _take_aux(self, receiver: Receiver, room: DecodeRoom) -> None:
        """What came by message is put into the row; what was written in place is there."""
        if receiver.state is State.SUCCESS:
            return
        shared = room.shared
        if shared is None or self.metadata is None:
            receiver._aux = room.aux
            return
        row = self.lent.of(receiver) or AuxRow((), np.zeros(self.metadata.row_nbytes, np.uint8))
        if room.aux is not None:
            row.take(room.aux, shared)
        receiver._aux = row.of(shared.dst)

    # Its sessions.

    def _layouts(self, session: Session) -> tuple[Layout, Layout]:
        return session.layout, self.pool.layout

    def _identify_peer(self, session: Session, description: bytes) -> None:
        self.transport.identify(label(session), description)

    def _on_refused(self, route: bytes, error: PdstageError, now: float) -> None:
        if route:
            self.directory.forget()  # the peer may be at the same address under another key
            self.core.unreachable(route, error, now)

    def _peer_name(self, session: Session) -> str:
        return f"prefill rank {place(session.topology)}"

    def _path_to(self, session: Session) -> str:
        return "staged" if self.path == "staged" else "as prefill chooses"

    def _is_fenced(self, session: Session) -> bool:
        return self.transport.traits_of(label(session)).fences or self.directory.has_ended(session.id.writer)

    def _holds_nothing(self, session: Session) -> bool:
        return not self.core.holds(session)

    def _copies_to(self, session: Session) -> bool:
        del session
        return False

    # What it waits for.

    def _in_flight(self) -> bool:
        traits = self.transport.traits
        return (traits.notifies or traits.polled) and (bool(self.core.rooms.by_epoch) or self.core.leases.lent)

    def _expects(self) -> bool:
        return bool(self._binding)
