"""Rooms that decode gives up before it opens them: who is told, and when a room of that name may come again (I10)."""

from collections.abc import Callable

import pytest

from pdstage import Aborted, DeadlineExceeded, State, UsageError
from pdstage.protocol import messages as m
from tests.pair import DecodeRoom, World, assert_failed, assert_flat, is_message, nth

WHY = "the client left"


def abort(world: World, room) -> None:
    world.abort(world.d, room, WHY)


def assert_given_up(*rooms) -> None:
    for room in rooms:
        assert room.released
        assert_failed(room, WHY, Aborted)


def aborts(world: World) -> int:
    return sum("Abort(" in line for line in world.log)


def restart(world: World) -> None:
    world.restart(world.p)


def lose(world: World) -> None:
    world.lose(world.p, DeadlineExceeded("decode was silent"))


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
    world.serve(1)
    forget(world)
    sent = world.send(2) if submitted else None
    handle = world.announce(2)
    if bound:
        world.bind(handle, 8, [2, 3])
    world.run(until=1.0)
    sent = sent or world.send(2)
    world.run(until=2.0)
    for room in (handle, sent):
        assert_failed(room, "does not know this session")
        assert room.released
    again, _ = world.serve(3)
    world.check(again, 3)
    assert_flat(world)


def test_a_room_given_up_before_it_is_submitted_fails_when_it_is() -> None:
    world = World()
    handle = world.announce(1)
    world.run()
    abort(world, handle)
    world.run()
    sent = world.send(1)
    world.run()
    assert_given_up(handle, sent)
    assert_flat(world)


def test_what_was_given_up_fails_one_room_and_not_the_next_of_its_name() -> None:
    world = World()
    abort(world, world.announce(1))
    world.run()
    assert not any(peer.given_up for peer in world.d.core.handshake.peers.values()), "it was told once"
    assert_given_up(world.submit(1))
    handle, sent = world.serve(1)
    assert sent.state is State.SUCCESS
    world.check(handle, 1)


def test_a_room_wanted_again_before_its_writer_answered_was_never_given_up() -> None:
    world = World()
    sent = world.send(1)
    world.hold(is_message(m.Welcome))
    abort(world, world.announce(1))
    handle = world.receive(1)
    world.free()
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1)
    assert not aborts(world)


def test_a_room_whose_writers_were_still_looked_up_is_given_up_with_a_greeting() -> None:
    world = World()
    sent, handle = world.send(1), look_up(world)
    abort(world, handle)
    assert handle.released, "nothing was said to anybody"
    found(world, handle)
    world.run()
    assert_failed(sent, WHY)
    assert_flat(world)


def test_a_room_received_anew_meanwhile_is_not_given_up() -> None:
    world = World()
    sent, given_up = world.send(1), look_up(world)
    abort(world, given_up)
    handle = world.receive(1)
    found(world, given_up)
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1)


@pytest.mark.parametrize(("writers", "words"), [({}, "0 writers"), ({0: b"P0", 1: b"P0"}, "2 writers at 1 routes")])
def test_writers_that_are_none_fail_the_room_that_was_looked_up(writers: dict[int, bytes], words: str) -> None:
    world = World()
    handle = look_up(world)
    world.d.core.found(handle, writers)
    world.carry(world.d)
    assert handle.released
    assert_failed(handle, words, UsageError)
    assert_flat(world)


def look_up(world: World) -> DecodeRoom:
    return world.d.core.announce(b"i1", deadline_s=60.0)


def found(world: World, handle: DecodeRoom) -> None:
    world.d.core.found(handle, {0: world.p.name})
    world.carry(world.d)


# A room that was opened, and parked at prefill, since its engine had not submitted it yet.


def open_and_abort(world: World, room: int = 1) -> DecodeRoom:
    handle = world.receive(room)
    world.run(until=world.now)
    abort(world, handle)
    world.run(until=world.now)
    return handle


def test_a_room_whose_parked_open_is_aborted_fails_when_it_is_submitted() -> None:
    """Its blocks would be kept for `open_wait_s`: nobody opens it again (I10)."""
    world = World()
    handle = open_and_abort(world)
    assert not len(world.p.core.pending)
    sent = world.send(1)
    world.run()
    assert_given_up(handle, sent)
    assert world.now == 0.0
    assert_flat(world)


@pytest.mark.parametrize("bound", [True, False], ids=["opened", "asked for"])
def test_an_abort_that_comes_after_the_next_open_gives_nothing_up(bound: bool) -> None:
    """The first one is lost. It is repeated, and by then the room is wanted again."""
    world = World()
    handle = world.receive(1)
    world.run()
    world.drop(nth(0, is_message(m.Abort)))
    abort(world, handle)
    again = world.receive(1) if bound else world.announce(1)
    world.run(until=1.0)
    assert aborts(world) and handle.released
    sent = world.send(1)
    if not bound:
        world.bind(again, 8, [0, 1])
    world.run(until=2.0)
    assert sent.state is State.SUCCESS, sent.error
    world.check(again, 1)


def test_what_was_aborted_is_remembered_as_long_as_an_open_would_wait() -> None:
    """The next room of its name, much later, is another's (I14)."""
    world = World(open_wait_s=5.0)
    open_and_abort(world)
    world.run(until=5.5)
    sent = world.send(1)
    world.run(until=6.0)
    assert not sent.ended
    handle = world.receive(1)
    world.run(until=7.0)
    assert sent.state is State.SUCCESS
    world.check(handle, 1)


def test_what_is_remembered_of_aborted_rooms_has_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """I14: the latest are remembered."""
    monkeypatch.setattr("pdstage.protocol.session.MAX_REMEMBERED", 64)
    world = World()
    n = 64 + 3
    for room in range(n):
        open_and_abort(world, room=room)
    assert len(world.p.core.ended) == 64
    assert_given_up(world.submit(n - 1))
    assert not world.submit(0).ended
