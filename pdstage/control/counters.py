"""What a control socket has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ControlCounters:
    """Totals of one socket, in messages (one turn's frames to one route)."""

    sent: int = 0
    received: int = 0
    unroutable: int = 0
    """Not sent: no connection of that route. Loss, as on any wire."""
    full: int = 0
    """Not sent: the peer has stopped reading and its queue is full."""
    refused: int = 0
    """Connections, here or at the peer, that came to nothing for want of the right keys."""
    ended: int = 0
    """Connections that were ended because too much of what came by them waited for the end of a message."""
    malformed: int = 0
    """Received and dropped: no frame at all, or more than `zmq.MAX_FRAMES`."""
