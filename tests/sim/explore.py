"""Every state of small worlds of the real cores, breadth first: `python -m tests.sim.explore`.

What is covered. The real `PrefillCore` and `DecodeCore`, frames and tags in their binary forms, in worlds of one or
two writers, one or two rooms of one or two chunks a writer, and a lane for about two leases. All orders of: frames
(those of one process to another keep theirs), ends of gathers, scatters and disconnects, tags, completions, the
engines' steps, and data that comes late. At any moment, as often as a configuration's `Faults` say: a frame is lost,
a room is aborted on either side, a process crashes and another takes its address, a tag is told twice, a question is
repeated early, a deadline passes early (a peer is called silent that is not), a post's outcome is unknown. A
disconnect is a fence, or (`fences`) only the end of the other process is. A write may land at any moment until its
tag or completion is told, also after its room's abort and its writer's end. Once nothing is under way time passes:
any question may be repeated, in any order; deadlines pass only for what something failed for, so that whatever waits
for a deadline though nothing failed is found.

What is checked. I1, I4, I6 and I7 of every input to a process (`nodes`), I3, I8, I13, I15 and I16 of every state of
one (`facts`), I2, I5, I8 and I11 of the whole (`steps`, `network`), and I14 at the ends. A state without a next step
must be a good end: every room ended and released, nothing left of any. From every state some way without a further
fault leads to a good end; and rooms to which nothing happened but loss, or the abort of another, succeed.

What is not. Bytes do not move: what may be written is judged by the ledgers instead. Frames never come twice or out
of order within one link, as seq is for that, and the cores judge it elsewhere. Time has no lengths: any early timer
stands for any slow network, and where a timer's handler looks at how long something waited, either none has waited
long enough or all have. Heartbeats are not sent except to a peer that forgot the session. Worlds are small.

How states are cut down. Two states are one when all that may ever differ in their futures is equal (`frozen`). Steps
of a writer that has a frame to hear are not interleaved with the other processes' where they commute with all of
those (`Network._apart`). A node's answer to an input is computed once (`nodes`). Visited states are kept as 64-bit
hashes: that two of a million share one has a chance of 1 in 30 million.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import numpy as np

from tests.sim.facts import Shape, Violation
from tests.sim.network import Move, Network
from tests.sim.steps import Configuration, Faults, Global


@dataclass
class Report:
    name: str
    n_states: int = 0
    n_steps: int = 0
    depth: int = 0
    n_ends: int = 0
    n_node_states: int = 0
    n_node_steps: int = 0
    complete: bool = False
    took_s: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        whole = "complete" if self.complete else "NOT complete"
        return (
            f"{self.name:24} {self.n_states:>9,} states {self.n_steps:>10,} transitions, depth {self.depth:>3}, "
            f"{self.n_ends:>5,} ends, {self.n_node_states:>7,} node states, {self.n_node_steps:>8,} node steps, "
            f"{self.took_s:6.1f} s, {self.n_steps / max(self.took_s, 1e-9):>7,.0f}/s, {whole}"
        )


class Explorer:
    """One configuration, explored once."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        most_states: int = 1 << 40,
        most_s: float = 1e9,
        every_order: bool = False,
    ) -> None:
        self.configuration = configuration
        self.network = Network(configuration, every_order=every_order)
        self.most_states, self.most_s = most_states, most_s
        self.parent, self.step = array("q"), array("H")
        self.edges_from, self.edges_to = array("I"), array("I")
        self.good: list[int] = []
        self.ends: set[Global] = set()
        self.report = Report(configuration.name)

    def run(self) -> Report:
        began = time.perf_counter()
        report = self.report
        try:
            self._search(began)
        finally:
            report.took_s = time.perf_counter() - began
            report.n_states = len(self.parent)
            report.n_node_states = len(self.network.nodes.frozen)
            report.n_node_steps = len(self.network.nodes.memo)
        if report.complete:
            self._all_end()
            report.took_s = time.perf_counter() - began
        return report

    def _search(self, began: float) -> None:
        network, report = self.network, self.report
        self.root = network.first()
        seen = {hash(self.root): 0}
        self.parent.append(-1)
        self.step.append(0)
        level, at = [self.root], 0
        while level:
            following = []
            for state in level:
                if time.perf_counter() - began > self.most_s or len(self.parent) > self.most_states:
                    return
                for n, move in self._moves(state, at):
                    report.n_steps += 1
                    report.kinds[move.what] += 1
                    key = hash(move.after)
                    number = seen.get(key)
                    if number is None:
                        number = seen[key] = len(self.parent)
                        self.parent.append(at)
                        self.step.append(n)
                        following.append(move.after)
                    if not move.fault:
                        self.edges_from.append(at)
                        self.edges_to.append(number)
                at += 1
            level = following
            report.depth += bool(level)
        report.complete = True

    def _moves(self, state: Global, at: int) -> list[tuple[int, Move]]:
        network = self.network
        try:
            left = network.left_over(state)
            moves = network.moves(state)
            if not left:
                network.end(state)
                self.good.append(at)
                self.ends.add(state)
                self.report.n_ends += 1
        except Violation as violation:
            violation.path = [*self.path(at), network.words_of(*network.trying)]
            raise
        if left and all(move.fault for move in moves):
            raise self._violation(f"deadlock: {left}", at)
        return [(n, move) for n, move in enumerate(moves) if left or move.fault]

    def _all_end(self) -> None:
        """From every state a good end can be reached without another fault; else the way is lost for ever."""
        n = len(self.parent)
        sources, targets = np.frombuffer(self.edges_from, np.uint32), np.frombuffer(self.edges_to, np.uint32)
        order = np.argsort(targets, kind="stable")
        starts = np.searchsorted(targets[order], np.arange(n + 1))
        before = sources[order]
        reaches = np.zeros(n, bool)
        reaches[self.good] = True
        todo = list(self.good)
        while todo:
            number = todo.pop()
            for other in before[starts[number] : starts[number + 1]].tolist():
                if not reaches[other]:
                    reaches[other] = True
                    todo.append(other)
        if not reaches.all():
            lost = int(np.argmin(reaches))
            raise self._violation(f"{int((~reaches).sum())} states never come to a good end", lost)

    def _violation(self, what: str, at: int) -> Violation:
        violation = Violation(what)
        violation.path = self.path(at)
        return violation

    def path(self, at: int) -> list[str]:
        return [self.network.words(move) for move in self.moves_to(at)]

    def moves_to(self, at: int) -> list[Move]:
        """The shortest way to a state."""
        steps = []
        while self.parent[at] >= 0:
            steps.append(self.step[at])
            at = self.parent[at]
        state, moves = self.root, []
        for n in reversed(steps):
            move = self.network.moves(state)[n]
            moves.append(move)
            state = move.after
        return moves


