"""Staged chunks whose bytes change between the gather and the scatter."""

from __future__ import annotations

from tests.pair import World
from tests.rows import either_side

TOKENS, SRC, DST = 8, [3, 1], [2, 5]


@either_side
def test_one_side_alone_has_no_checksums(side):
    world = World(checksums=side == "prefill")
    world.config = type(world.config)(checksums=side == "decode")
    world.decode[0] = world.make_decode(0)
    receiver = world.receive(7, TOKENS, DST)
    world.send(7, TOKENS, SRC)
    world.run(until=60)
    world.check(receiver, 7, TOKENS)
    assert not any(session.checksums for node in world.nodes() for session in node.core.sessions.values())
