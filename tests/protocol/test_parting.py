"""Sessions that nobody needs end in order, unseen by rooms; who does not answer is asked ever more seldom."""

from __future__ import annotations

import itertools

import pytest

from pdstage import PeerError, State, UsageError
from pdstage.protocol import messages as m
from tests.pair import Item, World, assert_failed, assert_flat, is_kind, is_message, nth
from tests.rows import either_side

IDLE_S, BEAT_S = 20.0, 10.0 / 3


def served(room: int = 1, **how: float) -> World:
    """A world whose pair has served a room at time 0."""
    world = World(**{"idle_s": IDLE_S, **how})
    serve(world, room)
    return world


def serve(world: World, room: int) -> None:
    handle, _ = world.serve(room)
    world.check(handle, room)


def strangers(world: World) -> bool:
    """No end holds anything of the other: no session, greeting, farewell or timer (I14)."""
    assert_flat(world)
    return all(not node.core.sessions and not len(node.core.endpoint.timers) for node in world.nodes()) and not any(
        node.core.handshake.peers or node.core.handshake.leaving for node in world.decode
    )


def test_an_idle_session_ends_in_order_on_both_sides() -> None:
    world = served()
    prefill, decode = world.p, world.d
    world.run(until=IDLE_S - 0.1)
    serve(world, 3)
    world.run(until=2 * IDLE_S - 0.2)
    assert prefill.core.sessions
    assert decode.core.sessions
    world.run(until=2 * IDLE_S + BEAT_S)
    assert strangers(world)
    assert prefill.core.counters.sessions_ended == decode.core.counters.sessions_ended == 1
    assert decode.core.counters.sessions_idle == 1
    assert prefill.core.counters.sessions_lost == decode.core.counters.sessions_lost == 0
    assert prefill.peer_warnings == decode.peer_warnings == []
    assert world.n_hung_up == 1
    for way in ("D0>P0", "P0>D0"):
        assert sum(f"frame {way} Bye" in line for line in world.log) == 1
    serve(world, 2)


def test_prefill_keeps_a_session_of_which_it_still_holds_a_room() -> None:
    """A writer that owes nothing: decode is done with it when told, but its engine sends the room later (I10)."""
    world = World(prefill=2, decode=2, idle_s=IDLE_S, open_wait_s=900.0)
    handles = [world.receive(1, rank=rank) for rank in range(2)]
    world.send(1, rank=0)
    world.run()
    world.send(2, rank=0)
    world.run(until=10 * IDLE_S)
    assert handles[0].state is State.SUCCESS
    assert handles[0].released
    late = world.prefill[1].core
    assert {session.route for session in late.sessions.values()} == {b"D0", b"D1"}, (
        "its record of D0's room waits for submit"
    )
    sent = world.send(1, rank=1)
    world.run()
    assert sent.state is State.SUCCESS, sent.error
    world.check(handles[1], 1, 8, 1)
    world.run(until=20 * IDLE_S)
    assert not late.sessions


@either_side
def test_a_lost_farewell_is_made_good_long_before_silence_would_tell(side: str) -> None:
    """Bye, or its answer (I4)."""
    world = served(max_silence_s=30.0)
    lossy = world.p if side == "prefill" else world.d
    world.run(until=IDLE_S - 0.1)
    world.drop(nth(0, lambda item: is_message(m.Bye)(item) and item.src is lossy))
    world.run(until=IDLE_S + 12.0)
    assert sum("Bye" in line for line in world.log) >= 2
    assert strangers(world)
    assert not world.p.peer_warnings
    assert world.p.core.counters.sessions_ended == 1


@pytest.mark.parametrize("lost", [m.Bye, m.NoSession, m.Heartbeat])
def test_a_farewell_that_is_never_answered_is_over_in_time(lost: type) -> None:
    """The peer died as its session ended: Bye is said ever more seldom, until its silence says enough."""
    world = served()
    world.run(until=IDLE_S - 0.1)
    world.drop(lambda item: is_message(m.Bye)(item) and item.src is world.p)
    world.drop(lambda item: is_message(lost)(item) and item.src is world.p and not world.d.core.sessions)
    world.run(until=IDLE_S + 2 * BEAT_S)
    assert not world.d.core.sessions
    world.run(until=IDLE_S + 30.0)
    assert strangers(world)
    byes = sum("Bye" in line and "D0>P0" in line for line in world.log)
    assert byes <= 8, "in 10 s"
    assert world.n_hung_up == 1


