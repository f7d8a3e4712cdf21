"""Deliberate bugs that a tester from outside planted and no test of ours saw at first."""

from __future__ import annotations

from tests.sim.mutants import Mutant

MUTANTS = [
    Mutant(
        "a writer's window is one view too wide",
        "6 window, I2",
        "Windows.is_open",
        "<= mark + session.lanes[chunk.lane].nbytes",
        "<= mark + session.lanes[chunk.lane].nbytes + 128",
    ),
    Mutant(
        "a rising watermark opens what it does not reach",
        "6 window, I2",
        "Windows.raise_mark",
        "        n_open = sum(map(self.is_open, held))\n",
        "        n_open = len(held)\n",
    ),
    Mutant(
        "the total of what waits for its room never falls",
        "10 limits, I14",
        "PrefillRooms.unpark",
        "        destination.session.parked_nbytes -= destination.parked_nbytes\n",
        "",
        "tests/protocol/test_rooms.py",
    ),
    Mutant(
        "one dead way is taken for a dead peer",
        "9 proved_dead, I2",
        "AutoTransport.proved_dead",
        "all(way.proved_dead(peer) for way in met.values())",
        "any(way.proved_dead(peer) for way in met.values())",
        "tests/transport/test_auto.py",
    ),
    Mutant(
        "a failed write counts as settled",
        "9 settled, I2",
        "NixlTransport._end",
        "settled=False",
        "settled=True",
        "tests/transport/test_nixl.py::test_the_agent_of_a_dead_peer_goes_with_its_last_post",
    ),
]
