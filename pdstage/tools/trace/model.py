"""A trace: its nodes, the stages of their chunks, and the lives of their rooms.

`chrome` writes and reads them.
"""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.protocol.room import RoomId

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Clock(NamedTuple):
    """A host's monotonic clock, named by the host's boot. Its times plus `wall_offset_s` are the time of day."""

    name: str
    wall_offset_s: float

    @classmethod
    def here(cls) -> Clock:
        name = _BOOT.read_text().strip() if _BOOT.exists() else platform.node()
        return cls(name, time.time() - time.monotonic())


class Node(NamedTuple):
    """One rank's node in one process. `place` is its topology as text; `incarnation` is unique."""

    incarnation: int
    role: str
    rank: int
    place: str
    host: str
    os_pid: int

    @property
    def name(self) -> str:
        return f"{self.role} rank {self.rank}"


class Stage(NamedTuple):
    """A `StageOver` of the node with this `incarnation`; (`decode`, `writer`, `epoch`, `chunk`) is one chunk on both
    sides. Times are seconds of the trace's clock.
    """

    incarnation: int
    kind: str
    room: str
    decode: int
    writer: int
    epoch: int
    peer: int
    lane: int | None
    chunk: int
    began_at: float
    ended_at: float
    nbytes: int
    error: str = ""

    @property
    def claim(self) -> tuple[int, int, int, int]:
        return self.decode, self.writer, self.epoch, self.chunk


class RoomLife(NamedTuple):
    """A room at the node with this `incarnation`. None: it never happened, or had not when the trace ended."""

    incarnation: int
    number: int
    room: str
    opened_at: float
    bound_at: float | None = None
    moved_at: float | None = None
    ended_at: float | None = None
    released_at: float | None = None
    state: str = ""
    reason: str = ""


class Trace(msgspec.Struct):
    """All times are of `clock`; nodes are by incarnation; `n_dropped` older events did not fit into the tracer."""

    clock: Clock
    nodes: dict[int, Node] = {}
    stages: list[Stage] = []
    rooms: list[RoomLife] = []
    n_dropped: int = 0

    def moved_to(self, clock: Clock) -> Trace:
        """The same trace on another host's clock, as exact as the hosts' times of day agree."""
        if clock.name == self.clock.name:
            return self
        by = self.clock.wall_offset_s - clock.wall_offset_s

        stages = [s._replace(began_at=s.began_at + by, ended_at=s.ended_at + by) for s in self.stages]
        rooms = []
        for life in self.rooms:
            times = {
                name: value + by for name, value in life._asdict().items() if name[-3:] == "_at" and value is not None
            }
            rooms.append(life._replace(**times))
        return Trace(clock, self.nodes, stages, rooms, self.n_dropped)

    @property
    def ordered_nodes(self) -> list[Node]:
        """Prefill before decode, then by rank, then by time of start."""
        begun = [(stage.began_at, stage.incarnation) for stage in self.stages]
        begun += [(life.opened_at, life.incarnation) for life in self.rooms]
        first = {incarnation: at for at, incarnation in sorted(begun, reverse=True)}
        return sorted(
            self.nodes.values(),
            key=lambda node: (node.role != "prefill", node.rank, first.get(node.incarnation, 0.0), node.incarnation),
        )

    def chunks(self) -> dict[tuple[int, int, int, int], list[Stage]]:
        """The stages of each chunk, of both sides, by start time."""
        found = defaultdict(list)
        for stage in sorted(self.stages, key=lambda stage: stage.began_at):
            found[stage.claim].append(stage)
        return found


def merged(traces: Sequence[Trace]) -> Trace:
    """All traces on the clock of the first. There must be at least one."""
    whole = Trace(traces[0].clock)
    for trace in traces:
        moved = trace.moved_to(whole.clock)
        whole.nodes |= moved.nodes
        whole.stages += moved.stages
        whole.rooms += moved.rooms
        whole.n_dropped += moved.n_dropped
    return whole


def room_text(room: RoomId) -> str:
    """A room's name for display: bytes that are not text in hexadecimal."""
    if isinstance(room, bytes):
        return room.decode() if room.isascii() and room.decode().isprintable() else room.hex()
    return str(room)


def rows(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The row of each span, so that no two in a row overlap: the lowest row that is free when it begins."""
    ends: list[float] = []
    given = [0] * len(spans)
    for number in sorted(range(len(spans)), key=lambda number: spans[number]):
        began_at, ended_at = spans[number]
        row = next((row for row, end in enumerate(ends) if end <= began_at), len(ends))
        ends[row : row + 1] = [ended_at]
        given[number] = row
    return given
