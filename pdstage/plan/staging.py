"""Who sends which bytes to whom, and in what order they are staged.

This module answers two questions. *Ownership*: of the source ranks that hold a shard, exactly one sends it to each
destination rank that wants it, and replicas share that work. Under context parallelism that holds for each part of the
tokens. *Staged order*: a chunk's bytes lie view by view in key order. Each view starts at the next multiple of 128
bytes, in an order that depends on neither side's strides. So gather and scatter need not know each other's layout.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from pdstage.errors import UsageError
from pdstage.layout import ALL_TOKENS, Key, Layout, TokenShard, View
from pdstage.layout.topology import Axis, Range, Tp, shard_axis, shard_range
from pdstage.plan.ownership import CommonTokens

VIEW_ALIGNMENT = 128
TOKEN_MAJOR = "token"
HEAD_MAJOR = "head"

Tokens: TypeAlias = "Mapping[str, Range]"


def _replicas(total: int, tp: int, shard: int) -> range:
    """The ranks of `tp` that hold `shard`: one when tp <= total, else consecutive ones."""
    # rank*total//tp == shard exactly when shard*tp <= rank*total < (shard+1)*tp; with tp <= total one rank spans it.
    if tp <= total:
        rank = ((shard + 1) * tp - 1) // total
        return range(rank, rank + 1)
    return range(-(-shard * tp // total), -(-(shard + 1) * tp // total))


def owner_of(src: Sequence[int], dst: Sequence[int], dst_rank: int, turn: int) -> int:
    """The rank of `src`, which hold a shard, that sends it to `dst_rank`, one of the ranks `dst` that want it."""
    start, end = shard_range(len(src), len(dst), dst.index(dst_rank))
    return src[start + turn % (end - start)]


class Share(NamedTuple):
    """What one writer sends to one destination rank: shards `[first, first + count)`, numbered globally, of some
    layers.

    `layers` is `(start, stop, step)`. Decode computes shares once per session and announces them in Open.
    """

    component: str
    role: str
    layers: tuple[int, int, int]
    first: int
    count: int  # type: ignore[assignment]  # the field's name, over tuple.count


Shares: TypeAlias = tuple[Share, ...]
"""Of one writer."""


def shares(writers: Mapping[int, Layout], dst: Layout, dst_tp: Tp) -> dict[int, Shares]:
    """Assigns every (view, shard) of `dst` to exactly one writer, or to one per part of the tokens (`TokenShard`).

    `writers` maps a writer's number to its layout; `dst_tp` is the destination's (size, rank). A view that the
    destination shards otherwise than by `shard_range` is assigned as if there were no other destination, which is
    correct but less even. Replicas take a component's layers in turn, by index and not by number, since hybrid models
    skip numbers regularly. All roles of a layer have the same turn, even if some layers lack a role, so that data and
    its scales come from one writer. Holders of different tokens are not replicas, and a holder of none of `dst`'s
    tokens gets nothing. Raises `UsageError` naming the first shard, or part of the tokens, that no writer holds.
    `layout.mismatch` checks that bytes mean the same.
    """
    holders = defaultdict(list)
    for number, layout in sorted(writers.items()):
        for component in layout.components:
            for view in component.views:
                holders[view.key].append(_Holder(number, view.axis, component.owned))
    runs = defaultdict(list)
    turns = {name: {layer: turn for turn, layer in enumerate(layers)} for name, layers in dst.layers.items()}
    owned = {component.name: component.owned for component in dst.components}
    for view in dst.views():
        turn = turns[view.key.component][view.key.layer]
        for number, first, count in _deal(view, owned[view.key.component], holders[view.key], dst_tp, turn):
            runs[number, view.key.component, view.key.role, first, count].append(view.key.layer)
    dealt: dict[int, list[Share]] = {number: [] for number in writers}
    for (number, component_name, role, first, count), layers in runs.items():
        dealt[number] += [Share(component_name, role, run, first, count) for run in _progressions(layers)]
    return {number: tuple(sorted(theirs)) for number, theirs in dealt.items()}


class _Holder(NamedTuple):
    """A writer of a view: its shards, and its part of the tokens."""

    number: int
    axis: Axis
    owned: TokenShard


def _deal(view: View, wanted: TokenShard, holders: list[_Holder], dst_tp: Tp, turn: int) -> list[tuple[int, int, int]]:
    """(writer, first shard, count) runs that cover the shards of destination view `view`, for each part of the tokens
    `wanted`.
    """
    tp, rank = dst_tp
    axis = view.axis
    regular = axis == shard_axis(axis.name, axis.total, tp, rank)
    dealt: dict[TokenShard, list[tuple[int, int, int]]] = defaultdict(list)
    for shard in range(axis.first, axis.first + axis.count):
        held = defaultdict(list)
        for number, theirs, owned in holders:
            if theirs.first <= shard < theirs.first + theirs.count:
                held[owned].append(number)
        if not held:
            raise UsageError(
                f"no prefill rank holds shard {shard} of {view.key}",
                remedy="check both sides' model, layer split and component names",
                key=view.key,
                shard=shard,
            )
        dst = _replicas(axis.total, tp, shard) if regular else (rank,)
        for owned in token_parts(tuple(held), wanted, view.key.component):
            number, runs = owner_of(held[owned], dst, rank, turn), dealt[owned]
            if runs and runs[-1][0] == number and sum(runs[-1][1:]) == shard:
                runs[-1] = (number, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((number, shard, 1))
    return [run for runs in dealt.values() for run in runs]


@lru_cache(maxsize=1024)
def token_parts(held: tuple[TokenShard, ...], wanted: TokenShard, component: str) -> tuple[TokenShard, ...]:
    """Those parts of the tokens held by ranks that `wanted` needs, all from one partition.

    If ranks partition sequences in several ways, the coarsest complete one is used. Raises `UsageError` if tokens are
    missing.
    """
    missing = ALL_TOKENS
    for size, interleave in sorted({(owned.size, owned.interleave) for owned in held}):
        parts = [TokenShard(size, rank, interleave) for rank in range(size)]
        needed = tuple(part for part in parts if CommonTokens.of(part, wanted).per_period)
        lacking = [part for part in needed if part not in held]
        if not lacking:
            return needed
        missing = lacking[0]
    raise UsageError(
        f"prefill ranks hold of {component!r} {', '.join(map(str, sorted(held, key=astuple)))}; "
        f"decode holds {wanted}, and nobody sends {missing}",
        remedy="give each rank's `owned`, and have all context-parallel ranks of prefill serve the room",
        component=component,
    )


def _progressions(layers: list[int]) -> list[tuple[int, int, int]]:
    """Ascending layers as the fewest `(start, stop, step)` runs."""
    runs = []
    at = 0
    while at < len(layers):
        step = layers[at + 1] - layers[at] if at + 1 < len(layers) else 1
        end = at + 1
        while end < len(layers) and layers[end] - layers[end - 1] == step:
            end += 1
        runs.append((layers[at], layers[end - 1] + 1, step))
        at = end
    return runs


class Rect(NamedTuple):
    """Tokens (or slots) `[start, stop)` of layers `[layer_start, layer_stop)` of one component: a part of a chunk."""

    component: str
    start: int
    stop: int
    layer_start: int
    layer_stop: int

    def overlaps(self, other: Rect, row_tokens: int = 1) -> bool:
        """Whether the two share a token of a layer, or a row if one covers `row_tokens` of them."""
        return (
            self.component == other.component
            and self.start // row_tokens * row_tokens < other.stop
            and other.start // row_tokens * row_tokens < self.stop
            and self.layer_start < other.layer_stop
            and other.layer_start < self.layer_stop
        )


Rects: TypeAlias = tuple[Rect, ...]


class Select(NamedTuple):
    """Local shards `[start, start + count)` of the view `key` of one layout."""

    key: Key
    start: int
    count: int  # type: ignore[assignment]  # the field's name, over tuple.count


def selects(layout: Layout, owned: Iterable[Share], rects: Iterable[Rect]) -> tuple[Select, ...]:
    """The views and local shards of `layout`, in key order, that a chunk of `rects` carries for a destination with the
    shares `owned`.
    """
    by_key = layout.by_key()
    layers = {rect.component: (rect.layer_start, rect.layer_stop) for rect in rects}
    chosen = []
    for share in owned:
        start, stop = layers.get(share.component, (0, 0))
        for layer in range(*share.layers):
            if start <= layer < stop:
                view = by_key[Key(share.component, share.role, layer)]
                chosen.append(Select(view.key, share.first - view.axis.first, share.count))
    return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True)
class _Sized:
    """What staging needs of one selected view."""

    component: str
    tokens_per_row: int
    row_nbytes: int


class Staging:
    """Staged sizes and offsets of one selection, for any token ranges. Both sides compute the same from their own
    layouts.
    """

    def __init__(self, layout: Layout, select: Iterable[Select]) -> None:
        by_key = layout.by_key()
        self.select = tuple(sorted(select))
        self._sized = []
        self._groups: dict[_Sized, int] = defaultdict(int)
        for key, start, count in self.select:
            view = by_key.get(key)
            if view is None or start < 0 or count < 1 or start + count > view.shards:
                raise UsageError(
                    f"shards {start}..{start + count} of {key} are not in this layout",
                    remedy=f"it holds {view.shards} shards of it" if view else "it has no such view",
                    key=key,
                )
            sized = _Sized(key.component, view.tokens_per_row, count * view.shard_nbytes)
            self._sized.append(sized)
            self._groups[sized] += 1

    def nbytes(self, tokens: Tokens) -> int:
        """Staged bytes of token ranges `{component: (start, stop)}`, a multiple of 128; none if omitted."""
        nbytes = 0
        for sized, n in self._groups.items():
            nbytes += n * _staged_nbytes(sized, tokens)
        return nbytes

    def offsets(self, tokens: Tokens) -> list[int]:
        """Where each selected view's bytes start, in the order of `select`."""
        starts, at = [], 0
        for sized in self._sized:
            starts.append(at)
            at += _staged_nbytes(sized, tokens)
        return starts

    def row_tokens(self, component: str) -> int:
        """The tokens between positions where `component` can be cut without splitting a row: 1, except for compressed
        caches.
        """
        return math.lcm(*(sized.tokens_per_row for sized in self._groups if sized.component == component))

    def tokens_within(self, component: str, nbytes: int) -> int:
        """The largest number of tokens of `component` alone whose staged bytes fit `nbytes`, wherever they start in a
        row; 0 for none.
        """
        groups = [(sized, n) for sized, n in self._groups.items() if sized.component == component]
        if not groups:
            return 0

        def worst_nbytes(tokens: int) -> int:
            return sum(n * _aligned(_max_rows(s.tokens_per_row, tokens) * s.row_nbytes) for s, n in groups)

        first = groups[0][0]
        limit = nbytes // first.row_nbytes * first.tokens_per_row
        return bisect_right(range(1, limit + 1), nbytes, key=worst_nbytes)


