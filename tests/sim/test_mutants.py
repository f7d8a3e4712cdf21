"""Every deliberate bug of `mutants` is seen, and the code as it is passes the same detectors in the same budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutants import NODES, SEARCH, Mutant, detect, everyone

MUTANTS = everyone()
DETECTORS = sorted({mutant.shown_by for mutant in MUTANTS})


@pytest.mark.full  # each of these passes by itself in `make test`, and the simulator in `make sim`
@pytest.mark.parametrize("shown_by", DETECTORS, ids=lambda shown_by: shown_by or SEARCH)
def test_the_code_as_it_is_passes(shown_by: str) -> None:
    """A detector that always sees something proves nothing."""
    verdict = detect(None, shown_by)
    assert not verdict.words, f"{verdict.detector}, run {verdict.seed}: {verdict.words}"


def test_every_bug_has_its_place_in_the_source() -> None:
    for mutant in MUTANTS:
        module, text = mutant.patched()
        compile(text, f"{module}, {mutant.name}", "exec")
        assert mutant.shown_by in ("", NODES) or Path(mutant.shown_by.split("::")[0]).is_file(), (
            "what is not there sees nothing"
        )


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(one, id=one.name, marks=() if n % 24 == 12 else pytest.mark.full) for n, one in enumerate(MUTANTS)],
)
def test_the_bug_is_seen(mutant: Mutant) -> None:
    verdict = detect(mutant)
    assert verdict.words, f"{verdict.detector} passed {verdict.n_runs} runs although {mutant.rule} is broken"


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("function", "old", "n"),
    [
        ("release", "no such text", "0 times in .*pdstage/protocol/lane.py:Lane.release"),
        ("no_such_function", "x", "0 times in no_such_function"),
        ("release", "def release(", "[2-9] times"),
        ("Lane.release", "self.", "[2-9] times"),
    ],
)
def test_a_mutant_whose_source_moved_on_is_named(function: str, old: str, n: str) -> None:
    with pytest.raises(LookupError, match=f"'gone'.*{n}"):
        Mutant("gone", "none", function, old, "").place()


def test_a_method_is_found_by_its_class_too() -> None:
    assert Mutant("named", "none", "Lane.release", "def release(", "").place().name == "Lane.release"