QUICK = [
    Configuration(name="one room", shape=Shape(late=1), faults=Faults(loss=2, abort=1, twice=1)),
    Configuration(
        name="from the start", shape=Shape(chunks=1), faults=Faults(loss=2, abort=1), connected=False, begun=False
    ),
    Configuration(
        name="a lane for one",
        shape=Shape(rooms=2, chunks=1, late=1, lane_nbytes=256),
        faults=Faults(early=2),
    ),
    Configuration(
        name="padding", shape=Shape(rooms=2, chunks=1, tokens=32, lane_nbytes=768), faults=Faults(loss=1, abort=1)
    ),
    Configuration(name="a crash, then again", shape=Shape(chunks=1), faults=Faults(loss=1, crash=1), again=1),
    Configuration(name="straight into pages", shape=Shape(path="direct"), faults=Faults(loss=1, abort=1, twice=1)),
    Configuration(name="a false alarm", shape=Shape(), faults=Faults(late=1, broken=1)),
    Configuration(
        name="two writers of a room", shape=Shape(writers=2, instances=False, chunks=1), faults=Faults(crash=1)
    ),
]
"""Complete within seconds."""

PAIR = {"writers": 2, "instances": False, "chunks": 1}
"""Two writers that each hold half of the heads of every room."""

LARGE = [
    Configuration(name="two rooms", shape=Shape(rooms=2, late=1), faults=Faults(loss=1, abort=1)),
    Configuration(name="two writers, two rooms", shape=Shape(writers=2, rooms=2), faults=Faults(abort=1)),
    Configuration(
        name="two writers, a crash", shape=Shape(writers=2, rooms=2, chunks=1), faults=Faults(abort=1, crash=1)
    ),
    Configuration(name="two writers of a room, lossy", shape=Shape(**PAIR), faults=Faults(loss=2, abort=1)),
    Configuration(name="two writers of a room, alarmed", shape=Shape(**PAIR), faults=Faults(late=1)),
    Configuration(name="impatient", shape=Shape(rooms=2, late=1), faults=Faults(early=2)),
    Configuration(
        name="two lanes",
        shape=Shape(writers=2, rooms=2, chunks=1, late=1, lane_nbytes=256, n_lanes=2),
        faults=Faults(abort=1, early=1),
    ),
    Configuration(
        name="staged or direct",
        shape=Shape(rooms=2, chunks=1, late=1, lane_nbytes=256, path="auto"),
        faults=Faults(abort=1, early=1),
    ),
    Configuration(name="nothing fences", shape=Shape(chunks=1), faults=Faults(crash=1, late=1), fences=False, again=1),
]
"""Complete within minutes, together."""

HUGE = [
    Configuration(
        name="all at once", shape=Shape(writers=2, rooms=2, late=1), faults=Faults(loss=2, abort=1, crash=1), again=1
    ),
    Configuration(
        name="two rooms of two writers",
        shape=Shape(**PAIR, rooms=2),
        faults=Faults(loss=2, abort=1, crash=1),
    ),
    Configuration(name="two rooms, two lost", shape=Shape(rooms=2, late=1), faults=Faults(loss=2, abort=1, twice=1)),
    Configuration(name="two writers of a room, again", shape=Shape(**PAIR), faults=Faults(crash=1, abort=1), again=1),
]
"""For those with hours and memory, each cut off by --most-s or --most-states; by name only."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="configurations; those that end within minutes if none is named")
    parser.add_argument("--most-s", type=float, default=1e9)
    parser.add_argument("--most-states", type=int, default=1 << 40)
    parser.add_argument("--workers", type=int, default=2, help="processes; default %(default)s")
    options = parser.parse_args(arguments)
    by_name = {configuration.name: configuration for configuration in [*QUICK, *LARGE, *HUGE]}
    chosen = [by_name[name] for name in options.names] if options.names else [*QUICK, *LARGE]
    one = partial(_explore, options.most_s, options.most_states)
    failed = False
    with get_context("spawn").Pool(min(options.workers, len(chosen)), maxtasksperchild=1) as pool:
        for said, good in pool.imap(one, chosen, chunksize=1):
            print(said, flush=True)
            failed = failed or not good
    return int(failed)


def _explore(most_s: float, most_states: int, configuration: Configuration) -> tuple[str, bool]:
    """What there is to say of one world, and whether nothing is wrong in it."""
    explorer = Explorer(configuration, most_s=most_s, most_states=most_states)
    try:
        explorer.run()
    except Violation as violation:
        return f"{violation}\n{explorer.report}", False
    return str(explorer.report), True


if __name__ == "__main__":
    sys.exit(main())
