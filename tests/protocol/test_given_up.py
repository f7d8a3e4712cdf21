"""Rooms that decode gives up before it opens them: who is told, and when a room of that name may come again (I10)."""

from collections.abc import Callable

import pytest

from pdstage.errors import Aborted, DeadlineExceeded, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol.state import State
from tests.pair import DecodeRoom, World, assert_flat, first, is_message

_MAX_ENDED = 64

WHY = "the client left"


def abort(world: World, room, rank: int = 0) -> None:
    world.decode[rank].core.abort(room, WHY, world.now)
    world.carry(world.decode[rank])


def assert_given_up(*rooms) -> None:
    for room in rooms:
        assert room.state is State.FAILED and room.released
        assert isinstance(room.error, Aborted)
        assert WHY in str(room.error)


def aborts(world: World) -> int:
    return sum("Abort(" in line for line in world.log)


def test_every_writer_of_an_unbound_room_is_told_at_once() -> None:
    world = World(prefill=2)
    sent = [world.send(1, 8, [0, 1], rank) for rank in (0, 1)]
    handle = world.announce(1)
    world.run()
    assert handle.state is State.WAITING_FOR_INPUT
    abort(world, handle)
    world.run()
    assert_given_up(handle, *sent)
    assert world.now == 0.0
    assert_flat(world)


def test_a_writer_that_has_not_answered_yet_is_told_once_it_does() -> None:
    world = World()
    sent = world.send(1, 8, [0, 1])
    world.hold(is_message(m.Welcome))
    handle = world.receive(1, 8, [0, 1])
    world.run()
    abort(world, handle)
    world.run()
    assert handle.released and not sent.ended
    world.free()
    world.run()
    assert_given_up(handle, sent)
    assert_flat(world)


def test_of_two_writers_each_is_told_when_it_answers() -> None:
    """One of them never does: what it has computed goes at its own deadline, and the other's does not wait for that."""
    world = World(prefill=2, hello_s=5.0, open_wait_s=50.0)
    sent = [world.send(1, 8, [0, 1], rank) for rank in (0, 1)]
    world.hold(lambda item: item.src is world.prefill[1])
    handle = world.announce(1)
    world.run(until=6.0)
    assert isinstance(handle.error, DeadlineExceeded)
    assert sent[0].state is State.FAILED and "no answer from" in str(sent[0].error)
    assert not sent[1].ended


def restart(world: World) -> None:
    world.restart(world.prefill[0])


def lose(world: World) -> None:
    (node,) = world.prefill
    (session,) = node.core.sessions.values()
    node.core.lose(session, DeadlineExceeded("decode was silent"), world.now)
    world.carry(node)


@pytest.mark.parametrize("bound", [True, False], ids=["opened", "asked for"])
@pytest.mark.parametrize("submitted", [True, False], ids=["submitted", "not yet"])
@pytest.mark.parametrize("forget", [restart, lose])
def test_who_does_not_know_the_session_is_told_of_the_room_that_was_opened_under_it(
    forget: Callable[[World], None], submitted: bool, bound: bool
) -> None:
    """Decode learns by the answer to that very Open that prefill restarted at its address, or lost the session. The
    room fails on both sides at once, and the next ones go on (I10).
    """
    world = World()
    world.receive(1, 8, [0, 1])
    world.send(1, 8, [0, 1])
    world.run()
    forget(world)
    sent = world.send(2, 8, [0, 1]) if submitted else None
    handle = world.announce(2)
    if bound:
        world.bind(handle, 8, [2, 3])
    world.run(until=1.0)
    sent = sent or world.send(2, 8, [0, 1])
    world.run(until=2.0)
    assert handle.state is sent.state is State.FAILED
    assert "does not know this session" in str(handle.error)
    assert "does not know this session" in str(sent.error)
    assert handle.released
    assert sent.released
    again, _ = world.receive(3, 8, [2, 3]), world.send(3, 8, [0, 1])
    world.run()
    world.check(again, 3, 8)
    assert_flat(world)


def test_a_room_that_the_predecessor_had_answered_is_not_given_up_at_the_next_process() -> None:
    """It may be submitted there anew, for whoever wants it then."""
    world = World(path="direct")
    handle = world.receive(1, 8, [0, 1])
    world.run()
    world.restart(world.prefill[0])
    world.run(until=5.0)
    assert handle.state is State.FAILED
    assert not world.submit(1).ended


def test_a_room_given_up_before_it_is_submitted_fails_when_it_is() -> None:
    world = World()
    handle = world.announce(1)
    world.run()
    abort(world, handle)
    world.run()
    sent = world.send(1, 8, [0, 1])
    world.run()
    assert_given_up(handle, sent)
    assert_flat(world)


def test_what_was_given_up_fails_one_room_and_not_the_next_of_its_name() -> None:
    world = World()
    abort(world, world.announce(1))
    world.run()
    assert_given_up(world.submit(1))
    handle, sent = world.receive(1, 8, [0, 1]), world.send(1, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)


