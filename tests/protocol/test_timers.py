"""The timer against a plain dict of moments."""

from __future__ import annotations

import weakref

from pdstage.protocol.session import Timers


def test_memory_is_of_live_moments_only() -> None:
    """A key set again and again, as a repeated question is, leaves nothing behind (I14)."""
    timers = Timers()
    timers.set(1e9, "far")
    for n in range(100_000):
        timers.set(float(n), "retry")
    assert len(timers._heap) <= 64 + 4 * len(timers) + 1


def test_a_cancelled_moment_holds_nothing_of_its_key() -> None:
    """A key names a room, and a room holds the engine's index arrays: far deadlines must not keep ended rooms (I14)."""

    class Room:
        pass

    timers, rooms = Timers(), [Room() for _ in range(50)]
    for room in rooms:
        timers.set(1e9, "deadline", room)
    gone = [weakref.ref(room) for room in rooms]
    for room in rooms[:25]:
        timers.cancel("deadline", room)
    for room in rooms[25:]:
        timers.set(2e9, "deadline", room)
        timers.cancel("deadline", room)
    rooms.clear()
    del room
    assert [ref() for ref in gone] == [None] * 50
