"""Prefill's node, what an engine has where prompts are computed, and a room as it holds it there, a `Sender`."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from pdstage import arguments
from pdstage.control.address import Address
from pdstage.control.bootstrap import BootstrapServer
from pdstage.errors import PeerError, UsageError
from pdstage.layout import Region
from pdstage.layout.states import canonical
from pdstage.manager.calibration import costs
from pdstage.manager.data_path import DataPath
from pdstage.manager.driver import changes_rooms
from pdstage.manager.handle import CudaEvent, Handle, check_event
from pdstage.manager.items import GivenItems, GivenTokens, check, rects_of
from pdstage.manager.node import Node
from pdstage.manager.options import MAX_PARTS, NodeOptions, check_path
from pdstage.manager.sessions import label
from pdstage.manager.status import Status, with_rooms
from pdstage.metadata import AuxRow
from pdstage.plan.cost import CostModel
from pdstage.protocol.destinations import GivenRow, PrefillRoom
from pdstage.protocol.messages import Welcome
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import ChunkEffect, Gather
from pdstage.protocol.room import RoomId, room_key
from pdstage.protocol.state import ChunkPhase
from pdstage.transport import Done, Inbound, PostFailed, Traits

if TYPE_CHECKING:
    from pdstage.kernels import Pool
    from pdstage.layout.topology import Range, Topology
    from pdstage.protocol.session import Session
    from pdstage.stager import Copied


_CARRIED_S = 1e-3
"""How often `wait_carried` asks: a chunk that arrives changes no room's state, so nothing wakes who waits for it."""
_OVER = (ChunkPhase.WRITTEN, ChunkPhase.DROPPED, ChunkPhase.BROKEN)


class Sender(Handle):
    """One room at its prefill rank. Its chunks' pages must stay as they are until `released`."""

    __slots__ = ("driver", "finishing")

    room: PrefillRoom
    _node: PrefillNode

    def __init__(self, node: PrefillNode, room: PrefillRoom) -> None:
        super().__init__(node, room)
        self.driver, self.finishing = node.driver, False

    @property
    def prefix_tokens(self) -> int | None:
        """The first token that any destination asks for; None before all have opened."""
        return self._prefix_tokens({one.name for one in self._node.pool.layout.components if one.positional})

    def prefix_tokens_of(self, component: str) -> int | None:
        """The same of one component, for engines whose states reach further back than what they send of the cache."""
        return self._prefix_tokens({canonical(arguments.text("a component's name", component))})

    def _prefix_tokens(self, names: set[str]) -> int | None:
        with self.driver.use():
            if not self.room.opened:
                return None
            asked = (one for destination in self.room.destinations.values() for one in destination.asked.items())
            return min((start for name, (start, _) in asked if name in names), default=0)

    @property
    def opened(self) -> bool:
        """Whether all destinations have opened the room, so that chunks given now are on their way at once."""
        with self.driver.use():
            return self.room.opened

    @property
    def backlog_nbytes(self) -> int:
        """Bytes given to `chunk` that no write has carried yet, summed over destinations."""
        with self.driver.use():
            chunks = (chunk for destination in self.room.destinations.values() for chunk in destination.chunks.values())
            return sum(chunk.nbytes for chunk in chunks if chunk.phase not in _OVER)

    @changes_rooms
    def chunk(
        self,
        items: GivenItems,
        tokens: GivenTokens = None,
        *,
        layers: Range | None = None,
        ready: CudaEvent | None = None,
    ) -> None:
        """More of the room: `tokens` (absolute, start and stop, by component) stored in `items`, of `layers` or of all.
        A rank that holds part of the tokens gives ranges as if it held all.

        `ready` is an event after which the data exists; leases are sought meanwhile. Raises `UsageError` for items that
        are out of range or do not cover the tokens; nothing is sent then.
        """
        node = self._node
        if self.finishing:
            raise UsageError(f"room {self.id!r} got a chunk after finish()", remedy="chunks come first")
        check_event("`ready`", ready)
        checked = check(node.pool.layout, items, tokens, unique=False)
        rects, given = rects_of(node.pool.layout, checked, layers), {name: one.index for name, one in checked.items()}
        if rects:
            with self.driver.use():
                node.core.endpoint.now = time.monotonic()
                source = node.core.chunk(self.room, rects, given, ready=ready is None)
                if ready is not None:
                    node._waiting.append((self, ready, partial(node.core.data_ready, source)))
        self.driver.kick()

    @changes_rooms
    def finish(
        self,
        aux: bytes | AuxRow | None = None,
        *,
        states: GivenItems | None = None,
        ready: CudaEvent | None = None,
        open_wait_s: float | None = None,
    ) -> None:
        """No more chunks. `states` is a last chunk of slots.

        `aux` is the request's small row, for the destination: bytes, or a row of the node's metadata buffers. Such a
        row must stay as it is until `released`. `ready` is an event after which the row and `states` are there.
        `open_wait_s` is how long from then on decode may take to open the room or, by its heartbeats, to say that it
        waits with it; None: as `send` said. Raises `UsageError` for a second call, too many bytes or a row that is free
        or another room's.
        """
        node = self._node
        check_event("`ready`", ready)
        if open_wait_s is not None:
            open_wait_s = arguments.number("open_wait_s", open_wait_s, above=0.0)
        if aux is not None and not isinstance(aux, AuxRow):
            aux = arguments.octets("aux", aux)
            if len(aux) > (most := node.config.max_aux_nbytes):
                raise UsageError(f"{len(aux)} aux bytes for room {self.id!r}", remedy=f"at most {most}, see Config")
        if states is not None:
            self.chunk(states, ready=ready)
        with self.driver.use():
            if self.finishing:
                raise UsageError(f"room {self.id!r} is finished already", remedy="call finish() once")
            given = aux if not isinstance(aux, AuxRow) else GivenRow(node._lend(self, aux).address(aux), aux.read)
            self.finishing = True
            then = partial(node.core.finish, self.room, given, open_wait_s=open_wait_s)
            if ready is None:
                node.core.endpoint.now = time.monotonic()
                then()
            else:
                node._waiting.append((self, ready, then))
        self.driver.kick()

    def wait_carried(self, timeout_s: float | None = None) -> None:
        """Until every destination has the chunks given so far, so that their pages may change before `released`: for
        an engine that takes a request's pages in the middle of its prefill. Returns too once the room has ended, as
        nobody goes on from what it carried. A destination that comes anew afterwards cannot have them: the room fails.
        `TimeoutError` after `timeout_s`.
        """
        self._node.wait_for(self, self._is_carried, timeout_s, every_s=_CARRIED_S)

    def _is_carried(self) -> bool:
        room = self.room
        with self.driver.lock:
            if room.ended or not room.sources:
                return True
            carried = room.opened and not self.backlog_nbytes
            room.carried |= carried  # for good
            return carried


