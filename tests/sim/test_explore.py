"""The explorer finds nothing in the cores as they are, finds what is broken on purpose, and stands on solid ground:
what it says of a state is what cores do that were never frozen.
"""

from __future__ import annotations

import random

import pytest

from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.coverage import Coverage
from pdstage.protocol.decode_chunks import ChunkReceiver
from pdstage.protocol.leases import Lender
from pdstage.protocol.prefill_chunks import ChunkSender, Windows
from pdstage.protocol.prefill_rooms import PrefillRooms
from pdstage.protocol.session import Detach
from pdstage.protocol.state import ROOM, ChunkPhase, DestinationPhase, RoomEvent, State
from tests.rows import drawn, rows
from tests.sim.explore import QUICK, Search
from tests.sim.facts import Shape, Violation
from tests.sim.frozen import Node, canonical, digest, freeze, thaw
from tests.sim.network import Move, Network
from tests.sim.steps import Configuration, Faults

BY_NAME = {configuration.name: configuration for configuration in QUICK}
IN_FULL = {
    "padding", "lent in advance, in another's way", "a crash, then again", "a row in place", "two writers of a room",
    "tags are said",
}  # fmt: skip


@pytest.mark.parametrize("name", rows(list(BY_NAME), full=IN_FULL))  # `make sim` explores the same worlds, and more
def test_every_state_of_a_small_world(name: str) -> None:
    assert Search(BY_NAME[name]).run().n_ends


def walk(network: Network, rng: random.Random) -> list[Move]:
    """A random way to an end. Faults are rarer than the rest, so that rooms get far."""
    state, taken = network.first(), []
    while network.left_over(state):
        moves = network.moves(state)
        sound = [move for move in moves if not move.fault]
        move = rng.choice(moves if rng.random() < 0.1 else sound)
        taken.append(move)
        state = move.after
        assert len(taken) < 10_000
    return taken


@pytest.mark.parametrize("configuration", QUICK, ids=lambda c: c.name)
def test_what_is_left_out_of_a_state_has_no_influence(configuration: Configuration) -> None:
    """Cores that live through a whole walk, with seq, tickets and queues as they grow, never frozen in between, are at
    each step in the state that the explorer computed from frozen ones.
    """
    network = Network(configuration)
    nodes, rng = network.nodes, random.Random(configuration.name)
    number_of = {number: key for key, number in nodes.ids.items()}
    for _ in range(drawn(3, full=6)):
        moves = walk(network, rng)
        number_of.update((number, key) for key, number in nodes.ids.items())
        state = network.first()
        lives = [nodes.thawed(number) for number in state.nodes]
        for move in moves:
            node = lives[move.node]
            if move.what == "crash":
                lives[move.node] = nodes.thawed(move.after.nodes[move.node])
            elif move.what not in ("lose", "no tag"):
                _live_step(network, node, move)
            for alive, number in zip(lives, move.after.nodes, strict=True):
                copy = thaw(freeze(alive))
                canonical(copy)
                assert digest(copy) == number_of[number], network.words(move.what, move.node, move.given)


def _live_step(network: Network, node: Node, move: Move) -> None:
    """The same input to a core that was never brought into canonical form: its frames must have a rising seq."""
    nodes, given = network.nodes, move.given
    if given[0] == "hear":
        frame = wire.decode(nodes.frames[given[2]])
        session = node.core.sessions.get(frame.session)
        seq = session.last_seq + 1 if session is not None and frame.seq else frame.seq
        node.core.receive(nodes.names[given[1]], wire.encode(frame.session, seq, frame.message), 0.0)
    else:
        nodes._give(node, given)
    for effect in node.core.take_effects():
        if isinstance(effect, Detach):
            node.fencing[effect.session.id] = effect.session


# The explorer can fail: bugs put in on purpose, each with the configuration that shows it and what it must say.


def recall_frees_the_lease(patch: pytest.MonkeyPatch) -> None:
    whole = Lender._recall

    def recall(self, lease, now):
        whole(self, lease, now)
        self.leases.release(lease, now)

    patch.setattr(Lender, "_recall", recall)


def drained_before_the_last_completion(patch: pytest.MonkeyPatch) -> None:
    def drained(self, destination, now):
        if destination.phase is DestinationPhase.DRAINING:
            self.endpoint.send(destination.session, m.Drained(destination.epoch), now)
            self.forget(destination)

    patch.setattr(PrefillRooms, "_maybe_drained", drained)


def a_returned_lease_is_taken_again(patch: pytest.MonkeyPatch) -> None:
    """Attempts are not raised."""

    def recalled(self, chunk, now):
        self.endpoint.timers.cancel(("reserve", chunk))
        chunk.phase = ChunkPhase.PARKED
        if chunk.source.ready:
            self.reserve(chunk, now)

    patch.setattr(ChunkSender, "_recalled", recalled)


def no_question_is_repeated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkSender, "on_watermark", lambda *_: None)
    whole = ChunkSender._take

    def take(self, chunk, lease):
        whole(self, chunk, lease)
        self.endpoint.timers.cancel(("reserve", chunk))

    patch.setattr(ChunkSender, "_take", take)


def a_lost_lease_is_not_told_again(patch: pytest.MonkeyPatch) -> None:
    whole = ChunkReceiver.on_reserve

    def reserve(self, session, ask, now):
        if self._leases.find(session, ask.epoch, ask.chunk) is None:
            whole(self, session, ask, now)

    patch.setattr(ChunkReceiver, "on_reserve", reserve)


def the_window_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Windows, "is_open", lambda *_: True)


def a_tag_counts_after_its_room(patch: pytest.MonkeyPatch) -> None:
    def tag(self, session, tag, now):
        writer = self._rooms.writer(session, tag.epoch)
        if writer is not None and tag.chunk not in writer.arrived:
            self._arrived(writer, tag, now)
        return True

    patch.setattr(ChunkReceiver, "_on_tag", tag)


def success_without_coverage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coverage, "complete", property(lambda _: True))


def source_pages_come_back_at_an_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillRooms, "_maybe_release", lambda self, room: room.ended and room.release())


def a_room_fails_after_its_success(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(ROOM.rows[State.SUCCESS], RoomEvent.FAILED, State.FAILED)


BUGS = {
    recall_frees_the_lease: ("a lane for one", "I2"),
    drained_before_the_last_completion: ("one room", "I2"),
    a_returned_lease_is_taken_again: ("a lane for one", "I2"),
    the_window_is_ignored: ("a lane for one", "I2"),
    no_question_is_repeated: ("a lane for one", "deadlock"),
    a_lost_lease_is_not_told_again: ("one room", "never come to a good end"),
    a_tag_counts_after_its_room: ("straight into pages", "I6, I7"),
    success_without_coverage: ("two writers of a room", "I5"),
    source_pages_come_back_at_an_abort: ("one room", "I8"),
    a_room_fails_after_its_success: ("two writers of a room", "I1"),
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_finds(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    name, what = BUGS[bug]
    bug(monkeypatch)
    with pytest.raises(Violation, match=what) as caught:
        Search(BY_NAME[name]).run()
    assert caught.value.path, "the way there"


def test_a_state_without_a_step_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that stops before its end, and one whose end is not good, are both told."""
    monkeypatch.setattr(Network, "_time_passes", lambda *_: ())
    with pytest.raises(Violation, match="deadlock"):
        Search(Configuration(name="lost", shape=Shape(chunks=1), faults=Faults(loss=1))).run()
