"""Where an engine keeps a request's state: regions, views and components.

A *region* is registered memory. A *view* is affine addressing of one region:

    address = region.base + offset + item*item_stride + row_offset(t) + shard*shard_stride + seg*seg_stride + byte

`rows` holds one or two levels `(tokens, stride)`, applied in turn to t, a token within its item. With levels (n1, s1),
(n2, s2) the row offset is (t // n1)*s1 + (t % n1 // n2)*s2. The last level's `tokens` is how many tokens one row
covers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pdstage.errors import UsageError
from pdstage.layout.states import canonical
from pdstage.layout.topology import Axis, Range, Topology, shard_axis

_MAX_RANKS = 1 << 10
_MAX_INTERLEAVE = 1 << 20
MAX_LAYERS = (1 << 31) - 1
"""A layer's number travels in 32 bits."""


class Key(NamedTuple):
    """Identifies a view on both sides. Its tuple order is the staged order: all K before all V, layers ascending."""

    component: str
    role: str
    layer: int


class RowLevel(NamedTuple):
    """One level of a view's row addressing: every `tokens` tokens are `stride` bytes apart."""

    tokens: int
    stride: int


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory: `nbytes` from address `base`, of `kind` "cpu" or "cuda", on `device` (0 for "cpu")."""

    base: int
    nbytes: int
    kind: str = "cpu"
    device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Affine addressing of one region; every size and stride in bytes. The module's docstring gives the formula.

    `region` indexes `Layout.regions`. There are `n_items` pages or slots of `tokens_per_item` tokens, `shards` local
    shards of `axis`, and `segs` runs of `width` bytes inside a shard. `format` names the encoding ("bf16", "fp8_e4m3",
    ...), compared for equality.
    """

    key: Key
    region: int
    offset: int
    n_items: int
    item_stride: int
    tokens_per_item: int
    rows: tuple[RowLevel, ...]
    shards: int
    shard_stride: int
    segs: int = 1
    seg_stride: int = 0
    width: int
    axis: Axis
    format: str

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise UsageError(f"view {self.key} {problem}", remedy="correct the view's geometry", key=self.key)

    def _problem(self) -> str:  # noqa: PLR0911  (a list of rules)
        rows = self.rows
        if not 1 <= len(rows) <= 2:
            return f"has {len(rows)} row levels, not one or two"
        if min(self.n_items, self.tokens_per_item, self.shards, self.segs, self.width) < 1:
            return "has a size below 1"
        if not 0 <= self.key.layer < MAX_LAYERS:
            return f"has a layer number outside of 0..{MAX_LAYERS - 1}"
        if any(row.tokens < 1 for row in rows):
            return "has a row level of 0 tokens"
        if self.tokens_per_item % rows[-1].tokens:
            return f"has {self.tokens_per_item} tokens per item, not a multiple of the {rows[-1].tokens} a row covers"
        if len(rows) == 2 and rows[0].tokens % rows[1].tokens:
            return "has a first row level that is not a multiple of the second"
        axis, total, first, count = self.axis
        if count != self.shards:
            return f"declares {count} shards on axis {axis!r} but stores {self.shards}"
        if first < 0 or first + count > total:
            return f"declares shards {first}..{first + count} of {total}"
        return ""

    @property
    def tokens_per_row(self) -> int:
        """Tokens that one row covers: 1, except in compressed caches."""
        return self.rows[-1].tokens

    @property
    def rows_per_item(self) -> int:
        """Rows per item: fewer than tokens in caches that compress."""
        return self.tokens_per_item // self.tokens_per_row

    @property
    def shard_nbytes(self) -> int:
        """Payload bytes of one shard of one row."""
        return self.segs * self.width

    def row_offset(self, t: int) -> int:
        """Bytes from an item's start to the row that holds its token `t`."""
        offset = 0
        for tokens, stride in self.rows:
            offset += t // tokens * stride
            t %= tokens
        return offset

    def _corners(self) -> set[int]:
        """The tokens of an item whose rows bound all others: offsets are linear in each level."""
        outer, row, tokens = self.rows[0].tokens, self.tokens_per_row, self.tokens_per_item
        whole = tokens - tokens % outer
        last = {min(outer, tokens) - row, tokens - row}
        return last | ({0, whole - outer, whole - row} if whole else {0}) | ({whole} if whole < tokens else set())

    def extent(self) -> Range:
        """Lowest and one past the highest byte the view can touch, from the region's base."""
        low = high = self.offset
        rows = [self.row_offset(t) for t in self._corners()]
        steps = (
            ((self.n_items - 1) * self.item_stride,),
            ((self.shards - 1) * self.shard_stride,),
            ((self.segs - 1) * self.seg_stride,),
            rows,
        )
        for step in steps:
            low += min(0, *step)
            high += max(0, *step)
        return low, high + self.width


