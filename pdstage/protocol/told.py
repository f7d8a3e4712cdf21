"""What a peer's layout must be before anything is computed from it.

Layer 2, pure. Must not know sessions or messages: it says in words what is wrong.

Decoding has checked types and each view's own rules; here are the limits. Every number of a layout goes into 64-bit
tables later, unused strides too, and every view is looked at in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.layout import check_inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.layout import Layout, Region, View

_MAX_VIEWS = 1 << 14
_MAX_NAME = 256
_MAX_TOKENS_PER_ITEM = 1 << 20
_MOST = 1 << 62


def layout_problem(layout: Layout) -> str:
    """What is wrong with a peer's `layout`, in words; empty if nothing is."""
    views = list(layout.views())
    if not 0 < len(views) <= _MAX_VIEWS or len(layout.regions) > _MAX_VIEWS:
        return f"a layout of {len(views)} views in {len(layout.regions)} regions"
    if len(layout.by_key()) != len(views) or len({c.name for c in layout.components}) != len(layout.components):
        return "a layout that names a view or a component twice"
    for region in layout.regions:
        numbers = (region.base, region.nbytes, region.device)
        if not all(0 <= number < _MOST for number in numbers) or len(region.kind) > _MAX_NAME:
            return f"a region of {region.nbytes} bytes at {region.base}"
    return next(filter(None, (_view_problem(view, layout.regions) for view in views)), "")


def _view_problem(view: View, regions: tuple[Region, ...]) -> str:
    if any(len(name) > _MAX_NAME for name in (*view.key[:2], view.axis.name, view.format)):
        return "a name of more than 256 characters"
    if any(abs(number) >= _MOST for number in _numbers(view)):
        return f"view {view.key} has a number beyond 2^62"
    if view.tokens_per_item > _MAX_TOKENS_PER_ITEM:
        return f"view {view.key} has items of {view.tokens_per_item} tokens"
    try:
        check_inside(view, regions)
    except UsageError as error:
        return str(error)
    return ""


def _numbers(view: View) -> Iterator[int]:
    yield from (view.key.layer, view.region, view.offset, view.n_items, view.item_stride, view.tokens_per_item)
    yield from (view.shards, view.shard_stride, view.segs, view.seg_stride, view.width, view.axis.total)
    for row in view.rows:
        yield from row
