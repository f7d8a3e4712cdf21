"""Clients that leave and engines that die: answers are right or an error, in time, and both pools are empty after."""

from __future__ import annotations

import pytest

from tests.e2e import compare, faults, load
from tests.e2e.sglang.engines import FOUND, check_free, handed_over

LONG = 300
"""Tokens of an answer that is still under way when something is killed."""


@pytest.mark.full
def test_clients_that_leave(fleet):
    """Both legs' connections close at once, as a router's do."""
    prefill, decode, _ = fleet.up(*FOUND.engines)
    ask = handed_over(prefill, decode)
    faults.clients_leave(fleet, FOUND.reference, ask, 200, check_free=lambda: check_free(prefill, decode))


FAULTS = {
    "prefill killed": lambda prefill, decode: prefill.kill(),
    "prefill asked to end": lambda prefill, decode: prefill.stop(240),
    "decode killed": lambda prefill, decode: decode.kill(),
}


@pytest.mark.full
@pytest.mark.parametrize("what", FAULTS)
def test_an_engine_ends_under_load(fleet, what: str):
    """The other engine goes on, with the next one at the same address. Who is asked to end serves what it has."""
    prefill, decode, _ = fleet.up(*FOUND.engines)
    n_tokens = LONG if what == "decode killed" else load.N_TOKENS
    ask = handed_over(prefill, decode, n_tokens=n_tokens)
    end = lambda: FAULTS[what](prefill, decode)  # noqa: E731
    answers = faults.ends_under_load(fleet, FOUND.reference, ask, end, n_tokens=n_tokens, all_ok=False)
    assert "asked" in what or not all(one.is_ok for one in answers), "nothing was under way when it was killed"
    check_free(*(one for one in (prefill, decode) if one.runs))
    again = load.prompts(32, seed=232)
    prefill, decode, _ = fleet.up(*FOUND.engines)
    compare.check(load.ask_all(handed_over(prefill, decode), again, 8), fleet.right(FOUND.reference, again))
    check_free(prefill, decode)
