"""Clients that leave and engines that die: answers are right or an error, in time, and both pools are empty after."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e import faults, load
from tests.e2e.sglang import right
from tests.e2e.sglang.engines import CHUNKED, check_free, handed_over, pair

PAIR = pair({"tp": 2, "options": CHUNKED}, {})
LONG = 300
"""Tokens of an answer that is still under way when something is killed."""


@pytest.mark.full
def test_clients_that_leave(fleet, request: pytest.FixtureRequest):
    """A third of them, at any moment; both legs' connections close at once, as a router's do."""
    n = 200
    asked = load.prompts(n, seed=201)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, asked)
    some = load.ask_all(handed_over(prefill, decode), load.prompts(16, seed=202), 16)
    leaving = faults.leaving(n, 203, 1.2 * faults.median_seconds(some))
    with fleet.timed(f"leaving: {len(leaving)} of {n} clients"):
        answers = load.ask_all(handed_over(prefill, decode), asked, 16, leaves=leaving)
    fleet.note(f"leaving: {right.summary(answers, answered)}")
    right.check(answers, answered, all_ok=False)
    stayed = [one for index, one in enumerate(answers) if index not in leaving and not one.is_ok]
    assert not stayed, f"clients that stayed got no answer: {stayed[0].status} {stayed[0].body}"
    check_free(prefill, decode)
    right.check(load.ask_all(handed_over(prefill, decode), asked[:16], 8), answered)


FAULTS = {
    "prefill killed": lambda prefill, decode: prefill.kill(),
    "prefill asked to end": lambda prefill, decode: prefill.stop(240),
    "decode killed": lambda prefill, decode: decode.kill(),
}


@pytest.mark.full
@pytest.mark.parametrize("what", FAULTS)
def test_an_engine_ends_under_load(fleet, what: str):
    """While 16 clients ask: each of them hears of its request, and what came is right. The other engine goes on, with
    the next one at the same address. Who is asked to end serves what it has.
    """
    asked = load.prompts(60, seed=231)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    n_tokens = LONG if what == "decode killed" else load.N_TOKENS
    answered = right.tokens(fleet, PAIR.reference, asked, n_tokens)
    n_answered = 0
    ask = handed_over(prefill, decode, n_tokens=n_tokens)

    async def counted(session, prompt: load.Prompt) -> load.Answer:
        nonlocal n_answered
        answer = await ask(session, prompt)
        n_answered += 1
        return answer

    async def end() -> None:
        await faults.until(lambda: n_answered >= 12)
        assert await asyncio.to_thread(FAULTS[what], prefill, decode) is not False, "it did not end"

    with fleet.timed(f"{what}: {len(asked)} prompts"):
        answers = load.ask_all(counted, asked, 16, while_=end())
    fleet.note(f"{what}: {right.summary(answers, answered)}")
    right.check(answers, answered, all_ok=False)
    assert "asked" in what or not all(one.is_ok for one in answers), "nothing was under way when it was killed"
    check_free(*(one for one in (prefill, decode) if one.runs))
    again = load.prompts(32, seed=232)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    right.check(load.ask_all(handed_over(prefill, decode), again, 8), right.tokens(fleet, PAIR.reference, again))
    check_free(prefill, decode)
