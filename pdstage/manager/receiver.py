"""A room at its decode rank, as the engine holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.manager.handle import Handle

if TYPE_CHECKING:
    from pdstage.manager.decode import DecodeNode
    from pdstage.manager.handle import CudaEvent
    from pdstage.manager.items import Checked, GivenItems, GivenTokens
    from pdstage.metadata import AuxRow
    from pdstage.protocol import messages as m
    from pdstage.protocol.decode_rooms import DecodeRoom


class Bound:
    """What `bind` was given, until the core may have it."""

    __slots__ = ("after", "asked", "checked", "priority", "row")

    def __init__(
        self,
        checked: dict[str, Checked],
        asked: tuple[m.Asked, ...],
        priority: int,
        after: CudaEvent | None,
        row: AuxRow | None,
    ) -> None:
        self.checked = checked
        self.asked = asked
        self.priority = priority
        self.after = after
        self.row = row


class Receiver(Handle):
    """One room at its decode rank. Its pages must stay reserved until `released`."""

    __slots__ = ("_aux", "bound")

    room: DecodeRoom | None
    _node: DecodeNode

    def __init__(self, node: DecodeNode, key: bytes) -> None:
        super().__init__(node, None, key)
        self.bound: Bound | None = None
        self._aux: bytes | AuxRow | None = None

    @property
    def aux(self) -> bytes | AuxRow | None:
        """The request's aux as prefill gave it to `finish`, bytes or a row; there once the state is Success.

        A row is the one given to `bind`, of the columns that both sides have; its others hold what they held before.
        """
        return self._aux

    @property
    def ready_to_bind(self) -> bool:
        """Whether prefill has computed everything and only waits for `bind`, for engines that allocate late."""
        return self.room is not None and self.room.ready_to_bind

    def bind(
        self,
        items: GivenItems,
        tokens: GivenTokens = None,
        *,
        prefix_tokens: int = 0,
        after: CudaEvent | None = None,
        priority: int = 0,
        aux: AuxRow | None = None,
    ) -> None:
        """Publishes where the room's state goes: `tokens` (start, stop, by component; all that `items` cover if None).
        A rank that holds part of the tokens gives the whole range, and items for its own; where parts are contiguous,
        on either side, they are those of a sequence of `stop` tokens.

        Of components with positions, tokens below `prefix_tokens` are here already and are not sent. `after` is an
        event; until it is done the engine may still use the pages, and nothing is opened. Lower `priority` goes first.
        `aux` is a row of the node's metadata buffers: the request's row goes there, on whatever way, and until
        `released` a peer may write it. Raises `UsageError` for items out of range, named twice or too few, or a row
        that is free or another room's; the room stays unbound then.
        """
        self._node.bind(self, items, tokens, prefix_tokens=prefix_tokens, after=after, priority=priority, aux=aux)

    def abort(self, reason: str = "aborted by the engine") -> None:
        """Gives the room up: it fails here, and at every writer: as soon as that is found and answers, and where it was
        not submitted yet, once it is. `released` tells when its pages are safe.
        """
        self._node.abort(self, reason)
