"""Limits which warnings are logged: a peer may repeat the same fault a thousand times a second.

The clock is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

AGAIN_S = 60.0
MAX_A_PEER = 16
_MAX_PEERS = 1024


class _Window(NamedTuple):
    began_at: float
    said: set[str]


class LogLimit:
    """Each warning about each peer once a minute, and at most `MAX_A_PEER` per peer in that time."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def due(self, peer: str, text: str, now: float) -> str:
        """The line to log for `text` about `peer` now (monotonic seconds); empty for none."""
        window = self._windows.get(peer)
        if window is None or now - window.began_at >= AGAIN_S:
            window = self._windows[peer] = _Window(now, set())
            self._windows.move_to_end(peer)
            if len(self._windows) > _MAX_PEERS:
                self._windows.popitem(last=False)
        if text in window.said or len(window.said) == MAX_A_PEER:
            return ""
        window.said.add(text)
        if len(window.said) == MAX_A_PEER:
            return f"{text}; more about it is left out for {AGAIN_S:.0f} s"
        return text
