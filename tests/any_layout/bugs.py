"""Deliberate bugs in the planner, the staging and the direct path, one at a time: the property must see each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select, ownership, spans, tables
from pdstage.plan import staging as plan
from pdstage.protocol import destinations
from pdstage.stager import Stager
from tests.any_layout import check, held
from tests.any_layout.describe import Case
from tests.any_layout.draw import draw
from tests.any_layout.tape import Tape


@contextlib.contextmanager
def _selects(wrong: Callable) -> Iterator[None]:
    with patch("pdstage.stager.selects", wrong), patch("tests.any_layout.check.selects", wrong):
        yield


@contextlib.contextmanager
def _at_decode_only(*patches: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Inside `Stager.scatter`, where the decode side makes its plans and uses them."""
    scatter = Stager.scatter

    def wrong(self, *given, **named):
        with contextlib.ExitStack() as stack:
            for one in patches:
                stack.enter_context(one())
            scatter(self, *given, **named)

    with patch.object(Stager, "scatter", wrong):
        yield


def shard_start_off_by_one():
    """The second of a rank's shards is taken for the first."""

    def wrong(layout, owned, rects):
        views = layout.by_key()
        return tuple(
            Select(key, start + (start + count < views[key].shards), count)
            for key, start, count in plan.selects(layout, owned, rects)
        )

    return _selects(wrong)


def positions_taken_for_lengths():
    """Items count from the token range, not from their first token: windows and prefixes shift."""
    parts = tables.Table.parts

    def wrong(self, indexes, tokens):
        return [p._replace(first_token=0, start=0, stop=p.stop - p.start) for p in parts(self, indexes, tokens)]

    return patch.object(tables.Table, "parts", wrong)


def kernel_pages_forgotten():
    """The outer row level is left out: pages of several `[keys][scales]` blocks run on as one."""
    row = tables._row

    def wrong(*given):
        made = row(*given)
        return made._replace(outer_rows=made.rows_per_item)

    return patch.object(tables, "_row", wrong)


def replicas_all_send():
    """Every rank that holds a shard sends it."""

    def wrong(view, wanted, holders, dst_tp, turn):
        return [
            (holder.number, shard, 1)
            for shard in range(view.axis.first, view.axis.first + view.axis.count)
            for holder in holders
            if holder.axis.first <= shard < holder.axis.first + holder.axis.count
        ]

    return patch.object(plan, "_deal", wrong)


def padding_left_out_at_decode():
    """Decode reads views back to back where prefill starts each at a multiple of 128 bytes."""
    return _at_decode_only(lambda: patch.object(plan, "VIEW_ALIGNMENT", 1))


def layers_before_roles_at_decode():
    """Decode takes K and V in turn, layer by layer, where all K are staged before all V."""

    class Wrong(plan.Staging):
        def __init__(self, layout, select):
            super().__init__(layout, select)
            self.select = tuple(sorted(self.select, key=lambda s: (s.key.component, s.key.layer, s.key.role)))

    return _at_decode_only(lambda: patch.object(tables, "Staging", Wrong))


def page_sizes_forgotten_in_the_wire_order():
    """Head-major wherever both sides keep heads outermost, in pages of any sizes."""

    def wrong(pairs):
        heads_first = pairs and all(plan._heads_outermost(view) for pair in pairs for view in pair)
        return HEAD_MAJOR if heads_first else TOKEN_MAJOR

    return patch("pdstage.plan.token_slices.order_of", wrong)


def prefix_sent_again():
    """A chunk is not cut at the first token that decode asked for."""
    clip = destinations.clip

    def wrong(rects, destination):
        from_start = copy.copy(destination)
        from_start.asked = {name: (0, stop) for name, (_, stop) in destination.asked.items()}
        return clip(rects, from_start)

    return patch.object(destinations, "clip", wrong)


def layer_ranges_inclusive():
    """The layer after a chunk's last travels with it."""

    def wrong(layout, owned, rects):
        return plan.selects(layout, owned, [rect._replace(layer_stop=rect.layer_stop + 1) for rect in rects])

    return _selects(wrong)


def half_rows_dropped():
    """A compressed row that a range ends in is left to nobody."""

    def wrong(row, part):
        origin = part.first_token // row.tokens_per_row
        return part.start // row.tokens_per_row - origin, part.stop // row.tokens_per_row - origin

    return patch.object(tables, "rows_touched", wrong)


def rows_cut_between_pieces():
    """A chunk that is too long is cut inside compressed rows, which then travel several times."""

    def wrong(staging, component, limit):
        return staging.tokens_within(component, limit)

    return patch.object(destinations, "_whole_rows", wrong)


def joined_by_the_source_alone():
    """A descriptor goes on where only the source does."""

    def wrong(cells, allocation):
        return joined(spans.Spans(cells.src, cells.dst[:1] + (cells.src - cells.src[:1]), cells.nbytes), allocation)

    joined = spans._joined
    return patch.object(spans, "_joined", wrong)


def shards_numbered_locally():
    """A share's first shard is looked up as if every rank's first shard were number 0."""

    def wrong(layout, owned, rects):
        views = layout.by_key()
        return tuple(
            Select(key, (start + views[key].axis.first) % max(1, views[key].shards - count + 1), count)
            for key, start, count in plan.selects(layout, owned, rects)
        )

    return _selects(wrong)


def contiguous_parts_not_cut():
    """A rank of contiguous parts is asked for all tokens of the sequence."""
    return patch("pdstage.plan.ownership.Common.part", lambda self, component, start, stop: (start, stop))


def blocks_numbered_from_the_chunk():
    """The common tokens of a chunk are counted from its first, wherever that lies in the ranks' blocks."""
    tokens = ownership.Common.tokens

    def wrong(self, rects):
        return {name: (0, stop - start) for name, (start, stop) in tokens(self, rects).items()}

    return patch("pdstage.plan.ownership.Common.tokens", wrong)


def numpy_staged(tape: Tape) -> Case:
    return replace(draw(tape), code="numpy", path="staged")


def numpy_direct(tape: Tape) -> Case:
    return replace(draw(tape), code="numpy", path="direct")


BUGS = {
    shard_start_off_by_one: draw,
    positions_taken_for_lengths: draw,
    kernel_pages_forgotten: draw,
    replicas_all_send: draw,
    padding_left_out_at_decode: numpy_staged,
    layers_before_roles_at_decode: draw,
    page_sizes_forgotten_in_the_wire_order: draw,
    prefix_sent_again: draw,
    layer_ranges_inclusive: draw,
    half_rows_dropped: numpy_direct,
    rows_cut_between_pieces: draw,
    joined_by_the_source_alone: numpy_direct,
    shards_numbered_locally: draw,
    contiguous_parts_not_cut: draw,
    blocks_numbered_from_the_chunk: draw,
}


@contextlib.contextmanager
def planted(bug: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """The bug, and room for it to write where it must not."""
    with bug(), patch.object(held, "MARGIN", 1 << 20):
        yield


def cases_until_found(bug: Callable[[], AbstractContextManager], most: int) -> int | None:
    """How many of the seeds 0, 1, ... it takes; None if more than `most`."""
    with planted(bug):
        for seed in range(most):
            try:
                check.check(BUGS[bug](Tape(seed)))
            except check.FAILURES:
                return seed + 1
    return None
