"""Decode's tokens are those of one engine, whatever the two sides' ranks, pages, models and chunks are."""

from __future__ import annotations

import pytest

from tests.e2e import compare, load
from tests.e2e.sglang.engines import CHUNKED, FOUND, WINDOWS_WHOLE, Pair, check_free, handed_over, pair

LOCAL, STAGED = '{"transport": "local"}', '{"transport": "nixl", "path": "staged"}'
ROWS = [
    FOUND,
    pair({"pp": 2}, {}),
    pair({}, {}),
    pair({"pp": 2, "tp": 2, "options": CHUNKED}, {}),
    pair({"radix": True}, {}),
    pair({}, {"tp": 2}),
    pair({"pp": 2}, {"tp": 2}),
    pair({"options": CHUNKED}, {}, page=1),
    pair({}, {}, page=64),
    pair({"tp": 2}, {}, node=LOCAL),
    pair({"tp": 2}, {"tp": 2}, node=STAGED),
    pair({}, {}, dtype="bfloat16"),
    pair({"tp": 2}, {}, model="gemma3", options=WINDOWS_WHOLE),
]


def rows() -> list[object]:
    return [pytest.param(row, id=row.name, marks=pytest.mark.full if row.full else ()) for row in ROWS]


@pytest.mark.parametrize("row", rows())
def test_answers_are_those_of_one_engine(fleet, request: pytest.FixtureRequest, row: Pair):
    """Prompts of 20 to 600 tokens, 8 and then 16 at a time."""
    n = 100 if request.config.getoption("--full") else 15
    asked = {at_a_time: load.prompts(n, seed=at_a_time) for at_a_time in (8, 16)}
    prefill, decode, _ = fleet.up(*row.engines)
    right = fleet.right(row.reference, [prompt for some in asked.values() for prompt in some])
    answers = []
    for at_a_time, some in asked.items():
        with fleet.timed(f"{row.name}: {n} prompts, {at_a_time} at a time"):
            answers += load.ask_all(handed_over(prefill, decode), some, at_a_time)
    fleet.note(f"{row.name}: {compare.summary(answers, right)}")
    compare.check(answers, right)
    check_free(prefill, decode)


@pytest.mark.full
def test_decode_keeps_prefixes(fleet):
    """With decode's radix cache on, prefill sends what follows the prefix that decode has."""
    row = pair({}, {"radix": True, "options": ("--enable-cache-report",)})
    asked = load.prompts(60, seed=31, shortest=200, shared=160)
    prefill, decode, _ = fleet.up(*row.engines)
    right = fleet.right(row.reference, asked)
    hits = []
    for at_a_time in (8, 16):
        answers = load.ask_all(handed_over(prefill, decode), asked, at_a_time)
        compare.check(answers, right)
        hits.append(sum(_cached(one) for one in answers))
    fleet.note(f"{row.name}: {compare.summary(answers, right)}; {hits} tokens were decode's already")
    assert hits[1] > 0, "decode's cache was never hit"


def _cached(answer: load.Answer) -> int:
    told = answer.body["usage"].get("prompt_tokens_details") or {}
    return int(told.get("cached_tokens") or 0)
