"""What the decode side knows of the rooms it receives: each writer's part, and chunks that have landed.

Layer 2, pure. Must not know messages' order or leases' lives; `decode` says when things move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from pdstage.protocol.room import Room

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.columns import Shared
    from pdstage.plan import Rect, Share
    from pdstage.protocol import messages as m
    from pdstage.protocol.coverage import Coverage
    from pdstage.protocol.leases import Lease
    from pdstage.protocol.session import Session


class WriterPhase(Enum):
    UNOPENED = auto()
    OPENING = auto()
    """Open is repeated."""
    OPENED = auto()
    ABORTING = auto()
    """Abort is repeated until Drained or CloseOk."""
    QUIET = auto()
    """Proved: this writer touches nothing of this room any more."""


@dataclass(slots=True, eq=False)
class Writer:
    """One writer of one room."""

    room: DecodeRoom
    number: int
    session: Session
    shares: tuple[Share, ...]
    phase: WriterPhase = WriterPhase.UNOPENED
    coverage: Coverage | None = None
    arrived: set[int] = field(default_factory=set)
    closing: m.CloseOk | None = None
    has_aux: bool = False
    direct: bool = False
    row_arrived: bool = False
    reason: str = ""

    @property
    def writes_in_place(self) -> bool:
        """Whether its writer was told of memory of this room: of pages, or of the aux row."""
        return self.direct or (self.has_aux and self.room.row is not None)


@dataclass(slots=True, eq=False)
class Landing:
    """A chunk that lies in staging memory and must be scattered into its room's items."""

    writer: Writer
    lease: Lease
    address: int
    nbytes: int
    rects: tuple[Rect, ...]
    checksum: int


class DecodeRoom(Room):
    """One room as its decode rank sees it. `items` are the engine's, opaque here."""

    __slots__ = (
        "asked", "aux", "bound", "deadline_s", "epoch", "items", "pending", "priority", "routes", "row", "shared",
        "wire_items", "writers",
    )  # fmt: skip

    def __init__(self, key: bytes, epoch: int, routes: dict[int, bytes]) -> None:
        super().__init__(key)
        self.epoch = epoch
        self.routes = routes
        """Of each writer, by its number."""
        self.writers: dict[m.SessionId, Writer] = {}
        self.bound = False
        self.items: Mapping[str, object] = {}
        self.wire_items: tuple[m.Items, ...] = ()
        self.asked: tuple[m.Asked, ...] = ()
        self.aux: bytes | None = None
        self.row: int | None = None
        """The number of the aux row that its writer may write."""
        self.shared: Shared | None = None
        """Once the aux is here, if it is a row: of which columns. Its bytes are in the row itself if `aux` is None."""
        self.pending = 0
        self.priority = 0
        self.deadline_s = 0.0
