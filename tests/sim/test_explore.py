"""The explorer finds nothing in the cores as they are, finds what is broken on purpose, and stands on solid ground:
what it says of a state is what cores do that were never frozen.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdstage.protocol import wire
from pdstage.protocol.session import Detach
from tests.rows import drawn, rows
from tests.sim.explore import QUICK, Search
from tests.sim.facts import Shape, Violation
from tests.sim.frozen import Node, canonical, digest, freeze, thaw
from tests.sim.mutants import detect, everyone
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
        node.core.endpoint.receive(nodes.names[given[1]], wire.encode(frame.session, seq, frame.message), 0.0)
    else:
        nodes._give(node, given)
    for effect in node.core.endpoint.take_effects():
        if isinstance(effect, Detach):
            node.fencing[effect.session.id] = effect.session


BUGS = {
    "decode frees on sending Recall": "a lane for one",
    "Drained before the last completion": "one room",
    "no attempts: Returned is not final": "a lane for one",
    "the window is not checked before a write": "a lane for one",
    "Reserve is not repeated": "one room",
    "Reserve of what is granted is not answered": "one room",
    "a tag counts after its room ended": "straight into pages",
    "Success before the scatters are done": "one room",
    "source memory is given back before the last completion": "one room",
}
"""Bugs of `mutants`, and a world that shows each."""


@pytest.mark.parametrize("name", rows(list(BUGS), full=list(BUGS)[3:]))
def test_finds(name: str) -> None:
    mutant = next(one for one in everyone() if one.name == name)
    test = f"tests/sim/test_explore.py::test_every_state_of_a_small_world[{BUGS[name]}]"
    assert detect(replace(mutant, shown_by=test))


def test_a_state_without_a_step_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world that stops before its end, and one whose end is not good, are both told."""
    monkeypatch.setattr(Network, "_time_passes", lambda *_: ())
    with pytest.raises(Violation, match="deadlock"):
        Search(Configuration("lost", Shape(chunks=1), Faults(loss=1))).run()
