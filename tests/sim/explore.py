"""Every state of small worlds of the real cores, breadth first."""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tests.sim.network import Configuration, Faults, Global, Move, Network
from tests.sim.nodes import Shape, Violation


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

    def __init__(self, configuration: Configuration, *, most_states: int = 1 << 40, most_s: float = 1e9) -> None:
        self.configuration = configuration
        self.network = Network(configuration)
        self.most_states, self.most_s = most_states, most_s
        self.parent, self.step = array("q"), array("H")
        self.edges_from, self.edges_to = array("I"), array("I")
        self.good: list[int] = []
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
                for n, move in enumerate(self._moves(state, at)):
                    report.n_steps += 1
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

    def _moves(self, state: Global, at: int) -> list[Move]:
        network = self.network
        try:
            if not network.left_over(state):
                network.end(state)
                self.good.append(at)
                self.report.n_ends += 1
                return []
            moves = network.moves(state)
        except Violation as violation:
            violation.path = [*self.path(at), network.words_of(*network.trying)]
            raise
        for move in moves:
            self.report.kinds[move.what] += 1
        if not moves or all(move.fault for move in moves):
            raise self._violation(f"deadlock: {network.left_over(state)}", at)
        return moves

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


CONFIGURATIONS = [
    Configuration(name="one room, clean", shape=Shape()),
    Configuration(name="one room", shape=Shape(late=1), faults=Faults(loss=2, abort=1)),
    Configuration(name="two rooms", shape=Shape(rooms=2, late=1), faults=Faults(loss=1, abort=1)),
    Configuration(name="crash", shape=Shape(chunks=1), faults=Faults(crash=1, abort=1)),
    Configuration(name="two writers, one room", shape=Shape(writers=2, instances=False, chunks=1)),
    Configuration(name="two writers, two rooms", shape=Shape(writers=2, rooms=2, chunks=1), faults=Faults(loss=1)),
]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="configurations; all if none is named")
    parser.add_argument("--most-s", type=float, default=1e9)
    parser.add_argument("--most-states", type=int, default=1 << 40)
    options = parser.parse_args(arguments)
    failed = 0
    for configuration in CONFIGURATIONS:
        if options.names and configuration.name not in options.names:
            continue
        explorer = Explorer(configuration, most_s=options.most_s, most_states=options.most_states)
        try:
            explorer.run()
        except Violation as violation:
            failed = 1
            print(violation)
        print(explorer.report, dict(explorer.report.kinds), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
