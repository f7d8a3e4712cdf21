"""Every committed input, then some seconds of new ones from a fixed seed, for each target."""

from __future__ import annotations

import logging

import pytest

from tests.fuzz.targets import TARGETS, inputs


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """Every refusal is logged; here they are what happens all the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    for n, data in enumerate(inputs(name, TARGETS[name].n_tests, seed=1)):
        try:
            TARGETS[name].run(data)
        except BaseException as error:
            error.add_note(f"input {n} of target {name}: {data!r}")
            raise
