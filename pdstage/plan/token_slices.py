"""Pages cut into pieces of the tokens that two ranks both hold, so that kernels see plain consecutive items.

Numpy only.

If two ranks hold different tokens of a sequence, pages on one or both sides contain tokens that the other side lacks
between the common ones. The views of such a side are *cut*: a piece of `grain` common tokens, consecutive in one page,
becomes an item, and lists of pages become lists of pieces. A cut view addresses the same region by

    item number = page * page_step + piece // per_block * block_step + piece % per_block * piece_step

in units of the largest stride that divides all three. Views of one component with other steps (keys and scales of one
page, say) form another *class* and take another list. A copy then consists of several, one per run of views of one
class. Staged order, keys and checksums do not change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import ALL_TOKENS, Component, Key, Layout, View
from pdstage.plan.ownership import Common, CommonTokens
from pdstage.plan.spans import DirectPlan, Spans
from pdstage.plan.staging import Select, Tokens, order_of
from pdstage.plan.tables import Index, Indexes, Int64s, integers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray


MAX_ITEMS = 1 << 31
"""Of a view, since a room names its items by 32-bit numbers."""


class _Steps(NamedTuple):
    """How a class of views numbers its pieces; `lowest` is the smallest number, `n_items` their range."""

    per_block: int
    page: int
    block: int
    piece: int
    lowest: int
    n_items: int


class _Pieces:
    """The common tokens of one component on one side: the page that holds number n, and the place in it."""

    def __init__(self, component: Component, numbers: CommonTokens) -> None:
        owned, tokens_per_item = component.owned, component.tokens_per_item
        own = CommonTokens.of(owned)
        self._per_period = numbers.per_period
        self._own_per_period = own.count(numbers.period)
        places = np.array([own.count(int(token)) for token in numbers.starts], np.int64)
        number = np.arange(len(places), dtype=np.int64) * numbers.grain
        follows = np.diff(places, append=places[:1] + self._own_per_period) == numbers.grain
        first = np.flatnonzero(~np.roll(follows, 1))
        self.grain = math.gcd(
            tokens_per_item, self._per_period, self._own_per_period, *places[first].tolist(), *number[first].tolist()
        )
        blocks = {view.rows[0].tokens for view in component.views if len(view.rows) == 2}
        while any(self.grain % block and block % self.grain for block in blocks):
            self.grain = math.gcd(self.grain, *(block for block in blocks if self.grain % block))
        self._places, self._run = places, numbers.grain
        self.per_item = tokens_per_item // self.grain
        self._tokens_per_item = tokens_per_item
        self.steps: list[_Steps] = []
        self._classes: dict[_Steps, int] = {}

    def cut(self, view: View) -> tuple[View, int]:
        """The view whose items are pieces, and the number of its class."""
        grain, rows = self.grain, view.rows
        block = piece = 0
        per_block = self.per_item
        if len(rows) == 2 and grain % rows[0].tokens:
            per_block = rows[0].tokens // grain
            block, rows = rows[0].stride, rows[1:]
        if self.per_item > 1:
            piece = view.row_offset(grain)
        strides = view.item_stride, block, piece
        most = (view.n_items - 1, -(-self.per_item // per_block) - 1, min(per_block, self.per_item) - 1)
        used = tuple(stride if n else 0 for stride, n in zip(strides, most, strict=True))
        unit = math.gcd(*used) or 1
        page, block, piece = (stride // unit for stride in used)
        ends = [step * n for step, n in zip((page, block, piece), most, strict=True)]
        lowest, highest = sum(min(0, end) for end in ends), sum(max(0, end) for end in ends)
        steps = _Steps(per_block, page, block, piece, lowest, highest - lowest + 1)
        if steps.n_items > MAX_ITEMS:
            raise UsageError(
                f"view {view.key} has strides of {strides} bytes, cut into pieces of {self.grain} tokens: their only "
                f"common unit is {unit}",
                remedy="store it apart from wider views, or make the interleave larger",
                key=view.key,
            )
        number = self._classes.setdefault(steps, len(self.steps))
        if number == len(self.steps):
            self.steps.append(steps)
        view = replace(
            view, offset=view.offset + lowest * unit, n_items=steps.n_items, item_stride=unit,
            tokens_per_item=self.grain, rows=rows,
        )  # fmt: skip
        return view, number

    def find(self, start: int, stop: int) -> tuple[Int64s, int]:
        """Own numbers of the first tokens of the pieces that hold common tokens `[start, stop)`, and the common number
        of the first piece's first token.
        """
        first = start // self.grain * self.grain
        numbers = np.arange(first, stop, self.grain, dtype=np.int64)
        periods = numbers // self._per_period
        own = periods * self._own_per_period
        if len(self._places) == 1 and self._run == self.grain:
            return own + self._places[0], first
        within = numbers - periods * self._per_period
        runs = within // self._run
        return own + self._places[runs] + (within - runs * self._run), first

    def place(self, own: Int64s, index: Index, component: str) -> tuple[Int64s, Int64s]:
        """The page, and the piece in it, of each of these own tokens. Raises `UsageError` if `index` lacks a page."""
        at = (own - index.first_token) // self.grain
        position = at // self.per_item
        on_host = index.device == "cpu" and index.first_token % self.grain == 0
        if not (on_host and at[0] >= 0 and position[-1] < index.n):
            raise UsageError(
                f"the index of component {component!r} has {index.n} items from own token {index.first_token} on, on "
                f"{index.device}; own tokens {own[0]}..{own[-1] + self.grain} are wanted",
                remedy="give every item that the token range touches, in host memory, first_token at an item's start",
                component=component,
            )
        return integers(index)[position].astype(np.int64), at - position * self.per_item

    def number(self, page: Int64s, piece: Int64s, number: int) -> NDArray[Any]:
        """Items of class `number`."""
        steps = self.steps[number]
        if steps.per_block >= self.per_item:
            items = page * steps.page + (piece * steps.piece - steps.lowest)
        else:
            block = piece // steps.per_block
            items = page * steps.page + block * steps.block + (piece - block * steps.per_block) * steps.piece
            items -= steps.lowest
        return items.astype(np.int32)


class Cut:
    """One side's layout for its common tokens with another: unchanged, or with pages cut into pieces.

    `key` identifies the cut among those of one layout; it is empty if nothing is cut.
    """

    def __init__(self, layout: Layout, common: Common) -> None:
        """Raises `UsageError`, naming the view, for strides that cannot be numbered."""
        self._layout = layout
        self._pieces: dict[str, _Pieces] = {}
        self._classes: dict[Key, int] = {}
        self._views: dict[Key, View] = {}
        keys = []
        for component in layout.components:
            numbers = common.numbers(component.name)
            if numbers.whole or not numbers.per_period:
                continue
            if numbers.per_period < CommonTokens.of(component.owned).count(numbers.period):
                pieces = self._pieces[component.name] = _Pieces(component, numbers)
                keys.append((component.name, numbers))
                for view in component.views:
                    self._views[view.key], self._classes[view.key] = pieces.cut(view)
        self.key = tuple(keys)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """One layout per class, with the views of that class; uncut views are in the first."""
        if not self._pieces:
            return (self._layout,)
        n = max(self._classes.values()) + 1
        by_class: list[list[Component]] = [[] for _ in range(n)]
        for whole in self._layout.components:
            owned = whole.owned if whole.name not in self._pieces else ALL_TOKENS
            views = defaultdict(list)
            for view in whole.views:
                views[self.class_of(view.key)].append(self._views.get(view.key, view))
            for number, some in views.items():
                by_class[number].append(replace(whole, views=tuple(some), owned=owned))
        return tuple(Layout(self._layout.regions, tuple(components)) for components in by_class)

    def class_of(self, key: Key) -> int:
        """The index in `layouts` of the one that holds a view."""
        return self._classes.get(key, 0)

    def view(self, key: Key) -> View | None:
        """A view after cutting."""
        return self._views.get(key) or self._layout.by_key().get(key)

    def runs(self, select: Sequence[Select]) -> list[tuple[int, list[Select]]]:
        """`select` in order, split where the class changes: (class, selected views)."""
        if not self._pieces:
            return [(0, list(select))]
        return [(number, list(run)) for number, run in groupby(select, lambda s: self.class_of(s.key))]

    def indexes(self, items: Indexes, tokens: Tokens) -> _Indexes:
        """Item lists for one chunk's token ranges, from lists of whole pages; all in host memory."""
        return _Indexes(self._pieces, items, tokens)


