"""The choices a case is drawn from. A seed gives random ones; a failing case is shrunk by lowering them one by one."""

from __future__ import annotations

import random


class Tape:
    """Numbers below given bounds: those of `choices` first, then random ones of `seed`, or zeros without one.

    The first of any options is the simplest, so that lower choices are simpler cases.
    """

    def __init__(self, seed: int | None = None, choices: tuple[int, ...] = ()) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._given = choices
        self.choices: list[int] = []

    def below(self, n: int) -> int:
        at = len(self.choices)
        if at < len(self._given):
            chosen = min(self._given[at], n - 1)
        else:
            chosen = int(self._random.random() * n) if self._random else 0
        self.choices.append(chosen)
        return chosen

    def pick(self, *options):
        return options[self.below(len(options))]

    def between(self, low: int, high: int) -> int:
        """Of `[low, high]`."""
        return low + self.below(high - low + 1)

    def seldom(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def shuffled(self, values) -> list:
        left, found = list(values), []
        while left:
            found.append(left.pop(self.below(len(left))))
        return found

    def cuts(self, n: int, most: int) -> list[int]:
        """`[0, ..., n]` with at most `most` ascending places between."""
        return [0, *sorted({self.between(1, n - 1) for _ in range(self.below(most + 1))} if n > 1 else ()), n]


def shrink(choices: list[int], fails, most_runs: int = 3000) -> tuple[int, ...]:
    """The lowest choices found by which a case still `fails`; those past the end are zeros."""
    best, runs = tuple(choices), 0

    def try_(candidate: tuple[int, ...]) -> bool:
        nonlocal best, runs
        runs += 1
        if runs <= most_runs and candidate != best and fails(candidate):
            best = candidate
            return True
        return False

    n = len(best)
    while n:
        n //= 2
        while try_(best[: len(best) - n]) and n:
            pass
    before = None
    while before != best and runs < most_runs:
        before = best
        for at in range(len(best)):
            if at < len(best) and best[at] and not try_((*best[:at], 0, *best[at + 1 :])):
                for lower in (best[at] // 2, best[at] - 1):
                    if try_((*best[:at], lower, *best[at + 1 :])):
                        break
    while best and not best[-1]:
        best = best[:-1]
    return best
