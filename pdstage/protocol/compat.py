"""Whether two engines hold the same state, whatever each one's layout, and whether what a peer says of its own can be.

What does not fit is a sentence that names both sides. Two ranks can judge the views that both have. What one of them
lacks is no mismatch as long as another rank of its engine may have it: a pipeline stage holds its own layers, and a
draft model's only the last. So who is alone in its pipeline is judged at Hello, a pipeline by the union of its ranks:
that of prefill at decode, once every writer of a room has answered; that of decode at prefill, once every destination
of a room has opened it.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pdstage.errors import PeerError, UsageError
from pdstage.layout import Key, Layout, Region, View, check_inside, mismatch
from pdstage.plan.ownership import CommonTokens
from pdstage.plan.token_slices import MAX_ITEMS, tokens_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdstage.layout.topology import Topology
    from pdstage.plan import Shares
    from pdstage.protocol import messages as m
    from pdstage.protocol.session import Endpoint, Session

    Held: TypeAlias = dict[str, dict[str, set[int]]]

WEIGHTS = "weights"
_NAMES = ("name", "revision")
_MAX_VIEWS = 1 << 14
_MAX_NAME = 256
_MAX_TOKENS_PER_ITEM = 1 << 20
_MAX_NUMBER = 1 << 62
_MAX_SHARES = 64
_FEW = 256


# Models, at Hello and Welcome.


def other_model(src: m.Model, dst: m.Model) -> str:
    """Where prefill's engine and decode's contradict each other about their model, in words; empty if nowhere.

    What one of them does not say is not compared. Equal `weights` are the same model, whatever its name and revision:
    a folder's name is one host's own.
    """
    at_prefill, at_decode = dict(src), dict(dst)
    same_weights = WEIGHTS in at_prefill and at_prefill[WEIGHTS] == at_decode.get(WEIGHTS)
    for name, said in at_prefill.items():
        if at_decode.get(name, said) != said and not (same_weights and name in _NAMES):
            both_say = f"the model's {name} is {said!r} at prefill and {at_decode[name]!r} at decode"
            return f"{both_say}; if they may go together all the same, leave it out of `model` on one side"
    return ""


# Layouts, at Hello and Welcome.


def incompatible(src: Layout, dst: Layout, src_place: Topology, dst_place: Topology) -> str:
    """Why `src`, a rank of prefill, cannot serve `dst`, one of decode, naming the first culprit; empty if it can."""
    held = src.by_key()
    for component in dst.components:
        ours = src.component(component.name) if component.name in src.names else component
        if ours.positional != component.positional:
            alone = "prefill" if ours.positional else "decode"
            return f"component {component.name!r} has token positions at {alone} alone"
        if ours.exact != component.exact:
            alone = "decode" if ours.exact else "prefill"
            return f"component {component.name!r} takes unequal numbers of slots at {alone} alone"
        for view in component.views:
            if view.key in held and (problem := mismatch(held[view.key], view)):
                return problem
    for side, place in (("prefill", src_place), ("decode", dst_place)):
        if place.pp_size == 1 and (problem := lacking(side, (src,), (dst,))):
            return problem
    return tokens_problem(src, dst)


def lacking(side: str, src: Iterable[Layout], dst: Iterable[Layout]) -> str:
    """What all ranks of `side` together lack of what the other side holds, and what each has; empty if nothing.

    `src` are prefill's layouts, `dst` decode's; `side` is "prefill" or "decode".
    """
    at_prefill, at_decode = _held(src), _held(dst)
    here, there = (at_prefill, at_decode) if side == "prefill" else (at_decode, at_prefill)
    for name, roles in there.items():
        if name not in here:
            both = f"prefill has {_and(at_prefill)}, decode {_and(at_decode)}"
            return f"no {side} rank has component {name!r}: {both}"
        for role, layers in roles.items():
            if role not in here[name]:
                both = f"prefill has {_and(at_prefill[name])}, decode {_and(at_decode[name])}"
                return f"no {side} rank has {role!r} of component {name!r}: {both}"
            if missing := layers - here[name][role]:
                both = f"{len(at_prefill[name][role])} layers at prefill and {len(at_decode[name][role])} at decode"
                return f"{role!r} of component {name!r} has {both}: no {side} rank has layer {min(missing)}"
    return ""


def _held(layouts: Iterable[Layout]) -> Held:
    held: Held = {}
    for layout in layouts:
        for view in layout.views():
            held.setdefault(view.key.component, {}).setdefault(view.key.role, set()).add(view.key.layer)
    return held


def _and(names: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in sorted(names))


def layout_problem(layout: Layout) -> str:
    """What is wrong with a peer's `layout`, in words; empty if nothing is.

    Decoding has checked types and each view's own rules; here are the limits. Every number of a layout goes into 64-bit
    tables later, unused strides too, and every view is looked at in turn.
    """
    views = list(layout.views())
    if not 0 < len(views) <= _MAX_VIEWS or len(layout.regions) > _MAX_VIEWS:
        return f"a layout of {len(views)} views in {len(layout.regions)} regions"
    if len(layout.by_key()) != len(views) or len({c.name for c in layout.components}) != len(layout.components):
        return "a layout that names a view or a component twice"
    for region in layout.regions:
        numbers = (region.base, region.nbytes, region.device)
        if not all(0 <= number < _MAX_NUMBER for number in numbers) or len(region.kind) > _MAX_NAME:
            return f"a region of {region.nbytes} bytes at {region.base}"
    return next(filter(None, (_view_problem(view, layout.regions) for view in views)), "")


def _view_problem(view: View, regions: tuple[Region, ...]) -> str:
    if any(len(name) > _MAX_NAME for name in (*view.key[:2], view.axis.name, view.format)):
        return "a name of more than 256 characters"
    numbers = (
        view.key.layer, view.region, view.offset, view.n_items, view.item_stride, view.tokens_per_item, view.shards,
        view.shard_stride, view.segs, view.seg_stride, view.width, view.axis.total, *chain.from_iterable(view.rows),
    )  # fmt: skip
    if any(abs(number) >= _MAX_NUMBER for number in numbers):
        return f"view {view.key} has a number beyond 2^62"
    if view.n_items > MAX_ITEMS or view.tokens_per_item > _MAX_TOKENS_PER_ITEM:
        return f"view {view.key} has {view.n_items} items of {view.tokens_per_item} tokens"
    try:
        check_inside(view, regions)
    except UsageError as error:
        return str(error)
    return ""


# What an Open asks for.


def open_problems(opened: m.Open, session: Session) -> Iterator[str]:
    """What is wrong with an Open, in words; nothing if every number is in its range, every share both of this rank's
    layout and of the destination's, and every item in the destination's pool.
    """
    place = session.topology
    if (opened.rank, opened.destinations) != (place.group_rank, place.group_size):
        said = f"Hello said {place.group_rank} of {place.group_size}"
        yield f"Open from rank {opened.rank} of {opened.destinations}, {said}"
    if opened.items and not session.exposes_pool:
        yield "Open gives items, but Hello did not expose the pool"
    if opened.row is not None and (session.rows is None or opened.row >= session.rows.n_rows):
        yield f"Open names aux row {opened.row}, which Hello did not expose"
    for one in opened.advances:
        lane = session.lanes[one.lane] if one.lane < len(session.lanes) else None
        if lane is None or one.cursor % lane.nbytes + one.nbytes > lane.nbytes:
            yield f"Open with {one}"
    if opened.shares not in session.shares:
        if problem := _shares_problem(session.staged[:2], opened.shares):
            yield problem
        if len(session.shares) >= _MAX_SHARES:
            session.shares.clear()
        session.shares.add(opened.shares)
    asked = {ask.component: ask for ask in opened.asked}
    known = session.layout.names
    for ask in opened.asked:
        if ask.component not in known or ask.start > ask.stop or asked[ask.component] is not ask:
            yield f"Open asks for {ask.component!r} {ask.start}..{ask.stop}"
    for items in opened.items:
        if problem := items_problem(session.layout, items, asked.get(items.component)):
            yield problem


def _shares_problem(layouts: tuple[Layout, ...], owned: Shares) -> str:
    """Each of `layouts` must hold the shards of every share, and no two shares be of one."""
    held_by_each = [layout.by_key() for layout in layouts]
    taken: dict[Key, list[range]] = {}
    for share in owned:
        start, stop, step = share.layers
        if step < 1 or start >= stop or share.count < 1:
            return f"Open asks for {share}, which is nothing"
        shards = range(share.first, share.first + share.count)
        for layer in range(start, stop, step):
            key = Key(share.component, share.role, layer)
            for held in held_by_each:
                axis = held[key].axis if key in held else None
                if axis is None or not axis.first <= shards.start < shards.stop <= axis.first + axis.count:
                    return f"Open asks for {share} of layer {layer}, which is not here"
            others = taken.setdefault(key, [])
            if any(shards.start < other.stop and other.start < shards.stop for other in others):
                return f"Open asks for {share} of layer {layer} twice"
            others.append(shards)
    return ""


def items_problem(layout: Layout, items: m.Items, asked: m.Asked | None) -> str:
    """The item numbers must exist in `layout`, each once, and cover what is asked."""
    component = layout.component(items.component) if items.component in layout.names else None
    if component is None or len(items.data) % 4:
        return f"Open gives {len(items.data)} bytes of items of {items.component!r}"
    numbers = np.frombuffer(items.data, "<i4")
    # Of a few numbers plain Python finds these several times faster than numpy's calls.
    few = len(numbers) <= _FEW
    ordered = sorted(numbers.tolist()) if few else np.sort(numbers)
    view = component.views[0]
    if len(ordered) and not 0 <= ordered[0] <= ordered[-1] < view.n_items:
        return f"Open gives items of {items.component!r} past its {view.n_items}"
    if len(set(ordered)) < len(ordered) if few else np.any(np.equal(ordered[1:], ordered[:-1])):
        return f"Open gives an item of {items.component!r} twice"
    # The tokens asked for, by the numbers that the destination's own tokens have.
    own = CommonTokens.of(component.owned)
    first, end = (own.count(asked.start), own.count(asked.stop)) if asked is not None else (0, 0)
    stop = items.first_token + len(numbers) * view.tokens_per_item
    if first < end and not items.first_token <= first < end <= stop:
        both = f"for {items.first_token}..{stop} and asks for {first}..{end}"
        return f"Open gives items of {items.component!r} {both}"
    return ""


# Slots, at the end of a room.


class Slots:
    """A node's components without positions, and which of them it has warned of: what follows when the two sides of a
    room name different numbers of slots (I9). Both cores ask here, so that both say the same.

    Items without token positions are matched by order, so the side with fewer says how many there are, and the other
    keeps as many of its own; SGLang trims its state indices so. A component that needs exact lengths refuses instead.
    """

    def __init__(self, layout: Layout) -> None:
        self.components = {component.name: component for component in layout.components if not component.positional}
        self.exact = frozenset(name for name, component in self.components.items() if component.exact)
        self._warned: set[str] = set()

    def compare(self, endpoint: Endpoint, session: Session, name: str, at_prefill: int, at_decode: int) -> str:
        """Why a room with these numbers of slots cannot be, in words that name both; empty if it can.

        Where they differ and may, that is counted, and complained of the first time for each component.
        """
        if at_prefill == at_decode:
            return ""
        what = "slots" if self.components[name].tokens_per_item == 1 else "rows of slots"
        both = f"{at_prefill} {what} at prefill and {at_decode} at decode"
        if name in self.exact:
            return f"component {name!r} has {both}, and must have as many on both sides"
        endpoint.counters.slots_trimmed += 1
        if name not in self._warned:
            self._warned.add(name)
            kept = f"component {name!r} has {both}: the first {min(at_prefill, at_decode)} are used"
            endpoint.warn(session.route, PeerError(kept, remedy="this is said once; see slots_trimmed"))
        return ""
