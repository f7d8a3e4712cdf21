"""Whether the state of two engines is the same state, whatever each one's layout: else a sentence that names both.

Layer 2, pure. Must not know sessions or rooms.

Two ranks can judge the views that both have. What one of them lacks is no mismatch as long as another rank of its
engine may have it: a pipeline stage holds its own layers, and a draft model's only the last. So who is alone in its
pipeline is judged at Hello, a pipeline by the union of its ranks: that of prefill at decode, once every writer of a
room is met; that of decode at prefill, once every destination of a room has opened it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pdstage.convert import DATA, Encoding
from pdstage.cut import Cut, tokens_problem
from pdstage.layout import mismatch
from pdstage.ownership import Common

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdstage.convert import Conversion
    from pdstage.layout import Component, Layout
    from pdstage.topology import Topology

    Held: TypeAlias = dict[str, dict[str, set[int]]]


def incompatible(src: Layout, dst: Layout, src_place: Topology, dst_place: Topology) -> str:
    """Why `src`, a rank of prefill, cannot serve `dst`, one of decode, naming the first culprit; empty if it can."""
    held = src.by_key()
    for component in dst.components:
        ours = next((c for c in src.components if c.name == component.name), component)
        if problem := _other_kind(ours, component):
            return problem
        for view in component.views:
            if view.key in held and (problem := mismatch(held[view.key], view)):
                return problem
    alone = [side for side, place in (("prefill", src_place), ("decode", dst_place)) if place.pp_size == 1]
    lacks = next(filter(None, (lacking(side, (src,), (dst,)) for side in alone)), "")
    return lacks or tokens_problem(src, dst)


def parted(met: Conversion, dst: Layout) -> str:
    """Why decode's layout `dst` cannot decode what `met` stages, in words; empty if it can.

    Data and its scales must be scattered by one plan; cut pages that are not all numbered alike take several.
    """
    if not met.components:
        return ""
    cut, own = Cut(met.taken, Common.of(met.offered, met.taken)), dst.by_key()
    for component in met.taken.components:
        if len({cut.class_of(view.key) for view in component.views}) == 1:
            continue
        for view in component.views:
            encoding = Encoding.parse(view.format)
            if encoding is not None and encoding.part == DATA and own[view.key].format != view.format:
                return (
                    f"{view.key}: format {view.format} at prefill, {own[view.key].format} at decode, whose ranks hold "
                    f"other tokens and whose views of {component.name!r} have pages of unequal strides: such data and "
                    "its scales meet in no plan"
                )
    return ""


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


_POSITIONS = {True: "token positions", False: "no token positions"}
_EXACT = {True: "only equal numbers of slots", False: "unequal numbers of slots too"}


def _other_kind(src: Component, dst: Component) -> str:
    if src.positional != dst.positional:
        both = f"{_POSITIONS[src.positional]} at prefill, {_POSITIONS[dst.positional]} at decode"
        return f"component {dst.name!r} has {both}"
    if src.exact != dst.exact:
        return f"component {dst.name!r} takes {_EXACT[src.exact]} at prefill, {_EXACT[dst.exact]} at decode"
    return ""


def _held(layouts: Iterable[Layout]) -> Held:
    held: Held = {}
    for layout in layouts:
        for view in layout.views():
            held.setdefault(view.key.component, {}).setdefault(view.key.role, set()).add(view.key.layer)
    return held


def _and(names: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in sorted(names))
