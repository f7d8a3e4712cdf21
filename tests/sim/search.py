"""Breadth first through every state of a small world, a level at a time.

For `explore`. Must not know what a step is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.sim.columns import Columns, Words
from tests.sim.facts import Violation
from tests.sim.network import LATE_TAG, Move
from tests.sim.steps import Configuration, Global

Numbers = NDArray[np.uint32]
BATCH = 100_000
"""States whose next ones are found at once."""


@dataclass
class Report:
    name: str
    n_states: int = 0
    n_all: int = 0
    """How many states these stand for, with their images."""
    n_steps: int = 0
    depth: int = 0
    n_ends: int = 0
    n_node_states: int = 0
    n_parts: int = 0
    complete: bool = False
    took_s: float = 0.0

    def __str__(self) -> str:
        whole = "complete" if self.complete else "NOT complete"
        stands_for = f" (for {self.n_all:,})" if self.n_all != self.n_states else ""
        return (
            f"{self.name:24} {self.n_states:>9,} states{stands_for} {self.n_steps:>10,} transitions, "
            f"depth {self.depth:>3}, {self.n_ends:>5,} ends, {self.n_node_states:>7,} node states, "
            f"{self.n_parts:>7,} parts, {self.took_s:6.1f} s, {self.n_steps / max(self.took_s, 1e-9):>7,.0f}/s, {whole}"
        )


class Search:
    """One configuration, explored once."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        most_states: int = 1 << 32,
        most_s: float = 1e9,
        every_order: bool = False,
        mirrored: bool = True,
    ) -> None:
        self.columns = Columns(configuration, every_order=every_order, mirrored=mirrored)
        self.parts = self.columns.parts
        self.most_states, self.most_s = most_states, most_s
        self.report = Report(configuration.name)
        self.levels: list[Words] = []
        self.parents: list[Numbers] = []
        self.edges: list[tuple[Numbers, Numbers]] = []
        """Steps without a fault, by level: from which state, to which."""
        self.good: list[int] = []

    def run(self) -> Report:
        began = time.perf_counter()
        report = self.report
        try:
            self._search(began)
            if report.complete:
                if self.columns.mirror is not None:
                    self.columns.mirror.verify()
                self._all_end()
        finally:
            report.took_s = time.perf_counter() - began
            report.n_node_states = len(self.parts.nodes.frozen)
            report.n_parts = len(self.parts.sides) + len(self.parts.decodes)
        return report

    def _search(self, began: float) -> None:
        report = self.report
        level = self.seen = np.array([self.columns.root], np.uint64)
        self.numbers = np.zeros(1, np.uint32)
        self.parents.append(np.zeros(1, np.uint32))
        start = 0
        while len(level):
            self.levels.append(level)
            report.n_states = start + len(level)
            report.n_all += len(level)
            if self.columns.mirror is not None:
                report.n_all += int((self.columns.images(level) != level).sum())
            found = []
            for at in range(0, len(level), BATCH):
                if time.perf_counter() - began > self.most_s or report.n_states > self.most_states:
                    return
                found.append(self._batch(level[at : at + BATCH], start + at))
            start += len(level)
            level = self._merged(found, start)
            report.depth += bool(len(level))
        report.complete = True

    def _batch(self, words: Words, start: int) -> tuple[Words, Numbers, NDArray[np.bool_]]:
        """Next states, from which, and whether without a fault."""
        try:
            moves, ends = self.columns.moves(words)
        except Violation as violation:
            violation.path = self._way(start + violation.at)
            raise
        self.good += [start + at for at in ends]
        self.report.n_ends += len(ends)
        self.report.n_steps += len(moves.src)
        after = self.columns.least(moves.decode, moves.common, moves.sides)
        return after, (moves.src + start).astype(np.uint32), ~moves.fault

    def _merged(self, found: list[tuple[Words, Numbers, NDArray[np.bool_]]], n_known: int) -> Words:
        after = np.concatenate([each[0] for each in found])
        src = np.concatenate([each[1] for each in found])
        sound = np.concatenate([each[2] for each in found])
        del found
        words, first, inverse = np.unique(after, return_index=True, return_inverse=True)
        where = np.searchsorted(self.seen, words)
        known = np.zeros(len(words), bool)
        inside = where < len(self.seen)
        known[inside] = self.seen[where[inside]] == words[inside]
        number = np.empty(len(words), np.uint32)
        number[known] = self.numbers[where[known]]
        fresh = np.flatnonzero(~known)
        fresh = fresh[np.argsort(first[fresh], kind="stable")]
        number[fresh] = np.arange(n_known, n_known + len(fresh), dtype=np.uint32)
        self.edges.append((src[sound], number[inverse[sound]]))
        level = words[fresh]
        self.parents.append(src[first[fresh]])
        new = ~known
        self.seen = np.insert(self.seen, where[new], words[new])
        self.numbers = np.insert(self.numbers, where[new], number[new])
        return level

    def _all_end(self) -> None:
        """From every state a good end can be reached without another fault; else the way is lost for ever."""
        reaches = np.zeros(self.report.n_states, bool)
        reaches[self.good] = True
        n = -1
        while n != (n := int(reaches.sum())):
            for sources, targets in reversed(self.edges):
                reaches[sources[reaches[targets]]] = True
        if not reaches.all():
            lost = int(np.argmin(reaches))
            violation = Violation(f"{int((~reaches).sum())} states never come to a good end")
            violation.path = self._way(lost)
            raise violation

    # Words.

    def _way(self, at: int) -> list[str]:
        """The shortest way to a state, and the step that is wrong there or, in another order, before."""
        network, levels, parents = self.parts.whole, np.concatenate(self.levels), np.concatenate(self.parents)
        numbers = [at]
        while numbers[-1]:
            numbers.append(int(parents[numbers[-1]]))
        words, state = [], self.columns.state(self.columns.root)
        try:
            for number in reversed(numbers[:-1]):
                move = next(move for move in self._every(state) if self.columns.word(move.after) == levels[number])
                words.append(network.words(move))
                state = move.after
            for _ in self._every(state):
                pass
        except Violation:
            words.append(network.words_of(*network.trying))
        return words

    def _every(self, state: Global) -> Iterator[Move]:
        network, quiet = self.parts.whole, True
        for node in range(len(state.nodes)):
            for move in network._of(state, node):
                quiet = quiet and (move.fault or move.what == LATE_TAG)
                yield move
        if quiet:
            yield from network._time_passes(state)

    @property
    def ends(self) -> set[Global]:
        """The good ends, with their images."""
        words = np.concatenate(self.levels)[self.good]
        images = self.columns.images(words) if self.columns.mirror is not None else words
        return {self.columns.state(word) for word in {*words.tolist(), *images.tolist()}}
