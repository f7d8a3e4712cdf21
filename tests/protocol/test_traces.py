"""The traces of DESIGN 8 that every implementation must survive, one test each. Time is virtual throughout.

`pair.World` fails by itself when a byte lands in released memory (I2), a lease is written twice (I15), or a write or
gather reads source memory that was given back (I8).
"""

from __future__ import annotations

import pytest

from pdstage import TransportError
from pdstage.protocol import messages as m
from pdstage.protocol import prefill_chunks, wire
from pdstage.protocol.state import ChunkPhase, State
from tests.pair import World, assert_flat, is_kind, is_message, nth
from tests.rows import both_paths

LEASE = 512
"""Staged bytes of 8 tokens of one rank's pool in these worlds: 4 views of 128 bytes."""


@both_paths
def test_a_writer_crashes_says_hello_again_and_is_asked_about_the_old_epoch(path: str) -> None:
    """Its "nothing in flight" proves nothing for the old process, whose write may still land (I2, I6)."""
    world = World(path=path)
    world.hold(is_kind("write", "fence"))
    handle, _ = world.serve(1)
    (write,) = world.held
    old_session = world.d.session
    world.restart(world.p)
    world.run(until=5.0)
    assert any("NoSession" in line for line in world.log), "the new process was asked, and answered in its own name"
    assert handle.state is State.FAILED
    again = world.receive(1)
    world.run(until=6.0)
    assert again.state is State.WAITING_FOR_INPUT, "a new session with the new process"
    core = world.d.core
    if path == "staged":
        (lease,) = core.leases.of(old_session)
        assert lease.phase == "quarantined"
        assert handle.released, "no page of the room was open to the writer"
    else:
        assert not handle.released, "the old process may still write these pages"
    world.held.remove(write)
    world.rules.clear()
    world.queue.append(write)
    world.run()
    world.free()
    world.send(1)
    world.run(until=9.0)
    assert handle.released, "fenced: now it is proved"
    world.check(again, 1)
    assert_flat(world)


def test_decode_restarts_and_an_old_larger_watermark_comes() -> None:
    """It must not open a window in the new ring: marks are of a session (I2, I6)."""
    world = World(lane_nbytes=LEASE)
    for room in range(4):
        world.serve(room)
    assert world.d.core.leases.lanes[0].watermark == 4 * LEASE
    old = world.p.session
    world.restart(world.d)
    world.hold(is_kind("scatter"))
    handles = {room: world.receive(room) for room in (10, 11)}
    for room in handles:
        world.send(room)
    world.run(until=1.0)
    # The old process's last words, late: in its own session, with a mark far beyond the new ring's.
    core = world.p.core
    core.endpoint.receive(b"D0", wire.encode(old.id, 1000, m.Watermark(0, 4 * LEASE)))
    world.carry(world.p)
    world.run(until=2.0)
    held = [c for r in core.destinations for c in r.chunks.values() if c.phase is ChunkPhase.HELD]
    assert len(held) == 1, "the second room's lease is one lap ahead and stays closed"
    world.free()
    world.run(until=4.0)
    for room, handle in handles.items():
        world.check(handle, room)
    assert_flat(world)


def test_a_process_that_gathers_for_a_lost_session_does_not_say_that_it_is_quiet() -> None:
    """A gather may go straight into the lease, where that is mapped: it is a write like any other (I2)."""
    world = World(fences=False)
    world.hold(is_kind("gather"))
    handle = world.receive(1)
    world.send(1)
    world.run(until=0.5)
    session = world.d.session
    assert world.p.core.chunks.flights, "the gather is under way"
    world.lose(world.p, TransportError("the connection broke"))
    world.run(until=60.0)
    assert handle.state is State.FAILED
    assert [lease.phase for lease in world.d.core.leases.of(session)] == ["quarantined"]
    world.free()
    world.run(until=120.0)
    assert not world.d.core.leases.of(session)
    assert_flat(world)


def test_a_doubt_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more sessions in doubt than are remembered by name, none is said to be quiet (I2)."""
    monkeypatch.setattr(prefill_chunks, "_MAX_IN_DOUBT", 1)
    world = World(decode=2, fences=False)
    world.hold(is_kind("write"))
    for number in range(2):
        world.receive(1, rank=number)
    world.send(1)
    world.run()
    core = world.p.core
    sessions = [node.session for node in world.decode]
    for ticket in list(core.chunks.flights):
        core.chunks.completed(ticket, TransportError("the fabric gave up"), settled=False)
    world.carry(world.p)
    world.run(until=60.0)
    for node, session in zip(world.decode, sessions, strict=True):
        assert [lease.phase for lease in node.core.leases.of(session)] == ["quarantined"]


def test_a_session_that_was_denied_is_not_begun_by_a_late_hello() -> None:
    """Else the NoSession that is still on its way would prove quiet what has begun to write meanwhile (I2, I6)."""
    world = World(fences=False, max_silence_s=1.0, open_wait_s=5.0)
    world.hold(is_message(m.Welcome, m.NoSession))
    world.hold(nth(1, is_message(m.Hello)))
    world.drop(lambda item: is_message(m.Heartbeat)(item) and item.src is world.p)
    world.hold(lambda item: item.kind == "frame" and item.src is world.d and not is_message(m.Hello)(item))
    handle = world.receive(1)
    world.run(until=0.3)
    world.release_held(nth(0, is_message(m.Welcome)))
    world.run(until=1.1)
    assert not world.p.core.sessions, "the half-open session expired"
    sent = world.send(1)
    world.release_held(is_message(m.Heartbeat))
    world.run()
    world.release_held(is_message(m.Hello))
    world.run()
    assert any(is_message(m.NoSession)(item) for item in world.held)
    world.rules.clear()
    world.hold(is_kind("write"))
    world.release_held(lambda item: item.src is world.d)
    world.run()
    world.release_held(is_message(m.NoSession))
    world.run()
    world.free()
    world.run(until=30.0)
    assert handle.released
    assert sent.released
    assert_flat(world)
