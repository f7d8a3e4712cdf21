"""Prefill and decode cores over a scriptable network, with real bytes and a clock that only moves when told.

A `World` holds any number of both. Frames, writes, tags and scatters are queued; a test drops or holds them by
predicate and lets the rest run. Every landing write is checked against the ledger: no byte may land in staging
memory or pages that were given back (I2).
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pdstage import Config, Key, Layout, PdstageError, Region, RowLevel, TransportError, View
from pdstage.columns import Column, Columns
from pdstage.layout.topology import Topology, shard_axis
from pdstage.plan import HEAD_MAJOR, Rect, Share, selects, wire_order
from pdstage.protocol import messages as m
from pdstage.protocol import state, wire
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import Chunk, GivenRow, PrefillRoom, SubmittedChunk
from pdstage.protocol.handshake import _GOLDEN, features
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.room import NO_ROWS, OwnRows, Room, room_key
from pdstage.protocol.session import Attach, Changed, Detach, HangUp, PeerWarning, Renew, Send, Session
from pdstage.protocol.state import State, WriterPhase
from tests.owners import held, holds, place_of

state.strict = True
_space = itertools.count(1)
PAGE, WIDTH = 4, 8
STAGED_ALIGNMENT = 128
ROLES = ("k", "v")
N_ROWS = 8
COLUMNS = (Column("token", "int32", (1,)), Column("logprobs", "float32", (5,)))
Pages = list[int]
Span = tuple[int, int]
"""From, and up to: layers or tokens."""


class Memory:
    """Named bytes at invented addresses, so that a stray address is an error and not a crash."""

    def __init__(self, nbytes: int, base: int = 0) -> None:
        self.base = base or next(_space) << 32
        self.bytes = np.zeros(nbytes, np.uint8)

    def at(self, address: int, nbytes: int) -> np.ndarray:
        start = address - self.base
        assert 0 <= start <= start + nbytes <= len(self.bytes), "an address outside its region"
        return self.bytes[start : start + nbytes]


def pool_nbytes(
    *, heads: int, tp: int, rank: int, layers: Span, n_pages: int, page: int = PAGE,
    roles: tuple[str, ...] = ROLES,
) -> int:  # fmt: skip
    n_views = len(roles) * (layers[1] - layers[0])
    return n_views * n_pages * page * shard_axis("", heads, tp, rank).count * WIDTH


def make_layout(
    memory: Memory, *, heads: int, tp: int, rank: int, layers: Span, n_pages: int, hnd: bool = False,
    page: int = PAGE, slots: bool = False, exact: bool = False, roles: tuple[str, ...] = ROLES,
) -> Layout:  # fmt: skip
    """A pool of one rank in `memory`: NHD or HND pages of `page` tokens, or `slots` of as many rows."""
    axis = shard_axis("kv_head", heads, tp, rank)
    row, shard = (WIDTH, page * WIDTH) if hnd else (axis.count * WIDTH, WIDTH)
    item = page * axis.count * WIDTH
    views = [
        View(
            key=Key("kv", role, layer), region=0, offset=0, n_items=n_pages, item_stride=item, tokens_per_item=page,
            rows=(RowLevel(1, row),), shards=axis.count, shard_stride=shard, width=WIDTH, axis=axis, format="u8",
        )
        for layer in range(*layers)
        for role in roles
    ]  # fmt: skip
    views = [replace(view, offset=number * n_pages * item) for number, view in enumerate(views)]
    return Layout.of((Region(memory.base, len(memory.bytes)),), views, slots=("kv",) * slots, exact=("kv",) * exact)


def cell(view: View, memory: Memory, pages: Pages, token: int, shard: int) -> np.ndarray:
    """The `WIDTH` bytes of one token and local shard."""
    page, t = divmod(token, view.tokens_per_item)
    address = view.offset + pages[page] * view.item_stride + view.row_offset(t) + shard * view.shard_stride
    return memory.bytes[address : address + view.width]


@functools.lru_cache(8192)
def truth(layer: int, role: str, token: int, head: int, room: int) -> np.ndarray:
    """What every cell of a room must hold, from a generator no implementation shares."""
    return np.frombuffer(random.Random(f"{room}/{layer}/{role}/{token}/{head}").randbytes(WIDTH), np.uint8)


def place(layout: Layout, token: int) -> int:
    """Where among its items' tokens a rank keeps `token`."""
    return place_of(layout.components[0].owned, token + 1)[token]


def common(src: Layout, dst: Layout, rect: Rect) -> list[int]:
    """The tokens of `rect` that both ranks hold."""
    owned = [layout.components[0].owned for layout in (src, dst)]
    return [t for t in range(rect.start, rect.stop) if all(holds(o, t) for o in owned)]