class _Indexes:
    """The item lists of one chunk, by class; pages are looked up once for all classes."""

    def __init__(self, pieces: Mapping[str, _Pieces], items: Indexes, tokens: Tokens) -> None:
        self._pieces = pieces
        self._items = items
        self._found: dict[str, tuple[Int64s, Int64s, int]] = {}
        self._lists: dict[int, Indexes] = {}
        for name, (start, stop) in tokens.items():
            if name in pieces and name in items and start < stop:
                own, first = pieces[name].find(start, stop)
                self._found[name] = *pieces[name].place(own, items[name], name), first

    def of(self, number: int) -> Indexes:
        """The item lists for the views of class `number`."""
        if not self._found:
            return self._items
        if number not in self._lists:
            self._lists[number] = self._of(number)
        return self._lists[number]

    def _of(self, number: int) -> Indexes:
        lists = dict(self._items)
        for name, (page, piece, first) in self._found.items():
            pieces = self._pieces[name]
            if number < len(pieces.steps):
                lists[name] = Index.of(pieces.number(page, piece, number), first)
        return lists


class Pair:
    """Two layouts together: the staged order, and each side's pages cut for the common tokens."""

    def __init__(self, src: Layout, dst: Layout, common: Common, order: str | None = None) -> None:
        """`order` overrides the order that follows from the layouts."""
        self.src, self.dst = Cut(src, common), Cut(dst, common)
        held = src.by_key()
        pairs = [(self.src.view(view.key), self.dst.view(view.key)) for view in dst.views() if view.key in held]
        self.order = order or order_of(pairs)  # type: ignore[arg-type]


