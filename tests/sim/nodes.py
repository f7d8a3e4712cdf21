"""The processes of an exploration: states of one core by number, and what one input makes of one of them.

For `explore`. Each state of a core is thawed, given one input, checked and named by its digest; the outcome is
remembered by (state, input), because the same input meets the same state of a core in very many states of the whole.
Here is what no input may do to a process (I1, I4, I6, I7); what must hold in each of its states is in `facts`.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import NamedTuple

import numpy as np

from pdstage.errors import TransportError
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.destinations import GivenRow
from pdstage.protocol.handshake import _GOLDEN
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.room import room_key
from pdstage.protocol.session import Attach, Changed, Detach, PeerWarning, Send
from pdstage.protocol.state import State
from tests.pair import World
from tests.sim.facts import N_BUFFERS, Facts, Name, Shape, Violation, decode_facts, must, prefill_facts
from tests.sim.frozen import Armed, Core, Node, canonical, digest, flight_name, freeze, key_name, thaw

Input = tuple[object, ...]


IN_PLACE = (m.DIRECT, m.AUX)
_ENDED = frozenset({State.SUCCESS, State.FAILED, State.SUCCESS | 0x80, State.FAILED | 0x80})


class Post(NamedTuple):
    """A write that began: whose, into what, and the tag that tells of it."""

    node: int
    flight: Name
    session: m.SessionId
    room: tuple[int, int]
    tag: int
    where: tuple[int, int]
    """(lane, cursor), (DIRECT, epoch) or (AUX, epoch)."""


class Did(NamedTuple):
    """What an input made of a node."""

    after: int
    sends: tuple[tuple[int, int], ...]
    """(to which node, which frame)"""
    posts: tuple[Post, ...]
    lost: tuple[m.SessionId, ...]
    """Sessions to be fenced."""
    met: tuple[m.SessionId, ...]
    """Sessions to be reachable for writes."""


class Nodes:
    """Every state met of every process. Node 0 is the decode rank, 1 and up are the writers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        heads = 1 if shape.instances else shape.writers
        self.world = World(
            prefill=shape.writers, heads=heads, layers=1, lane_nbytes=shape.lane_nbytes, n_lanes=shape.n_lanes,
            n_buffers=N_BUFFERS, path=shape.path, instances=shape.instances, notifies=shape.notifies,
            aux="rows" if shape.rows else "", advance=shape.advance,
        )  # fmt: skip
        self.names = [b"D0", *(b"P%d" % n for n in range(shape.writers))]
        self.templates: dict[tuple[int, int], Core] = {}
        self.frames: list[bytes] = []
        self.tags: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self.facts: list[Facts] = []
        self.frozen: list[bytes] = []
        self.home: list[tuple[int, int]] = []
        """Which process each state is of: (node, life)."""
        self.ids: dict[bytes, int] = {}
        self.memo: dict[tuple[int, Input], Did] = {}

    def born(self, node: int, life: int = 0) -> int:
        """The first state of a process."""
        return self.name(node, life, Node(self.template(node, life)))

    def template(self, node: int, life: int) -> Core:
        core = self.templates.get((node, life))
        if core is None:
            made = self.world.make_decode(0, life) if node == 0 else self.world.make_prefill(node - 1, life)
            core = self.templates[node, life] = made.core
            core.endpoint.timers = Armed()
        return core

    @staticmethod
    def nonces(incarnation: int) -> set[int]:
        """Decode's half of the sessions that one life of it may greet with."""
        return {(incarnation + n * _GOLDEN) % (1 << 64) for n in range(1, 16)}

    def thawed(self, state: int) -> Node:
        return thaw(zlib.decompress(self.frozen[state]))

    def step(self, state: int, given: Input) -> Did:
        did = self.memo.get((state, given))
        if did is None:
            node = self.thawed(state)
            did = self.memo[state, given] = self.apply(state, node, given)
        return did

    def apply(self, state: int, node: Node, given: Input) -> Did:
        """Gives a live node one input, checks what it did and brings it into canonical form."""
        before = self.facts[state]
        at, life = self.home[state]
        try:
            self._give(node, given)
        except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise Violation(f"{self.names[at].decode()} raised {error!r}") from error
        done = self._effects(at, node)
        for handle, status in before.rooms:
            room = node.handles[handle]
            ended = status in _ENDED
            must(not ended or room.state == status & 0x7F, f"I1: {handle} left its end for {room.state.name}")
            must(status < 0x80 or room.released, f"I1: {handle} is no longer released")
            must((room.error is not None) == (room.state is State.FAILED), f"I1: {handle} has error {room.error}")
        after = self.name(at, life, node)
        self._unchanged(state, after, given)
        marks = dict(before.marks)
        for key, mark in self.facts[after].marks:
            must(mark >= marks.get(key, mark), f"I4: watermark {key} fell from {marks.get(key)} to {mark}")
        return Did(after, *done)

    def _give(self, node: Node, given: Input) -> None:
        core = node.core
        match given:
            case ("hear", int() as src, int() as frame):
                core.endpoint.receive(self.names[src], self.frames[frame], 0.0)
            case ("gathered", flight):
                core.chunks.gathered(self._ticket(node, flight), 0.0)
            case ("written", flight, ok):
                core.chunks.completed(
                    self._ticket(node, flight), 0.0, None if ok else TransportError("unknown outcome")
                )
            case ("told", int() as tag):
                core.tag(self.tags[tag], 0.0)
            case ("scattered", flight):
                core.scattered(self._ticket(node, flight), 0.0)
            case ("fenced", session_id):
                names = {ticket: flight_name(core, ticket) for ticket in core.chunks.flights}
                core.fenced(node.fencing.pop(session_id), 0.0)  # type: ignore[arg-type]
                node.orphans |= {name: t for t, name in names.items() if t in getattr(core.chunks, "orphans", ())}
            case ("timer", name, float() as at):
                core.endpoint.timers.chosen = next(
                    key for key in core.endpoint.timers.keys if key_name(core, key) == name
                )
                core.endpoint.tick(at)
            case ("abort", handle):
                core.abort(node.handles[handle], "the test says so", 0.0)
            case ("greet", int() as writer):
                core.handshake.peer(self.names[writer], 0.0)
            case ("receive", int() as room):
                self._receive(node, room)
            case ("send", int() as room):
                self._send(node, room)
            case ("ready", handle, int() as n):
                room = node.handles[handle]
                core.data_ready(room, room.sources[n], 0.0)
            case _:
                raise NotImplementedError(given)

    def _receive(self, node: Node, room: int) -> None:
        shape, core = self.shape, node.core
        writers = {n: b"P%d" % n for n in shape.writers_of(room)}
        handle = core.announce(room_key(room), writers, 0.0, deadline_s=1000.0)
        n_tokens = shape.tokens * shape.chunks
        pages = list(range(-(-n_tokens // 4)))
        items = (m.Items("kv", 0, memoryview(np.array(pages, np.int32).tobytes())),) if shape.path != "staged" else ()
        node.handles[room, sum(known == room for known, _ in node.handles)] = handle
        core.bind(
            handle, (m.Asked("kv", 0, n_tokens),), {"kv": pages}, 0.0, wire_items=items, row=0 if shape.rows else None
        )

    def _send(self, node: Node, room: int) -> None:
        shape, core = self.shape, node.core
        handle = core.submit(room_key(room), 0.0)
        node.handles[room, sum(known == room for known, _ in node.handles)] = handle
        for n in range(shape.chunks):
            rects = (Rect("kv", n * shape.tokens, (n + 1) * shape.tokens, 0, 1),)
            core.chunk(handle, rects, {"kv": []}, 0.0, ready=n < shape.chunks - shape.late)
        core.finish(handle, GivenRow(1 << 20, partial(memoryview, bytes(64))) if shape.rows else b"aux", 0.0)

    @staticmethod
    def _ticket(node: Node, flight: Name) -> int:
        if flight in node.orphans:
            return node.orphans[flight]
        return next(ticket for ticket in node.core.chunks.flights if flight_name(node.core, ticket) == flight)

    def _effects(self, at: int, node: Node) -> tuple[tuple, tuple, tuple, tuple]:
        sends, posts, lost, met = [], [], [], []
        for effect in node.core.endpoint.take_effects():
            match effect:
                case Send(route, frame):
                    sends.append((self.names.index(route), self.frame(frame)))
                case Write() | WriteDirect() | WriteRow():
                    posts.append(self._post(at, node, effect))
                case Detach(session):
                    node.fencing[session.id] = session
                    lost.append(session.id)
                case Attach(session):
                    met.append(session.id)
                case Gather() | Scatter() | Changed() | PeerWarning() | _:
                    pass
        return tuple(sends), tuple(posts), tuple(lost), tuple(met)

    def _post(self, at: int, node: Node, effect: Write | WriteDirect | WriteRow) -> Post:
        chunk = effect.chunk
        session_id = chunk.destination.session.id
        room = next((name for name, room in node.handles.items() if room is chunk.destination.room), None)
        assert room is not None
        flight = flight_name(node.core, effect.ticket)
        where = (chunk.where[0], chunk.destination.epoch) if chunk.direct else chunk.where
        return Post(at, flight, session_id, room, self.tag(effect.tag), where)

    def frame(self, data: bytes) -> int:
        """The number of a frame, its seq made 1 (0 where it has none) and its words left out."""
        frame = wire.decode(data)
        message = frame.message
        if getattr(message, "reason", ""):
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
            message = type(message)(**(fields | {"reason": "-"}))
        return self._number(wire.encode(frame.session, min(frame.seq, 1), message), self.frames)

    def said(self, frame: int) -> wire.Tag | None:
        """The tag that a frame says, if it says one."""
        message = wire.decode(self.frames[frame]).message
        return wire.decode_tag(message.tag, ("kv",)) if isinstance(message, m.Tagged) else None

    def tag(self, data: bytes) -> int:
        return self._number(data, self.tags)

    def _number(self, data: bytes, table: list[bytes]) -> int:
        number = self._numbers.setdefault(data, len(table))
        if number == len(table):
            table.append(data)
        return number

    def name(self, at: int, life: int, node: Node) -> int:
        """The number of a node's state; a new one is checked and kept."""
        canonical(node)
        key = digest(node)
        number = self.ids.get(key)
        if number is None:
            facts = decode_facts(node) if at == 0 else prefill_facts(node)
            number = self.ids[key] = len(self.frozen)
            self.frozen.append(zlib.compress(freeze(node), 1))
            self.home.append((at, life))
            self.facts.append(facts)
        return number

    def _unchanged(self, before: int, after: int, given: Input) -> None:
        """I6, I7: what is stale or was had already changes nothing."""
        facts = self.facts[before]
        if given[0] == "told":
            tag = wire.decode_tag(self.tags[given[1]], ("kv",))  # type: ignore[index]
            held = facts.leases.get((tag.lane, tag.cursor)) if tag.lane not in IN_PLACE else None
            ended = dict(facts.rooms).get(facts.epochs.get(tag.epoch, (0, 0)), State.FAILED) in _ENDED
            stale = tag.session not in facts.sessions or ended
            had = tag.lane not in IN_PLACE and held != (tag.session, "granted")
            must(not (stale or had) or before == after, f"I6, I7: a tag that is stale or had already counts: {tag}")
        elif given[0] == "hear":
            frame = wire.decode(self.frames[given[2]])  # type: ignore[index]
            if frame.session in facts.sessions or isinstance(frame.message, m.Hello | m.Welcome | m.HelloRefused):
                return
            same = before == after
            if isinstance(frame.message, m.NoSession | m.Bye):  # may prove a lost session quiet, but only of itself
                other = getattr(frame.message, "incarnation", None) not in (None, frame.session.writer)
                same = not other or facts.leases == self.facts[after].leases
            elif self.home[before][0] != 0:  # prefill notes that it has denied this session, and nothing else
                same = facts._replace(flat="") == self.facts[after]._replace(flat="")
            must(same, f"I6: a frame of no live session counts: {frame.message}")