def staged(
    layout: Layout, other: Layout, memory: Memory, shares: tuple[Share, ...], pages: Pages, rects: tuple[Rect, ...]
) -> Iterator[tuple[int, np.ndarray]]:
    """(staged offset, cell) of every cell of a chunk: the definition of the staged order, cell by cell."""
    rect_of, wire = {rect.component: rect for rect in rects}, wire_order(layout, other)
    views, offset = layout.by_key(), 0
    for key, first, count in selects(layout, shares, rects):
        view, tokens = views[key], common(layout, other, rect_of[key.component])
        order = [(t, s) for t in tokens for s in range(count)]
        if wire == HEAD_MAJOR:
            order.sort(key=lambda ts, v=view: (ts[0] // v.tokens_per_item, ts[1], ts[0]))
        for t, s in order:
            yield offset, cell(view, memory, pages, place(layout, t), first + s)
            offset += WIDTH
        offset += -offset % STAGED_ALIGNMENT


def held_of(layout: Layout, n: int) -> list[int]:
    """The tokens of a sequence of `n` that a rank holds."""
    return held(layout.components[0].owned, n)


@dataclass(eq=False)
class Rank:
    """A process of either role."""

    name: bytes
    memory: Memory
    rows: Memory
    alive: bool = field(default=True, init=False)
    peer_warnings: list[str] = field(default_factory=list, init=False)
    changes: list[tuple[bytes, int]] = field(default_factory=list, init=False)

    @property
    def session(self) -> Session:
        """The one with its one peer."""
        (one,) = self.core.sessions.values()  # type: ignore[attr-defined]
        return one


@dataclass(eq=False)
class Prefill(Rank):
    core: PrefillCore
    buffers: list[np.ndarray]


@dataclass(eq=False)
class Decode(Rank):
    core: DecodeCore
    staging: Memory
    pages: dict[DecodeRoom, Pages] = field(default_factory=dict)
    row_of: dict[DecodeRoom, int] = field(default_factory=dict)

    def nonces(self) -> set[int]:
        """Its half of every session it has greeted with."""
        return {(self.core.incarnation + n * _GOLDEN) % (1 << 64) for n in range(1, self.core.handshake._n_greeted + 1)}


Node = Prefill | Decode


class Copy(NamedTuple):
    """One cell on the direct path: token and local shard of the destination's view `key`, the bytes on each side."""

    key: Key
    token: int
    shard: int
    src: np.ndarray
    dst: np.ndarray


def direct_cells(src: Prefill, dst: Decode, chunk: Chunk) -> Iterator[Copy]:
    """Every cell of a chunk that goes straight into the destination's pages."""
    destination = chunk.destination
    ours = {key: start for key, start, _ in selects(src.core.layout, destination.shares, chunk.rects)}
    src_views, dst_views = src.core.layout.by_key(), destination.session.layout.by_key()
    src_pages, dst_pages = chunk.source.items["kv"], np.frombuffer(destination.open.items[0].data, np.int32).tolist()
    layouts = src.core.layout, destination.session.layout
    tokens = common(*layouts, chunk.rects[0])
    for key, first, count in selects(destination.session.layout, destination.shares, chunk.rects):
        for token, shard in itertools.product(tokens, range(count)):
            at_src, at_dst = (place(layout, token) for layout in layouts)
            here = cell(src_views[key], src.memory, src_pages, at_src, ours[key] + shard)  # type: ignore[arg-type]
            there = cell(dst_views[key], dst.memory, dst_pages, at_dst, first + shard)
            yield Copy(key, token, first + shard, here, there)


@dataclass(eq=False)
class Item:
    """Something on its way: `kind` is frame, write, done, tag, scatter, gather or fence."""

    kind: str
    src: Node
    dst: Node
    run: Callable[[], None]
    message: object = None
    tag: bytes = b""
    fail: Callable[[], None] | None = None
    """What a write becomes when its session is disconnected first."""
    passed: bool = False
    """Held once and let go: no rule applies to it any more."""
    key: str = ""
    """What the simulator's schedules call it."""

    def __repr__(self) -> str:
        return f"{self.kind} {self.src.name.decode()}>{self.dst.name.decode()} {self.message or ''}"


Want = Callable[[Item], bool]
"""Which of what is on its way a rule is for."""


class World:
    """All ranks, everything under way, and the clock. It is given any of these by name, and numbers of `Config`."""

    heads = 2
    n_pages = 16
    lane_nbytes = 4096
    n_lanes = 1
    n_buffers = 2
    buffer_nbytes = 4096
    path = "staged"
    dst_hnd = False
    dst_page = src_page = PAGE
    src_stages: tuple[Span, ...] = ()
    dst_stages: tuple[Span, ...] = ()
    slots = exact = False
    roles = ROLES
    fences = True
    notifies = True
    placed = False
    """Prefill maps decode's lanes, and gathers straight into them."""
    instances = False
    deadline_s = 1000.0
    choose: Callable[[Chunk], bool] | None = None
    aux = ""
    src_columns = dst_columns = COLUMNS
    advance = True
    """Decode lends memory with Open."""
    models: tuple[tuple[m.Fact, ...], ...] = ((), ())

    def __init__(self, *, prefill: int = 1, decode: int = 1, layers: int = 2, **given: object) -> None:
        for name in [name for name in given if hasattr(World, name)]:
            setattr(self, name, given.pop(name))
        self.config = Config(**given)  # type: ignore[arg-type]
        self.prefill: list[Prefill] = []
        self.decode: list[Decode] = []
        self.now = 0.0
        self.layers = (0, layers)
        self.columns = {"P": Columns(self.src_columns), "D": Columns(self.dst_columns)}
        self.lives, self.space = itertools.count(1), itertools.count(1)
        self.written: set[tuple[object, ...]] = set()
        self.fenced: set[m.SessionId] = set()
        self.processes: list[Decode] = []
        self.queue: list[Item] = []
        self.held: list[Item] = []
        self.log: list[str] = []
        self.n_hung_up = 0
        self.rules: list[tuple[Want, str]] = []
        self.n_prefill, self.n_decode = prefill, decode
        self.prefill = [self.make_prefill(rank) for rank in range(prefill)]
        self.decode = [self.make_decode(rank) for rank in range(decode)]

    @property
    def p(self) -> Prefill:
        """The first prefill rank."""
        return self.prefill[0]

    @property
    def d(self) -> Decode:
        """The first decode rank."""
        return self.decode[0]

    @property
    def now(self) -> float:
        return self._now

    @now.setter
    def now(self, now: float) -> None:
        """Every core has the world's time."""
        self._now = now
        for node in self.nodes():
            node.core.endpoint.now = now

    # Building and rebuilding ranks.

    def make_prefill(self, rank: int, life: int = 0) -> Prefill:
        memory, layout, topology = self.rank_of("P", rank)
        row_memory, rows = self.make_rows("P")
        core = PrefillCore(
            1000 + rank + 100 * life, m.Welcome(**self.said("P", layout, topology, rows)), self.config, rows,
            n_buffers=self.n_buffers, buffer_nbytes=self.buffer_nbytes,
            choose=self.choose or (lambda _: self.path == "direct"),
        )  # fmt: skip
        buffers = [np.zeros(self.buffer_nbytes, np.uint8) for _ in range(self.n_buffers)]
        return Prefill(b"P%d" % rank, memory, row_memory, core, buffers)

    def rank_of(self, side: str, rank: int) -> tuple[Memory, Layout, Topology]:
        """The pool of a rank of "P" or "D" and its place."""
        if side == "P":
            stages, n_ranks, page, hnd = self.src_stages, self.n_prefill, self.src_page, False
        else:
            stages, n_ranks, page, hnd = self.dst_stages, self.n_decode, self.dst_page, self.dst_hnd
        stages = stages or (self.layers,)
        tp = n_ranks // len(stages)
        at = Topology(tp_size=tp, tp_rank=rank % tp, pp_size=len(stages), pp_rank=rank // tp)
        if self.instances and side == "P":
            at = Topology()
        shape = {
            "heads": self.heads, "tp": at.tp_size, "rank": at.tp_rank, "layers": stages[at.pp_rank],
            "n_pages": self.n_pages, "page": page, "roles": self.roles,
        }  # fmt: skip
        memory = self.make_memory(pool_nbytes(**shape))
        return memory, make_layout(memory, hnd=hnd, slots=self.slots, exact=self.exact, **shape), at

    def said(self, side: str, layout: Layout, topology: Topology, rows: OwnRows) -> dict[str, object]:
        """What the greeting of a rank of "P" or "D" says."""
        return {
            "topology": topology, "layout": layout, "transport": "test", "description": b"", "columns": rows.columns,
            "features": features(self.config, tags=not self.notifies, direct=side == "D"),
            "max_silence_s": self.config.max_silence_s, "model": self.models[side == "D"],
        }  # fmt: skip

    def make_rows(self, side: str) -> tuple[Memory, OwnRows]:
        """A rank's aux rows, if this world has any: `aux` is "packed" for those that only travel in messages, "rows"
        for those that may be written in place.
        """
        columns = self.columns[side]
        if not self.aux:
            return Memory(0, base=1), NO_ROWS
        held = self.make_memory(N_ROWS * columns.row_nbytes)
        span = m.RowSpan(held.base, columns.row_nbytes, N_ROWS)
        return held, OwnRows(columns.placed, self.aux == "rows", span if self.aux == "rows" else None)

    def make_decode(self, rank: int, life: int = 0) -> Decode:
        memory, layout, topology = self.rank_of("D", rank)
        staging = self.make_memory(self.lane_nbytes * self.n_lanes)
        row_memory, rows = self.make_rows("D")
        lanes = tuple(m.LaneSpan(staging.base + n * self.lane_nbytes, self.lane_nbytes) for n in range(self.n_lanes))
        hello = m.Hello(lanes=lanes, rows=rows.span, **self.said("D", layout, topology, rows))
        core = DecodeCore(2000 + rank + 100 * life, hello, self.config, rows)
        if not self.advance:
            core.leases.max_advances = 0
        node = Decode(b"D%d" % rank, memory, row_memory, core, staging)
        self.processes.append(node)
        return node

    def must(self, holds: bool, invariant: str, what: str) -> None:
        assert holds, f"{invariant}: {what}"

    def make_memory(self, nbytes: int) -> Memory:
        """At addresses of this world's own numbering, so that two runs of one schedule send the same frames."""
        return Memory(nbytes, base=next(self.space) << 32)

    def restart(self, node: Node) -> Node:
        """The same address, another process: the old one's memory and writes in flight stay behind."""
        node.alive = False
        rank = int(node.name[1:])
        ranks, make = (
            (self.prefill, self.make_prefill) if isinstance(node, Prefill) else (self.decode, self.make_decode)
        )
        ranks[rank] = make(rank, life=next(self.lives))  # type: ignore[operator]
        ranks[rank].core.endpoint.now = self.now  # type: ignore[operator]
        return ranks[rank]

    # What an engine does.

    def announce(self, room: int, rank: int = 0, *, prefill: int | None = None) -> DecodeRoom:
        """`prefill` names the one writer; else every prefill rank is one."""
        node = self.decode[rank]
        writers = {n: p.name for n, p in enumerate(self.prefill) if prefill in {None, n}}
        handle = node.core.announce(room_key(room), deadline_s=self.deadline_s)
        node.core.found(handle, writers)
        self.carry(node)
        return handle

    def bind(
        self,
        handle: DecodeRoom,
        tokens: int,
        pages: Pages,
        rank: int = 0,
        *,
        prefix: int = 0,
        priority: int = 0,
        row: int | None = None,
    ) -> None:
        node = self.decode[rank]
        node.pages[handle] = pages
        if row is not None:
            node.row_of[handle] = row
        data = memoryview(np.array(pages, np.int32)).cast("B")
        wire_items = (m.Items("kv", 0, data),) if self.path != "staged" else ()
        asked = (m.Asked("kv", prefix, tokens),)
        node.core.bind(handle, asked, {"kv": pages}, wire_items=wire_items, priority=priority, row=row)
        self.carry(node)

    def receive(
        self, room: int, tokens: int = 8, pages: Pages | None = None, rank: int = 0, *, prefill: int | None = None,
        **how: int,
    ) -> DecodeRoom:  # fmt: skip
        handle = self.announce(room, rank, prefill=prefill)
        self.bind(handle, tokens, self.pages(room) if pages is None else pages, rank, **how)
        return handle

    def abort(self, node: Node, room: Room, why: str = "changed its mind") -> None:
        node.core.abort(room, why)  # type: ignore[arg-type]
        self.carry(node)

    def lose(self, node: Node, error: PdstageError) -> None:
        """The session with its one peer."""
        node.core.lose(node.session, error)
        self.carry(node)

    def pages(self, room: int) -> Pages:
        """Two pages of a room's own."""
        return [2 * room % self.n_pages, (2 * room + 1) % self.n_pages]

    def submit(self, room: int, rank: int = 0) -> PrefillRoom:
        node = self.prefill[rank]
        handle = node.core.submit(room_key(room))
        self.carry(node)
        return handle

    def fill(self, room: int, tokens: int, pages: Pages, rank: int = 0) -> None:
        """What the model computes: the room's truth into the rank's pool."""
        for _, stored, value in self._cells(self.prefill[rank], room, tokens, pages):
            stored[:] = value

    def _cells(
        self, node: Node, room: int, tokens: int, pages: Pages, prefix: int = 0
    ) -> Iterator[tuple[object, np.ndarray, np.ndarray]]:
        """Every cell of a room's tokens in a rank's pool: its name, its bytes, and what they must be."""
        layout = node.core.layout
        asked = [token for token in held_of(layout, tokens) if token >= prefix]
        for view in layout.views():
            for token, shard in itertools.product(asked, range(view.shards)):
                want = truth(view.key.layer, view.key.role, token, view.axis.first + shard, room)
                yield (view.key, token, shard), cell(view, node.memory, pages, place(layout, token), shard), want

    def chunk(
        self, handle: PrefillRoom, tokens: Span = (0, 8), pages: Pages | None = None, rank: int = 0, *,
        ready: bool = True, layers: Span | None = None,
    ) -> SubmittedChunk:  # fmt: skip
        """Without `pages` the room's own, filled."""
        if pages is None:
            room = int(handle.key[1:])
            pages = self.pages(room)[::-1]
            self.fill(room, tokens[1], pages, rank)
        node = self.prefill[rank]
        stages = self.src_stages or (self.layers,)
        low, high = layers or stages[node.core.handshake.welcome.topology.pp_rank]
        source = node.core.chunk(handle, (Rect("kv", *tokens, low, high),), {"kv": pages}, ready=ready)
        self.carry(node)
        return source

    def row(self, node: Node, number: int) -> np.ndarray:
        """A row's bytes."""
        nbytes = self.columns[node.name.decode()[0]].row_nbytes
        return node.rows.at(node.rows.base + number * nbytes, nbytes)

    def given_row(self, node: Prefill, number: int, fill: int) -> GivenRow:
        """Row `number` of a prefill rank, every byte `fill`."""
        held = self.row(node, number)
        held[:] = fill
        return GivenRow(node.rows.base + number * len(held), lambda: memoryview(held))

    def finish(self, handle: PrefillRoom, rank: int = 0, aux: bytes | GivenRow | None = b"aux") -> None:
        self.prefill[rank].core.finish(handle, aux)
        self.carry(self.prefill[rank])

    def send(self, room: int, tokens: int = 8, pages: Pages | None = None, rank: int = 0, step: int = 0) -> PrefillRoom:
        """A whole room from one rank, in chunks of `step` tokens."""
        pages = self.pages(room)[::-1] if pages is None else pages
        self.fill(room, tokens, pages, rank)
        handle = self.submit(room, rank)
        step = step or tokens
        for start in range(0, tokens, step):
            self.chunk(handle, (start, min(tokens, start + step)), pages, rank)
        self.finish(handle, rank)
        return handle

    def serve(self, room: int) -> tuple[DecodeRoom, PrefillRoom]:
        """A room is received and sent, and everything moves that may."""
        both = self.receive(room), self.send(room)
        self.run()
        return both

    def check(self, handle: DecodeRoom, room: int, tokens: int = 8, rank: int = 0, prefix: int = 0) -> None:
        """Success, and every byte asked for is the truth."""
        assert handle.state is State.SUCCESS, (handle.state, handle.error)
        node = self.decode[rank]
        for name, got, want in self._cells(node, room, tokens, node.pages[handle], prefix):
            assert np.array_equal(got, want), name

    # Rules about what is on its way.

    def drop(self, want: Want) -> None:
        self.rules.append((want, "drop"))

    def hold(self, want: Want) -> None:
        self.rules.append((want, "hold"))

    def free(self) -> None:
        """Forgets all rules; what was held goes on, in the order it was sent."""
        self.rules.clear()
        self.queue, self.held = self.held + self.queue, []

    def release_held(self, want: Want = lambda _: True) -> None:
        """Lets go of what was held, in the order it was sent; the rules stay for what comes."""
        ours = [item for item in self.held if want(item)]
        for item in ours:
            item.passed = True
        self.held = [item for item in self.held if not want(item)]
        self.queue = ours + self.queue

    # Running.

    def run(self, until: float | None = None) -> None:
        """Delivers everything that may move; then, up to `until`, lets time pass from timer to timer."""
        n_ticks = 0
        for _ in range(100_000):
            if self.queue:
                self._deliver(self.queue.pop(0))
                continue
            due = [at for node in self.nodes() if (at := node.core.endpoint.timers.next_at()) is not None]
            if until is None or not due or min(due) > until:
                self.now = max(self.now, until or self.now)
                return
            self.now, n_ticks = max(self.now, min(due)), n_ticks + 1
            assert n_ticks < 3_000, "a timer is due for ever"
            for node in self.nodes():
                node.core.endpoint.tick()
                self.carry(node)
        raise AssertionError("the world does not come to rest")

    def nodes(self) -> list[Node]:
        return [node for node in (*self.prefill, *self.decode) if node.alive]

    def _deliver(self, item: Item) -> None:
        for want, what in self.rules:
            if not item.passed and want(item):
                if what == "hold":
                    self.held.append(item)
                return
        self.log.append(repr(item))
        item.run()

    def greeter(self, session_id: m.SessionId) -> Decode:
        """The decode process that drew this session, dead or alive: a write finds the memory it was meant for, or
        nothing.
        """
        return next(p for p in self.processes if session_id.decode in p.nonces())

    def node(self, name: bytes) -> Node:
        return next(node for node in (*self.prefill, *self.decode) if node.name == name)

    def put(self, item: Item) -> None:
        """Something is on its way from now on."""
        self.queue.append(item)

    def carry(self, node: Node) -> None:
        """The driver: queues what a core asked for."""
        for effect in node.core.endpoint.take_effects():
            match effect:
                case Send(route, frame):
                    self._frame(node, route, frame)
                case Gather() if isinstance(node, Prefill):
                    self.put(Item("gather", node, node, lambda e=effect: self._gather(node, e)))
                case Write() | WriteDirect() | WriteRow() if isinstance(node, Prefill):
                    lands = {Write: self._write, WriteDirect: self._direct, WriteRow: self._row_lands}
                    dst = self.greeter(effect.chunk.destination.session.id)
                    self._post(node, dst, effect, lands[type(effect)])
                case Scatter() if isinstance(node, Decode):
                    self.put(Item("scatter", node, node, lambda e=effect: self._scatter(node, e)))
                case PeerWarning(_, error):
                    node.peer_warnings.append(str(error))
                case Changed(room):
                    self.changed(node, room)
                case Detach(session):
                    self.detach(node, session)
                case Attach(session):
                    self.attach(node, session)
                case Renew():  # connections here do not break at one end
                    pass
                case HangUp(route):
                    self.hang_up(node, route)
                case _:
                    raise AssertionError(effect)

    def changed(self, node: Node, room: Room) -> None:
        """Before anybody sees a Success, a row that came in a message is put in its place, as the driver does."""
        if isinstance(node, Decode) and isinstance(room, DecodeRoom) and room.state is State.SUCCESS:
            seen = any(key == room.key and status & 0x7F == State.SUCCESS for key, status in node.changes)
            number = node.row_of.get(room)
            if room.shared and room.aux is not None and number is not None and not seen:
                for column, data in room.shared.unpack(room.aux):
                    at = self.row(node, number)[column.offset : column.offset + column.nbytes]
                    at[:] = np.frombuffer(data, np.uint8)
        node.changes.append((room.key, room.status))

    def attach(self, node: Node, session: Session) -> None:
        """The transport connects to the session's peer; here it always can."""

    def hang_up(self, node: Node, route: bytes) -> None:
        """The connection goes, unless it is needed again; and with it what is on its way there and back."""
        if not node.core.needs(route):
            self.n_hung_up += 1
            self.cut_off(lambda item: item.kind == "frame" and {item.src.name, item.dst.name} == {node.name, route})

    def cut_off(self, want: Want) -> None:
        """What `want` accepts of all that is on its way never arrives."""
        self.queue = [item for item in self.queue if not want(item)]
        self.held = [item for item in self.held if not want(item)]

    def detach(self, node: Node, session: Session) -> None:
        if self.fences:
            self.put(Item("fence", node, node, lambda: self.fence(node, session)))

    def say(self, node: Node, message: m.AnyMessage, session: Session | None = None) -> list[m.AnyMessage]:
        """Says `message` to `node`, in the session with its one peer if in no other, and takes its answers before they
        travel.
        """
        session = session or node.session
        node.core.endpoint.receive(session.route, wire.encode(session.id, session.last_seq + 1, message))
        effects = node.core.endpoint.take_effects()
        node.peer_warnings += [str(effect.error) for effect in effects if isinstance(effect, PeerWarning)]
        return [wire.decode(effect.frame).message for effect in effects if isinstance(effect, Send)]

    def _frame(self, node: Node, route: bytes, frame: bytes) -> None:
        message = wire.decode(frame).message
        self.put(Item("frame", node, self.node(route), lambda: self.hear(node, route, frame, message), message))

    def hear(self, src: Node, route: bytes, frame: bytes, message: m.AnyMessage) -> None:
        """A frame arrives at whoever lives at `route` by now."""
        target = self.node(route)
        if target.alive:
            target.core.endpoint.receive(src.name, frame)
            self.carry(target)

    def fence(self, node: Node, session: Session) -> None:
        """The transport's disconnect: writes of the session that have not landed never will."""
        if not node.alive:
            return
        self.fenced.add(session.id)
        ours = [
            item
            for item in self.queue + self.held
            if item.kind == "write" and node in {item.src, item.dst} and wire.tag_session(item.tag) == session.id
        ]
        self.cut_off(lambda item: item in ours)
        for item in ours:
            assert item.fail is not None
            item.fail()
        node.core.fenced(session)
        self.carry(node)

    def _post(
        self, node: Prefill, dst: Decode, effect: Write | WriteDirect | WriteRow, land: Callable[..., None]
    ) -> None:
        def failed() -> None:
            if node.alive:
                node.core.chunks.completed(effect.ticket, TransportError("disconnected"))
                self.carry(node)

        def run() -> None:
            if not dst.alive or wire.tag_session(effect.tag) in self.fenced:
                failed()
                return
            room = effect.chunk.destination.room
            assert room is not None
            self.must(not (node.alive and room.released), "I8", "a write that reads released source memory")
            land(node, dst, effect)

        def fail() -> None:
            self.put(Item("done", node, node, failed, tag=effect.tag))

        self.put(Item("write", node, dst, run, tag=effect.tag, fail=fail))

    def _gather(self, node: Prefill, effect: Gather) -> None:
        if not node.alive:
            return
        chunk = effect.chunk
        room = chunk.destination.room
        self.must(room is not None and not room.released, "I8", "a gather from released source memory")
        lost = chunk.destination.session.id not in node.core.sessions
        self.must(lost or node.core.chunks.is_open(chunk), "I11", "a buffer held for a closed window")
        buffer, to = node.buffers[effect.buffer], chunk.destination
        buffer[:] = 0xEE
        pages: Pages = chunk.source.items["kv"]  # type: ignore[assignment]
        for offset, src in staged(node.core.layout, to.session.layout, node.memory, to.shares, pages, chunk.rects):
            buffer[offset : offset + WIDTH] = src
        if self.placed:
            self._place(self.greeter(chunk.destination.session.id), effect, buffer[: chunk.nbytes])
        node.core.chunks.gathered(effect.ticket, checksum=_checksum(chunk.destination.session, buffer[: chunk.nbytes]))
        self.carry(node)

    def _write(self, node: Prefill, dst: Decode, effect: Write) -> None:
        if not self.placed:
            self._land_staged(dst, effect, node.buffers[effect.buffer][: effect.chunk.nbytes])
        self._landed(node, dst, effect.ticket, effect.tag)

    def _place(self, dst: Decode, effect: Gather, data: np.ndarray) -> None:
        """A gather into the destination's memory is a write, whatever became of the room or session meanwhile."""
        if dst.alive:
            self._land_staged(dst, effect, data)

    def _land_staged(self, dst: Decode, effect: Gather | Write, data: np.ndarray) -> None:
        chunk = effect.chunk
        self.check_lease(dst, chunk)
        where = (dst.staging.base, chunk.destination.session.id, chunk.lane, chunk.cursor)
        self.must(where not in self.written, "I15", "a lease written twice")
        self.written.add(where)
        dst.staging.at(effect.address, len(data))[:] = data

    def _direct(self, node: Prefill, dst: Decode, effect: WriteDirect) -> None:
        chunk = effect.chunk
        self.check_pages(dst, chunk)
        for copy in direct_cells(node, dst, chunk):
            copy.dst[:] = copy.src
        self._landed(node, dst, effect.ticket, effect.tag)

    def _row_lands(self, node: Prefill, dst: Decode, effect: WriteRow) -> None:
        self.check_pages(dst, effect.chunk)
        for src, at, nbytes in effect.spans:
            dst.rows.at(at, nbytes)[:] = node.rows.at(src, nbytes)
        self._landed(node, dst, effect.ticket, effect.tag)

    def check_lease(self, dst: Decode, chunk: Chunk) -> None:
        """A byte of `chunk` lands in staging memory: is it still the chunk's?"""
        lease = dst.core.leases.at(chunk.lane, chunk.cursor)
        mine = lease is not None and lease.session.id == chunk.destination.session.id
        held = mine and lease is not None and lease.phase in ("granted", "quarantined")
        self.must(held, "I2", "a write into released staging memory")

    def check_pages(self, dst: Decode, chunk: Chunk) -> None:
        """A byte of `chunk` lands in pages or in a row: is the room's part of its writer still open?"""
        room = dst.core.by_epoch.get(chunk.destination.epoch)
        writer = room.writers.get(chunk.destination.session.id) if room is not None else None
        self.must(writer is not None and writer.phase is not WriterPhase.QUIET, "I2", "a write into released pages")

    def _landed(self, node: Prefill, dst: Decode, ticket: int, tag: bytes) -> None:
        def done() -> None:
            if node.alive:
                node.core.chunks.completed(ticket)
                self.carry(node)

        def told() -> None:
            if dst.alive:
                dst.core.tag(tag)
                self.carry(dst)

        if self.notifies:
            self.put(Item("tag", node, dst, told, tag=tag))
        self.put(Item("done", node, node, done, tag=tag))

    def _scatter(self, node: Decode, effect: Scatter) -> None:
        if not node.alive:
            return
        node.core.scattered(effect.ticket, checksum=self.copy_in(node, effect))
        self.carry(node)

    def copy_in(self, node: Decode, chunk: Scatter) -> int:
        """The scatter itself: from staging memory into the room's pages. Returns the checksum of what it found."""
        writer = chunk.writer
        self.must(not writer.room.released, "I2", "a scatter into released pages")
        src = node.staging.at(chunk.address, chunk.nbytes)
        layouts, pages = (node.core.layout, writer.session.layout), node.pages[writer.room]
        for offset, dst in staged(*layouts, node.memory, writer.shares, pages, chunk.lease.rects):
            dst[:] = src[offset : offset + WIDTH]
        return _checksum(writer.session, src)


def _checksum(session: Session, staged_bytes: np.ndarray) -> int:
    """Any function of a chunk's bytes does for the cores."""
    return zlib.crc32(staged_bytes) if session.checksums else 0


def is_message(*kinds: type) -> Want:
    """Frames that carry one of these messages."""
    return lambda item: item.kind == "frame" and isinstance(item.message, kinds)


def nth(n: int, want: Want) -> Want:
    """The item number `n`, from 0, that `want` accepts."""
    seen = itertools.count()
    return lambda item: want(item) and next(seen) == n


def is_kind(*kinds: str) -> Want:
    return lambda item: item.kind in kinds


def snapshot(core: PrefillCore | DecodeCore) -> list[object]:
    """Everything of rooms, leases and chunks that may differ between two states of a core."""
    if isinstance(core, DecodeCore):
        rooms = [
            (room.epoch, room.status, room.pending, [(key, writer.phase) for key, writer in room.writers.items()])
            for room in core.by_epoch.values()
        ]
        leases = [(lease, lease.attempt, lease.phase) for lease in core.leases.live()]
        waiting = [(request, request.attempt) for request in core.leases.waiting]
        return [rooms, leases, waiting, [(lane.head, lane.watermark) for lane in core.leases.lanes]]
    destinations = [
        (
            one.epoch,
            one.phase,
            [(chunk.number, chunk.phase, chunk.attempt, *chunk.where) for chunk in one.chunks.values()],
        )
        for one in core.destinations
    ]
    handles = [(key, room.status, room.in_flight) for key, room in core.by_key.items()]
    return [handles, destinations, [dict(one.marks) for one in core.sessions.values()], list(core.chunks.free)]


def assert_failed(room: Room, words: str, kind: type[Exception] = Exception) -> None:
    """With these words in its error, which is of this kind."""
    assert room.state is State.FAILED
    assert isinstance(room.error, kind)
    assert words in str(room.error)


def assert_flat(world: World) -> None:
    """Nothing is left of any room: no lease, request, claim or timer beyond the live sessions' own (I13, I14)."""
    for node in world.nodes():
        core = node.core
        end = core.endpoint
        own = {(call, session) for call in (end._beat, end._listen) for session in core.sessions.values()}
        left = {key for key in end.timers._at if key not in own and key[0].__name__ != "recall_all"}
        assert not left, (node.name, left)
        if isinstance(core, DecodeCore):
            assert core.idle and not core.by_key, (node.name, core.by_epoch)
            assert not core.leases.live() and not core.leases.waiting, (node.name, snapshot(core))
            assert all(lane.head == lane.watermark and not lane.quarantined_nbytes for lane in core.leases.lanes)
            assert all(peer.session is not None and not peer.rooms for peer in core.handshake.peers.values())
        else:
            rooms, chunks = core, core.chunks
            assert core.idle and not rooms.by_key and not rooms.destinations, (node.name, rooms.by_key)
            assert sorted(chunks.free) == list(range(world.n_buffers))
            assert not rooms.pending and not chunks.flights and not chunks.orphans
            assert not chunks.staged and not chunks.direct
