"""The pages or slots an engine names for a room, checked once and copied (I9)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from pdstage.arguments import integer, pair, shown, text
from pdstage.errors import UsageError
from pdstage.kernels import Index
from pdstage.layout.states import canonical
from pdstage.layout.views import MAX_LAYERS
from pdstage.plan import Rect, Rects
from pdstage.plan.ownership import CommonTokens

if TYPE_CHECKING:
    import numpy.typing as npt

    from pdstage.layout import Component, Layout
    from pdstage.layout.topology import Range


_FEW = 256
MAX_TOKENS = (1 << 40) - 1
"""The most tokens that a sequence may have, so that no sum of theirs and bytes is beyond 63 bits."""


_Integers: TypeAlias = "npt.NDArray[np.integer[Any]]"
GivenItems: TypeAlias = "Mapping[str, Items | npt.ArrayLike] | npt.ArrayLike"
GivenTokens: TypeAlias = "Mapping[str, Range] | Range | int | None"


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Pages or slots of one component: item i covers tokens `[first_token + i*T, first_token + (i+1)*T)`.

    In components with positions, `first_token` is a multiple of T: both sides then cut a sequence at the same places,
    which the head-major staged order requires.

    Under context parallelism, a rank with interleaved tokens (`TokenShard`) counts only its own: item i covers its own
    tokens from number `first_token + i*T` on. Token ranges, as in `Sender.chunk` and `Receiver.bind`, are positions in
    the sequence on every rank.

    `pages` is a one-dimensional sequence of integers; it is copied, never modified.
    """

    pages: npt.ArrayLike
    first_token: int = 0


@dataclass(slots=True, eq=False)
class Checked:
    """Items as the wire and, by their index, the kernels take them, and the tokens they serve."""

    pages: npt.NDArray[np.int32]
    start: int
    stop: int
    index: Index


def check(layout: Layout, items: GivenItems, tokens: GivenTokens, *, unique: bool) -> dict[str, Checked]:
    """Normalises what an engine passed; raises `UsageError` naming the component, the place and the value.

    A bare array stands for the layout's only component, a bare number n of tokens for `(0, n)`, no tokens for all that
    the items cover. No items at all are nothing to move, of a component this rank does not have too. `unique`:
    destinations, where a page may not be named twice.
    """
    spans = _spans(layout, tokens)
    held = layout.names
    checked, nothing = {}, set()
    for alias, given in _by_name(layout, items).items():
        name, first = alias if alias in held else canonical(alias), 0
        if isinstance(given, Items):
            first = integer(f"first_token of {name!r}", given.first_token)
            given = given.pages  # noqa: PLW2901
        pages = _as_integers(name, given)
        if name not in held and not len(pages):
            nothing.add(name)
            continue
        checked[name] = _check_one(layout.component(name), pages, first, spans.get(name), unique=unique)
    for name in spans:
        if name not in checked and name not in nothing:
            raise UsageError(f"tokens of {name!r} without its items", remedy="give the items too", component=name)
    return checked


def _by_name(layout: Layout, items: GivenItems) -> Mapping[str, Items | npt.ArrayLike]:
    try:
        named = dict(items) if isinstance(items, Mapping) else None
    except Exception as error:
        raise UsageError(f"items are {shown(items)}", remedy="give a mapping, or the items themselves") from error
    if named is None:
        return {_only(layout, "items").name: cast("npt.ArrayLike", items)}
    return {text("a component's name", name): given for name, given in named.items()}


def _spans(layout: Layout, tokens: GivenTokens) -> dict[str, Range]:
    """By component; none for all that the items cover."""
    if tokens is None:
        return {}
    if isinstance(tokens, Mapping):
        return {
            canonical(text("a component's name", name)): pair(f"tokens of {name!r}", span, high=MAX_TOKENS)
            for name, span in tokens.items()
        }
    name = _only(layout, "tokens").name
    if isinstance(tokens, tuple | list):
        return {name: pair("tokens", tokens, high=MAX_TOKENS)}
    return {name: (0, integer("tokens", tokens, high=MAX_TOKENS))}


