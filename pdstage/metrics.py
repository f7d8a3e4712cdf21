"""Plain counters that the cores and the driver raise."""

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
    aux_rows: int = 0
    """Aux rows written straight into decode's."""
    aux_fallbacks: int = 0
    """Aux rows that went by control message, although they were to go by the data transport."""
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
    posts_measured: int = 0
    """Posts of which the transport told its figures, where it was asked to; the next three are of these alone."""
    posts_measured_bytes: int = 0
    posts_measured_us: int = 0
    """What starting them took."""
    writes_measured_us: int = 0
    """From then until each was seen to be done."""

    def measured(self, nbytes: int, post_s: float, write_s: float) -> None:
        """Counts a post by what its transport measured."""
        self.posts_measured += 1
        self.posts_measured_bytes += nbytes
        self.posts_measured_us += round(post_s * 1e6)
        self.writes_measured_us += round(write_s * 1e6)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