@pytest.mark.parametrize("bound", [True, False], ids=["opened", "asked for"])
def test_a_room_wanted_again_is_not_given_up(bound: bool) -> None:
    world = World()
    abort(world, world.announce(1))
    world.run()
    handle = world.announce(1)
    if bound:
        world.bind(handle, 8, [0, 1])
    world.run(until=0.1)
    sent = world.send(1, 8, [0, 1])
    if not bound:
        world.bind(handle, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)
    assert_flat(world)


def test_a_room_wanted_again_before_its_writer_answered_was_never_given_up() -> None:
    world = World()
    sent = world.send(1, 8, [0, 1])
    world.hold(is_message(m.Welcome))
    abort(world, world.announce(1))
    handle = world.receive(1, 8, [0, 1])
    world.free()
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)
    assert not aborts(world)


def test_one_rank_of_decode_gives_up_and_its_fellow_is_refused() -> None:
    """The fellow has opened it already, or does so later, and need not wait for its own deadline."""
    for late in (True, False):
        world = World(decode=2)
        rooms = [world.announce(1, rank) for rank in (0, 1)]
        world.run()
        if not late:
            world.bind(rooms[1], 8, [0, 1], 1)
            world.run()
        abort(world, rooms[0])
        world.run()
        sent = world.submit(1)
        if late:
            world.bind(rooms[1], 8, [0, 1], 1)
        world.run()
        assert_given_up(rooms[0], sent)
        assert rooms[1].state is State.FAILED and rooms[1].released
        assert WHY in str(rooms[1].error)
        assert_flat(world)


def test_both_ranks_of_decode_give_up_and_want_it_again() -> None:
    world = World(decode=2)
    for rank in (0, 1):
        abort(world, world.announce(1, rank), rank)
    world.run()
    rooms = [world.receive(1, 8, [0, 1], rank) for rank in (0, 1)]
    world.run()
    sent = world.send(1, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    for rank, room in enumerate(rooms):
        world.check(room, 1, 8, rank)


def test_a_room_that_fails_at_prefill_and_at_decode_may_be_opened_again() -> None:
    """The destination that gave it up means the room again, and is not refused as one that comes late."""
    world = World()
    sent, handle = world.submit(1), world.announce(1)
    world.run()
    world.prefill[0].core.abort(sent, "out of memory", world.now)
    world.carry(world.prefill[0])
    abort(world, handle)
    world.run()
    handle = world.receive(1, 8, [0, 1])
    world.run()
    assert not handle.ended
    assert world.send(1, 8, [0, 1]) is not sent
    world.run()
    world.check(handle, 1, 8)


def test_a_room_whose_writers_were_still_looked_up_is_given_up_with_a_greeting() -> None:
    world = World()
    sent, handle = world.send(1, 8, [0, 1]), look_up(world)
    abort(world, handle)
    assert handle.released, "nothing was said to anybody"
    found(world, handle)
    world.run()
    assert sent.state is State.FAILED and WHY in str(sent.error)
    assert_flat(world)


def test_a_room_received_anew_meanwhile_is_not_given_up() -> None:
    world = World()
    sent, given_up = world.send(1, 8, [0, 1]), look_up(world)
    abort(world, given_up)
    handle = world.receive(1, 8, [0, 1])
    found(world, given_up)
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)


def test_a_room_whose_writers_are_looked_up_may_be_bound() -> None:
    world = World()
    sent, handle = world.send(1, 8, [0, 1]), look_up(world)
    world.bind(handle, 8, [0, 1])
    world.run(until=1.0)
    assert handle.state is State.BOOTSTRAPPING
    found(world, handle)
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)


def test_the_deadline_of_a_room_counts_while_its_writers_are_looked_up() -> None:
    world = World()
    handle = look_up(world, deadline_s=5.0)
    world.bind(handle, 8, [0, 1])
    world.run(until=6.0)
    assert handle.state is State.FAILED and handle.released
    assert "did not end in its 5.0 s" in str(handle.error)
    assert_flat(world)


@pytest.mark.parametrize("writers", [{}, {0: b"P0", 1: b"P0"}])
def test_writers_that_are_none_fail_the_room_that_was_looked_up(writers: dict[int, bytes]) -> None:
    world = World()
    handle = look_up(world)
    world.decode[0].core.found(handle, writers, world.now)
    world.carry(world.decode[0])
    assert isinstance(handle.error, UsageError) and handle.released
    assert_flat(world)


def look_up(world: World, *, deadline_s: float = 60.0) -> DecodeRoom:
    return world.decode[0].core.announce(b"i1", None, world.now, deadline_s=deadline_s)


def found(world: World, handle: DecodeRoom) -> None:
    world.decode[0].core.found(handle, {0: world.prefill[0].name}, world.now)
    world.carry(world.decode[0])


