"""Thousands of real cores in one process: a virtual clock, a network that only delivers, engines that only count.

Beside the seeded simulator this one is blind to bytes and to orders: no payload exists, every hop takes its constant
time, and nothing is lost unless `loss` asks for it. So a room costs little more here than the cores themselves do.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Topology, shard_axis
from pdstage.manager.effects import Effect
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol.config import Config
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.session import Changed, Detach, PeerWarning, Send
from pdstage.protocol.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.protocol.destinations import PrefillRoom

HEADS, LAYERS, PAGE, WIDTH, N_PAGES = 4, 2, 64, 128, 4096
NEVER = float("inf")
# Where a frame says what it is: after the header of 28 bytes and msgpack's head of an array comes the struct's tag.
_KIND_AT = 29
KINDS = {
    cls.__struct_config__.tag: cls.__name__
    for cls in m.Message.__subclasses__()
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long things take in virtual seconds. A rank's copies run one after the other, as on one stream."""

    hop_s: float = 50e-6
    gather_s: float = 100e-6
    write_s: float = 400e-6
    scatter_s: float = 100e-6
    copy_s: float = 0.0
    """More for each byte that is gathered or scattered."""


class Memory(NamedTuple):
    """`n_objects` that hold others, but tuples, which Python tracks as it likes; `n_blocks` of Python's allocator."""

    n_objects: int
    n_blocks: int
    n_garbage: int
    """What only the collector could free, since the last look."""

    def __sub__(self, before: Memory) -> Memory:
        return Memory(self.n_objects - before.n_objects, self.n_blocks - before.n_blocks, self.n_garbage)


@cache
def layout_of(tp: int, rank: int, width: int = WIDTH) -> Layout:
    """The pool of one rank. Ranks of one place share it: nobody looks at the addresses."""
    axis = shard_axis("kv_head", HEADS, tp, rank)
    row = axis.count * width
    views, offset = [], 0
    for layer in range(LAYERS):
        for role in ("k", "v"):
            view = View(
                key=Key("kv", role, layer), region=0, offset=offset, n_items=N_PAGES, item_stride=PAGE * row,
                tokens_per_item=PAGE, rows=(RowLevel(1, row),), shards=axis.count, shard_stride=width, width=width,
                axis=axis, format="u8",
            )  # fmt: skip
            views.append(view)
            offset += N_PAGES * PAGE * row
    return Layout.of((Region(1 << 40, offset),), views)


@dataclass(slots=True, eq=False)
class Node:
    """One process: a rank's core, and what its engine waits for."""

    route: bytes
    place: tuple[int, int]
    """(TP size, rank) in its instance."""
    core: Any
    """A `PrefillCore` or a `DecodeCore`."""
    alive: bool = True
    wake_at: float = NEVER
    jobs: dict[object, Job] = field(default_factory=dict)
    n_warnings: int = 0
    copies_until: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """One request: what a router decided, and how it went."""

    key: bytes
    prefill: tuple[Node, ...]
    decode: tuple[Node, ...]
    tokens: int
    step: int
    """Tokens an engine computes at a time."""
    compute_s: float
    """How long it computes each step."""
    priority: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0
    left: int = 0
    """Rooms of it, on all ranks, not released yet."""
    n_failed: int = 0


