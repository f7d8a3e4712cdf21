"""Windows of the lanes that prefill writes to: how far each may be written now, and which chunks wait for more.

Layer 2, pure. Must not know how a lease was come by, or what is written into it.

A lane's window ends one capacity beyond its watermark, which decode tells and which only rises. A lease may end beyond
the window: it is held, but not written yet, since what was lent one lap before lies in the same memory.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from typing import TYPE_CHECKING

from pdstage.errors import PeerError
from pdstage.protocol.handshake import HandshakeServer
from pdstage.protocol.outbox import Phase

if TYPE_CHECKING:
    from pdstage.protocol import messages as m
    from pdstage.protocol.config import Config
    from pdstage.protocol.outbox import Chunk
    from pdstage.protocol.session import Session


class Windowed(HandshakeServer):
    """The prefill core's lanes, by session: their watermarks, and held chunks whose window is closed."""

    def __init__(self, incarnation: int, config: Config, welcome: m.Welcome) -> None:
        super().__init__(incarnation, config, welcome)
        self._marks: dict[tuple[Session, int], int] = {}
        self._closed: dict[tuple[Session, int], list[tuple[int, int, Chunk]]] = {}
        """Heaps of (end of its lease, ticket, chunk)."""

    @abstractmethod
    def _advance(self, chunk: Chunk) -> None:
        """The window of a held chunk has opened."""

    def _window_open(self, chunk: Chunk) -> bool:
        session = chunk.destination.session
        mark = self._marks.get((session, chunk.lane), 0)
        return chunk.cursor + chunk.nbytes <= mark + session.lanes[chunk.lane].nbytes

    def _await_window(self, chunk: Chunk) -> None:
        key = (chunk.destination.session, chunk.lane)
        heapq.heappush(self._closed.setdefault(key, []), (chunk.cursor + chunk.nbytes, self.ticket(), chunk))

    def _on_watermark(self, session: Session, mark: m.Watermark, now: float) -> None:
        self._raise_mark(session, mark.lane, mark.watermark)

    def _raise_mark(self, session: Session, lane: int, watermark: int) -> None:
        if not 0 <= lane < len(session.lanes):
            raise PeerError(f"a watermark of lane {lane}", remedy=f"Hello named {len(session.lanes)} lanes")
        key = (session, lane)
        if watermark <= self._marks.get(key, 0):
            return
        self._marks[key] = watermark
        closed = self._closed.get(key)
        limit = watermark + session.lanes[lane].nbytes
        while closed and closed[0][0] <= limit:
            end, _, chunk = heapq.heappop(closed)
            if chunk.phase is Phase.HELD and (chunk.lane, chunk.cursor + chunk.nbytes) == (lane, end):
                self.timers.cancel(("ask", chunk))
                self._advance(chunk)
        if not closed:
            self._closed.pop(key, None)

    def _forget_marks(self, session: Session) -> None:
        for lane in range(len(session.lanes)):
            self._marks.pop((session, lane), None)
            self._closed.pop((session, lane), None)
