"""States of a small world as columns of part numbers, and all their next states at once.

For `search`. A state is one 64-bit word: decode's core, the faults left and each writer's side, by their numbers in
`sides.Parts`. Nothing is hashed: two states are the same word or are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.sim.facts import Violation
from tests.sim.mirror import Asymmetry, Mirror
from tests.sim.sides import Parts, Step
from tests.sim.steps import Configuration, Faults, Global

Column = NDArray[np.int64]
Words = NDArray[np.uint64]
MASK_BITS = 6


class _Rows:
    """A growing matrix of numbers."""

    def __init__(self, width: int) -> None:
        self.n, self._data = 0, np.empty((1024, width), np.int64)

    def append(self, row: list[int]) -> None:
        if self.n == len(self._data):
            self._data = np.concatenate([self._data, np.empty_like(self._data)])
        self._data[self.n] = row
        self.n += 1

    @property
    def data(self) -> NDArray[np.int64]:
        return self._data[: self.n]


class Table:
    """Steps of parts, worked out when first asked for: of decode (or one life of it), a side, and what may fail."""

    def __init__(self, make: Callable[[int, int, Faults], list[Step]], masks: list[Faults], n_sides: int) -> None:
        self.make, self.masks, self.n_sides = make, masks, n_sides
        self.spans = _Rows(2)
        self.rows = _Rows(5 + n_sides)
        self._of: dict[tuple[int, int], int] = {}

    def span(self, a: int, b: int) -> int:
        number = self._of.get((a, b))
        if number is None:
            steps = self.make(a >> MASK_BITS, b, self.masks[a & (1 << MASK_BITS) - 1])
            number = self._of[a, b] = self.spans.n
            self.spans.append([self.rows.n, len(steps)])
            for step in steps:
                added = step.added or (0,) * self.n_sides
                self.rows.append([step.spent, step.aborted, step.decode, step.side, step.late, *added])
        return number


class Moves(NamedTuple):
    """Steps from some states: from which, to what; `late` is a tag that may never come."""

    src: Column
    fault: NDArray[np.bool_]
    late: NDArray[np.bool_]
    decode: Column
    common: Column
    sides: list[Column]

    @staticmethod
    def joined(parts: list[Moves]) -> Moves:
        columns = [np.concatenate(column) for column in zip(*(part[:5] for part in parts), strict=True)]
        return Moves(*columns, [np.concatenate(c) for c in zip(*(part.sides for part in parts), strict=True)])


class Columns:
    """The transition relation of one configuration, on many states at once."""

    def __init__(self, configuration: Configuration, *, every_order: bool, mirrored: bool) -> None:
        self.configuration, self.every_order = configuration, every_order
        parts = self.parts = Parts(configuration)
        n = self.n_sides = parts.n_sides
        self.bits = (19, 5, 20, 20) if n == 2 else (20, 8, 36)
        self.masks: list[Faults] = []
        self.of_decode = Table(lambda d, _, left: parts.of_decode(d, left), self.masks, n)
        self.of_side = [Table(partial(parts.of_side, w), self.masks, n) for w in range(1, n + 1)]
        self.of_writer = [Table(partial(parts.of_writer, w), self.masks, n) for w in range(1, n + 1)]
        self.commons: list[tuple[Faults, int]] = []
        self._common_numbers: dict[tuple[Faults, int], int] = {}
        root = parts.whole.first()
        self.mirror = Mirror(parts, root) if mirrored and configuration.symmetric else None
        self.root = self.word(root)
        if self.mirror is not None and self.images(np.array([self.root], np.uint64))[0] != self.root:
            raise Asymmetry("the first state is not its own image")

    def pack(self, decode: Column, common: Column, sides: list[Column]) -> Words:
        word = np.zeros(len(decode), np.uint64)
        for bits, column in zip(self.bits, (decode, common, *sides), strict=True):
            if len(column) and int(column.max()) >> bits:
                raise OverflowError(f"{self.configuration.name}: parts outgrow {self.bits} bits")
            word = word << np.uint64(bits) | column.astype(np.uint64)
        return word

    def unpack(self, word: Words) -> list[Column]:
        columns = []
        for bits in reversed(self.bits):
            columns.append((word & np.uint64((1 << bits) - 1)).astype(np.int64))
            word = word >> np.uint64(bits)
        return columns[::-1]

    def common(self, left: Faults, aborted: int) -> int:
        number = self._common_numbers.setdefault((left, aborted), len(self.commons))
        if number == len(self.commons):
            self.commons.append((left, aborted))
        return number

    def _mask(self, common: int) -> int:
        """Which faults there are left."""
        mask = Faults(*(min(few, 1) for few in self.commons[common][0]))
        if mask not in self.masks:
            self.masks.append(mask)
        return self.masks.index(mask)

    def _charged(self, common: int, what: int) -> int:
        """The faults left after one more, if any."""
        left, aborted = self.commons[common]
        kind, room = (what >> 8) - 1, what & 0xFF
        if kind >= 0:
            left = Faults(*(few - (n == kind) for n, few in enumerate(left)))
        return self.common(left, room or aborted)

    def word(self, state: Global) -> int:
        decode, sides = self.parts.split(state)
        numbers = [decode, self.common(state.left, state.aborted), *map(self.parts.side, sides)]
        decode_, common, *rest = (np.array([number], np.int64) for number in numbers)
        return int(self.least(decode_, common, rest)[0])

    def state(self, word: int) -> Global:
        decode, common, *sides = (int(column[0]) for column in self.unpack(np.array([word], np.uint64)))
        return self.parts.joined(decode, sides, *self.commons[common])

    def least(self, decode: Column, common: Column, sides: list[Column]) -> Words:
        """The words of states, or of their images where those are less."""
        words = self.pack(decode, common, sides)
        if self.mirror is None:
            return words
        words, inverse = np.unique(words, return_inverse=True)
        return np.minimum(words, self.images(words))[inverse]

    def images(self, words: Words) -> Words:
        """The words of the images of states."""
        mirror = self.mirror
        assert mirror is not None
        decode, common, *sides = self.unpack(words)
        decode = self._look(lambda d, _: mirror.decode(d), decode, decode)
        common = self._look(lambda c, _: self.common(*mirror.common(*self.commons[c])), common, common)
        images = [self._look(lambda s, _: mirror.side(s), side, side) for side in reversed(sides)]
        return self.pack(decode, common, images)

    # Steps.

    def _look(self, f: Callable[[int, int], int], a: Column, b: Column, src: Column | None = None) -> Column:
        """f of every pair, worked out once for equal ones."""
        key, inverse = np.unique(a << 32 | b, return_inverse=True)
        out = np.empty(len(key), np.int64)
        for n, pair in enumerate(key.tolist()):
            try:
                out[n] = f(pair >> 32, pair & 0xFFFFFFFF)
            except Violation as violation:
                at = int(np.flatnonzero(inverse == n)[0])
                raise self._at(at if src is None else int(src[at]), violation) from None
        return out[inverse]

    @staticmethod
    def _at(at: int, violation: Violation) -> Violation:
        violation.at = at
        return violation

    def moves(self, words: Words) -> tuple[Moves, list[int]]:
        """Every step from these states, and which of them are good ends."""
        n, parts = len(words), self.parts
        d, c, *s = self.unpack(words)
        everything = np.arange(n)
        mask = self._look(lambda c, _: self._mask(c), c, c)
        life = self._look(lambda d, _: parts.life(d), d, d) << MASK_BITS | mask
        core = d << MASK_BITS | mask
        crash_left = np.array([left.crash > 0 for left, _ in self.commons])[c]
        free, found = np.ones(n, bool), []
        for w in range(self.n_sides if not self.every_order else 0):
            apart = self._look(lambda _, s, w=w: parts.apart(w + 1, s), np.zeros_like(d), s[w]).astype(bool)
            alone = np.flatnonzero(free & apart & ~crash_left)
            found += self._steps(self.of_writer[w], w, life, s[w], alone, (d, c, s))
            free[alone] = False
        rest = everything[free]
        for w in range(self.n_sides):
            found += self._steps(self.of_writer[w], w, life, s[w], rest, (d, c, s))
            found += self._steps(self.of_side[w], w, core, s[w], rest, (d, c, s))
        found += self._steps(self.of_decode, -1, core, core * 0, rest, (d, c, s))
        found += self._crashes(rest[crash_left[rest]], d, c, s)
        moves = self._settled(Moves.joined(found), d)
        under_way = np.zeros(n, bool)
        under_way[moves.src[~moves.fault & ~moves.late]] = True
        moving = np.zeros(n, bool)
        moving[moves.src[~moves.fault]] = True
        quiet, ends = self._quiet(np.flatnonzero(~under_way), moving, d, c, s)
        return (Moves.joined([moves, quiet]) if quiet is not None else moves), ends

    def _steps(self, table: Table, w: int, a: Column, b: Column, who: Column, state: tuple) -> list[Moves]:
        if not len(who):
            return []
        d, c, s = state
        spans = self._look(table.span, a[who], b[who], who)
        starts, counts = table.spans.data[spans].T
        src = np.repeat(who, counts)
        offsets = np.arange(len(src)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = table.rows.data[np.repeat(starts, counts) + offsets]
        spent, aborted, decode, side, late = rows[:, :5].T
        common = self._look(self._charged, c[src], (spent + 1) << 8 | aborted)
        sides = [each[src] for each in s]
        if w >= 0:
            sides[w] = side
        for n in range(self.n_sides):
            added = rows[:, 5 + n]
            some = np.flatnonzero(added)
            if len(some):
                sides[n] = sides[n].copy()
                sides[n][some] = self._look(self.parts.merged, sides[n][some], added[some])
        decode = np.where(decode >= 0, decode, d[src])
        return [Moves(src, spent >= 0, late.astype(bool), decode, common, sides)]

    def _crashes(self, who: Column, d: Column, c: Column, s: list[Column]) -> list[Moves]:
        if not len(who):
            return []
        parts = self.parts
        born = self._look(lambda d, _: parts.born_again(d), d[who], d[who])
        kind = Faults._fields.index("crash")
        common = self._look(self._charged, c[who], np.full(len(who), (kind + 1) << 8))
        sides = [
            self._look(lambda d, s, w=w: parts.crashed(w, d, s), d[who], s[w - 1][who])
            for w in range(1, self.n_sides + 1)
        ]
        fault = np.ones(len(who), bool)
        return [Moves(who, fault, ~fault, born, common, sides)]

    def _settled(self, moves: Moves, d: Column) -> Moves:
        parts, src = self.parts, moves.src
        before = d[src]
        succeeds = self._look(lambda a, b: bool(parts.succeeds(a, b)), before, moves.decode, src).astype(bool)
        checked = set()
        for at in np.flatnonzero(succeeds).tolist():
            who = (int(before[at]), int(moves.decode[at]), *(int(side[at]) for side in moves.sides))
            if who in checked:
                continue
            checked.add(who)
            state = parts.joined(who[1], list(who[2:]), Faults())
            try:
                for handle in parts.succeeds(who[0], who[1]):
                    parts.whole.covered(state, handle)
            except Violation as violation:
                raise self._at(int(src[at]), violation) from None
        sides = [
            self._look(lambda d, s, w=w: parts.settled(w, d, s), moves.decode, side, src)
            for w, side in enumerate(moves.sides, 1)
        ]
        return moves._replace(sides=sides)

    def _quiet(
        self, who: Column, moving: NDArray[np.bool_], d: Column, c: Column, s: list[Column]
    ) -> tuple[Moves | None, list[int]]:
        """Where nothing is under way: good ends, or time passes."""
        parts = self.parts
        rows: list[list[int]] = []
        ends: list[int] = []
        for at in who.tolist():
            state = parts.joined(int(d[at]), [int(side[at]) for side in s], *self.commons[c[at]])
            left = parts.whole.left_over(state)
            try:
                if not left:
                    parts.whole.end(state)
                    ends.append(at)
                    continue
                passes = list(parts.whole._time_passes(state))
            except Violation as violation:
                raise self._at(at, violation) from None
            if not passes and not moving[at]:
                raise self._at(at, Violation(f"deadlock: {left}"))
            for move in passes:
                decode, sides = parts.split(move.after)
                rows.append([at, decode, int(c[at]), *(parts.side(side) for side in sides)])
        if not rows:
            return None, ends
        src, decode, common, *sides = np.array(rows, np.int64).T
        false = np.zeros(len(src), bool)
        return Moves(src, false, false, decode, common, sides), ends
