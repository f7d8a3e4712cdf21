"""What a prefill core asks to be moved: each chunk's gather, and its write as spans of addresses.

Layer 5. Must not know rooms' states, locks or the clock. `paths` says which way a chunk goes, `posts` how a write is
posted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import Region
from pdstage.manager.sessions import label
from pdstage.protocol.effects import Gather, Write, WriteDirect, WriteRow
from pdstage.spans import Index
from pdstage.transport import Mapped, Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdstage.cut import Pair
    from pdstage.errors import PdstageError
    from pdstage.manager.observer import Observation
    from pdstage.manager.paths import Paths
    from pdstage.manager.posts import Posts
    from pdstage.metrics import Counters
    from pdstage.protocol.outbox import Chunk
    from pdstage.protocol.session import Link
    from pdstage.stager import Stager
    from pdstage.transport import Transport


class Moves:
    """One node's gathers and writes, out of its pool and of `parts`, its send buffers.

    `pair_of` says how a session's layouts meet. `observed` is told when a write begins; None: nobody observes.
    """

    def __init__(
        self,
        transport: Transport,
        stager: Stager,
        posts: Posts,
        paths: Paths,
        *,
        parts: Sequence[Region],
        device: str,
        pair_of: Callable[[Link], Pair],
        counters: Counters,
        observed: Observation | None,
    ) -> None:
        self._transport, self._stager, self._posts, self._paths = transport, stager, posts, paths
        self._parts, self._kind, self._pair_of = parts, device.partition(":")[0], pair_of
        self._counters, self._observed = counters, observed
        self.placed: dict[int, Mapped] = {}
        """Destinations' memory that gathers under way write, by ticket: it stays mapped until they are over."""

    def gather(self, effect: Gather) -> None:
        """Launches a chunk's gather: the stager says when it is over, and then `gathered` is to be called."""
        ticket, chunk = effect.ticket, effect.chunk
        link, pair = chunk.record.link, self._pair_of(chunk.record.link)
        dst = self._place(ticket, chunk, effect.address) or self._part(effect.buffer, chunk.nbytes)
        self._stager.gather(
            ticket, chunk.record.shares, chunk.rects, wire=pair.wire, items=_indexes(chunk), dst=dst,
            checksum=link.checksums, tokens=chunk.tokens, cut=pair.src,
            staged=link.converted and link.converted.offered,
        )  # fmt: skip

    def gathered(self, ticket: int) -> None:
        self.placed.pop(ticket, None)

    def write(self, effect: Write | WriteDirect | WriteRow) -> PdstageError | None:
        """Begins a write; an error means that it never began."""
        try:
            spans = self._spans(effect)
        except UsageError as error:
            return error
        if self._observed is not None:
            self._observed.began(effect.ticket)
        failed = self._posts.begin(effect.ticket, label(effect.chunk.record.link), spans, effect.tag)
        self._counters.descriptors += len(spans.nbytes) if spans is not None else 0
        return failed

    def _spans(self, effect: Write | WriteDirect | WriteRow) -> Spans | None:
        """From where to where; None: the bytes are where they belong, and only the tag is left to be sent."""
        match effect:
            case Write(_, buffer, chunk, address):
                if chunk.placed:
                    return None
                src = self._parts[buffer].base
                return Spans(np.array([src]), np.array([address]), np.array([chunk.nbytes]))
            case WriteDirect(_, chunk):
                record = chunk.record
                plan = self._paths.direct(record, chunk.rects)
                theirs = {
                    given.component: Index.of(np.frombuffer(given.data, np.int32), given.first_token)
                    for given in record.open.items
                }
                return Spans(*plan.spans(chunk.tokens, _indexes(chunk), theirs))
            case WriteRow(_, _, spans):
                return Spans(*np.ascontiguousarray(np.array(spans, np.int64).T))

    def _place(self, ticket: int, chunk: Chunk, address: int) -> Region | None:
        """The chunk's lease, if it is mapped here: then it is gathered and written in one pass."""
        mapped = self._transport.mapped(label(chunk.record.link), address, chunk.nbytes)
        chunk.placed = mapped is not None and mapped.kind == self._kind
        if mapped is None or not chunk.placed:
            return None
        self.placed[ticket] = mapped
        return Region(mapped.address, chunk.nbytes)

    def _part(self, buffer: int, nbytes: int) -> Region:
        held = self._parts[buffer]
        return Region(held.base, min(held.nbytes, nbytes), held.kind, held.device)


def _indexes(chunk: Chunk) -> Mapping[str, Index]:
    return {name: given.index for name, given in chunk.source.items.items()}  # type: ignore[attr-defined]
