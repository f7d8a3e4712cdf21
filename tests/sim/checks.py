"""The invariants of DESIGN 8, each checked where it is cheap: after every step of whoever moved, or of everything.

Must not change anything. Who may write memory is judged by `fabric` and `side` as bytes move (I2, I5, I7, I8, I9); here
is what the books of the cores must say meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.lane import ALIGNMENT, Lane, Lease
from pdstage.protocol.room import Room
from pdstage.protocol.state import State
from tests.pair import Decode, Node, Prefill, assert_flat, snapshot
from tests.sim.seeds import Violation
from tests.sim.side import Side

if TYPE_CHECKING:
    from tests.sim.world import SimWorld

NEXT = {"granted": {"granted", "landed", "quarantined"}, "landed": {"landed"}, "quarantined": {"quarantined"}}
GREETINGS = m.Hello | m.Welcome | m.HelloRefused
ENDINGS = m.NoSession | m.Bye
EPSILON_S = 1e-6


class Checks:
    """What was seen so far, of every process."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.watermarks: dict[tuple[Decode, int], int] = {}
        self.moved_at: dict[tuple[Decode, int], float] = {}
        self.states: dict[Decode, dict[tuple[int, int], str]] = {}
        self.stuck_since: dict[Lease, float] = {}
        self.recalled_at: dict[tuple[Decode, int, int], float] = {}

    def node(self, node: Node) -> None:
        if isinstance(node, Decode):
            self._lanes(node)
            self._ledger(node)
            if node.core.leases.contended:
                self._waiting(node)
        else:
            self._marks(node)
            self._buffers(node)

    # Decode.

    def _lanes(self, node: Decode) -> None:
        for number, lane in enumerate(node.core.leases.lanes):
            key = (node, number)
            before = self.watermarks.get(key, 0)
            if lane.watermark < before:
                raise Violation(
                    "I4", f"the watermark of {node.name!r} lane {number} fell: {before} -> {lane.watermark}"
                )
            if lane.watermark > before or lane.head == lane.watermark:
                self.moved_at[key] = self.world.now
            self.watermarks[key] = lane.watermark
            self._disjoint(node, number, lane)

    def _disjoint(self, node: Decode, number: int, lane: Lane) -> None:
        """Leases are inside the lane; of those that may be written, no two share a byte but quarantined ones (I3)."""
        writable: list[tuple[int, int, str]] = []
        end_before = 0
        for lease in lane.leases():
            cursor, nbytes, state = lease.cursor, lease.end - lease.cursor, lease.phase
            start = cursor % lane.capacity
            where = f"lease {cursor}+{nbytes} ({state}) of {node.name!r} lane {number}"
            if cursor < end_before or cursor % ALIGNMENT or nbytes < 1 or start + nbytes > lane.capacity:
                raise Violation("I3", f"{where} overlaps its neighbour or the lane's end")
            end_before = cursor + nbytes
            if cursor + nbytes > lane.watermark + lane.capacity:
                continue
            for other, stop, held in writable:
                if start < stop and other < start + nbytes and not state == held == "quarantined":
                    raise Violation("I3", f"{where} lies on bytes {other}..{stop} ({held}) that another may write")
            writable.append((start, start + nbytes, state))

    def _ledger(self, node: Decode) -> None:
        """No lease goes back, and each that landed has its scatter (I15)."""
        leases, seen = node.core.leases, self.states.setdefault(node, {})
        now: dict[tuple[int, int], str] = {}
        n_landed = 0
        for number, lane in enumerate(leases.lanes):
            for lease in lane.leases():
                cursor, state = lease.cursor, lease.phase
                if leases.at(number, cursor) is not lease or lease.lane != number:
                    raise Violation("I15", f"lane {number} of {node.name!r} has lease {cursor} twice")
                if state not in NEXT[seen.get((number, cursor), state)]:
                    raise Violation("I15", f"lease {cursor} of {node.name!r} was {seen[number, cursor]}, is {state}")
                n_landed += state == "landed"
                now[number, cursor] = state
        self.states[node] = now
        if n_landed != len(node.core.chunks.flights):
            raise Violation(
                "I15", f"{node.name!r} has {n_landed} landed leases and {len(node.core.chunks.flights)} scatters"
            )

    def _waiting(self, node: Decode) -> None:
        leases, config = node.core.leases, self.world.config
        idle = [lane for lane in leases.lanes if lane.head == lane.watermark]
        for request in leases.waiting:
            if any(request.nbytes <= lane.largest() for lane in idle):
                raise Violation(
                    "I13", f"a request of {request.nbytes} bytes waits at {node.name!r} beside an idle lane"
                )
        stuck: dict[Lease, float] = {}
        for lease in leases.live():
            if lease.phase == "granted" and not lease.said_written and not leases.is_open(lease):
                moved_at = self.moved_at[node, lease.lane]
                if leases.elsewhere(lease) and lease.session.id in node.core.sessions:
                    since = self.stuck_since.get(lease, max(moved_at, self.world.now))
                    stuck[lease] = max(since, moved_at)
        self.stuck_since = {g: at for g, at in self.stuck_since.items() if leases.at(g.lane, g.cursor) is not g} | stuck
        patience_s = config.stuck_after_s + 2 * config.retry_s + self.world.sides[node].late_s + EPSILON_S
        for lease, since in stuck.items():
            told_at = self.recalled_at.get((node, lease.lane, lease.cursor), -1.0)
            if self.world.now - max(since, told_at) > patience_s:
                raise Violation("I12", f"lease {lease.cursor} of {node.name!r} waits in a stuck lane beside a free one")

    # Prefill.

    def _marks(self, node: Prefill) -> None:
        """No window is open that its own decode process did not open (I4, I6)."""
        for session in node.core.sessions.values():
            for lane, mark in session.marks.items():
                told = self.world.greeter(session.id).core.leases.lanes[lane].watermark
                if mark > told:
                    raise Violation("I6", f"{node.name!r} has watermark {mark} of a lane whose own is {told}")

    def _buffers(self, node: Prefill) -> None:
        chunks = node.core.chunks
        held = sum(chunks.staged._busy.values()) + len(chunks.free)
        if held != self.world.n_buffers:
            raise Violation("I8", f"{node.name!r} knows of {held} send buffers, not {self.world.n_buffers}")

    def sent(self, node: Node, session_id: m.SessionId, message: object) -> None:
        if isinstance(message, m.Recall):
            self.recalled_at[node, message.lane, message.cursor] = self.world.now  # type: ignore[index]
        elif isinstance(message, m.Reserve) and message.attempt and isinstance(node, Prefill):
            named = session_id, message.epoch
            destination = next(one for one in node.core.destinations if (one.session.id, one.epoch) == named)
            if not destination.chunks[message.chunk].source.ready:
                raise Violation("I16", f"{node.name!r} asks again for a recalled chunk whose data does not exist")

    # Rooms.

    def changed(self, side: Side, room: Room) -> None:
        """Success and Failed are terminal, and a failed room says why (I1)."""
        before = side.ended.get(room)
        if before is not None and before != (room.state, room.error):
            raise Violation("I1", f"room {room.key!r} at {side.label} ended as {before[0]!r} and is {room.state!r} now")
        if (room.state is State.FAILED) != (room.error is not None):
            raise Violation("I10", f"room {room.key!r} at {side.label} is {room.state.name} with error {room.error!r}")

    def on_time(self, side: Side) -> None:
        """Every room ends within its deadlines, counted from when its process was there (I10)."""
        for room, at in side.live.items():
            if self.world.now > at + side.late_s + EPSILON_S:
                raise Violation(
                    "I10", f"room {room.key!r} at {side.label} is {room.state.name}, should be over at {at}"
                )

    # What is stale.

    @contextmanager
    def stale_frame_changes_nothing(self, node: Node, frame: bytes, message: object) -> Iterator[None]:
        """A frame of another session, or not above the last accepted one, changes nothing and is counted (I6, I7)."""
        session_id, seq = wire.decode_head(frame)
        session = node.core.sessions.get(session_id)
        old = seq <= session.last_seq if session is not None else not isinstance(message, GREETINGS)
        if not old or isinstance(message, ENDINGS) or not node.alive:
            yield
            return
        before, n = snapshot(node.core), node.core.counters.frames_stale
        yield
        if snapshot(node.core) != before:
            raise Violation("I6", f"a stale {type(message).__name__} changed {node.name!r}")
        if node.core.counters.frames_stale != n + 1:
            raise Violation("I6", f"a stale {type(message).__name__} was not counted at {node.name!r}")

    @contextmanager
    def stale_tag_changes_nothing(self, node: Decode, tag: bytes) -> Iterator[None]:
        """A tag of another session, or of an epoch that is not live, changes nothing and is counted (I6)."""
        session = node.core.sessions.get(wire.tag_session(tag))
        room = node.core.by_epoch.get(wire.decode_tag(tag, ("kv",)).epoch)
        if session is not None and room is not None and not room.ended:
            yield
            return
        before, n = snapshot(node.core), node.core.counters.tags_stale
        yield
        if snapshot(node.core) != before or node.core.counters.tags_stale != n + 1:
            raise Violation("I6", f"a stale tag changed {node.name!r}, or was not counted")

    # Everything.

    def everything(self) -> None:
        """Every byte of every live process, and every room that ever ended (I1, I2)."""
        for node, side in self.world.sides.items():
            if not node.alive:
                continue
            side.check_memory()
            for room, (state, error) in side.ended.items():
                if (room.state, room.error) != (state, error):
                    raise Violation("I1", f"room {room.key!r} at {side.label} left {state!r}")

    def all_over(self, *, released: bool = True) -> None:
        """Every room of every live process ended and, if `released`, gave its memory back (I10)."""
        for node, side in self.world.sides.items():
            if not node.alive:
                continue
            for room in (*side.live, *side.ended):
                if not (room.ended and (room.released or not released)):
                    what = "not over" if not room.ended else "not released"
                    raise Violation(
                        "I10", f"room {room.key!r} at {side.label} is {what}: {room.state.name} {room.error}"
                    )
            if released and len(side.free) != len(side.owner):
                raise Violation("I14", f"{side.label} has only {len(side.free)} of its pages back")

    def quarantine_is_bounded(self) -> None:
        """What is still carved out is of sessions that are lost and not fenced (I14)."""
        for node in self.world.decode:
            for lease in node.core.leases.live():
                if lease.phase != "quarantined" or lease.session.id in node.core.sessions:
                    raise Violation("I14", f"lease {lease.cursor} of {node.name!r} is left, {lease.phase}")

    def is_flat(self) -> bool:
        try:
            self.flat()
        except Violation:
            return False
        return True

    def flat(self) -> None:
        """Nothing is left of any room (I13, I14)."""
        try:
            assert_flat(self.world)
        except AssertionError as error:
            raise Violation("I14", f"something is left: {error}") from error
        if self.world.posts:
            raise Violation("I14", f"{len(self.world.posts)} posts never ended")
