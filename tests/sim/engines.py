"""The engines of all ranks: they announce, bind, submit, compute and abort rooms, each from its own few pages.

Must not know what the network does. A step that cannot be taken now (no page is free, the room is still there) waits.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

from pdstage.plan import Rect
from pdstage.protocol.destinations import GivenRow
from pdstage.protocol.room import room_key
from tests.pair import PAGE, Node
from tests.sim.scenario import Job
from tests.sim.seeds import Violation
from tests.sim.side import truth

if TYPE_CHECKING:
    import numpy as np

    from pdstage.layout import Key
    from pdstage.protocol.decode_rooms import DecodeRoom
    from pdstage.protocol.destinations import PrefillRoom, SubmittedChunk
    from pdstage.protocol.room import Room
    from tests.sim.side import Side
    from tests.sim.world import SimWorld


@cache
def aux_row(number: int, nbytes: int) -> bytes:
    """What prefill's aux row of a room holds."""
    return hashlib.shake_128(b"aux/%d" % number).digest(nbytes)


@dataclass(eq=False, slots=True)
class Part:
    """One rank's share of a job: how far its engine is. It ends with the process that began it."""

    job: Job
    rank: str
    steps: tuple[tuple[str, object], ...]
    at: int = 0
    node: Node | None = None
    room: Room | None = None
    pages: list[int] = field(default_factory=list)
    sources: list[SubmittedChunk] = field(default_factory=list)


