"""Every committed input, then some seconds of new ones from a fixed seed, for each target."""

from __future__ import annotations

import logging

import pytest

from tests.fuzz import nodes
from tests.fuzz.__main__ import HERE, corpus_of, plain_inputs
from tests.fuzz.targets import TARGETS

N_RUNS = {
    "messages": 20_000, "tags": 20_000, "descriptions": 10_000, "datagrams": 10_000, "requests": 8_000,
    "answers": 10_000, "frames": 600, "prefill-peer": 120, "decode-peer": 150, "nodes": 400,
    "attach": 300,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> object:
    """Every refusal is logged; here they are what happens all the time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def _closed() -> object:
    yield
    nodes.close()


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    for data in corpus_of(name):
        TARGETS[name].run(data)


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs(name: str) -> None:
    for n, data in enumerate(plain_inputs(name, N_RUNS[name], seed=1)):
        try:
            TARGETS[name].run(data)
        except BaseException as error:
            error.add_note(f"input {n} of target {name}: {data!r}")
            raise


def test_each_corpus_file_has_a_target() -> None:
    files = list((HERE / "corpus").iterdir())
    assert {path.name.partition(".")[0] for path in files} == set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 200_000
