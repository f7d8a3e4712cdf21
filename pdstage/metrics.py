"""Plain counters that the cores and the driver raise.

Layer 1, pure. Must not know how they are exported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the node started; none ever falls. Units by suffix, else events."""

    frames_sent: int = 0
    frames_received: int = 0
    frames_malformed: int = 0
    frames_stale: int = 0
    """Of another session, or not above the last accepted seq."""
    tags_received: int = 0
    tags_stale: int = 0
    tags_malformed: int = 0
    rooms_opened: int = 0
    rooms_succeeded: int = 0
    rooms_failed: int = 0
    chunks_staged: int = 0
    chunks_direct: int = 0
    chunks_fallen_back: int = 0
    """Chunks that began as staged and went direct."""
    chunks_altered: int = 0
    """Staged chunks whose checksum at decode was not the one prefill told."""
    slots_trimmed: int = 0
    """Components of rooms that had fewer slots on one side, by peer: the longer list was trimmed."""
    leases_granted: int = 0
    leases_recalled: int = 0
    leases_returned: int = 0
    leases_quarantined: int = 0
    sessions_opened: int = 0
    sessions_lost: int = 0
    sessions_ended: int = 0
    """In order: a side closed, or neither needed it."""
    sessions_idle: int = 0
    """Of those, at decode: neither side needed it."""
    peers_crowded: int = 0
    """New peers that found `max_peers` of them: the idlest was asked to go, or the new one was refused."""
    sessions_refused: int = 0
    peers_refused: int = 0
    """Connections, made from here or from elsewhere, that came to nothing for want of the right keys."""
    bytes_written: int = 0
    descriptors: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