class Engines:
    """Every job of a world."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.jobs: dict[int, Job] = {}
        self.parts: dict[tuple[int, str], Part] = {}
        self.todo: dict[tuple[int, str], Part] = {}
        self.of: dict[Room, Part] = {}

    def start(self, uid: int) -> bool:
        if uid in self.jobs:
            return False
        job = self.jobs[uid] = Job(self.world.scenario, uid)
        for rank, script in job.scripts.items():
            part = Part(job, rank, script)
            self.parts[uid, rank] = self.todo[uid, rank] = part
        return True

    def pending(self) -> list[tuple[int, str]]:
        """Steps that some engine can take now."""
        return [at for at, part in list(self.todo.items()) if self._can(part)]

    def _can(self, part: Part) -> bool:
        node = self.world.node(part.rank.encode())
        verb = part.steps[part.at][0]
        if part.node is not None and (part.node is not node or (part.room is not None and part.room.ended)):
            del self.todo[part.job.uid, part.rank]  # the process is gone, or the room is over
            return False
        side = self.world.sides[node]
        if side.stalled_at is not None or side.closing_at is not None:
            return False
        match verb:
            case "receive":
                return b"i%d" % part.job.number not in node.core.by_key
            case "submit":
                return b"i%d" % part.job.number not in node.core.by_key and len(side.free) >= self._n_pages(part)
            case "bind":
                return len(side.free) >= self._n_pages(part)
        return True

    def _n_pages(self, part: Part) -> int:
        job = part.job
        n, size = (job.tokens, PAGE) if part.rank.startswith("P") else (job.n_asked, self.world.dst_page)
        return -(-n // size)

    def step(self, uid: int, rank: str) -> bool:
        part = self.todo.get((uid, rank))
        if part is None or not self._can(part):
            return False
        verb, argument = part.steps[part.at]
        part.at += 1
        if part.at == len(part.steps):
            del self.todo[uid, rank]
        getattr(self, f"_{verb}")(part, int(rank[1:]), argument)
        return True

    def abort(self, uid: int, rank: str) -> bool:
        part = self.parts.get((uid, rank))
        if part is None or part.node is None or not part.node.alive or part.room is None or part.room.ended:
            return False
        if self.world.sides[part.node].stalled_at is not None:
            return False
        part.node.core.abort(part.room, "the engine says so")  # type: ignore[arg-type]
        self.world.carry(part.node)
        return True

    def _began(self, part: Part, room: Room, within_s: float) -> None:
        part.room = room
        self.of[room] = part
        self.world.sides[part.node].live[room] = self.world.now + within_s  # type: ignore[index]

    def _receive(self, part: Part, rank: int, _: object) -> None:
        world, job = self.world, part.job
        part.node = node = world.decode[rank]
        writers = {n: p.name for n, p in enumerate(world.prefill) if job.writer in {None, n}}
        room = node.core.announce(room_key(job.number), deadline_s=world.deadline_s)
        node.core.found(room, writers)
        node.pages[room] = []
        self._began(part, room, world.deadline_s)
        world.carry(node)

    def _bind(self, part: Part, rank: int, _: object) -> None:
        assert part.node is not None and part.room is not None
        side = self.world.sides[part.node]
        pages = side.take(part.room, self._n_pages(part), self._rng(part))
        job = part.job
        row = side.take_row(part.room) if job.uid % 7 != 3 else None
        self.world.bind(
            part.room, job.n_asked, pages, rank, prefix=min(job.prefix, job.n_asked), priority=job.priority, row=row
        )  # type: ignore[arg-type]

    def _rng(self, part: Part) -> random.Random:
        return random.Random(f"pages/{self.world.scenario.seed}/{part.job.uid}/{part.rank}")

    def _submit(self, part: Part, rank: int, _: object) -> None:
        world, job = self.world, part.job
        part.node = node = world.prefill[rank]
        room = node.core.submit(room_key(job.number))
        self._began(part, room, world.config.open_wait_s)
        for destination in room.destinations.values():
            self.opened(world.sides[node], room, destination.open.deadline_s)
        side = world.sides[node]
        part.pages = side.take(room, self._n_pages(part), self._rng(part))
        side.fill(world.scenario.seed, job.number, job.tokens, world.heads, part.pages)
        world.carry(node)

    def opened(self, side: Side, room: Room, deadline_s: float) -> None:
        """A destination opened the room: from now on it has that long."""
        if room in side.live:
            side.live[room] = max(side.live[room], self.world.now + deadline_s)

    def _chunk(self, part: Part, _: int, what: tuple[int, int, int, int, bool]) -> None:
        start, stop, low, high, ready = what
        node, room = part.node, part.room
        rects = (Rect("kv", start, stop, low, high),)
        part.sources.append(node.core.chunk(room, rects, {"kv": part.pages}, ready=ready))  # type: ignore[union-attr, arg-type]
        self.world.carry(node)  # type: ignore[arg-type]

    def _ready(self, part: Part, _: int, n: int) -> None:
        source = [source for source in part.sources if not source.ready]
        if source:
            part.node.core.data_ready(source[0])  # type: ignore[union-attr]
            self.world.carry(part.node)  # type: ignore[arg-type]

    def _finish(self, part: Part, _: int, __: object) -> None:
        room: PrefillRoom = part.room  # type: ignore[assignment]
        aux, side = part.job.aux, self.world.sides[part.node]  # type: ignore[index]
        number = side.take_row(room)
        if number is not None:
            side.fill_row(number, aux_row(part.job.number, side.row_nbytes))
            row = self.world.row(part.node, number)  # type: ignore[arg-type]
            aux = GivenRow(side.rows.base + number * side.row_nbytes, partial(memoryview, row))
        part.node.core.finish(room, aux)  # type: ignore[union-attr, arg-type]
        self.world.carry(part.node)  # type: ignore[arg-type]

    # What the rooms must hold.

    def truth_of(self, room: Room, key: Key) -> np.ndarray:
        """[token, head, byte] of one view of a room."""
        job = self.of[room].job
        return truth(self.world.scenario.seed, job.number, key, job.tokens, self.world.heads)

    def check_success(self, side: Side, room: Room) -> None:
        job = self.of[room].job
        if self.world.scenario.kind == "exact" and job.n_asked != job.tokens:
            raise Violation("I9", f"room {room.key!r} is a Success at {side.label} with another number of slots")
        stop = min(job.tokens, job.n_asked)
        side.check_delivered(room, lambda key: self.truth_of(room, key), min(job.prefix, stop), stop)  # type: ignore[arg-type]
        if room.shared is not None:  # type: ignore[attr-defined]
            self._check_row(side, room)  # type: ignore[arg-type]
        elif room.aux != job.aux:  # type: ignore[attr-defined]
            raise Violation("I5", f"room {room.key!r} is a Success at {side.label} with aux {room.aux!r}")  # type: ignore[attr-defined]

    def _check_row(self, side: Side, room: DecodeRoom) -> None:
        """What came in a message is taken as a node takes it; then every common column is what prefill's row held."""
        assert room.shared is not None
        true, number = aux_row(self.of[room].job.number, self.world.columns["P"].row_nbytes), side.row_of.get(room)
        if room.aux is not None:
            for column, data in room.shared.unpack(room.aux):
                if number is not None:
                    side.fill_row(number, bytes(data), column.offset)
        elif number is None:
            raise Violation("I5", f"room {room.key!r} is a Success at {side.label} with no row for its aux")
        for ours, theirs in zip(room.shared.src, room.shared.dst, strict=True):
            want = true[ours.offset : ours.offset + ours.nbytes]
            if number is not None:
                row = self.world.row(side.node, number)
                found = row[theirs.offset : theirs.offset + theirs.nbytes].tobytes()
                if found != want:
                    raise Violation("I5", f"room {room.key!r} is a Success at {side.label} with other aux {ours.name}")
        if room.aux is not None and room.aux != room.shared.pack(memoryview(true)):
            raise Violation("I5", f"room {room.key!r} is a Success at {side.label} with an aux of another's")

    def check_calm(self) -> None:
        """Without faults every room finishes, at every rank (I11)."""
        for (uid, rank), part in self.parts.items():
            room = part.room
            if room is None or room.state.name != "SUCCESS":
                how = "never began" if room is None else f"is {room.state.name}, {room.error}"
                raise Violation("I11", f"job {uid} at {rank} {how}")
