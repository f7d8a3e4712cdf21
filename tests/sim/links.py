"""NICs with a speed that is shared: a network for `fleet` in the place of its constant time.

Each rank has `n_rails` NICs of `bytes_per_s` each way, rail to rail with the others' over a network without limits of
its own. A NIC divides its speed evenly among the writes it carries, and a write goes at the speed of the slower of its
ends. What it leaves unused at the other end nobody else gets, so throughput is understated, never overstated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.fleet import Fleet, Node


class Port(NamedTuple):
    """One direction of one NIC."""

    route: bytes
    rail: int
    sends: bool


@dataclass(slots=True, eq=False)
class Flow:
    """One write under way, or a stripe of one."""

    ends: tuple[Port, Port]
    left: float
    done: Callable[[], None]
    bytes_per_s: float = 0.0
    at: float = 0.0
    n_changes: int = 0


class Links:
    """`write` is for `Fleet.write`. With `striped` each write goes over all rails at once, else over the next one."""

    def __init__(self, fleet: Fleet, *, bytes_per_s: float, n_rails: int = 1, striped: bool = False) -> None:
        self.fleet = fleet
        self.bytes_per_s, self.n_rails, self.striped = bytes_per_s, n_rails, striped
        self.carried: dict[Port, set[Flow]] = {}
        self._n_writes = 0

    def write(self, src: Node, dst: Node, nbytes: int, done: Callable[[], None]) -> None:
        self._n_writes += 1
        rails = range(self.n_rails) if self.striped else [self._n_writes % self.n_rails]
        left = len(rails)

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        for rail in rails:
            ends = Port(src.route, rail, sends=True), Port(dst.route, rail, sends=False)
            flow = Flow(ends, nbytes / len(rails), ended, at=self.fleet.now)
            for end in ends:
                self.carried.setdefault(end, set()).add(flow)
            self._divide(ends)

    def _divide(self, ends: tuple[Port, Port]) -> None:
        """The speeds of all that these two carry, which has just changed."""
        now = self.fleet.now
        for flow in sorted(self.carried[ends[0]] | self.carried[ends[1]], key=id):
            share = self.bytes_per_s / max(len(self.carried[end]) for end in flow.ends)
            if share != flow.bytes_per_s:
                flow.left -= flow.bytes_per_s * (now - flow.at)
                flow.bytes_per_s, flow.at = share, now
                flow.n_changes += 1
                self.fleet.at(now + max(0.0, flow.left) / share, self._end, flow, flow.n_changes)

    def _end(self, flow: Flow, n_changes: int) -> None:
        if n_changes != flow.n_changes:
            return
        for end in flow.ends:
            self.carried[end].remove(flow)
        flow.n_changes += 1
        self._divide(flow.ends)
        flow.done()
