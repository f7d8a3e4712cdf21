"""What the cores cost at scale, and whether they share: `python -m tests.sim.scale [--small] [--profile] [NAME ...]`.

Real cores on a virtual clock (`fleet`). Each experiment prints what it measured and holds counts, bytes and shares to
bounds; CPU times are printed only. By default a fleet of 1,000 prefill and 1,000 decode ranks serves 100,000 rooms.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from dataclasses import dataclass, replace

from tests.sim import caps, sharing, stars
from tests.sim.fleet import Fleet, Job, Memory, Node

PODS = 16  # prefill instances that a router may pair with one decode instance: rails, racks and cached prefixes decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of each: ranks of each role, rooms, restarts of each role, and the peers of a star's hub."""

    n_ranks: int
    n_rooms: int
    n_restarts: int
    n_peers: int
    loss: float = 0.0


FULL = Scale(n_ranks=1000, n_rooms=100_000, n_restarts=200, n_peers=1000)
SMALL = Scale(n_ranks=40, n_rooms=1200, n_restarts=8, n_peers=100)


class Router:
    """Instances of TP 1, 2 and 4 on both sides, and which prefill instances serve each decode instance."""

    def __init__(self, fleet: Fleet, n_ranks: int) -> None:
        self.fleet = fleet
        self.prefill = self._instances("prefill", b"P", n_ranks)
        self.decode = self._instances("decode", b"D", n_ranks)
        n = len(self.prefill)
        self.pairs = [(d, (d + k * k) % n) for d in range(len(self.decode)) for k in range(min(PODS, n))]
        self.n_ended = self.n_failed = self.n_open = self._n_routed = 0
        fleet.on_end = self._ended

    def _instances(self, role: str, letter: bytes, n_ranks: int) -> list[list[Node]]:
        instances: list[list[Node]] = []
        left = n_ranks
        while left:
            tp = min(self.fleet.random.choices((1, 2, 4), (14, 4, 1))[0], 1 << left.bit_length() - 1)
            name = letter + b"%d." % len(instances)
            instances.append([self.fleet.add(role, name + b"%d" % rank, tp, rank) for rank in range(tp)])
            left -= tp
        return instances

    def serve(self, n_rooms: int, per_s: float) -> None:
        """Rooms at an even rate until all have ended. Each pair of instances comes once before the rest by chance."""
        start = self.fleet.now
        for n in range(n_rooms):
            pair = self.pairs[n] if n < len(self.pairs) else self.fleet.random.choice(self.pairs)
            self.fleet.at(start + n / per_s, self._route, *pair)
        self.fleet.run(start + n_rooms / per_s)
        self.fleet.run_while(lambda: self.n_open > 0, limit_s=120.0)
        self.fleet.run(self.fleet.now + 0.5)  # the last answers

    def restarts(self, n: int, over_s: float) -> None:
        """`n` ranks of each role restart, evenly spread."""
        for k in range(n):
            for instances in (self.prefill, self.decode):
                self.fleet.at(self.fleet.now + k * over_s / n, self._restart, instances)

    def _restart(self, instances: list[list[Node]]) -> None:
        instance = self.fleet.random.choice(instances)
        rank = self.fleet.random.randrange(len(instance))
        instance[rank] = self.fleet.restart(instance[rank])

    def _route(self, decode: int, prefill: int) -> None:
        self._n_routed += 1
        self.n_open += 1
        tokens = self.fleet.random.choice((64, 128, 256, 512))
        self.fleet.route(
            Job(b"room %d" % self._n_routed, tuple(self.prefill[prefill]), tuple(self.decode[decode]), tokens, 256, 0.2)
        )

    def _ended(self, job: Job) -> None:
        self.n_open -= 1
        self.n_ended += 1
        self.n_failed += job.n_failed > 0


def serve_a_fleet(scale: Scale) -> None:
    """Rooms by the thousand: their cost, their traffic, and memory flat in what was served, lost and restarted (I14).

    Memory is looked at with no room open: after the first fifth, after two more fifths, and after the last two, during
    which ranks of both roles restart.
    """
    gc.disable()  # as engines do; `memory` says what it would have found
    try:
        _serve_a_fleet(scale)
    finally:
        gc.enable()


def _serve_a_fleet(scale: Scale) -> None:
    fleet = Fleet(seed=1, loss=scale.loss, wait_s=30, open_wait_s=30, send_wait_s=30, drain_s=5)
    router = Router(fleet, scale.n_ranks)
    fifth, per_s = scale.n_rooms // 5, scale.n_ranks * 10.0
    began = time.process_time()
    router.serve(max(fifth, len(router.pairs)), per_s)
    before, n_before = fleet.memory(), router.n_ended
    router.serve(2 * fifth, per_s)
    n_served, served_s = router.n_ended, time.process_time() - began
    after = fleet.memory()
    assert router.n_failed == 0, f"{router.n_failed} rooms failed"
    check_flat(fleet)
    _report_rooms(scale, fleet, n_served, served_s)
    n_more, grown = n_served - n_before, after - before
    print(
        f"  memory with no room open: {before.n_objects:,} objects, {before.n_blocks:,} blocks after {n_before:,} rooms"
    )
    print(
        f"    the next {n_more:,}: {grown.n_objects / n_more:+.3f} objects, {grown.n_blocks / n_more:+.2f} blocks each"
    )
    # An integer takes a block once it is above 256: each counter of a core and of a session does so once.
    assert grown.n_garbage <= 0.01 * n_more, "ended rooms wait for the garbage collector (I14)"
    assert grown.n_objects <= 0.01 * n_more + 16, "objects pile up with the rooms served (I14)"
    assert grown.n_blocks <= 0.75 * n_more + before.n_blocks // 100, "memory grows with the rooms served (I14)"
    _restart_and_serve(scale, router, per_s, after)


