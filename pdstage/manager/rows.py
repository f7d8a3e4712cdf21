"""Which room has which of a node's aux rows: one, until it is released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.protocol.room import Room

if TYPE_CHECKING:
    from pdstage.manager.handle import Handle
    from pdstage.metadata import AuxRow, MetadataBuffers


class LentRows:
    """Rows of one node's `metadata`; without, none can be lent."""

    def __init__(self, metadata: MetadataBuffers | None) -> None:
        self._metadata = metadata
        self._lent: dict[Handle, AuxRow] = {}

    def __len__(self) -> int:
        """How many rooms have one."""
        return len(self._lent)

    def of(self, handle: Handle) -> AuxRow | None:
        return self._lent.get(handle)

    def lend(self, handle: Handle, row: AuxRow) -> MetadataBuffers:
        """The handle's room has `row` until it is released; under the lock. Raises `UsageError` for a row that is not
        its to have.
        """
        if self._metadata is None:
            raise UsageError(
                f"an aux row for room {handle.id!r} at a node without rows", remedy="give the node its `metadata`"
            )
        room = handle.room
        if not (room.released if isinstance(room, Room) else handle.released):
            self._metadata.lend(row)
            self._lent[handle] = row
        return self._metadata

    def give_back(self, handle: Handle) -> None:
        """The handle's room is released: its row, if it had one, is the engine's again."""
        row = self._lent.pop(handle, None)
        if row is not None and self._metadata is not None:
            self._metadata.give_back(row)

    def give_all_back(self) -> None:
        for handle in list(self._lent):
            self.give_back(handle)