# At the limit.


def instances(n_prefill: int, n_decode: int, **how: float) -> World:
    return World(prefill=n_prefill, decode=n_decode, instances=True, heads=1, **how)


def one_room(world: World, room: int, prefill: int, decode: int, *, send: bool = True):
    handle = world.receive(room, rank=decode, prefill=prefill)
    if send:
        world.send(room, rank=prefill)
    world.run()
    return handle


def test_prefill_refuses_in_words_one_peer_too_many() -> None:
    """Until idle sessions have ended; a peer that greets anew is none more."""
    world = instances(1, 3, max_peers=2, idle_s=IDLE_S)
    core = world.p.core
    for decode in range(2):
        one_room(world, decode, 0, decode)
    handle = one_room(world, 5, 0, 2, send=False)
    assert_failed(handle, "already 2 peers; raise Config.max_peers", PeerError)
    assert core.counters.peers_crowded == core.counters.sessions_refused == 1
    assert len(core.sessions) == 2
    world.restart(world.d)
    assert one_room(world, 6, 0, 0).state is State.SUCCESS
    world.run(until=world.now + 2 * IDLE_S)
    assert one_room(world, 7, 0, 2).state is State.SUCCESS


def test_decode_says_so_where_a_room_has_one_peer_too_many() -> None:
    world = instances(3, 1, max_peers=2)
    core = world.d.core
    waiting = [one_room(world, n, n, 0, send=False) for n in range(2)]
    words = "room 5 would make 3 peers of this node; raise Config.max_peers, now 2"
    assert_failed(world.announce(5, 0, prefill=2), words, UsageError)
    assert set(core.handshake.peers) == {b"P0", b"P1"}
    assert not any(handle.ended for handle in waiting)
    assert core.counters.peers_crowded == 1


# Asking again.


def hellos(world: World) -> list[float]:
    """When the decode rank greeted."""
    return [at for at, line in world.timed if "Hello" in line]


class Timed(World):
    """Notes when each frame leaves."""

    def put(self, item: Item) -> None:
        self.timed = [*getattr(self, "timed", []), (self.now, repr(item))]
        super().put(item)


def test_a_dead_endpoint_costs_bounded_work() -> None:
    """A greeting is repeated after `retry_s`, doubled up to 20 times that, less up to half; then given up."""
    world = Timed(retry_s=0.25, hello_s=60.0)
    world.drop(is_kind("frame"))
    handle = world.announce(1)
    world.run(until=59.0)
    at = hellos(world)
    waits = [later - before for before, later in itertools.pairwise(at)]
    longest = [min(0.25 * 2**n, 5.0) for n in range(len(waits))]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True)), waits
    assert 15 <= len(at) <= 30
    assert len({round(wait / most, 3) for wait, most in zip(waits, longest, strict=True)}) > len(waits) / 2, "jitter"
    world.run(until=61.0)
    assert handle.state is State.FAILED
    assert world.n_hung_up == 1
    n = len(world.timed)
    world.run(until=1000.0)
    assert len(world.timed) == n, "nobody is asked any more"
    assert not len(world.d.core.endpoint.timers)


def test_a_stranded_sessions_route_is_kept_until_its_writer_answers() -> None:
    world = World(fences=False, path="direct", max_silence_s=2.0)
    handle = world.receive(1)
    world.run()
    world.hold(is_kind("write"))
    world.send(1)
    world.run()
    world.drop(lambda item: item.kind == "frame" and item.src is world.p)
    world.run(until=5.0)
    core = world.d.core
    assert handle.state is State.FAILED
    assert not core.sessions
    assert core.needs(b"P0")
    assert world.n_hung_up == 0
    world.free()
    world.run(until=30.0)
    assert handle.released
    assert not core.needs(b"P0")
    assert world.n_hung_up == 1


def test_bye_is_not_answered_while_a_write_is_in_flight() -> None:
    """The answer would prove the session quiet (I2): decode, which closes in a hurry, hears NoSession once it is."""
    world = World(path="direct", fences=False)
    world.hold(is_kind("write"))
    world.serve(1)
    writer = world.p
    session = writer.session

    assert world.held
    assert world.say(writer, m.Bye()) == []
    assert session.id not in writer.core.sessions
    assert world.say(writer, m.Heartbeat(), session) == []
    world.release_held()
    world.run(until=world.now)
    assert world.say(writer, m.Heartbeat(), session) == [m.NoSession(writer.core.incarnation)]