def by_classes(
    src: Cut, src_select: Iterable[Select], dst: Cut, dst_select: Iterable[Select]
) -> dict[tuple[int, int], tuple[list[Select], list[Select]]]:
    """Two selections of the same views, by the classes that a view has on either side."""
    found: dict[tuple[int, int], tuple[list[Select], list[Select]]] = {}
    for ours, theirs in zip(sorted(src_select), sorted(dst_select), strict=True):
        of_class = found.setdefault((src.class_of(ours.key), dst.class_of(theirs.key)), ([], []))
        of_class[0].append(ours)
        of_class[1].append(theirs)
    return found


class DirectPlans:
    """The direct path between two cut layouts: a `DirectPlan` for each pair of classes."""

    def __init__(self, src: Cut, src_select: Iterable[Select], dst: Cut, dst_select: Iterable[Select]) -> None:
        """Takes and raises the same as `DirectPlan`."""
        self._src, self._dst = src, dst
        self._plans = [
            (i, j, DirectPlan(src.layouts[i], ours, dst.layouts[j], theirs))
            for (i, j), (ours, theirs) in by_classes(src, src_select, dst, dst_select).items()
        ]

    def spans(self, tokens: Tokens, src_items: Indexes, dst_items: Indexes) -> Spans:
        """`DirectPlan.spans` for items that are whole pages."""
        ours, theirs = self._src.indexes(src_items, tokens), self._dst.indexes(dst_items, tokens)
        found = [plan.spans(tokens, ours.of(i), theirs.of(j)) for i, j, plan in self._plans]
        return found[0] if len(found) == 1 else Spans(*map(np.concatenate, zip(*found, strict=True)))

    def n_descriptors(self, tokens: Tokens) -> int:
        return sum(plan.n_descriptors(tokens) for _, _, plan in self._plans)


def tokens_problem(src: Layout, dst: Layout) -> str:
    """Why the tokens of ranks with these layouts cannot be matched; empty if they can."""
    try:
        common = Common.of(src, dst)
        Cut(src, common)
        Cut(dst, common)
    except UsageError as error:
        return str(error)
    return ""
