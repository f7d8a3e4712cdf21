"""Staged chunks whose bytes change between the gather and the scatter."""

from __future__ import annotations

import pytest

from pdstage.errors import TransportError
from pdstage.protocol.state import State
from tests.pair import World, assert_flat, is_kind

TOKENS, SRC, DST = 8, [3, 1], [2, 5]


def alter_first_landing(world):
    """Lets everything run but the first scatter, and flips one bit of what it will read."""
    world.hold(is_kind("scatter"))
    world.run()
    landing = world.decode[0].core.chunks.flights[min(world.decode[0].core.chunks.flights)]
    world.decode[0].staging.at(landing.address, landing.nbytes)[landing.nbytes // 2] ^= 1
    world.free()
    world.run(until=world.now + 60)


def test_an_altered_chunk_fails_its_room_and_leaves_nothing_behind():
    world = World(checksums=True)
    receiver = world.receive(7, TOKENS, DST)
    sender = world.send(7, TOKENS, SRC, step=4)
    alter_first_landing(world)
    assert receiver.state is State.FAILED
    assert isinstance(receiver.error, TransportError)
    assert "was altered" in str(receiver.error)
    assert receiver.released and sender.released
    assert world.decode[0].core.counters.chunks_altered == 1
    assert_flat(world)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_alone_has_no_checksums(side):
    world = World(checksums=side == "prefill")
    world.config = type(world.config)(checksums=side == "decode")
    world.decode[0] = world.make_decode(0)
    receiver = world.receive(7, TOKENS, DST)
    world.send(7, TOKENS, SRC)
    world.run(until=60)
    world.check(receiver, 7, TOKENS)
    assert not any(session.checksums for node in world.nodes() for session in node.core.sessions.values())
