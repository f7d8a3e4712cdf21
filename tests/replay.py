"""A whole session as frames on record, and a real core made to hold it against them: the peer of an older release.

    python -m tests.replay

records the session of `wire.VERSION`, once, when that version begins. The scripted peer is nothing but recorded
bytes: it says its next frame when the real core has said what it had said, or asked, on record. Only the session's two
numbers are written anew, for they are drawn by the cores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdstage.layout.topology import Topology
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.config import Config
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.room import room_key
from pdstage.protocol.session import Send
from pdstage.protocol.wire import VERSION
from tests.golden import FOLDER
from tests.pair import Memory, make_layout

CONFIG = Config()
ROUTE = b"peer"
AUX = b"the first token"
_SESSION = slice(4, 20)


class End:
    """One real core and a driver that does everything at once; its frames and tags pile up in `said`."""

    def __init__(self, core: PrefillCore | DecodeCore) -> None:
        self.core = core
        self.now = 0.0
        self.rooms: dict[int, object] = {}
        self.said: list[tuple[str, bytes]] = []

    def carry(self) -> None:
        while effects := self.core.endpoint.take_effects():
            for effect in effects:
                match effect:
                    case Send(_, frame):
                        self.said.append(("frame", frame))
                    case Gather():
                        self.core.chunks.gathered(effect.ticket, self.now)
                    case Write() | WriteDirect() | WriteRow():
                        self.said.append(("tag", effect.tag))
                        self.core.chunks.completed(effect.ticket, self.now)
                    case Scatter():
                        self.core.scattered(effect.ticket, self.now)
                    case _:
                        pass

    def hear(self, kind: str, data: bytes) -> None:
        if kind == "frame":
            self.core.endpoint.receive(ROUTE, data, self.now)
        else:
            self.core.tag(data, self.now)
        self.carry()

    def tick(self) -> None:
        self.now = self.core.endpoint.timers.next_at() or self.now
        self.core.endpoint.tick(self.now)
        self.carry()


def _layout(rank: int, tp: int, n_pages: int = 8):
    return make_layout(Memory(1 << 16), heads=2, tp=tp, rank=rank, layers=(0, 2), n_pages=n_pages)


def prefill_end() -> End:
    core = PrefillCore(
        0xAAAA, layout=_layout(0, 1), topology=Topology(), transport="test", description=b"p", n_buffers=2,
        buffer_nbytes=4096, config=CONFIG, choose=lambda chunk: chunk.destination.open.room == room_key(2),
    )  # fmt: skip
    return End(core)


def decode_end() -> End:
    lanes = (m.LaneSpan(1 << 40, 4096),)
    core = DecodeCore(
        0xDDDD, layout=_layout(0, 1), topology=Topology(), transport="test", description=b"d", lanes=lanes,
        config=CONFIG,
    )  # fmt: skip
    return End(core)


def _announce(end: End, room: int) -> None:
    end.rooms[room] = end.core.announce(room_key(room), {0: ROUTE}, end.now, deadline_s=100.0)


def _bind(end: End, room: int, *, direct: bool = False) -> None:
    items = (m.Items("kv", 0, memoryview(np.array([1, 2, 3], np.int32)).cast("B")),) if direct else ()
    end.core.bind(end.rooms[room], (m.Asked("kv", 0, 12),), {}, end.now, wire_items=items)


def _ask(end: End) -> None:
    """Lets time pass until it asks whether its room is there."""
    while not any(kind == "frame" and isinstance(wire.decode(data).message, m.Ask) for kind, data in end.said):
        end.tick()


def _receive(end: End, room: int, *, direct: bool = False) -> None:
    _announce(end, room)
    _bind(end, room, direct=direct)


def _send(end: End, room: int) -> None:
    out = end.rooms[room] = end.core.submit(room_key(room), end.now)
    for tokens in ((0, 8), (8, 12)):
        end.core.chunk(out, (Rect("kv", *tokens, 0, 2),), {}, end.now)
    end.core.finish(out, AUX, end.now)


def _give_up(end: End, room: int) -> None:
    out = end.rooms[room] = end.core.submit(room_key(room), end.now)
    end.core.abort(out, "out of memory", end.now)


Act = Callable[[End], object]


class Phase(NamedTuple):
    """What the two engines do before both sides talk until neither has more to say."""

    name: str
    decode: Act = lambda _: None
    prefill: Act = lambda _: None


PHASES = (
    Phase("greeted", lambda end: _announce(end, 1)),
    Phase("asked about a room that is not there yet", _ask),
    Phase("the room is there, all of it", prefill=lambda end: _send(end, 1)),
    Phase("bound late, staged", lambda end: _bind(end, 1)),
    Phase("direct", lambda end: _receive(end, 2, direct=True), lambda end: _send(end, 2)),
    Phase("opened, and nobody sends", lambda end: [_receive(end, room) for room in (3, 4)]),
    Phase("aborted", lambda end: end.core.abort(end.rooms[3], "the request was cancelled", end.now)),
    Phase("given up by its writer", prefill=lambda end: _give_up(end, 4)),
    Phase("ended in order", lambda end: end.core.endpoint.bye(end.now)),
)


class Line(NamedTuple):
    """One thing said: by "decode" or "prefill", a "frame" or a "tag"."""

    side: str
    kind: str
    data: bytes

    def about(self) -> tuple[object, ...]:
        """What the script waits for: which message, of which epoch and chunk; not its every byte."""
        if self.kind == "tag":
            tag = wire.decode_tag(self.data, ("kv",))
            return "Tag", tag.epoch, tag.chunk
        message = wire.decode(self.data).message
        return type(message).__name__, getattr(message, "epoch", None), getattr(message, "chunk", None)


def record() -> list[list[Line]]:
    """Both cores of today, phase by phase."""
    ends = {"decode": decode_end(), "prefill": prefill_end()}
    phases = []
    for phase in PHASES:
        phase.decode(ends["decode"])
        phase.prefill(ends["prefill"])
        lines: list[Line] = []
        for end in ends.values():
            end.carry()
        while any(end.said for end in ends.values()):
            for side, other in (("decode", "prefill"), ("prefill", "decode")):
                while ends[side].said:
                    line = Line(side, *ends[side].said.pop(0))
                    lines.append(line)
                    ends[other].hear(line.kind, line.data)
        phases.append(lines)
    return phases


def play(real: str, end: End, phases: list[list[Line]]) -> list[Line]:
    """Holds the recorded session against the real core `end` that stands for side `real`; returns what it said."""
    said: list[Line] = []
    session_id = b""
    for phase, lines in zip(PHASES, phases, strict=True):
        getattr(phase, real)(end)
        end.carry()
        for line in lines:
            if line.about()[0] == "Heartbeat" and line.side == real:
                continue
            if line.side == real:
                said.append(_until(real, end, line))
                session_id = session_id or said[-1].data[_SESSION]
            else:
                end.hear(line.kind, _addressed(line, end, session_id))
    return said


def _until(real: str, end: End, wanted: Line) -> Line:
    """The next thing the core says of what is wanted; what it says besides, or again, is no matter."""
    for _ in range(1000):
        while end.said:
            line = Line(real, *end.said.pop(0))
            if line.about() == wanted.about():
                return line
        end.tick()
    raise AssertionError(f"the {real} core never said {wanted.about()}")


def _addressed(line: Line, end: End, session_id: bytes) -> bytes:
    """The recorded bytes under the session that is held now."""
    session = next(iter(end.core.sessions), None)
    if session is not None:
        now = b"".join(half.to_bytes(8, "little") for half in session)
    elif isinstance(end.core, DecodeCore):  # a Welcome: decode's half is what it greeted with, the writer's its own
        now = session_id[:8] + line.data[12:20]
    else:
        return line.data
    return line.data[: _SESSION.start] + now + line.data[_SESSION.stop :]


def path(version: int) -> Path:
    return FOLDER / f"v{version}-session.json"


def save(phases: list[list[Line]]) -> str:
    """One line a frame, so that a reader sees who said what."""
    held = []
    for phase, lines in zip(PHASES, phases, strict=True):
        body = ",\n".join(json.dumps([x.side, x.kind, x.about()[0], x.data.hex()]) for x in lines)
        held.append(f"{json.dumps(phase.name)}: [\n{body}\n]")
    return "{\n" + ",\n".join(held) + "\n}\n"


def load(version: int) -> list[list[Line]]:
    held = json.loads(path(version).read_text())
    assert list(held) == [phase.name for phase in PHASES]
    return [[Line(side, kind, bytes.fromhex(data)) for side, kind, _, data in lines] for lines in held.values()]


if __name__ == "__main__":
    path(VERSION).write_text(save(record()))