@dataclass(frozen=True, slots=True)
class TokenShard:
    """The tokens of a sequence that a rank holds under context parallelism; with `size` 1, all of them.

    Of `size` ranks, `rank` holds every token t with `t // interleave % size == rank`: the interleaved ownership of DCP
    and PCP. A rank stores only its own tokens, one after the other, and `Items.first_token` counts these: token t has
    the number t minus the tokens before t that other ranks hold.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 0

    def __post_init__(self) -> None:
        in_range = 1 <= self.size <= _MAX_RANKS and 0 <= self.rank < self.size
        if not in_range or not (self.size == 1 or 1 <= self.interleave <= _MAX_INTERLEAVE):
            raise UsageError(
                f"rank {self.rank} of {self.size} holds tokens by blocks of {self.interleave}",
                remedy=f"give 1 <= size <= {_MAX_RANKS}, 0 <= rank < size, 1 <= interleave <= {_MAX_INTERLEAVE}",
            )
        if self.size == 1:  # all are equal, whatever the interleave
            object.__setattr__(self, "interleave", 0)

    @classmethod
    def by(cls, topology: Topology, interleave: int = 1) -> TokenShard:
        """What rank `topology.cp_rank` of `topology.cp_size` ranks holds in engines."""
        return cls(topology.cp_size, topology.cp_rank, interleave)

    def __str__(self) -> str:
        return "all tokens" if self.size == 1 else f"part {self.rank} of {self.size} (blocks of {self.interleave})"


ALL_TOKENS = TokenShard()


@dataclass(frozen=True)
class Component:
    """The views indexed together: one list of items (pages or slots) serves them all.

    `positional` items carry token positions and are intersected between the two sides. Other items are slots, matched
    by order; with `exact` both sides must have the same number, else the longer list is trimmed. `owned` gives the
    tokens of a sequence that this rank holds.
    """

    name: str
    views: tuple[View, ...]
    positional: bool = True
    exact: bool = False
    owned: TokenShard = ALL_TOKENS

    def __post_init__(self) -> None:
        if not self.views:
            raise UsageError(f"component {self.name!r} has no views", remedy="give it at least one view")
        if self.owned.size > 1 and not self.positional:
            raise UsageError(
                f"component {self.name!r} has no token positions, but `owned` gives this rank a part of the tokens",
                remedy="give `owned` only for components with positions",
            )
        first = self.views[0]
        for view in self.views:
            if view.key.component != self.name:
                raise UsageError(f"view {view.key} is not of component {self.name!r}", remedy="use one component name")
            if view.tokens_per_item != first.tokens_per_item or view.n_items != first.n_items:
                raise UsageError(
                    f"view {view.key} has {view.n_items} items of {view.tokens_per_item} tokens, "
                    f"{first.key} has {first.n_items} of {first.tokens_per_item}",
                    remedy="views indexed together share item count and page size; make two components",
                )
            per, owned = view.tokens_per_row, self.owned
            if per > 1 and owned.size > 1 and owned.interleave % per:
                raise UsageError(
                    f"a row of view {view.key} covers {per} tokens, yet the rank holds {owned} of a sequence",
                    remedy="interleave by a multiple of what a row covers",
                )

    @cached_property
    def tokens_per_item(self) -> int:
        """Tokens per page; the same in all its views."""
        return self.views[0].tokens_per_item

    @cached_property
    def n_items(self) -> int:
        """The number of pages or slots."""
        return self.views[0].n_items


@dataclass(frozen=True)
class Layout:
    """Everything a rank stores for its requests: regions and the components that address them.

    Components are kept in name order and views in key order, so that equal content is equal layout.
    """

    regions: tuple[Region, ...]
    components: tuple[Component, ...]

    @classmethod
    def of(
        cls,
        regions: Iterable[Region],
        views: Iterable[View],
        *,
        slots: Iterable[str] = (),
        exact: Iterable[str] = (),
        owned: Mapping[str, TokenShard] | None = None,
    ) -> Layout:
        """Groups `views` by component. `slots` names the components without token positions, `exact` those of which
        both sides must have the same number of slots. `owned` gives this rank's tokens of components that it holds only
        in part. An alias of a kind ("nsa") becomes the component's name ("dsa"), so that two sides may use either.

        Raises `UsageError` for a repeated key, an unknown region, or a view that leaves its region.
        """
        held = tuple(regions)
        by_key: dict[Key, View] = {}
        for given in views:
            name = canonical(given.key.component)
            view = given if name == given.key.component else replace(given, key=given.key._replace(component=name))
            if by_key.setdefault(view.key, view) is not view:
                raise UsageError(f"view {view.key} is given twice", remedy="each key names one view", key=view.key)
            check_inside(view, held)
        keys = sorted(by_key)
        names = dict.fromkeys(key.component for key in keys)
        no_positions, exactly = (frozenset(map(canonical, given)) for given in (slots, exact))
        parts = {canonical(name): part for name, part in (owned or {}).items()}
        for name in (*no_positions, *exactly, *parts):
            if name not in names:
                raise UsageError(f"no component {name!r}", remedy=f"the views are of {', '.join(names)}")
        return cls(
            held,
            tuple(
                Component(
                    name, tuple(by_key[k] for k in keys if k.component == name), name not in no_positions,
                    name in exactly, parts.get(name, ALL_TOKENS),
                )
                for name in names
            ),
        )  # fmt: skip

    def views(self) -> Iterator[View]:
        """Every view, component by component."""
        for component in self.components:
            yield from component.views

    def by_key(self) -> Mapping[Key, View]:
        """Every view by its key, which is the same on both sides."""
        return self._by_key

    @cached_property
    def _by_key(self) -> Mapping[Key, View]:
        return {view.key: view for view in self.views()}

    @cached_property
    def row_tokens(self) -> Mapping[str, int]:
        """By component, the tokens between positions that split no row: 1, except in compressed caches."""
        return {c.name: math.lcm(*(view.tokens_per_row for view in c.views)) for c in self.components}

    @cached_property
    def layers(self) -> Mapping[str, tuple[int, ...]]:
        """The layer numbers of each component's views, ascending."""
        return {c.name: tuple(sorted({view.key.layer for view in c.views})) for c in self.components}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The components' names, in order: a tag names a component by its place here."""
        return tuple(component.name for component in self.components)

    @cached_property
    def _by_name(self) -> Mapping[str, Component]:
        return {component.name: component for component in self.components}

    def component(self, name: str) -> Component:
        """The component of that name, or of the kind with that alias."""
        held = self._by_name
        component = held.get(name) or held.get(canonical(name))
        if component is None:
            known = ", ".join(self.names)
            raise UsageError(f"no component {name!r}", remedy=f"this layout has {known}", component=name)
        return component

    def digest(self) -> str:
        """16 hex digits over everything but addresses: equal digests mean equal geometry."""
        shape = [
            (c.name, c.positional, c.exact, astuple(c.owned), [astuple(v)[0:1] + astuple(v)[3:] for v in c.views])
            for c in self.components
        ]
        return hashlib.blake2b(repr(shape).encode(), digest_size=8).hexdigest()


