"""How long a driver may sleep, and what it sleeps on.

The control socket announces what it gets, and so do transports with descriptors. Of the rest nobody tells: engines'
events, copies on a device, transports without descriptors. While one of those is waited for, sleeps are naps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.manager.role import Role

_NAP_S = 100e-6
_PATIENCE_S = 1e-3


class Ready(NamedTuple):
    """Who may have something to say."""

    messages: bool
    transport: bool


EVERYTHING = Ready(messages=True, transport=True)


class Sleep:
    """One driver's sleep."""

    def __init__(self, node: Role[Any]) -> None:
        self._node = node
        self.until_at = 0.0
        """When it ends if nothing is announced; under the lock."""

    def longest_s(self) -> float:
        """How long nothing can happen that neither the socket nor the transport would announce."""
        node = self._node
        longest_s = min(1.0, node.config.retry_s)  # so that the question an engine's call asks needs no wake-up
        with node._lock:
            now, next_at = time.monotonic(), node.core.next_at()
            until_s = longest_s if next_at is None else min(max(next_at - now, 1e-4), longest_s)
            self.until_at = now + until_s
        return until_s

    def wait(self, wait_s: float) -> Ready:
        """Until somebody may have something to say, `wait_s` at most."""
        node = self._node
        fds = node.transport.filenos()
        if node._expects() or node.stager.launched:
            wait_s = min(wait_s, _NAP_S)
        if fds:
            ready = node.socket.wait(wait_s, fds)
            return Ready(ready.messages, bool(ready.fds))
        if not node._must_ask():
            return Ready(node.socket.wait(wait_s).messages, True)
        ready = node.socket.wait(0.0)
        if not (ready.messages or ready.woken):  # the transport has no descriptor to wait on: short naps instead
            if node._in_flight():
                time.sleep(min(wait_s, _NAP_S))
            else:
                ready = node.socket.wait(min(wait_s, _PATIENCE_S))
        return Ready(ready.messages, True)

    def pause_s(self, fds: Sequence[int]) -> float:
        """How long a loop that watches the socket and `fds`, the transport's, may do without a turn."""
        node, pause_s = self._node, self.longest_s()
        if node._expects() or (not fds and node._in_flight()):
            return min(pause_s, _NAP_S)
        return min(pause_s, _PATIENCE_S) if not fds and node._must_ask() else pause_s