class Fleet:
    """Prefill and decode ranks by name, everything under way, and the clock."""

    def __init__(
        self,
        *,
        seed: int = 0,
        loss: float = 0.0,
        lane_nbytes: int = 1 << 20,
        n_lanes: int = 2,
        n_buffers: int = 4,
        buffer_nbytes: int | None = None,
        width: int = WIDTH,
        times: Times | None = None,
        **config: float,
    ) -> None:
        """`width` is a cell's bytes. Send buffers are as long as lanes unless `buffer_nbytes` says otherwise."""
        self.now = 0.0
        self.config = Config(**config)  # type: ignore[arg-type]
        self.times = times or Times()
        self.random = random.Random(seed)
        self.loss = loss
        self.nodes: dict[bytes, Node] = {}
        self.sent: Counter[str] = Counter()
        self.sent_nbytes: Counter[str] = Counter()
        self.n_lost = self.n_ticks = self.n_writes = 0
        self.on_end: Callable[[Job], None] = lambda job: None
        """What a router hears: every rank has given the request's memory back."""
        self.on_landed: Callable[[Node, Node, int], None] = lambda src, dst, nbytes: None
        self.write: Callable[[Node, Node, int, Callable[[], None]], None] = self._write
        """The network: carries that many bytes from one node to another, and then calls."""
        self._lane_nbytes, self._n_lanes, self._n_buffers = lane_nbytes, n_lanes, n_buffers
        self._buffer_nbytes, self._width = buffer_nbytes or lane_nbytes, width
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n_events = 0
        self._n_lives = 0

    # Ranks.

    def add(self, role: str, name: bytes, tp: int = 1, rank: int = 0, **config: float) -> Node:
        """A new process of `role` "prefill" or "decode" at `name`; one that was there is dead from now on."""
        self._n_lives += 1
        life = self.random.getrandbits(63)
        topology = Topology(tp, rank)
        settings = self.config if not config else Config(**config)  # type: ignore[arg-type]
        core: PrefillCore | DecodeCore
        if role == "prefill":
            core = PrefillCore(
                life, layout=layout_of(tp, rank, self._width), topology=topology, transport="test", description=name,
                n_buffers=self._n_buffers, buffer_nbytes=self._buffer_nbytes, config=settings, choose=lambda _: False,
            )  # fmt: skip
        else:
            span = self._lane_nbytes
            lanes = tuple(m.LaneSpan((1 << 50) + n * span, span) for n in range(self._n_lanes))
            core = DecodeCore(
                life, layout=layout_of(tp, rank, self._width), topology=topology, transport="test", description=name,
                lanes=lanes, config=settings, direct=False,
            )  # fmt: skip
        node = self.nodes[name] = Node(name, (tp, rank), core)
        return node

    def restart(self, node: Node) -> Node:
        """The same address, another process; what its engine held is gone with it."""
        node.alive = False
        for job in list(node.jobs.values()):
            self._gone(job, failed=True)
        node.jobs.clear()
        role = "prefill" if isinstance(node.core, PrefillCore) else "decode"
        return self.add(role, node.route, *node.place)

    # What a router and the engines do.

    def route(self, job: Job) -> None:
        """Sends a request to its ranks: decode announces and binds at once, prefill computes step by step."""
        job.began_at = self.now
        job.left = len(job.prefill) + len(job.decode)
        for node in job.decode:
            self.at(self.now + self.times.hop_s, self._receive, job, node)
        for node in job.prefill:  # half of them hear of it before the decode ranks do
            self.at(self.now + self.times.hop_s * self.random.choice((0.5, 4)), self._begin, job, node)

    def _receive(self, job: Job, node: Node) -> None:
        if not node.alive:
            self._gone(job, failed=True)
            return
        writers = {number: peer.route for number, peer in enumerate(job.prefill)}
        room = node.core.announce(job.key, writers, self.now, deadline_s=60.0)
        node.jobs[room] = job
        node.core.bind(room, (m.Asked("kv", 0, job.tokens),), {}, self.now, priority=job.priority)
        self.deliver(node)

    def _begin(self, job: Job, node: Node) -> None:
        if not node.alive:
            self._gone(job, failed=True)
            return
        room = node.core.submit(job.key, self.now)
        node.jobs[room] = job
        self.deliver(node)
        self.at(self.now + job.compute_s, self._computed, job, node, room, 0)

    def _computed(self, job: Job, node: Node, room: PrefillRoom, start: int) -> None:
        if not node.alive or room.ended:
            return
        stop = min(job.tokens, start + job.step)
        node.core.chunk(room, (Rect("kv", start, stop, 0, LAYERS),), {}, self.now)
        if stop == job.tokens:
            node.core.finish(room, b"first token", self.now)
        else:
            self.at(self.now + job.compute_s, self._computed, job, node, room, stop)
        self.deliver(node)

    def _gone(self, job: Job, *, failed: bool) -> None:
        """One rank of a request gave its memory back, or died."""
        job.left -= 1
        job.n_failed += failed
        if job.left == 0:
            job.ended_at = self.now
            self.on_end(job)

    # Running.

    def at(self, at: float, call: Callable[..., None], *args: object) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (at, self._n_events, call, args))

    def run(self, until: float) -> None:
        """Everything that happens up to `until`, in order."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, args = heapq.heappop(events)
            call(*args)
        self.now = max(self.now, until)

    def run_while(self, wanted: Callable[[], bool], limit_s: float, step_s: float = 0.05) -> None:
        """Runs as long as `wanted`, looking every `step_s`; fails if that takes over `limit_s` of virtual time."""
        stop_at = self.now + limit_s
        while wanted():
            assert self.now < stop_at, f"still not there after {limit_s} virtual seconds"
            self.run(self.now + step_s)

    def memory(self) -> Memory:
        """What this process holds, less what timers and alarms forget lazily (within a constant factor, I14)."""
        self._events = [e for e in self._events if e[2] != self._tick or (e[3][0].alive and e[3][0].wake_at == e[3][1])]
        heapq.heapify(self._events)
        for node in self.nodes.values():
            node.core.endpoint.timers.delay(0.0)
        n_garbage = gc.collect()
        n_objects = sum(type(held) is not tuple for held in gc.get_objects())
        return Memory(n_objects, sys.getallocatedblocks(), n_garbage)

    def _tick(self, node: Node, at: float) -> None:
        if not node.alive or node.wake_at != at:
            return
        node.wake_at = NEVER
        due = node.core.next_at()
        if due is not None and due <= self.now:
            self.n_ticks += 1
            node.core.tick(self.now)
        self.deliver(node)

    def deliver(self, node: Node) -> None:
        """The driver: does what a core asked for, and sets its alarm."""
        for effect in node.core.take_effects():
            if type(effect) is Send:
                self._send(node, effect.route, effect.frame)
            else:
                self._do(node, effect)
        at = node.core.next_at()
        if at is not None and at < node.wake_at:
            node.wake_at = at
            self.at(at, self._tick, node, at)

    def _send(self, node: Node, route: bytes, frame: bytes) -> None:
        kind = KINDS[frame[_KIND_AT]]
        self.sent[kind] += 1
        self.sent_nbytes[kind] += len(frame)
        if self.loss and self.random.random() < self.loss:
            self.n_lost += 1
            return
        self.at(self.now + self.times.hop_s, self._frame, node.route, route, frame)

    def _frame(self, src: bytes, route: bytes, frame: bytes) -> None:
        node = self.nodes[route]
        if not node.alive:
            return
        node.core.receive(src, frame, self.now)
        self.deliver(node)

    def _do(self, node: Node, effect: Effect) -> None:
        now, times = self.now, self.times
        match effect:
            case Gather(ticket, _, chunk):
                self._copy(node, times.gather_s, chunk.nbytes, node.core.gathered, ticket)
            case Write(ticket, _, chunk, _, tag) | WriteDirect(ticket, chunk, tag) | WriteRow(ticket, chunk, _, tag):
                self.n_writes += 1
                route = chunk.destination.session.route
                landed = partial(self._landed, node, route, ticket, tag, chunk.nbytes)
                self.write(node, self.nodes[route], chunk.nbytes, landed)
            case Scatter(ticket, landing):
                self._copy(node, times.scatter_s, landing.nbytes, node.core.scattered, ticket)
            case Changed(room):
                if room.released:
                    job = node.jobs.pop(room, None)
                    if job is not None:
                        self._gone(job, failed=room.state is State.FAILED)
            case Detach(session):
                self.at(now + times.hop_s, self._tell, node, node.core.fenced, session)
            case PeerWarning():
                node.n_warnings += 1
            case _:
                pass

    def _copy(self, node: Node, least_s: float, nbytes: int, what: Callable[..., None], ticket: int) -> None:
        began_at = max(self.now, node.copies_until if self.times.copy_s else 0.0)
        node.copies_until = began_at + least_s + nbytes * self.times.copy_s
        self.at(node.copies_until, self._tell, node, what, ticket)

    def _write(self, src: Node, dst: Node, nbytes: int, done: Callable[[], None]) -> None:
        """Takes its constant time, whatever else is under way."""
        del src, dst, nbytes
        self.at(self.now + self.times.write_s, done)

    def _tell(self, node: Node, what: Callable[..., None], about: object) -> None:
        if node.alive:
            what(about, self.now)
            self.deliver(node)

    def _landed(self, node: Node, route: bytes, ticket: int, tag: bytes, nbytes: int) -> None:
        dst = self.nodes[route]  # a successor takes the tag for stale
        self.on_landed(node, dst, nbytes)
        dst.core.tag(tag, self.now)
        self.deliver(dst)
        if node.alive:
            node.core.completed(ticket, self.now)
            self.deliver(node)