def check_inside(view: View, regions: tuple[Region, ...]) -> None:
    """Raises `UsageError` unless every byte of `view` lies in its region."""
    if not 0 <= view.region < len(regions):
        raise UsageError(f"view {view.key} is of region {view.region}", remedy=f"there are {len(regions)} regions")
    low, high = view.extent()
    if low < 0 or high > regions[view.region].nbytes:
        raise UsageError(
            f"view {view.key} covers bytes {low}..{high} of a region of {regions[view.region].nbytes}",
            remedy="register the whole allocation, or correct the strides",
            key=view.key,
        )


def check_heads(layout: Layout, topology: Topology) -> None:
    """Raises `UsageError` where views lack KV heads that the rank at that place has. They may hold more: ranks that
    share a prompt's computation are replicas of one another.
    """
    tp = topology.tp_size, topology.tp_rank
    for view in layout.views():
        axis = view.axis
        if axis.name != "kv_head":
            continue
        own = shard_axis(axis.name, axis.total, *tp)
        if own.first < axis.first or own.first + own.count > axis.first + axis.count:
            raise UsageError(
                f"view {view.key} has KV heads {axis.first} to {axis.first + axis.count - 1} of {axis.total}, and rank "
                f"{tp[1]} of TP {tp[0]} has {own.first} to {own.first + own.count - 1}",
                remedy=f"say the same to both: tp={tp} for the tensors, or another tp_size and tp_rank for Topology",
                key=view.key,
            )


def with_views(layout: Layout, changed: Mapping[Key, View]) -> Layout:
    """`layout` with these views: they replace views of the same keys, or are added."""
    components = []
    for component in layout.components:
        views = {view.key: view for view in component.views}
        views |= {key: view for key, view in changed.items() if key.component == component.name}
        components.append(replace(component, views=tuple(views[key] for key in sorted(views))))
    return Layout(layout.regions, tuple(components))


def merged(layout: Layout, others: Iterable[Layout]) -> Layout:
    """`layout` with those views of `others` that it lacks, which some sessions stage besides its own."""
    held = layout.by_key()
    more = {view.key: view for other in others for view in other.views() if view.key not in held}
    return with_views(layout, more) if more else layout


def mismatch(src: View, dst: View) -> str:
    """Why bytes of `src` cannot become bytes of `dst`; empty if they can."""
    if src.format != dst.format:
        return f"{dst.key}: format {src.format} at prefill, {dst.format} at decode"
    if (src.width, src.segs) != (dst.width, dst.segs):
        each = dst.axis.name if dst.axis.total > 1 else "row"
        if src.shard_nbytes != dst.shard_nbytes:
            return f"{dst.key}: {src.shard_nbytes} bytes a {each} at prefill, {dst.shard_nbytes} at decode"
        runs = f"{src.segs} runs of {src.width} bytes a {each} at prefill, {dst.segs} of {dst.width} at decode"
        return f"{dst.key}: {runs}"
    if src.tokens_per_row != dst.tokens_per_row:
        return f"{dst.key}: a row covers {src.tokens_per_row} tokens at prefill, {dst.tokens_per_row} at decode"
    if (src.axis.name, src.axis.total) != (dst.axis.name, dst.axis.total):
        return (
            f"{dst.key}: axis {src.axis.name} of {src.axis.total} shards at prefill, "
            f"{dst.axis.name} of {dst.axis.total} at decode"
        )
    return ""