class Stagings:
    """The `Staging` of each (shares, layer ranges) that a session uses, made once."""

    _MAX = 1024

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made: dict[tuple[object, ...], Staging] = {}

    def of_layout(self, layout: Layout) -> Stagings:
        """These, if they are of `layout`; else new ones."""
        return self if layout is self._layout else Stagings(layout)

    def of(self, owned: Shares, rects: Rects) -> Staging:
        key = (owned, *map(layers_of, rects))
        staging = self._made.get(key)
        if staging is None:
            if len(self._made) >= self._MAX:
                self._made.clear()
            staging = self._made[key] = Staging(self._layout, selects(self._layout, owned, rects))
        return staging


layers_of = attrgetter("component", "layer_start", "layer_stop")
"""The layer range of a rectangle: plans are made once for each of a chunk's, whatever the tokens."""


def tokens_of(rects: Iterable[Rect]) -> dict[str, Range]:
    """The token ranges of a chunk by component, as `Staging` and the kernels take them."""
    return {rect.component: (rect.start, rect.stop) for rect in rects}


def rows_of(tokens_per_row: int, start: int, stop: int) -> int:
    """Rows that tokens `[start, stop)` of a sequence touch."""
    return -(-stop // tokens_per_row) - start // tokens_per_row if stop > start else 0


def _max_rows(tokens_per_row: int, tokens: int) -> int:
    """The most rows that `tokens` consecutive tokens, at least one, can touch."""
    return (tokens + tokens_per_row - 2) // tokens_per_row + 1


def _staged_nbytes(sized: _Sized, tokens: Tokens) -> int:
    start, stop = tokens.get(sized.component, (0, 0))
    return _aligned(rows_of(sized.tokens_per_row, start, stop) * sized.row_nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // VIEW_ALIGNMENT) * VIEW_ALIGNMENT


def wire_order(src: Layout, dst: Layout) -> str:
    """The pair's staged order: head-major if both sides keep heads outermost in pages of one size, else token-major.

    Head-major is `[item][shard][row][seg][byte]` and gives both kernels runs of a whole page; token-major is
    `[row][shard][seg][byte]`. It depends only on the two layouts, so each side computes it alone.
    """
    held = src.by_key()
    return order_of([(held[view.key], view) for view in dst.views() if view.key in held])


def order_of(pairs: Sequence[tuple[View, View]]) -> str:
    """`wire_order` of pairs of views with equal keys."""
    same = all(a.tokens_per_item == b.tokens_per_item for a, b in pairs)
    return HEAD_MAJOR if pairs and same and all(_heads_outermost(v) for pair in pairs for v in pair) else TOKEN_MAJOR


def _heads_outermost(view: View) -> bool:
    row = view.rows[-1].stride
    return len(view.rows) == 1 and view.rows_per_item > 1 and row == view.shard_nbytes and view.shard_stride > row
