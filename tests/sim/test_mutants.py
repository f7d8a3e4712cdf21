"""Every deliberate bug of `mutants` is seen, and the code as it is passes the same detectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutants import NODES, SEARCH, Mutant, detect, everyone

MUTANTS = everyone()


@pytest.mark.full  # each other detector passes by itself in `make test`
@pytest.mark.parametrize("search", [SEARCH, NODES])
def test_the_code_as_it_is_passes(search: str) -> None:
    """A detector that always sees something proves nothing."""
    assert not detect(None, search)


def test_every_bug_has_its_place_in_the_source() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        compile(mutant.patched()[1], mutant.name, "exec")
        assert mutant.shown_by in ("", NODES) or Path(mutant.shown_by.split("::")[0]).is_file(), (
            "what is not there sees nothing"
        )


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.name, marks=() if n % 24 == 12 else pytest.mark.full) for n, one in enumerate(MUTANTS)],
)
def test_the_bug_is_seen(mutant: Mutant) -> None:
    assert detect(mutant), f"{mutant.shown_by or SEARCH} sees nothing although {mutant.rule} is broken"
