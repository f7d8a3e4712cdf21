"""How long rooms and the stages of their chunks take, as histograms: an observer of nodes.

A node calls its observers on its driving thread. Adding a time is a search among twenty bounds and takes no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from pdstage import State
from pdstage.manager.observer import Event, Origin, RoomEnded, StageOver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.protocol.messages import SessionId

STAGE_BOUNDS_S = (*(round(digit * 10.0**power, 6) for power in range(-5, 1) for digit in (1, 2.5, 5)), 10.0)
ROOM_BOUNDS_S = (*STAGE_BOUNDS_S[6:], 30.0, 60.0, 120.0, 300.0, 600.0)
STAGES = {"prefill": ("lease_wait", "gather", "write", "direct", "aux"), "decode": ("scatter",)}
OUTCOMES = ("success", "failed", "aborted")
ERRORS = ("Aborted", "DeadlineExceeded", "PdstageError", "PeerError", "TransportError", "UsageError")
_MAX_WAITED = 4096


class Histogram:
    """Counts of seconds at or below each of `bounds`, and above the last. One thread adds, any thread reads."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> None:
        self.counts[bisect_left(self.bounds, duration_s)] += 1
        self.sum_s += duration_s


class NodeTimings:
    """One node's timings. Every series exists from the start, so that a first event is a rise from zero."""

    def __init__(self, role: str) -> None:
        stages = STAGES[role]
        paths = ("staged", "direct") if role == "prefill" else ()
        self.stages = {(stage,): Histogram(STAGE_BOUNDS_S) for stage in stages}
        self.stage_nbytes = Counter({(stage,): 0 for stage in stages if stage != "lease_wait"})
        self.stage_failures = self.stage_nbytes.copy()
        self.chunks = {(path,): Histogram(STAGE_BOUNDS_S) for path in paths}
        self.rooms = {(outcome,): Histogram(ROOM_BOUNDS_S) for outcome in OUTCOMES}
        self.transfers = {(outcome,): Histogram(ROOM_BOUNDS_S) for outcome in OUTCOMES}
        self.failures = Counter({(error,): 0 for error in ERRORS})
        self._waited: dict[tuple[SessionId, int, int], float] = {}

    def room(self, ended: RoomEnded) -> None:
        lost = "aborted" if ended.error == "Aborted" else "failed"
        outcome = ("success" if ended.state is State.SUCCESS else lost,)
        self.rooms[outcome].add(ended.ended_at - ended.opened_at)
        if ended.moved_at is not None:
            self.transfers[outcome].add(ended.ended_at - ended.moved_at)
        if ended.error:
            self.failures[ended.error if (ended.error,) in self.failures else "PdstageError",] += 1

    def stage(self, over: StageOver) -> None:
        stage = (over.kind,)
        self.stages[stage].add(over.ended_at - over.began_at)
        if over.kind == "lease_wait":
            self._wait(over)
            return
        self.stage_nbytes[stage] += over.nbytes
        self.stage_failures[stage] += bool(over.error)
        if over.kind in ("write", "direct"):
            began_at = self._waited.pop((over.session, over.epoch, over.chunk), over.began_at)
            self.chunks["staged" if over.kind == "write" else "direct",].add(over.ended_at - began_at)

    def _wait(self, over: StageOver) -> None:
        """Kept until its chunk is written; it never is in rooms that fail before."""
        self._waited[over.session, over.epoch, over.chunk] = over.began_at
        if len(self._waited) > _MAX_WAITED:
            del self._waited[next(iter(self._waited))]


class Timings:
    """Put it into a node's `observers`: `register` and `expose` then export its histograms too. One serves any number
    of nodes.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, NodeTimings] = {}

    def observe(self, origin: Origin, event: Event) -> None:
        found = self._nodes.get(origin.incarnation)
        if found is None:
            found = self._nodes[origin.incarnation] = NodeTimings(origin.role)
        if isinstance(event, StageOver):
            found.stage(event)
        elif isinstance(event, RoomEnded):
            found.room(event)

    def of(self, role: str, incarnation: int) -> NodeTimings:
        """The timings of a node so far."""
        return self._nodes.get(incarnation) or NodeTimings(role)