# A room that was opened, and parked at prefill, since its engine had not submitted it yet.


def open_and_abort(world: World, rank: int = 0, room: int = 1) -> DecodeRoom:
    handle = world.receive(room, 8, [0, 1], rank)
    world.run(until=world.now)
    abort(world, handle, rank)
    world.run(until=world.now)
    return handle


def test_a_room_whose_parked_open_is_aborted_fails_when_it_is_submitted() -> None:
    """Its blocks would be kept for `open_wait_s`: nobody opens it again (I10)."""
    world = World()
    handle = open_and_abort(world)
    assert not len(world.prefill[0].core.rooms.pending)
    sent = world.send(1, 8, [0, 1])
    world.run()
    assert_given_up(handle, sent)
    assert world.now == 0.0
    assert_flat(world)


def test_every_writer_of_an_aborted_room_fails_it_when_it_is_submitted() -> None:
    """A writer that owes nothing too: its engine waits for all of its ranks."""
    world = World(prefill=2, heads=1, layers=1)
    handle = open_and_abort(world)
    sent = [world.send(1, 8, [0, 1], rank) for rank in (0, 1)]
    world.run()
    assert_given_up(handle, *sent)
    assert world.now == 0.0
    assert_flat(world)


def test_a_fellow_of_a_rank_that_aborts_is_refused_once_the_room_is_submitted() -> None:
    for late in (True, False):
        world = World(decode=2)
        if not late:
            fellow = world.receive(1, 8, [0, 1], 1)
        handle = open_and_abort(world)
        sent = world.send(1, 8, [0, 1])
        if late:
            fellow = world.receive(1, 8, [0, 1], 1)
        world.run()
        assert_given_up(handle, sent)
        assert fellow.state is State.FAILED and fellow.released and WHY in str(fellow.error)
        assert world.now == 0.0
        assert_flat(world)


def test_a_room_opened_again_after_an_abort_is_sent() -> None:
    """Retraction: the engine at decode takes the request back, and wants it again under a higher epoch."""
    world = World()
    open_and_abort(world)
    handle = world.receive(1, 8, [0, 1])
    world.run(until=0.1)
    sent = world.send(1, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)
    assert_flat(world)


@pytest.mark.parametrize("bound", [True, False], ids=["opened", "asked for"])
def test_an_abort_that_comes_after_the_next_open_gives_nothing_up(bound: bool) -> None:
    """The first one is lost. It is repeated, and by then the room is wanted again."""
    world = World()
    handle = world.receive(1, 8, [0, 1])
    world.run()
    world.drop(first(1, is_message(m.Abort)))
    abort(world, handle)
    again = world.receive(1, 8, [0, 1]) if bound else world.announce(1)
    world.run(until=1.0)
    assert aborts(world) and handle.released
    sent = world.send(1, 8, [0, 1])
    if not bound:
        world.bind(again, 8, [0, 1])
    world.run(until=2.0)
    assert sent.state is State.SUCCESS, sent.error
    world.check(again, 1, 8)


def test_an_aborted_room_of_a_name_that_failed_before_fails_when_it_is_submitted() -> None:
    world = World()
    sent, handle = world.submit(1), world.receive(1, 8, [0, 1])
    world.run()
    world.prefill[0].core.abort(sent, "out of memory", world.now)
    world.carry(world.prefill[0])
    world.run()
    assert sent.released and handle.released
    handle = open_and_abort(world)
    again = world.send(1, 8, [0, 1])
    world.run()
    assert_given_up(handle, again)


def test_a_room_that_decode_aborts_since_prefill_was_too_late_fails_when_it_is_submitted() -> None:
    world = World(send_wait_s=5.0)
    handle = world.receive(1, 8, [0, 1])
    world.run(until=6.0)
    assert handle.state is State.FAILED and handle.released
    sent = world.send(1, 8, [0, 1])
    world.run(until=6.0)
    assert sent.state is State.FAILED and "given up at decode" in str(sent.error)
    assert_flat(world)


def test_what_was_aborted_is_remembered_as_long_as_an_open_would_wait() -> None:
    """The next room of its name, much later, is another's (I14)."""
    world = World(open_wait_s=5.0)
    open_and_abort(world)
    world.run(until=5.5)
    sent = world.send(1, 8, [0, 1])
    world.run(until=6.0)
    assert not sent.ended
    handle = world.receive(1, 8, [0, 1])
    world.run(until=7.0)
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)


def test_what_is_remembered_of_aborted_rooms_has_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: the latest are remembered."""
    monkeypatch.setattr("pdstage.protocol.prefill_rooms._MAX_ENDED", _MAX_ENDED)
    world = World()
    n = _MAX_ENDED + 3
    for room in range(n):
        open_and_abort(world, room=room)
    assert len(world.prefill[0].core.rooms.ended) == _MAX_ENDED
    assert_given_up(world.submit(n - 1))
    assert not world.submit(0).ended
