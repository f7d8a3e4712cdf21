"""The explorer finds nothing in the cores as they are, finds what is broken on purpose, and stands on solid ground:
what it says of a state is what cores do that were never frozen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rows import rows
from tests.sim.explore import QUICK, Search
from tests.sim.mutants import detect, everyone

BY_NAME = {configuration.name: configuration for configuration in QUICK}
IN_FULL = {
    "padding", "lent in advance, in another's way", "a crash, then again", "a row in place", "two writers of a room",
    "tags are said",
}  # fmt: skip


@pytest.mark.parametrize("name", rows(list(BY_NAME), full=IN_FULL))  # `make sim` explores the same worlds, and more
def test_every_state_of_a_small_world(name: str) -> None:
    assert Search(BY_NAME[name]).run().n_ends


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
