"""Which tokens of a sequence two ranks both hold, under context parallelism on either side.

Between two ranks, the tokens of a component that both hold are *numbered* in order, from 0. Staged bytes, leases and
kernels count these numbers; rectangles, tags and coverage name absolute positions, and mean by `[start, stop)` the
tokens in it that both ranks hold. Where both hold every token the two are the same.

Contiguous parts need no numbers. They depend on a sequence's length, which is the `stop` of what decode asks for, and
cut what is asked of a writer: see `Common.part`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import ALL_TOKENS, TokenShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from pdstage.layout import Layout

_MAX_GRAINS = 1 << 14


class CommonTokens:
    """The tokens that two ranks both hold of any sequence, numbered in order from 0.

    They repeat every `period` tokens, `per_period` in each, and come in pieces of `grain` tokens that begin at its
    multiples; `starts` lists the first token of each piece of a period. Contiguous parts count as all tokens.
    """

    def __init__(self, src: TokenShard, dst: TokenShard) -> None:
        cycles = [owned.size * owned.interleave for owned in (src, dst) if owned.interleaved]
        self.grain = math.gcd(*(owned.interleave for owned in (src, dst) if owned.interleaved)) or 1
        self.period = math.lcm(*cycles)
        if self.period // self.grain > _MAX_GRAINS:
            raise UsageError(
                f"{src} at prefill, {dst} at decode: this repeats after {self.period} tokens only",
                remedy=f"make the interleaves multiples of each other: at most {_MAX_GRAINS} pieces are kept",
            )
        grains = np.arange(0, self.period, self.grain, dtype=np.int64)
        held = _holds(src, grains) & _holds(dst, grains)
        self.starts: NDArray[np.int64] = grains[held]
        self.per_period = len(self.starts) * self.grain
        self._first: list[int] = self.starts.tolist()
        self._held: list[bool] = held.tolist()
        self._before: list[int] = (np.cumsum(held) - held).tolist()
        self.whole: bool = self.per_period == self.period

    @staticmethod
    @lru_cache(maxsize=64)
    def of(src: TokenShard, dst: TokenShard = ALL_TOKENS) -> CommonTokens:
        """The numbering of a pair, kept; of one rank's own tokens by itself. Raises `UsageError` for interleaves that
        hardly ever meet.
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
        """The absolute position of numbered token `number`. Only where there are any."""
        if self.whole:
            return number
        periods, within = divmod(number, self.per_period)
        return periods * self.period + self._first[within // self.grain] + within % self.grain

    def reach(self, n: int) -> int:
        """Of how many consecutive tokens, wherever they start, at most `n` are numbered; 0 where none ever is."""
        if not self.per_period:
            return 0
        return n // self.per_period * self.period + n % self.per_period


def _holds(owned: TokenShard, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    if not owned.interleaved:
        return np.ones(len(tokens), np.bool_)
    held: NDArray[np.bool_] = tokens // owned.interleave % owned.size == owned.rank
    return held


_EVERY_TOKEN = CommonTokens(ALL_TOKENS, ALL_TOKENS)


def meets(src: TokenShard, dst: TokenShard) -> bool:
    """Whether there is a sequence of which both hold a token."""
    if src.contiguous and dst.contiguous:
        return src.rank * dst.size < (dst.rank + 1) * src.size and dst.rank * src.size < (src.rank + 1) * dst.size
    return CommonTokens.of(src, dst).per_period > 0


class TokenRange(Protocol):
    """Some tokens of a component, in absolute positions: a `plan.Rect`, for one."""

    @property
    def component(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Common:
    """By component, the tokens that a prefill rank and a decode rank both hold."""

    __slots__ = ("_contiguous", "_numberings")

    def __init__(self, pairs: Mapping[str, tuple[TokenShard, TokenShard]]) -> None:
        numberings = {component: CommonTokens.of(*pair) for component, pair in pairs.items()}
        self._numberings = {component: numbers for component, numbers in numberings.items() if not numbers.whole}
        self._contiguous = {
            component: tuple(owned for owned in pair if owned.contiguous) for component, pair in pairs.items()
        }

    @classmethod
    def of(cls, src: Layout, dst: Layout) -> Common:
        """What ranks of these layouts have in common; `EVERYTHING` where each holds every token.

        Raises `UsageError` as `CommonTokens` does.
        """
        theirs = {component.name: component.owned for component in src.components}
        # Of what only the destination has there are no common tokens to number, but asked for are its own.
        wanted = (c for c in dst.components if c.name in theirs or c.owned.contiguous)
        pairs = {c.name: (theirs.get(c.name, ALL_TOKENS), c.owned) for c in wanted}
        parted = {name: pair for name, pair in pairs.items() if pair != (ALL_TOKENS, ALL_TOKENS)}
        return cls(parted) if parted else EVERYTHING

    def numbers(self, component: str) -> CommonTokens:
        return self._numberings.get(component, _EVERY_TOKEN)

    def tokens(self, rects: Iterable[TokenRange]) -> dict[str, tuple[int, int]]:
        """The numbers of a chunk's tokens by component: token ranges as `Staging` and the kernels take them."""
        if not self._numberings:
            return {rect.component: (rect.start, rect.stop) for rect in rects}
        numbered = ((rect, self.numbers(rect.component)) for rect in rects)
        return {rect.component: (numbers.count(rect.start), numbers.count(rect.stop)) for rect, numbers in numbered}

    @property
    def parted(self) -> bool:
        """Whether `part` is ever less than all."""
        return any(self._contiguous.values())

    def part(self, component: str, start: int, stop: int) -> tuple[int, int]:
        """What of `[start, stop)` lies in both ranks' contiguous parts of a sequence of `stop` tokens."""
        low, high = start, stop
        for owned in self._contiguous.get(component, ()):
            first, end = owned.part_of(stop)
            low, high = max(low, first), min(high, end)
        return low, max(low, high)


EVERYTHING = Common({})
