"""What must hold at every step of a `pair.World`, whoever misbehaves; a broken one raises AssertionError.

The numbers are DESIGN 8's. Must not steer: it reads the cores and remembers what was sent, begun and ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.protocol import messages as m
from pdstage.protocol.decode import DecodeCore, InRoom
from pdstage.protocol.effects import Write, WriteDirect
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.room import Room, State

if TYPE_CHECKING:
    from pdstage.protocol.holdings import Grant, Holdings
    from pdstage.protocol.outbox import OutChunk
    from pdstage.protocol.session import Core, Link
    from tests.pair import Decode, Prefill, World

_ROUNDING_S = 1e-6


class Invariants:
    """The memory of one world: last watermarks sent, epochs minted, ends of rooms, posts under way."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._marks: dict[tuple[m.Session, int], int] = {}
        self._epochs: dict[Core, int] = {}
        self._ends: dict[Room, State] = {}
        self._leases: set[tuple[m.Session, int, int]] = set()
        self._direct: set[tuple[object, ...]] = set()
        self._reading: dict[tuple[Core, int], int] = {}
        self._begun: dict[tuple[Core, int], tuple[float, Link]] = {}

    # Rooms.

    def announced(self, core: DecodeCore, room: InRoom) -> None:
        assert room.epoch > self._epochs.get(core, 0), "an epoch used again"
        self._epochs[core] = room.epoch

    def changed(self, core: Core, room: Room) -> bool:
        """Whether the room ended just now."""
        ended = self._ends.get(room)
        assert ended in {None, room.state}, "a room left its end (I1)"
        if ended is not None or not room.ended:
            return False
        self._ends[room] = room.state
        return True

    # Control messages.

    def sent(self, core: Core, frame: m.Frame) -> None:
        message = frame.message
        if isinstance(message, m.Lease | m.Recall | m.Watermark):
            key = (frame.session, message.lane)
            assert message.watermark >= self._marks.get(key, 0), "a watermark fell (I4)"
            self._marks[key] = message.watermark
        if isinstance(message, m.Lease) and isinstance(core, DecodeCore):
            where = (frame.session, message.lane, message.cursor)
            grant = core.holdings.at(message.lane, message.cursor)
            if grant is not None and where not in self._leases:
                self._leases.add(where)
                self._shared(core.holdings, grant)

    def _shared(self, holdings: Holdings, grant: Grant) -> None:
        """Who still waits after this turn waited during it: then nobody was given more than half."""
        link, half = grant.request.link, holdings.lanes[grant.lane].capacity // 2
        held = holdings._held.get((link, grant.lane), 0)
        others = any(other is not link for other in holdings._waiting)
        assert not others or held <= max(half, grant.request.nbytes), "a session took more than half while others wait"

    def lost(self, core: DecodeCore, link: Link) -> None:
        """What a lost session may still write is all that is kept of it."""
        for grant in core.holdings.of_session(link):
            known = self._marks.get((link.session, grant.lane), 0)
            may_begin = grant.end <= known + core.holdings.lanes[grant.lane].capacity
            assert grant.state == "landed" or may_begin, "a lease that can never be written is kept (I14)"

    # Source memory and send buffers.

    def gathering(self, node: Prefill, ticket: int, buffer: int) -> None:
        most = max(1, len(node.buffers) - 1)
        assert all(n <= most for n in node.core.buffers._busy.values()), "one destination has every send buffer"
        self._take(node, ticket, buffer)

    def _take(self, node: Prefill, ticket: int, buffer: int) -> None:
        busy = [b for (core, _), b in self._reading.items() if core is node.core]
        assert buffer not in busy, "a send buffer used again before its write ended"
        self._reading[node.core, ticket] = buffer

    def began(self, node: Prefill, effect: Write | WriteDirect) -> None:
        if isinstance(effect, Write):
            self._take(node, effect.ticket, effect.buffer)
        self._begun[node.core, effect.ticket] = self._world.now, effect.chunk.record.link

    def over(self, node: Prefill, ticket: int) -> None:
        """A gather or write ended: its buffer is free, or the core says what follows."""
        self._reading.pop((node.core, ticket), None)
        self._begun.pop((node.core, ticket), None)

    def fenced(self, node: Prefill | Decode, link: Link) -> None:
        """Posts of the session read no source any more, also those whose end was not heard of."""
        for core, ticket in [key for key, (_, of) in self._begun.items() if key[0] is node.core and of is link]:
            del self._begun[core, ticket]
            self._reading.pop((core, ticket), None)

    def paused(self) -> None:
        """The whole world stood still: no age counts."""
        self._begun = {key: (self._world.now, link) for key, (_, link) in self._begun.items()}

    def ticked(self, core: Core) -> None:
        if isinstance(core, PrefillCore):
            for (whose, _), (at, link) in self._begun.items():
                late = self._world.now - at > core.config.write_s + _ROUNDING_S
                assert not (whose is core and late and link.session in core.links), "a post older than write_s"

    # Destination memory.

    def staged_write(self, dst: Decode, chunk: OutChunk) -> None:
        """Asked when a write begins and when it lands: its lease is live and open, and nobody else's bytes are hit."""
        holdings = dst.core.holdings
        grant = holdings.at(chunk.lane, chunk.cursor)
        mine = grant is not None and grant.request.link.session == chunk.record.link.session
        assert mine and grant is not None and grant.state in ("granted", "quarantined"), (
            "a write into released staging memory (I2)"
        )
        assert holdings.is_open(grant), "a write into a lease whose window is closed (I2)"
        for other in holdings._at.values():
            if other is not grant and other.lane == grant.lane and _overlap(holdings, grant, other):
                shut = other.state != "landed" and not holdings.is_open(other)
                nobodys = grant.state == other.state == "quarantined"
                assert shut or nobodys, f"a write over bytes of another lease, which is {other.state} (I3)"

    def direct_write(self, dst: Decode, chunk: OutChunk) -> None:
        record = chunk.record
        room = dst.core.epochs.get(record.epoch)
        assert room is None or room.state is not State.SUCCESS, "a write into pages of a room that is complete (I2)"
        where = (record.link.session, record.epoch, chunk.rects)
        assert where not in self._direct, "a direct destination written twice (I15)"
        self._direct.add(where)

    # The protocol's own promise about data that does not exist yet.

    def recalled_once(self, core: PrefillCore) -> None:
        for record in core.records.values():
            for chunk in record.chunks.values():
                assert chunk.source.ready or chunk.attempt <= 1, "recalled twice before its data existed (I16)"


def _overlap(holdings: Holdings, one: Grant, two: Grant) -> bool:
    capacity = holdings.lanes[one.lane].capacity
    a, b = one.cursor % capacity, two.cursor % capacity
    return a < b + two.request.nbytes and b < a + one.request.nbytes
