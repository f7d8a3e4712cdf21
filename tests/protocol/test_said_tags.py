"""Tags said as messages, where the transport carries none: lost, late, twice, untrue; and never where it does."""

from __future__ import annotations

import pytest

from pdstage import PeerError, State
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from tests.pair import World, assert_failed, is_kind, is_message, nth
from tests.rows import either_side

TAGGED = is_message(m.Tagged)


def saying(**shape: object) -> World:
    return World(notifies=False, **shape)  # type: ignore[arg-type]


def said(world: World) -> int:
    return sum(" Tagged(" in line for line in world.log)


def test_a_recall_of_what_was_written_is_answered_with_its_tag() -> None:
    """A room that goes on computing keeps its lane from nobody, though the tag was lost (I12)."""
    world = saying(lane_nbytes=512, recall_after_s=0.5, transfer_s=500.0)
    world.drop(nth(0, TAGGED))
    world.receive(1, 16, [0, 1, 2, 3])
    endless = world.submit(1)
    world.chunk(endless)
    world.run()
    other, _ = world.serve(2)
    assert not other.ended
    world.run(until=3.0)
    world.check(other, 2)
    assert world.p.core.counters.leases_returned == 0
    assert not endless.ended


def test_nothing_is_said_under_a_lost_session() -> None:
    """Its write may be done all the same."""
    world = saying(fences=False)
    world.receive(1)
    world.hold(is_kind("done"))
    world.send(1)
    world.run()
    world.lose(world.p, PeerError("the test says so"))
    world.free()
    world.run()
    assert said(world) == 0


@pytest.mark.parametrize("what", ["another session", "no tag", "another component", "where tags come with the data"])
def test_an_untrue_tag_ends_its_session(what: str) -> None:
    """It is as untrusted as any other frame."""
    world = saying() if what != "where tags come with the data" else World()
    room = world.receive(1)
    world.run()
    session = world.d.session
    tag = wire.Tag(session.id, 1, 0, 0, 0, ())
    data = {
        "another session": wire.encode_tag(tag._replace(session=m.SessionId(1, 2)), ("kv",)),
        "no tag": b"Pt",
        "another component": wire.encode_tag(tag, ("kv",))[:-2] + b"\1\0" + b"\7" + bytes(25),
    }.get(what, wire.encode_tag(tag, ("kv",)))
    world.say(world.d, m.Tagged(data))
    assert world.d.core.counters.frames_malformed == 1
    assert not world.d.core.sessions
    assert room.state is State.FAILED


@either_side
def test_one_side_that_says_tags_and_one_that_does_not(side: str) -> None:
    """Refused at Hello, in words, at both ends."""
    world = World()
    world.notifies = False
    ranks, make = (world.prefill, world.make_prefill) if side == "prefill" else (world.decode, world.make_decode)
    ranks[0] = make(0)  # type: ignore[call-overload]
    room = world.receive(1)
    world.run()
    assert_failed(room, "carries tags at one side only")
    assert any("carries tags at one side only" in line for line in world.p.peer_warnings)
