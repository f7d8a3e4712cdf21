"""Whether peers share what is scarce: a decode rank's lanes, a prefill rank's send buffers, and by priority."""

from __future__ import annotations

from collections import Counter, defaultdict

from tests.sim.fleet import Job, Node
from tests.sim.gauges import jain
from tests.sim.stars import Star

SCARCE = {"lane_nbytes": 1 << 19, "n_lanes": 1, "n_buffers": 3}


class Contest:
    """A star whose peers keep asking: each has `depth` rooms open, and begins another when one ends."""

    def __init__(self, role: str, n_peers: int) -> None:
        self.star = Star(role, n_peers, **SCARCE)
        self.nbytes: Counter[bytes] = Counter()
        self.waits: dict[bytes, list[float]] = defaultdict(list)
        self.again: dict[Job, tuple[Node, int]] = {}
        self.running = True
        self.star.fleet.on_end = self._ended
        self.star.fleet.on_landed = self._landed

    def enter(self, peer: Node, depth: int, priority: int = 0, tokens: int = 128) -> None:
        for _ in range(depth):
            self.again[self.star.route(peer, tokens, priority=priority)] = (peer, tokens)

    def run(self, for_s: float) -> None:
        self.star.fleet.run(self.star.fleet.now + for_s)

    def end(self) -> None:
        self.running = False
        self.star.finish()

    def _landed(self, src: Node, dst: Node, nbytes: int) -> None:
        peer = src if dst is self.star.hub else dst
        self.nbytes[peer.route] += nbytes

    def _ended(self, job: Job) -> None:
        self.star.ended.append(job)
        entry = self.again.pop(job, None)
        if entry is not None:
            peer, tokens = entry
            self.waits[peer.route].append(job.ended_at - job.began_at)
            if self.running:
                self.enter(peer, 1, job.priority, tokens)


def equals(role: str, n_peers: int) -> None:
    """Equal peers get equal shares."""
    contest = Contest(role, n_peers)
    for peer in contest.star.peers:
        contest.enter(peer, 2)
    contest.run(n_peers * 0.02)
    shares = [contest.nbytes[peer.route] for peer in contest.star.peers]
    worst = max(max(waits) for waits in contest.waits.values())
    mean = sum(map(sum, contest.waits.values())) / sum(map(len, contest.waits.values()))
    contest.end()
    print(
        f"{n_peers} peers at one {role} rank: Jain {jain(shares):.4f}, min/max share {min(shares) / max(shares):.2f},"
    )
    print(f"  {sum(map(len, contest.waits.values())):,} rooms, mean wait {mean:.3f} s, worst {worst:.3f} s (virtual)")
    assert jain(shares) >= 0.98
    assert min(shares) >= 0.7 * max(shares)
    assert worst <= 3 * mean


def greedy(role: str, n_queued: int) -> None:
    """One peer with thousands of chunks queued, and ten with one at a time."""
    contest = Contest(role, 11)
    hog, *modest = contest.star.peers
    contest.enter(hog, n_queued)
    contest.run(0.1)
    before = contest.nbytes[hog.route]
    for peer in modest:
        contest.enter(peer, 1)
    contest.run(0.5)
    hogged = contest.nbytes[hog.route] - before
    shares = [contest.nbytes[peer.route] for peer in modest]
    worst = max(max(contest.waits[peer.route], default=99.0) for peer in modest)
    contest.end()
    print(f"greedy peer with {n_queued:,} rooms queued at one {role} rank, beside 10 with one room each:")
    print(f"  modest {min(shares) / 1024:.0f} to {max(shares) / 1024:.0f} KiB; greedy {hogged / 1024:.0f} KiB")
    print(f"  the modest wait {worst * 1e3:.1f} ms at worst (virtual)")
    assert worst <= 0.05, "a modest peer waits behind a greedy one's backlog"
    assert jain(shares) >= 0.98


def priorities(n_peers: int) -> None:
    """Urgent rooms go first at a decode rank, and the rest get all that the urgent ones leave."""
    contest = Contest("decode", n_peers)
    urgent, rest = contest.star.peers[: n_peers // 4], contest.star.peers[n_peers // 4 :]
    for peer in rest:
        contest.enter(peer, 4, priority=1)
    contest.run(0.1)
    for peer in urgent:
        contest.enter(peer, 1, priority=0)
    contest.run(1.0)
    waits = [[w for peer in peers for w in contest.waits[peer.route]] for peers in (urgent, rest)]
    shares = [contest.nbytes[peer.route] for peer in rest]
    contest.end()
    means = [sum(each) / len(each) for each in waits]
    print(f"priorities: {len(urgent)} urgent wait {means[0] * 1e3:.1f} ms, {len(rest)} others {means[1] * 1e3:.1f} ms")
    print(f"  the others share with Jain {jain(shares):.4f}")
    assert means[0] < means[1] / 2
    assert jain(shares) >= 0.95