_DEVICE_CHUNK_S = 250e-6
"""What a chunk costs both hosts, where its bytes pass none of them: profiled."""


@cache
def _by_traits(traits: Traits, copies_at: float | None) -> CostModel:
    """Of a transport nobody measured: one whose traits differ by peer costs each what its own say. `copies_at` are the
    bytes a second of a device's copies, on either side.
    """
    found = CostModel.linear(traits.bytes_per_s, traits.descriptor_s, traits.post_s)
    if copies_at is None:
        return found
    return replace(
        found, gather_bytes_per_s=copies_at, scatter_bytes_per_s=copies_at, gather_run_s=0.0, scatter_run_s=0.0,
        chunk_s=_DEVICE_CHUNK_S,
    )  # fmt: skip


class PrefillNode(Node[PrefillCore, ChunkEffect, Sender]):
    """One prefill rank.

    `pool` holds the KV memory, `topology` the rank's place in `instance`. `transport` is a name, a name with options
    (`pdstage.transport.open_from_config`) or an open transport. `directory` is the directory to publish to; None embeds
    one on the host of `bind`, at `directory_address`. Where the engine keeps the directory itself, `publish` is false,
    and `advert` is what to put there.
    `staging_nbytes` are split into `n_buffers` send buffers. `staging_on` is "pool", where the pool lies, or "host",
    page-locked memory of this host, for a pool on a GPU whose memory no NIC reaches (no GPUDirect); then `path` must be
    "staged". So must it be, and is unless given, if pages of a GPU's pool are in host memory (`Pool.on_host`): they are
    page-locked, bytes land on the GPU, and its kernels scatter them. `path` is "auto" (by cost), "staged" or "direct".
    `bind` is the control socket's address; beyond loopback it takes `keys`, a key file's path or `Keys`, or else
    `insecure` must be true, and so for the directory. `config` holds deadlines and limits. `progress` is "inline"
    (polls do the work) or "thread", which sets Python's switch interval to 0.1 ms at most.
    `max_sms` is how many multiprocessors of a GPU one copy may take from the engine's kernels; None: all of them.
    `calibration` is a file that `pdstage calibrate` wrote, by which "auto" chooses; None: the one that
    PDSTAGE_CALIBRATION names, else the transport's defaults. `aux` is how rows of `metadata` travel: "tcp", by control
    message; "rdma", by the data transport, from memory to memory, where both sides say so; "nvlink", the same, of rows
    on the device. What cannot go so goes by message. `observers` are told when rooms begin and end and how long each
    stage of a chunk took, as `pdstage.manager.observer` says. `model` is what the engine says of its model, as
    names and texts, such as `name`, `revision`, `weights`, `dtype`, `quantization` or `rope`: a peer that says another
    thing under the same name is refused, since KV of other weights may have the same shape (vllm issue 55776). Raises
    `UsageError` or `TransportError`.
    """

    role = "prefill"

    def __init__(
        self,
        pool: Pool,
        topology: Topology,
        *,
        n_buffers: int = 4,
        directory: str | None = None,
        instance: str = "prefill",
        publish: bool = True,
        calibration: arguments.GivenPath | None = None,
        **options: Unpack[NodeOptions],
    ) -> None:
        n_buffers = arguments.integer("n_buffers", n_buffers, low=2, high=MAX_PARTS)  # so that no destination holds all
        arguments.text("instance", instance)
        arguments.flag("publish", publish)
        if directory is not None:
            arguments.text("directory", directory)
        self._costs = costs(calibration)
        super().__init__(pool, topology, n_buffers, options)
        self._copies_at: float | None = None
        buffer_nbytes = self.parts[0].nbytes
        self.data_path = DataPath(
            self.transport, self.stager, self.sessions, path=self.options["path"], cost_of=self.cost_of,
            buffers=self.parts, chunk_nbytes=min(buffer_nbytes, self.config.chunk_nbytes), observed=self.observed,
        )  # fmt: skip
        self.core = PrefillCore(
            self.incarnation, Welcome(**self._said()), self.config, self.rows, n_buffers=n_buffers,
            buffer_nbytes=buffer_nbytes, choose=self.data_path.prefers_direct, piece=self.data_path.piece_nbytes,
            direct=self.options["path"] != "staged",
        )  # fmt: skip
        self._bootstrap: BootstrapServer | None = None
        self.directory_address = directory or ""
        self.advert = self._advert(instance)
        try:
            if self.options["path"] != "direct":
                with self.driver.device():
                    self._copies_at = self.stager.rate(self.parts[0], checksum=self.config.checksums)
            if publish and not directory:
                host = Address.parse(self.options["bind"], "tcp", listening=True)._replace(port=0)
                self._bootstrap = BootstrapServer(str(host), keys=self.keys, insecure=self.options["insecure"]).start()
                self.directory_address = self._bootstrap.address
            if publish:
                self.directory.publish(self.directory_address, lambda: [self.advert])
            self.driver.start()
        except BaseException:  # a Ctrl-C too: an advert would be renewed for a node that nobody has
            self.close()
            raise

    def cost_of(self, traits: Traits) -> CostModel:
        """What `path="auto"` takes a transport to cost: as calibrated, else as its traits say, and a device's copies as
        measured at the start.
        """
        return self._costs.get(traits.name) or _by_traits(traits, self._copies_at)

    @property
    def written(self) -> tuple[int, int]:
        """Bytes written since the start, and the descriptors that moved them: of `stats`, what every step may
        ask for.
        """
        counters = self.core.counters
        return counters.bytes_written, counters.descriptors

    def pieces(self, nbytes: int) -> int:
        """In how many pieces `nbytes` that a forward pass computes layer by layer are best handed over (`chunk`'s
        `layers`), by what the transport costs: 1 where they are too few to be worth more.
        """
        return self.cost_of(self.transport.traits).pieces(nbytes)

    @property
    def path(self) -> str:
        """ "auto", "direct" or "staged"; may be changed between rooms. A node made with "staged" writes no pages still.

        Setting it raises `UsageError` for another value, and where a node with it would be refused.
        """
        return self.data_path.path

    @path.setter
    def path(self, path: str) -> None:
        check_path(path, self.config, writes=True)
        self.data_path.path = path

    def status(self) -> Status:
        with self.driver.lock:
            now = self._status()._replace(
                n_buffers=len(self.parts),
                n_buffers_free=len(self.core.chunks.free),
                buffer_nbytes=self.parts[0].nbytes,
            )
        return with_rooms(now, self.handles())

    def _begin_drain(self) -> None:
        super()._begin_drain()
        self.core.endpoint.now = time.monotonic()
        self.core.drain()

    def _is_sought(self) -> bool:
        return any((self.core.unopened, room) in self.core.endpoint.timers for room in self.core.by_key.values())

    # What senders call.

    @changes_rooms
    def send(self, room: RoomId, *, open_wait_s: float | None = None) -> Sender:
        """This rank will send `room`: its chunks follow. `open_wait_s` is how long decode may take to open it; None is
        `Config.open_wait_s`. Raises `UsageError` if it is being sent already.
        """
        open_wait_s = None if open_wait_s is None else arguments.number("open_wait_s", open_wait_s, above=0.0)
        with self.driver.use():
            self.driver.check_begins()
            self.core.endpoint.now = time.monotonic()
            out = self.core.submit(room_key(room), open_wait_s=open_wait_s)
            sender = Sender(self, out)
            self._opened(sender)
        self.driver.kick()
        return sender

    # What the core asks for.

    def _carry(self, effect: ChunkEffect) -> None:
        if isinstance(effect, Gather):
            self.data_path.gather(effect)
            return
        error = self.data_path.write(effect, self.core.counters)
        if error is not None:  # it never began
            with self.driver.lock:
                self.core.endpoint.now = now = time.monotonic()
                if self.observed is not None:
                    self.observed.over(effect.ticket, error, 0.0, now)
                self.core.chunks.completed(effect.ticket, error)
        elif self.transport.traits_of(self.sessions.plan(effect.chunk.destination.session).label).post_blocks:
            # Several such writes in a row: the tags of the earlier ones move on only while the transport is asked.
            self.driver.poll()

    def _on_transport(self, event: Done | PostFailed | Inbound, seen_at: float) -> None:
        if isinstance(event, Done) and (figures := event.figures):
            counters = self.core.counters
            counters.posts_measured += 1
            counters.posts_measured_bytes += figures.nbytes
            counters.posts_measured_us += round(figures.post_s * 1e6)
            counters.writes_measured_us += round(figures.write_s * 1e6)
        if not isinstance(event, Inbound) and (over := self.data_path.posts.ended(event)) is not None:
            ticket, error, settled = over
            if self.observed is not None:
                self.observed.over(ticket, error, 0.0, seen_at)
            self.core.chunks.completed(ticket, error, settled=settled)

    def _on_staged(self, copied: Copied) -> None:
        path, ticket = self.data_path, copied.ticket
        if ticket in path.copies:
            error = path.copied(copied)
            if error is not None:
                self.core.chunks.completed(ticket, error)
            return
        path.placed.pop(ticket, None)
        self.core.chunks.gathered(ticket, copied.error, copied.checksum)

    # Its sessions.

    def _identify_peer(self, session: Session, description: bytes) -> None:
        regions = [Region(lane.base, lane.nbytes, lane.kind, lane.device) for lane in session.lanes]
        self.transport.connect(label(session), description)
        if (rows := session.rows) is not None:
            regions.append(Region(rows.base, rows.row_nbytes * rows.n_rows, rows.kind, rows.device))
        pool = session.layout.regions if session.exposes_pool else ()
        try:
            self.transport.prepare(label(session), [*regions, *pool])
        except PeerError as error:
            if not pool or self.path == "direct":
                raise
            self.transport.prepare(label(session), regions)
            session.in_place = False
            why = f"its pages cannot be written in place, so that all of its chunks are staged: {error.what}"
            self.sessions.warn(session.route, PeerError(why, remedy=error.remedy))

    def _is_fenced(self, session: Session) -> bool:
        return self.transport.traits_of(label(session)).stops_reads

    def _holds_nothing(self, session: Session) -> bool:
        return not self.data_path.posts.to(label(session))

    def _copies_to(self, session: Session) -> bool:
        return any(peer == label(session) for peer, *_ in list(self.data_path.copies.values()))

    # What it waits for.

    def _in_flight(self) -> bool:
        return bool(self.data_path.posts or self.data_path.copies)

    def close(self, timeout_s: float = 5.0) -> bool:
        """As of every node; then ends the bootstrap directory that it embeds, if it does."""
        safe = super().close(timeout_s)
        if not self.driver.was_forked:
            if safe:  # else gathers and copies may go on, into memory of peers that is mapped here
                self.data_path.placed.clear()
                self.data_path.copies.clear()
            if self._bootstrap is not None:
                self._bootstrap.close()
        return safe
