"""One rank and thousands of peers: what a session, a room, an idle second and a lost peer cost, by counts."""

from __future__ import annotations

from typing import NamedTuple

from pdstage.errors import PeerError
from tests.sim.fleet import Fleet, Job, Node
from tests.sim.gauges import Lines, size_of


class Cost(NamedTuple):
    n_peers: int
    nbytes: float
    """Of the hub's memory, a session."""
    idle_frames: float
    """Sent and received by the hub, a session and second."""
    idle_lines: float
    """Run by both ends, an idle frame."""
    room_lines: float
    """Run by both ends, a room beside idle sessions."""
    crowded_lines: float
    """The same while every peer has a room and staging memory or send buffers for a few."""
    loss_lines: float
    """Run by the hub to lose one session, while every peer has a room."""


class Star:
    """A hub of one role, and peers of the other that each have a session with it."""

    def __init__(self, role: str, n_peers: int, **how: float) -> None:
        self.fleet = Fleet(seed=1, **how)  # type: ignore[arg-type]
        self.role = role
        self.hub = self.fleet.add(role, b"hub")
        other = "decode" if role == "prefill" else "prefill"
        self.peers = [self.fleet.add(other, b"peer %d" % n) for n in range(n_peers)]
        self.ended: list[Job] = []
        self.fleet.on_end = self.ended.append
        self.n_rooms = 0
        for peer in self.peers:
            self.route(peer)
        self.finish()

    def route(self, peer: Node, tokens: int = 256, *, priority: int = 0, step: int = 128) -> Job:
        self.n_rooms += 1
        ends = ((self.hub,), (peer,)) if self.role == "prefill" else ((peer,), (self.hub,))
        job = Job(b"room %d" % self.n_rooms, *ends, tokens, step, 0.001, priority)
        self.fleet.route(job)
        return job

    def finish(self) -> None:
        self.fleet.run_while(lambda: len(self.ended) < self.n_rooms, limit_s=120.0, step_s=0.005)
        assert not any(job.n_failed for job in self.ended)


def cost(role: str, n_peers: int) -> Cost:
    star = Star(role, n_peers)
    fleet = star.fleet
    nbytes = size_of(star.hub.core).nbytes / n_peers
    fleet.sent.clear()
    with Lines() as idle:
        fleet.run(fleet.now + 20)
    n_idle = sum(fleet.sent.values())
    assert set(fleet.sent) == {"Heartbeat"}
    with Lines() as room:
        for n in range(50):
            star.route(star.peers[n * 7919 % n_peers])
            star.finish()
    crowded = Star(role, n_peers, lane_nbytes=1 << 18, n_lanes=1, n_buffers=2)
    n_rooms = max(50, n_peers)
    with Lines() as crowd:
        for n in range(n_rooms):
            crowded.route(crowded.peers[n % n_peers])
        crowded.finish()
    return Cost(
        n_peers, nbytes, n_idle / 20 / n_peers, idle.n / n_idle, room.n / 50, crowd.n / n_rooms, _lose_some(star)
    )


def _lose_some(star: Star) -> float:
    for peer in star.peers:
        star.route(peer)
    star.fleet.run(star.fleet.now + 0.0004)  # met and opened, nothing computed yet
    core = star.hub.core
    lost = [session for session in core.sessions.values() if session.route in {b"peer 1", b"peer 3", b"peer 5"}]
    with Lines() as lines:
        for session in lost:
            core.lose(session, PeerError("lost by the experiment"), star.fleet.now)
            core.fenced(session, star.fleet.now)
    return lines.n / len(lost)


def compare(n_few: int, n_many: int) -> None:
    """All of a hub's costs with few and with many peers."""
    for role in ("decode", "prefill"):
        few, many = cost(role, n_few), cost(role, n_many)
        print(f"one {role} rank with {n_few} / {n_many} peers:")
        print(f"  {few.nbytes:,.0f} / {many.nbytes:,.0f} bytes a session")
        rate = many.idle_frames * n_many
        print(
            f"  idle: {rate:.0f} frames a second with {n_many}, {few.idle_lines:.0f} / {many.idle_lines:.0f} lines each"
        )
        print(f"  lines a room beside idle sessions: {few.room_lines:,.0f} / {many.room_lines:,.0f}")
        print(f"  lines a room while all peers wait: {few.crowded_lines:,.0f} / {many.crowded_lines:,.0f}")
        print(f"  lines to lose a session: {few.loss_lines:,.0f} / {many.loss_lines:,.0f}")
        assert many.nbytes <= 1.25 * few.nbytes, "memory is not linear in sessions"
        assert many.idle_frames <= 0.61, "more than a heartbeat each way every third of max_silence_s"
        assert many.idle_lines <= 1.1 * few.idle_lines, "an idle session's timers cost more beside others"
        assert many.room_lines <= 1.1 * few.room_lines, "a room costs more beside idle sessions"
        assert many.crowded_lines <= 1.5 * few.crowded_lines, (
            "a room costs more while others wait (repeated questions aside)"
        )
        assert many.loss_lines <= 3 * few.loss_lines, "to lose one session costs more beside others"
