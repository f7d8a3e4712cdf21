"""Counters of a control socket, and of what a node asks of directories."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ControlCounters:
    """Totals of one socket, in messages; a message is the frames of one turn to one route."""

    sent: int = 0
    received: int = 0
    unroutable: int = 0
    """Not sent: the route has no connection. This is loss, as on any wire."""
    full: int = 0
    """Not sent: the peer has stopped reading, and its queue is full."""
    refused: int = 0
    """Connections that failed, here or at the peer, because the keys did not match."""
    malformed: int = 0
    """Received and dropped: no frames, or more than `zmq.MAX_FRAMES`."""


@dataclass(slots=True)
class DirectoryCounters:
    """Totals of one node's requests to directories. A look-up is one room's, however often it was asked."""

    lookups_answered: int = 0
    lookups_failed: int = 0
    publications: int = 0
    """Registrations and renewals that the directory took."""
    publications_failed: int = 0
