"""What the destinations of a sent room ask for, as numbers for the engine. The caller holds the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdstage.manager.items import Checked, rects_of
from pdstage.plan.spans import Index
from pdstage.protocol.state import ChunkPhase

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdstage.layout import Layout
    from pdstage.protocol.destinations import PrefillRoom

_OVER = (ChunkPhase.WRITTEN, ChunkPhase.DROPPED, ChunkPhase.BROKEN)


def prefix_tokens(room: PrefillRoom, names: Collection[str]) -> int | None:
    """The first token of the components `names` that any destination asks for; None before all have opened."""
    if not all_opened(room):
        return None
    asked = (one for destination in room.destinations.values() for one in destination.asked.items())
    return min((start for name, (start, _) in asked if name in names), default=0)


def max_chunk_tokens(room: PrefillRoom, layout: Layout, max_nbytes: int) -> int | None:
    """The most tokens that travel as one chunk of `max_nbytes` to every destination; None before all have opened."""
    if not all_opened(room):
        return None
    most = []
    for destination in room.destinations.values():
        limit = min(max_nbytes, destination.session.largest_lane)
        ours = layout.names
        asked = {n: _whole(n, *span) for n, span in destination.asked.items() if n in ours}
        rects = rects_of(layout, asked, None)
        session = destination.session
        staging = session.stagings.of(destination.shares, rects)
        most += [t for name in asked if (t := session.common.numbers(name).reach(staging.tokens_within(name, limit)))]
    return min(most, default=None)


def backlog_nbytes(room: PrefillRoom) -> int:
    """Bytes of the room's chunks that no write has carried yet, summed over destinations."""
    chunks = (c for destination in room.destinations.values() for c in destination.chunks.values())
    return sum(chunk.nbytes for chunk in chunks if chunk.phase not in _OVER)


def is_carried(room: PrefillRoom) -> bool:
    """Whether nothing will read the pages of the chunks given so far: each destination has them, or the room ended."""
    return room.ended or not room.sources or (all_opened(room) and not backlog_nbytes(room))


def all_opened(room: PrefillRoom) -> bool:
    """Whether every decode rank that will take part of the room has said so."""
    return 0 < room.n_destinations <= len(room.destinations)


def _whole(name: str, start: int, stop: int) -> Checked:
    empty = np.empty(0, np.int32)
    return Checked(name, empty, start, start, stop, Index.of(empty))
