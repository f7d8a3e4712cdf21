"""One rule of DESIGN 6 and 7 each, where random schedules hide its loss behind a deadline, or seldom meet it."""

from __future__ import annotations

from types import SimpleNamespace

from pdstage import PeerError
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol.state import ChunkPhase, State
from tests.pair import World, assert_failed, assert_flat, is_kind, is_message

LEASE = 512


def test_a_reserve_of_a_room_that_ended_gets_no_lease() -> None:
    """The room's memory would be lent to nobody (I13, I14)."""
    world = World()
    world.hold(is_kind("write"))
    handle, _ = world.serve(1)
    decode = world.d.core
    session = world.d.session
    decode.abort(handle, "changed its mind")
    said = world.say(world.d, m.Reserve(handle.epoch, 7, 0, LEASE, (Rect("kv", 0, 8, 0, 2),)))
    assert m.Refused(handle.epoch, 7, 0, "gone", 0) in said
    assert not decode.leases.contended
    assert [lease.phase for lease in decode.leases.of(session)] == ["quarantined"]


def test_a_writer_that_sent_all_succeeds_though_it_finishes_late() -> None:
    """After Success decode asks it to close, and takes its bytes as what they are: complete (I1)."""
    world = World(prefill=2, drain_s=2.0)
    handle = world.receive(1)
    world.send(1, rank=0)
    late = world.submit(1, 1)
    world.chunk(late, rank=1)
    world.run(until=1.0)
    world.check(handle, 1)
    assert not handle.released, "its second writer has not said that it is done"
    world.run(until=6.0)
    assert handle.released
    assert late.state is not State.FAILED, late.error
    world.finish(late, 1)
    world.run(until=7.0)
    assert late.state is State.SUCCESS


def test_a_writer_whose_chunk_nobody_takes_any_more_does_not_succeed() -> None:
    """Decode gave the room up, and that word is lost: "gone" says it too. Prefill wrote nothing (I1)."""
    world = World(advance=False)
    handle, sent = world.receive(1), world.submit(1)
    world.run()
    world.drop(is_message(m.Abort))
    world.abort(world.d, handle)
    world.chunk(sent)
    world.finish(sent)
    world.run()
    assert_failed(sent, "decode has ended the room")
    world.free()
    world.run(until=world.now + 60.0)
    assert_flat(world)


def test_of_a_lost_session_only_open_leases_are_in_doubt() -> None:
    """What its last watermark does not open it can never begin: free at once, fence or none (I12, I13)."""
    world = World(lane_nbytes=LEASE, fences=False)
    world.hold(is_kind("write"))
    world.serve(1)
    world.serve(2)
    decode = world.d.core
    session = world.d.session
    assert [decode.leases.is_open(lease) for lease in decode.leases.of(session)] == [True, False]
    decode.lose(session, PeerError("the test says so"))
    assert [(lease.phase, lease.cursor) for lease in decode.leases.of(session)] == [("quarantined", 0)]


def test_a_fence_leaves_what_has_landed_to_its_scatter() -> None:
    """The scatter still reads it (I2)."""
    world = World()
    world.hold(is_kind("scatter"))
    handle, _ = world.serve(1)
    decode = world.d.core
    session = world.d.session
    decode.lose(session, PeerError("the test says so"))
    decode.fenced(session)
    assert [lease.phase for lease in decode.leases.of(session)] == ["landed"]
    assert not handle.released
    world.carry(world.d)
    world.rules.clear()
    world.release_held()
    world.run()
    assert not decode.leases.of(session)
    assert handle.released


def test_a_lease_that_is_gathered_into_is_given_back_only_once_that_ended() -> None:
    """Where its memory is mapped at prefill a gather is a write, also of a room that failed meanwhile (I2)."""
    world = World(placed=True, fences=False, write_s=50.0, drain_s=50.0)
    world.hold(is_kind("gather"))
    world.receive(1)
    sender = world.send(1)
    world.run(until=world.now)
    (destination,) = world.p.core.destinations
    (chunk,) = destination.chunks.values()
    assert chunk.phase is ChunkPhase.GATHERING
    world.drop(is_message(m.CloseFailed))
    world.abort(world.p, sender)

    def asked_for_it_back() -> list[m.AnyMessage]:
        recall = m.Recall(destination.epoch, chunk.number, chunk.attempt, chunk.lane, chunk.cursor, 0)
        return world.say(world.p, recall)

    assert not any(isinstance(message, m.Returned) for message in asked_for_it_back())
    world.release_held()
    world.run(until=world.now)  # the gather lands, and the ledger looks whose the lease is
    assert chunk.phase is ChunkPhase.DROPPED
    assert any(isinstance(message, m.Returned) for message in asked_for_it_back())


def test_no_destination_has_every_send_buffer() -> None:
    """Of N buffers one session has N - 1 at most, so that another's room is not behind a slow one's (I12)."""

    def chunk(session: object) -> SimpleNamespace:
        return SimpleNamespace(direct=False, phase=ChunkPhase.READY, destination=SimpleNamespace(session=session))

    slow, quick = object(), object()
    turns = World(n_buffers=3).p.core.chunks.staged
    for _ in range(5):
        turns.queue(chunk(slow))
    assert [turns.begin() is None for _ in range(3)] == [False, False, True]
    turns.queue(chunk(quick))
    assert turns.begin().destination.session is quick
    assert turns.begin() is None