def _report_rooms(scale: Scale, fleet: Fleet, n_rooms: int, cpu_s: float) -> None:
    n_sessions = sum(len(node.core.sessions) for node in fleet.nodes.values()) // 2
    print(
        f"fleet: {scale.n_ranks} + {scale.n_ranks} ranks, {n_sessions:,} sessions, {n_rooms:,} rooms, loss {scale.loss}"
    )
    print(f"  {1e6 * cpu_s / n_rooms:.0f} us of CPU a room, all its ranks; {fleet.n_writes / n_rooms:.2f} writes")
    for kind, n in fleet.sent.most_common():
        print(f"  {kind:10} {n / n_rooms:7.3f} a room, {fleet.sent_nbytes[kind] / n:5.0f} bytes each")
    total = sum(fleet.sent.values())
    print(f"  in all     {total / n_rooms:7.3f} a room, {sum(fleet.sent_nbytes.values()) / n_rooms:5.0f} bytes a room")


def _restart_and_serve(scale: Scale, router: Router, per_s: float, before: Memory) -> None:
    fleet = router.fleet
    n_rooms = max(2 * scale.n_rooms // 5, len(router.pairs))
    n_failed, n_ended = router.n_failed, router.n_ended
    router.restarts(scale.n_restarts, n_rooms / per_s)
    router.serve(n_rooms, per_s)
    check_flat(fleet)
    failed = router.n_failed - n_failed
    assert router.n_ended - n_ended == n_rooms
    assert failed <= 40 * scale.n_restarts, "a restart ends the rooms of its rank, and no other"
    router.serve(len(router.pairs), per_s)  # every pair that restarted greets again
    assert router.n_failed == n_failed + failed, "a restarted rank serves as before"
    check_flat(fleet)
    cores = [node.core for node in fleet.nodes.values()]
    kept = sum(len(core.handshake.lost) + len(core.rooms.ended) for core in cores if hasattr(core.handshake, "lost"))
    grown = fleet.memory() - before
    print(f"  restarts: {scale.n_restarts} of each role, {failed} of {n_rooms:,} rooms failed with them")
    print(f"    {grown.n_objects:+,} objects, {grown.n_blocks:+,} blocks; prefill remembers {kept:,} lost sessions")
    print(f"    and failed rooms, a capped number of each: {grown.n_blocks / max(1, kept):.1f} blocks")
    assert grown.n_objects <= 8 * kept + 0.01 * n_rooms + 16, "objects pile up with restarts survived (I14)"
    assert grown.n_blocks <= 24 * kept + 0.75 * n_rooms + before.n_blocks // 100, "memory grows with restarts (I14)"


def check_flat(fleet: Fleet) -> None:
    """No room is open: no core holds anything but its sessions."""
    for node in fleet.nodes.values():
        core = node.core
        own = {(kind, session) for kind in ("beat", "silence") for session in core.sessions.values()}
        left = {key for key in core.endpoint.timers._at if key not in own and key != ("recalls",)}
        assert not left, (node.route, left)
        assert core.idle and not core.rooms.by_key and not node.jobs, (node.route, core.rooms.by_key)
        if hasattr(core, "leases"):
            assert core.leases.snapshot()[:2] == ((), ()), (node.route, core.leases.snapshot())
            assert all(lane.head == lane.watermark for lane in core.leases.lanes)
        else:
            assert core.chunks.buffers.idle and not core.rooms.pending and not core.rooms.askers, node.route


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scale", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}; all if none is given")
    parser.add_argument("--small", action="store_true", help="what the tests run: seconds, not minutes")
    parser.add_argument("--profile", action="store_true", help="print where a room's CPU time goes")
    parser.add_argument("--loss", type=float, default=0.0, help="share of control frames the fleet's network loses")
    given = parser.parse_args(args)
    scale = replace(SMALL if given.small else FULL, loss=given.loss)
    profile = cProfile.Profile()
    for name in given.names or EXPERIMENTS:
        began = time.process_time()
        if given.profile:
            profile.runcall(EXPERIMENTS[name], scale)
        else:
            EXPERIMENTS[name](scale)
        print(f"  ({name}: {time.process_time() - began:.1f} s of CPU)\n", flush=True)
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


def hubs(scale: Scale) -> None:
    """One rank and many peers: a session's memory, and a room's cost whatever the number of peers."""
    stars.compare(10, scale.n_peers)


def shares(scale: Scale) -> None:
    """Peers that compete for lanes and for send buffers; a greedy one; priorities."""
    for role in ("decode", "prefill"):
        sharing.equals(role, scale.n_peers // 5)
        sharing.greedy(role, scale.n_peers * 5)
    sharing.priorities(40)


def limits(scale: Scale) -> None:
    """Caps on what a peer may leave behind."""
    caps.parked(scale.n_peers * 5)
    caps.half_open(scale.n_peers)


EXPERIMENTS = {"fleet": serve_a_fleet, "hubs": hubs, "shares": shares, "limits": limits}

if __name__ == "__main__":
    sys.exit(main())
