"""Decode's tokens are those of one engine, whatever the two sides' sizes, blocks and transport are."""

from __future__ import annotations

import pytest

from tests.e2e import compare, load
from tests.e2e.vllm.engines import Pair, handed_over, pair

SIZES = [((1, 128), (1, 128)), ((2, 128), (1, 128)), ((1, 128), (2, 32)), ((1, 32), (1, 64))]
SHORT = [pair(*SIZES[0]), pair(*SIZES[1])]
ROWS = [*SHORT, *(pair(*sizes, transport=name) for name in ("nixl", "local") for sizes in SIZES)]


def rows() -> list[object]:
    return [
        pytest.param(row, id=row.name, marks=() if row in SHORT else pytest.mark.full) for row in dict.fromkeys(ROWS)
    ]


@pytest.mark.parametrize("row", rows())
def test_answers_are_those_of_one_engine(fleet, request: pytest.FixtureRequest, row: Pair):
    """200 prompts of 20 to 600 tokens, 8 and then 16 at a time; prefill computes the longer ones in chunks."""
    n = 100 if request.config.getoption("--full") else 30
    asked = {at_a_time: load.prompts(n, seed=at_a_time) for at_a_time in (8, 16)}
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, [prompt for some in asked.values() for prompt in some])
    answers = []
    for at_a_time, some in asked.items():
        with fleet.timed(f"{row.name}: {n} prompts, {at_a_time} at a time"):
            answers += load.ask_all(handed_over(prefill, decode), some, at_a_time)
    fleet.note(f"{row.name}: {compare.summary(answers, right)}")
    compare.check(answers, right)
