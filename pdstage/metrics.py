"""Plain counters that the cores and the driver increment."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Aborted, PdstageError


@dataclass(slots=True)
class Counters:
    """Totals since the node started; they never fall. Units by suffix, else events."""

    frames_sent: int = 0
    frames_received: int = 0
    frames_malformed: int = 0
    frames_stale: int = 0
    """Frames of another session, or not above the last accepted seq."""
    tags_received: int = 0
    tags_stale: int = 0
    tags_malformed: int = 0
    rooms_opened: int = 0
    rooms_succeeded: int = 0
    rooms_failed: int = 0
    rooms_aborted: int = 0
    """By an engine, here or at the peer; or the peer failed it first, and counts it among its failed ones."""
    chunks_staged: int = 0
    chunks_direct: int = 0
    chunks_fallen_back: int = 0
    """Chunks that began as staged and went direct."""
    aux_rows: int = 0
    """Aux rows written directly into decode's rows."""
    aux_fallbacks: int = 0
    """Aux rows sent by control message although they should go by the data transport."""
    chunks_altered: int = 0
    """Staged chunks whose checksum at decode differed from prefill's."""
    slots_trimmed: int = 0
    """Components of rooms with fewer slots on one side, by peer: the longer list was trimmed."""
    leases_granted: int = 0
    leases_recalled: int = 0
    leases_returned: int = 0
    leases_quarantined: int = 0
    sessions_opened: int = 0
    sessions_lost: int = 0
    sessions_ended: int = 0
    """Sessions ended in order: a side closed, or neither needed it."""
    sessions_idle: int = 0
    """Of those, at decode: ended because neither side needed it."""
    sessions_fenced: int = 0
    """Of those lost: the peer was proved quiet or dead, by the transport, the kernel or an operator's word."""
    peers_crowded: int = 0
    """New peers that were refused at `max_peers`."""
    sessions_refused: int = 0
    peers_refused: int = 0
    """Connections, made from here or by peers, that failed because the keys did not match."""
    bytes_written: int = 0
    descriptors: int = 0
    posts_measured: int = 0
    """Posts whose figures the transport reported, if asked to; the next three count only these."""
    posts_measured_bytes: int = 0
    posts_measured_us: int = 0
    """Time to start them."""
    writes_measured_us: int = 0
    """Time from then until each was seen to be done."""

    def lost(self, error: PdstageError) -> None:
        """Counts a room that ended with `error`."""
        if isinstance(error, Aborted):
            self.rooms_aborted += 1
        else:
            self.rooms_failed += 1
