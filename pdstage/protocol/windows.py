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
    from pdstage.protocol.session import Link


class Windowed(HandshakeServer):
    """The prefill core's lanes, by session: their watermarks, and held chunks whose window is closed."""

    def __init__(self, incarnation: int, config: Config, welcome: m.Welcome) -> None:
        super().__init__(incarnation, config, welcome)
        self._marks: dict[tuple[Link, int], int] = {}
        self._closed: dict[tuple[Link, int], list[tuple[int, int, Chunk]]] = {}
        """Heaps of (end of its lease, ticket, chunk)."""

    @abstractmethod
    def _advance(self, chunk: Chunk) -> None:
        """The window of a held chunk has opened."""

    def _window_open(self, chunk: Chunk) -> bool:
        link = chunk.record.link
        mark = self._marks.get((link, chunk.lane), 0)
        return chunk.cursor + chunk.nbytes <= mark + link.lanes[chunk.lane].nbytes

    def _await_window(self, chunk: Chunk) -> None:
        key = (chunk.record.link, chunk.lane)
        heapq.heappush(self._closed.setdefault(key, []), (chunk.cursor + chunk.nbytes, self.ticket(), chunk))

    def _on_watermark(self, link: Link, mark: m.Watermark, now: float) -> None:
        self._raise_mark(link, mark.lane, mark.watermark)

    def _raise_mark(self, link: Link, lane: int, watermark: int) -> None:
        if not 0 <= lane < len(link.lanes):
            raise PeerError(f"a watermark of lane {lane}", remedy=f"Hello named {len(link.lanes)} lanes")
        key = (link, lane)
        if watermark <= self._marks.get(key, 0):
            return
        self._marks[key] = watermark
        closed = self._closed.get(key)
        limit = watermark + link.lanes[lane].nbytes
        while closed and closed[0][0] <= limit:
            end, _, chunk = heapq.heappop(closed)
            if chunk.phase is Phase.HELD and (chunk.lane, chunk.cursor + chunk.nbytes) == (lane, end):
                self.timers.cancel(("ask", chunk))
                self._advance(chunk)
        if not closed:
            self._closed.pop(key, None)

    def _forget_marks(self, link: Link) -> None:
        for lane in range(len(link.lanes)):
            self._marks.pop((link, lane), None)
            self._closed.pop((link, lane), None)