def rects_of(layout: Layout, checked: Mapping[str, Checked], layers: Range | None) -> Rects:
    """One rectangle a component, over `layers` (all of its own if None).

    None for no tokens; one for no slots, which says that there are none.
    """
    if layers is not None:
        layers = pair("layers", layers, high=MAX_LAYERS)
    rects = []
    for name, one in checked.items():
        numbers = layout.layers[name]
        low, high = layers or (numbers[0], numbers[-1] + 1)
        some = one.start < one.stop or not layout.component(name).positional
        if some and bisect_left(numbers, low) < bisect_left(numbers, high):
            rects.append(Rect(name, one.start, one.stop, low, high))
    return tuple(sorted(rects))


def _only(layout: Layout, what: str) -> Component:
    if len(layout.components) != 1:
        names = ", ".join(layout.names)
        raise UsageError(f"{what} given without a component's name", remedy=f"give a mapping; there are {names}")
    return layout.components[0]


def _check_one(component: Component, given: _Integers, first: int, span: Range | None, *, unique: bool) -> Checked:
    name, per_item = component.name, component.tokens_per_item
    own = CommonTokens.of(component.owned)
    end = first + len(given) * per_item
    if span is None:
        span = own.token(first), own.token(end - 1) + 1 if end > first else own.token(first)
    start, stop = span
    low, high = own.count(start), own.count(stop)
    holds_none = component.owned.size > 1 and high <= low
    if start > stop or not (holds_none or first <= low <= high <= end):
        remedy = f"give the items of every {per_item} tokens, from first_token on"
        mine = f" (of {component.owned}: its own {low}..{high})" if component.owned.size > 1 else ""
        raise UsageError(
            f"tokens {start}..{stop} of {name!r}{mine} are not in items that cover {first}..{end}",
            remedy=remedy, component=name,
        )  # fmt: skip
    if component.positional and first % per_item:
        raise UsageError(
            f"first_token {first} of {name!r} is inside an item",
            remedy=f"round it down to a multiple of the {per_item} tokens an item has, and give that item too",
            component=name,
        )
    problem = _problem(given, component.n_items, unique=unique)
    if problem is not None:
        what, at = problem
        raise UsageError(
            f"item {at} of {name!r} {what}",
            remedy=f"give items of 0..{component.n_items - 1}, each at most once where they are destinations",
            position=at,
            component=name,
        )
    pages = given.astype(np.int32)  # always a copy: the caller's array stays the caller's (I9)
    return Checked(pages, start, stop, Index.of(pages, first))


def _as_integers(name: str, pages: npt.ArrayLike | Sequence[int]) -> _Integers:
    cause = None
    try:
        array = np.asarray(pages)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the cause)
        what, cause = shown(pages), error
    else:
        if array.ndim == 1 and (not array.size or array.dtype.kind in "iu"):
            return array
        what = f"{array.dtype} of shape {array.shape}"
    raise UsageError(
        f"items of {name!r} are {what}", remedy="give one dimension of integers", component=name
    ) from cause


def _problem(pages: _Integers, n_items: int, *, unique: bool) -> tuple[str, int] | None:
    """What is wrong with the first wrong item and where it is; None if all are good.

    A room has few pages more often than many: for those, plain Python is several times faster than numpy's calls.
    """
    if len(pages) <= _FEW:
        held = pages.tolist()
        good = not held or (min(held) >= 0 and max(held) < n_items and (not unique or len(set(held)) == len(held)))
    else:
        good = pages.min() >= 0 and pages.max() < n_items and not (unique and _named_twice(pages, n_items))
    seen = set()
    for at, page in enumerate([] if good else pages.tolist()):
        if not 0 <= page < n_items:
            return f"is {page}, out of range", at
        if unique and page in seen:
            return f"is {page}, named twice", at
        seen.add(page)
    return None


def _named_twice(pages: _Integers, n_items: int) -> bool:
    """Marks each page, which costs a tenth of sorting them."""
    marked = np.zeros(n_items, np.bool_)
    marked[pages] = True
    return int(np.count_nonzero(marked)) < len(pages)
