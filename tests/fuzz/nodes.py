"""Target: whole nodes, one of which lies, as `tests.sim.manager` runs them: with drivers that act on what they hear.

What the liar says is altered on its way, or is what it said before. Nothing of it ends another node's driver, is logged
there as an error, keeps a room open for ever, or has anybody write into memory that was given back.
"""

from __future__ import annotations

import logging

from tests.fuzz.draw import Draw
from tests.fuzz.wire import alter_frame, bend_frame
from tests.sim.manager.run import run as simulate
from tests.sim.manager.scenario import draw as scenario_of


def run(data: bytes) -> None:
    """`data`: a seed of the simulator, who lies, how often, then the lies."""
    draw = Draw(data)
    seed = draw.below(1 << 16)
    liar = draw.pick(scenario_of(seed).names)
    often = draw.pick((16, 64))

    said: list[bytes] = []

    def lie(frame: bytes) -> bytes:
        said.append(frame)
        if not draw.chance(often):
            return frame
        if draw.chance(32):
            frame = draw.pick(said[-32:])
        return bend_frame(frame, draw) if draw.chance(192) else alter_frame(frame, draw)

    logging.disable(logging.NOTSET)  # what is logged is looked at, and goes nowhere
    simulate(seed, liar, lie)


def seeds() -> list[bytes]:
    return [bytes([seed, 0]) + bytes(range(seed, 256)) * 2 for seed in range(16)]
