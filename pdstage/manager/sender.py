"""A room at its prefill rank, as the engine holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.manager.handle import Handle

if TYPE_CHECKING:
    from pdstage.manager.handle import CudaEvent
    from pdstage.manager.items import GivenItems, GivenTokens
    from pdstage.manager.prefill import PrefillNode
    from pdstage.metadata import AuxRow
    from pdstage.protocol.destinations import PrefillRoom


class Sender(Handle):
    """One room at its prefill rank. Its chunks' pages must stay as they are until `released`."""

    __slots__ = ("finishing",)

    room: PrefillRoom
    _node: PrefillNode

    def __init__(self, node: PrefillNode, room: PrefillRoom, key: bytes) -> None:
        super().__init__(node, room, key)
        self.finishing = False

    @property
    def prefix_tokens(self) -> int | None:
        """The first token that any destination asks for, of this rank's part if parts are contiguous; None before all
        have opened.
        """
        return self._node.prefix_tokens(self.room)

    def prefix_tokens_of(self, component: str) -> int | None:
        """The same of one component, for engines whose states reach further back than what they send of the cache."""
        return self._node.prefix_tokens(self.room, component)

    @property
    def max_chunk_tokens(self) -> int | None:
        """The most tokens that travel as one chunk to every destination; None before all have opened. Longer ones are
        split.
        """
        return self._node.max_chunk_tokens(self.room)

    @property
    def backlog_nbytes(self) -> int:
        """Bytes given to `chunk` that no write has carried yet, summed over destinations."""
        return self._node.backlog_nbytes(self.room)

    def chunk(
        self,
        items: GivenItems,
        tokens: GivenTokens = None,
        *,
        layers: tuple[int, int] | None = None,
        ready: CudaEvent | None = None,
    ) -> None:
        """More of the room: `tokens` (absolute, start and stop, by component) stored in `items`, of `layers` or of all.
        A rank that holds part of the tokens gives ranges as if it held all, but for contiguous parts: those it has.

        `ready` is an event after which the data exists; leases are sought meanwhile. Raises `UsageError` for items that
        are out of range or do not cover the tokens; nothing is sent then.
        """
        self._node.add_chunk(self, items, tokens, layers, ready)

    def finish(
        self, aux: bytes | AuxRow | None = None, *, states: GivenItems | None = None, ready: CudaEvent | None = None
    ) -> None:
        """No more chunks. `states` is a last chunk of slots.

        `aux` is the request's small row, for the destination: bytes, or a row of the node's metadata buffers. Such a
        row must stay as it is until `released`. `ready` is an event after which the row and `states` are there. Raises
        `UsageError` for a second call, too many bytes or a row that is free or another room's.
        """
        self._node.finish(self, aux, states, ready)

    def abort(self, reason: str = "aborted by the engine") -> None:
        """Gives the room up: it fails here and at every destination."""
        self._node.abort(self, reason)
