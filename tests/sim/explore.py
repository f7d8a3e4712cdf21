"""Every state of small worlds of the real cores, breadth first: `python -m tests.sim.explore [NAME ...]`.

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

How states are cut down. Two states are one when all that may ever differ in their futures is equal (`frozen`), and
what lay in memory that was given back is forgotten (`Steps.settled`). What a core answers to an input is worked out
once, by the real core (`nodes`). A frame is lost only when it would be heard, as nobody can tell when it was.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from tests.sim.facts import Shape, Violation, must
from tests.sim.network import Move, Network
from tests.sim.steps import Configuration, Faults, Global

QUICK = [
    Configuration("one room", Shape(late=1), Faults(loss=2, abort=1, twice=1)),
    Configuration("from the start", Shape(chunks=1), Faults(loss=2, abort=1), connected=False, begun=False),
    Configuration("a lane for one", Shape(rooms=2, chunks=1, late=1, lane_nbytes=256), Faults(early=2)),
    Configuration("padding", Shape(rooms=2, chunks=1, tokens=32, lane_nbytes=768), Faults(loss=1, abort=1)),
    Configuration("lent in advance", Shape(chunks=1, late=1, advance=True), Faults(loss=2, abort=1, early=2)),
    Configuration("lent in advance, too little", Shape(advance=True, lane_nbytes=1024), Faults(loss=2, abort=1)),
    Configuration(
        "lent in advance, in another's way",
        Shape(rooms=2, chunks=1, late=1, lane_nbytes=512, advance=True),
        Faults(loss=1, early=2),
    ),
    Configuration("a crash, then again", Shape(chunks=1), Faults(loss=1, crash=1), again=1),
    Configuration("straight into pages", Shape(path="direct"), Faults(loss=1, abort=1, twice=1)),
    Configuration("a row in place", Shape(chunks=1, rows=True), Faults(loss=1, abort=1, twice=1, crash=1)),
    Configuration("a row that fails", Shape(chunks=1, rows=True), Faults(late=1, broken=1)),
    Configuration("a false alarm", Shape(), Faults(late=1, broken=1)),
    Configuration("two writers of a room", Shape(writers=2, instances=False, chunks=1), Faults(crash=1)),
    Configuration("tags are said", Shape(notifies=False), Faults(loss=2, abort=1, early=1)),
    Configuration("tags are said, of pages", Shape(path="direct", notifies=False), Faults(loss=2, abort=1)),
    Configuration("tags are said, a crash", Shape(chunks=1, notifies=False), Faults(loss=1, crash=1)),
]
"""Complete within seconds."""

PAIR = Shape(writers=2, instances=False, chunks=1)
"""Two writers that each hold half of the heads of every room."""

LARGE = [
    Configuration("all at once, a chunk each", Shape(writers=2, rooms=2, chunks=1), Faults(loss=2, abort=1, crash=1)),
    Configuration("two rooms", Shape(rooms=2, late=1), Faults(loss=1, abort=1)),
    Configuration("two writers, two rooms", Shape(writers=2, rooms=2), Faults(abort=1)),
    Configuration("two writers of a room, lossy", PAIR, Faults(loss=2, abort=1)),
    Configuration("two writers of a room, alarmed", PAIR, Faults(late=1)),
    Configuration(
        "lent in advance, and aborted", Shape(rooms=2, chunks=1, late=1, advance=True), Faults(loss=1, abort=1, crash=1)
    ),
    Configuration("impatient", Shape(rooms=2, late=1), Faults(early=2)),
    Configuration(
        "two lanes", Shape(writers=2, rooms=2, chunks=1, late=1, lane_nbytes=256, n_lanes=2), Faults(abort=1, early=1)
    ),
    Configuration(
        "staged or direct", Shape(rooms=2, chunks=1, late=1, lane_nbytes=256, path="auto"), Faults(abort=1, early=1)
    ),
    Configuration("nothing fences", Shape(chunks=1), Faults(crash=1, late=1), fences=False, again=1),
]
"""Complete within minutes, together."""


@dataclass
class Report:
    name: str
    n_states: int = 0
    n_steps: int = 0
    n_ends: int = 0
    depth: int = 0

    def __str__(self) -> str:
        steps = f"{self.n_steps:>10,} transitions, depth {self.depth:>3}"
        return f"{self.name:40} {self.n_states:>9,} states, {steps}, {self.n_ends:>5,} ends"


class Search:
    """One configuration, explored once, one whole state after another. States are told apart by a hash of 64 bits."""

    def __init__(self, configuration: Configuration) -> None:
        self.network = Network(configuration)
        self.report = Report(configuration.name)
        self.ends: list[int] = []
        self._parent, self._step = array("q"), array("H")
        """Of each state a state before it, and which of its moves led here."""
        self._src, self._dst = array("q"), array("q")
        """Every step without a fault: from which state, to which."""

    def run(self) -> Report:
        """Raises a `Violation`, with the shortest way to it."""
        network, report = self.network, self.report
        self.root = network.first()
        seen = {hash(self.root): 0}
        self._parent.append(-1)
        self._step.append(0)
        level, at = [self.root], 0
        while level:
            following = []
            for state in level:
                for n, move in self._moves(state, at):
                    key = hash(move.after)
                    number = seen.setdefault(key, len(self._parent))
                    if number == len(self._parent):
                        self._parent.append(at)
                        self._step.append(n)
                        following.append(move.after)
                    if not move.fault:
                        self._src.append(at)
                        self._dst.append(number)
                    report.n_steps += 1
                at += 1
            report.n_states = at
            level = following
            report.depth += bool(level)
        self._all_end()
        return report

    def _moves(self, state: Global, at: int) -> list[tuple[int, Move]]:
        network = self.network
        try:
            left = network.left_over(state)
            moves = network.moves(state)
            if not left:
                network.end(state)
                self.ends.append(at)
                self.report.n_ends += 1
            must(not left or not all(move.fault for move in moves), f"deadlock: {left}")
        except Violation as violation:
            violation.path = [*self._way(at), network.words("at last", *network.trying)]
            raise
        return [(n, move) for n, move in enumerate(moves) if left or move.fault]

    def _all_end(self) -> None:
        """From every state a good end can be reached without another fault; else the way is lost for ever."""
        reaches = np.zeros(self.report.n_states, bool)
        reaches[self.ends] = True
        src, dst = np.array(self._src), np.array(self._dst)
        n = -1
        while n != (n := int(reaches.sum())):
            reaches[src[reaches[dst]]] = True
        if not reaches.all():
            violation = Violation(f"{int((~reaches).sum())} states never come to a good end")
            violation.path = self._way(int(np.argmin(reaches)))
            raise violation

    def _way(self, at: int) -> list[str]:
        """The shortest way to a state, in words."""
        steps = []
        while at:
            steps.append(self._step[at])
            at = self._parent[at]
        state, words = self.root, []
        for n in reversed(steps):
            move = self.network.moves(state)[n]
            words.append(self.network.words(move.what, move.node, move.given))
            state = move.after
        return words


def main(names: list[str]) -> int:
    chosen = [one for one in [*LARGE, *QUICK] if not names or one.name in names]
    failed = False
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for said, good in pool.imap(_explore, chosen, chunksize=1):
            print(said, flush=True)
            failed = failed or not good
    return int(failed)


def _explore(configuration: Configuration) -> tuple[str, bool]:
    """What there is to say of one world, and whether nothing is wrong in it."""
    search = Search(configuration)
    try:
        return str(search.run()), True
    except Violation as violation:
        return f"{violation}\n{search.report}", False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
