"""Every state of a small world, each order of everything, one whole state after another: what `search` is held against.

Must not know of parts, columns or images. It is slow, and it does not look for states that never come to a good end.
"""

from __future__ import annotations

import time
from array import array

from tests.sim.facts import Violation
from tests.sim.network import Move, Network
from tests.sim.search import Report
from tests.sim.steps import Configuration, Global


class Plain:
    """One configuration, explored once, whole states at a time."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        every_order: bool = True,
    ) -> None:
        self.configuration = configuration
        self.network = Network(configuration, every_order=every_order)
        self.parent, self.step = array("q"), array("H")
        self.ends: set[Global] = set()
        self.report = Report(configuration.name)

    def run(self) -> Report:
        began = time.perf_counter()
        report = self.report
        try:
            self._search()
        finally:
            report.took_s = time.perf_counter() - began
            report.n_states = report.n_all = len(self.parent)
            report.n_node_states = len(self.network.nodes.frozen)
        return report

    def _search(self) -> None:
        network, report = self.network, self.report
        self.root = network.first()
        seen = {hash(self.root): 0}
        self.parent.append(-1)
        self.step.append(0)
        level, at = [self.root], 0
        while level:
            following = []
            for state in level:
                for n, move in self._moves(state, at):
                    report.n_steps += 1
                    key = hash(move.after)
                    number = seen.get(key)
                    if number is None:
                        number = seen[key] = len(self.parent)
                        self.parent.append(at)
                        self.step.append(n)
                        following.append(move.after)
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
                self.ends.add(state)
                self.report.n_ends += 1
        except Violation as violation:
            violation.path = [*self.path(at), network.words_of(*network.trying)]
            raise
        if left and all(move.fault for move in moves):
            raise self._violation(f"deadlock: {left}", at)
        return [(n, move) for n, move in enumerate(moves) if left or move.fault]

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
