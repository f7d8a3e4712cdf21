"""Engines that change roles while they run (`--enable-pd-role-switch`): SGLang ends one manager and makes another."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engines.sglang.fleet import Fleet, eventually

SWITCH = ("--enable-pd-role-switch",)


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param((2, 1), id="heads, TP 2 and 1, direct"),
        pytest.param((1, 1, "hybrid", '{"path": "staged", "transport": "nixl"}'), id="conv and SSM states, staged"),
    ],
)
def test_two_engines_change_roles_and_change_back(engines):
    """Every byte of what goes the other way is right, and of what goes as before."""
    with Fleet(*engines, options=SWITCH) as fleet:
        fleet.run(1, chunks=2)
        fleet.switch()
        fleet.run(2, chunks=2)
        fleet.run(1)
        fleet.switch()
        fleet.run(3)
        fleet.run(1)
        fleet.forgets_all()


def test_an_engine_that_switches_keeps_nothing_of_its_last_role():
    """Threads and files of a process come back to what they were, whatever connection is open at the moment."""
    with Fleet(1, 1, options=SWITCH) as fleet:

        def switch_twice():
            for number in range(2):
                fleet.switch()
                fleet.run(number)

        def kept():
            return fleet.prefill.each("kept") + fleet.decode.each("kept")

        switch_twice()
        before = kept()
        for _ in range(3):
            switch_twice()
        eventually(lambda: np.all(np.array(kept()) <= before))
