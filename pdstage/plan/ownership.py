"""Which tokens of a sequence two ranks both hold, under context parallelism on either side.

The tokens of a component that two ranks both hold are *numbered* in order, from 0. Staged bytes, leases and kernels use
these numbers. Rectangles, tags and coverage use absolute positions: `[start, stop)` means the tokens in it that both
ranks hold. If both hold every token the two are the same.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import ALL_TOKENS, Layout, TokenShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from pdstage.plan.staging import Rect

_MAX_GRAINS = 1 << 14


class CommonTokens:
    """The tokens that two ranks both hold of any sequence, numbered in order from 0.

    They repeat every `period` tokens, `per_period` in each, in pieces of `grain` tokens that start at multiples of
    `grain`. `starts` lists the first token of each piece of a period.
    """

    def __init__(self, src: TokenShard, dst: TokenShard) -> None:
        parts = [owned for owned in (src, dst) if owned.size > 1]
        self.grain = math.gcd(*(owned.interleave for owned in parts)) or 1
        self.period = math.lcm(*(owned.size * owned.interleave for owned in parts))
        if self.period // self.grain > _MAX_GRAINS:
            raise UsageError(
                f"{src} at prefill, {dst} at decode: this repeats after {self.period} tokens only",
                remedy=f"make the interleaves multiples of each other: at most {_MAX_GRAINS} pieces are kept",
            )
        grains = np.arange(0, self.period, self.grain, dtype=np.int64)
        held = np.ones(len(grains), np.bool_)
        for owned in parts:
            held &= grains // owned.interleave % owned.size == owned.rank
        self.starts: NDArray[np.int64] = grains[held]
        self.per_period = len(self.starts) * self.grain
        self._first: list[int] = self.starts.tolist()
        self._held: list[bool] = held.tolist()
        self._before: list[int] = (np.cumsum(held) - held).tolist()
        self.whole: bool = self.per_period == self.period

    @staticmethod
    @lru_cache(maxsize=64)
    def of(src: TokenShard, dst: TokenShard = ALL_TOKENS) -> CommonTokens:
        """The numbering of a pair, cached; with one argument, of one rank's own tokens. Raises `UsageError` for
        interleaves with too long a common period.
        """
        return CommonTokens(src, dst)

    def count(self, token: int) -> int:
        """How many of the numbered tokens lie before absolute position `token`."""
        if self.whole:
            return token
        periods, within = divmod(token, self.period)
        grain, past = divmod(within, self.grain)
        return periods * self.per_period + self._before[grain] * self.grain + (past if self._held[grain] else 0)

    def token(self, number: int) -> int:
        """The absolute position of numbered token `number`. There must be numbered tokens."""
        if self.whole:
            return number
        periods, within = divmod(number, self.per_period)
        return periods * self.period + self._first[within // self.grain] + within % self.grain

    def reach(self, n: int) -> int:
        """How many consecutive tokens, wherever they start, hold at most `n` numbered ones; 0 if none is numbered."""
        if not self.per_period:
            return 0
        return n // self.per_period * self.period + n % self.per_period


_EVERY_TOKEN = CommonTokens(ALL_TOKENS, ALL_TOKENS)


class Common:
    """By component, the tokens that a prefill rank and a decode rank both hold."""

    __slots__ = ("_numberings",)

    def __init__(self, pairs: Mapping[str, tuple[TokenShard, TokenShard]]) -> None:
        numberings = {component: CommonTokens.of(*pair) for component, pair in pairs.items()}
        self._numberings = {component: numbers for component, numbers in numberings.items() if not numbers.whole}

    @classmethod
    def of(cls, src: Layout, dst: Layout) -> Common:
        """What ranks with these layouts have in common; `EVERYTHING` if each holds every token.

        Raises `UsageError` as `CommonTokens` does.
        """
        theirs = {component.name: component.owned for component in src.components}
        pairs = {c.name: (theirs[c.name], c.owned) for c in dst.components if c.name in theirs}
        parted = {name: pair for name, pair in pairs.items() if pair != (ALL_TOKENS, ALL_TOKENS)}
        return cls(parted) if parted else EVERYTHING

    def numbers(self, component: str) -> CommonTokens:
        return self._numberings.get(component, _EVERY_TOKEN)

    def tokens(self, rects: Iterable[Rect]) -> dict[str, tuple[int, int]]:
        """The numbers of a chunk's tokens by component, as `Staging` and the kernels take token ranges."""
        if not self._numberings:
            return {rect.component: (rect.start, rect.stop) for rect in rects}
        numbered = ((rect, self.numbers(rect.component)) for rect in rects)
        return {rect.component: (numbers.count(rect.start), numbers.count(rect.stop)) for rect, numbers in numbered}


EVERYTHING = Common({})
