"""What a destination may ask for in an Open: what both ranks hold, of rows and items that exist.

Layer 2, pure. Must not know rooms or leases: it says no with a `PeerError`, and the session ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdstage.errors import PeerError
from pdstage.layout import Key
from pdstage.ownership import Numbering

if TYPE_CHECKING:
    from pdstage.layout import Layout
    from pdstage.plan import Share
    from pdstage.protocol import messages as m
    from pdstage.protocol.session import Session

_MAX_SHARES = 64
_FEW = 256
_ITEM = np.dtype("<i4")


def check_open(opened: m.Open, session: Session, layout: Layout) -> None:
    """Raises `PeerError` unless every number is in its range, every share both of `layout`, this rank's, and of the
    destination's, and every item in the destination's pool.
    """
    place = session.topology
    if (opened.rank, opened.destinations) != (place.group_rank, place.group_size):
        what = f"Open from rank {opened.rank} of {opened.destinations}"
        raise PeerError(f"{what}, Hello said {place.group_rank} of {place.group_size}", remedy="check the peer")
    if not 0 < opened.deadline_s < float("inf"):
        raise PeerError("Open with an endless deadline", remedy="check the peer")
    if opened.items and not session.exposes_pool:
        raise PeerError("Open gives items, but Hello did not expose the pool", remedy="check the peer")
    if opened.row is not None and (session.rows is None or opened.row >= session.rows.n_rows):
        raise PeerError(f"Open names aux row {opened.row}, which Hello did not expose", remedy="check the peer")
    if opened.shares not in session.shares:
        check_shares(session.converted[:2] if session.converted else (layout, session.layout), opened.shares)
        if len(session.shares) >= _MAX_SHARES:
            session.shares.clear()
        session.shares.add(opened.shares)
    asked = {ask.component: ask for ask in opened.asked}
    known = {component.name for component in session.layout.components}
    for ask in opened.asked:
        if ask.component not in known or ask.start > ask.stop or asked[ask.component] is not ask:
            what = f"Open asks for {ask.component!r} {ask.start}..{ask.stop}"
            raise PeerError(what, remedy="ask for ascending tokens of each own component once")
    for items in opened.items:
        check_items(session.layout, items, asked.get(items.component))


def check_shares(layouts: tuple[Layout, ...], owned: tuple[Share, ...]) -> None:
    """Raises `PeerError` unless each of `layouts` holds the shards of every share, and no two shares are of one."""
    held_by_each = [layout.by_key() for layout in layouts]
    taken: dict[Key, list[range]] = {}
    for share in owned:
        start, stop, step = share.layers
        if step < 1 or start >= stop or share.count < 1:
            raise PeerError(f"Open asks for {share}", remedy="no such shards here")
        shards = range(share.first, share.first + share.count)
        for layer in range(start, stop, step):
            key = Key(share.component, share.role, layer)
            for held in held_by_each:
                view = held.get(key)
                axis = view.axis if view is not None else None
                if axis is None or shards.start < axis.first or shards.stop > axis.first + axis.count:
                    raise PeerError(f"Open asks for {share} of layer {layer}", remedy="no such shards here")
            others = taken.setdefault(key, [])
            if any(shards.start < other.stop and other.start < shards.stop for other in others):
                raise PeerError(f"Open asks for {share} of layer {layer} twice", remedy="check the peer")
            others.append(shards)


def check_items(layout: Layout, items: m.Items, asked: m.Asked | None) -> None:
    """Raises `PeerError` unless the item numbers exist in `layout` and cover what is asked."""
    component = next((c for c in layout.components if c.name == items.component), None)
    if component is None or len(items.data) % 4:
        raise PeerError(f"Open gives {len(items.data)} bytes of items of {items.component!r}", remedy="check the peer")
    numbers = np.frombuffer(items.data, _ITEM)
    # Of a few numbers plain Python finds the extremes several times faster than numpy's calls.
    held = numbers.tolist() if len(numbers) <= _FEW else [int(numbers.min()), int(numbers.max())]
    if held and not 0 <= min(held) <= max(held) < component.n_items:
        raise PeerError(
            f"Open gives items of {items.component!r} past its {component.n_items}", remedy="check the peer"
        )
    # The tokens asked for, by the numbers that the destination's own tokens have.
    own = Numbering.of(component.owned)
    first, end = (own.count(asked.start), own.count(asked.stop)) if asked is not None else (0, 0)
    stop = items.first_token + len(numbers) * component.tokens_per_item
    if first < end and not items.first_token <= first < end <= stop:
        what = f"Open gives items of {items.component!r} for {items.first_token}..{stop}"
        raise PeerError(f"{what} and asks for {first}..{end}", remedy="check the peer")
