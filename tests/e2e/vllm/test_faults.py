"""Clients that leave and engines that die: answers are right or an error, in time, and all blocks are free after."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.e2e import compare, faults, load
from tests.e2e.servers import wait_until
from tests.e2e.vllm.engines import DIRECTORY_PORT, PATIENT, RECEIVED, at_once, check_free, handed_over, pair
from tests.rows import rows

PAIR = pair((1, 128), (1, 128))
PAIR = replace(
    PAIR,
    prefill=replace(PAIR.prefill, config=(*PATIENT, ("open_wait_s", 8.0))),
    decode=replace(PAIR.decode, config=(*PATIENT, ("hello_s", 20.0))),
)
"""`hello_s` is how long decode greets a prefill rank that is gone: it is all that its requests wait for."""
LONG = 300
"""Tokens of an answer that is still under way when something is killed."""
DRAIN_S = 30
ENDS_S = 240
"""On a busy machine, ended by its own bound."""


def test_clients_that_leave(fleet, request: pytest.FixtureRequest):
    """Prefill's answer may be lost with a client, and with that the room's name, so that its blocks are free when
    `open_wait_s` is over.
    """
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    n = 200 if request.config.getoption("--full") else 60
    faults.clients_leave(
        fleet, PAIR.reference, handed_over(prefill, decode), n, check_free=lambda: check_free(prefill, decode)
    )


@pytest.mark.parametrize("policy", rows(["fail", "recompute"], full={"recompute"}))
def test_prefill_dies_before_the_hand_over(fleet, policy: str):
    """Some prompts are prefilled, prefill is killed, and decode is asked for them."""
    row = PAIR.with_policy(policy)
    asked = load.prompts(8, seed=221)
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, asked)
    waiting = asyncio.Event()
    n_prefilled = 0

    async def last() -> None:
        nonlocal n_prefilled
        n_prefilled += 1
        if n_prefilled == len(asked):
            prefill.kill()
            waiting.set()
        await waiting.wait()

    answers = load.ask_all(handed_over(prefill, decode, between=last), asked, len(asked))
    fleet.note(f"prefill killed before the hand-over, {policy}: {compare.summary(answers, right)}")
    if policy == "fail":
        assert all(answer.status >= 500 for answer in answers), [answer.status for answer in answers]
    else:
        compare.check(answers, right)
    check_free(decode)
    compare.check(load.ask_all(load.to(decode.url), asked[:1], 1), right)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "policy", "transport"),
    [
        ("prefill asked to end", "recompute", "nixl"),
        ("prefill asked to end, both asked at once", "recompute", "nixl"),
        *(("prefill killed", policy, transport) for policy in ("fail", "recompute") for transport in ("nixl", "local")),
        ("decode killed", "fail", "nixl"),
    ],
)
def test_an_engine_ends_under_load(fleet, what: str, policy: str, transport: str):
    """With the deadlines that an operator gets who says nothing. Prefill that is asked to end serves what it has, what
    comes later is decode's to compute, and it ends within its bound. Everything is handed over again with the next
    engine at the same address.
    """
    row = pair((1, 128), (1, 128), transport=transport, config=()).with_policy(policy)
    directory = DIRECTORY_PORT if "at once" in what else 0
    row = replace(row, prefill=replace(row.prefill, shutdown_s=DRAIN_S * ("asked" in what), directory=directory))
    prefill, decode, _ = fleet.fresh(*row.engines)
    end = {"prefill killed": prefill.restart, "decode killed": decode.kill}.get(what, lambda: prefill.stop(ENDS_S))
    n_tokens = LONG if what == "decode killed" else load.N_TOKENS
    ask = handed_over(prefill, decode, again=what != "decode killed", n_tokens=n_tokens)
    if directory:
        ask = at_once(prefill, decode, directory)
    faults.ends_under_load(fleet, row.reference, ask, end, n_tokens=n_tokens, all_ok=policy == "recompute")
    assert what != "prefill asked to end" or not decode.says("was not received"), decode.tail()
    prefill, decode, _ = fleet.fresh(*row.engines)
    asked = load.prompts(40, seed=232)
    received = decode.metrics()[RECEIVED]
    compare.check(load.ask_all(ask, asked, 8), fleet.right(row.reference, asked, n_tokens))
    assert wait_until(lambda: decode.metrics()[RECEIVED] - received >= len(asked), 10)
    check_free(prefill, decode)
