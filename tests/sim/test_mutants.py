"""Every deliberate bug of `mutants` is seen, and the code as it is passes the same detectors in the same budget."""

from __future__ import annotations

import pytest

from tests.sim.mutants import SEARCH, Mutant, detect, everyone

MUTANTS = everyone()
DETECTORS = sorted({mutant.shown_by for mutant in MUTANTS})


@pytest.mark.parametrize("shown_by", DETECTORS, ids=lambda shown_by: shown_by or SEARCH)
def test_the_code_as_it_is_passes(shown_by: str) -> None:
    """A detector that always sees something proves nothing."""
    verdict = detect(None, shown_by)
    assert not verdict.words, f"{verdict.detector}, run {verdict.seed}: {verdict.words}"


def test_every_bug_has_its_place_in_the_source() -> None:
    for mutant in MUTANTS:
        mutant.source()


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.name, marks=pytest.mark.full if n % 4 else ()) for n, one in enumerate(MUTANTS)],
)
def test_the_bug_is_seen(mutant: Mutant) -> None:
    verdict = detect(mutant)
    assert verdict.words, f"{verdict.detector} passed {verdict.n_runs} runs although {mutant.rule} is broken"


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_whose_source_moved_on_is_named() -> None:
    gone = Mutant("gone", "none", "ring.py", "no such text", "")
    with pytest.raises(LookupError, match=r"'gone'.*0 times in pdstage/ring\.py"):
        gone.source()
