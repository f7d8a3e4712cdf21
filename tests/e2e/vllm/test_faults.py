"""Clients that leave and engines that die: answers are right or an error, in time, and all blocks are free after."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.e2e import compare, faults, load
from tests.e2e.servers import wait_until
from tests.e2e.vllm.engines import DIRECTORY_PORT, PATIENT, RECEIVED, USAGE, at_once, handed_over, n_known, pair
from tests.rows import rows

PAIR = pair((1, 128), (1, 128))
HASTY = pair((1, 128), (1, 128), config=())
"""With the deadlines that an operator gets who says nothing."""
SOON = (("hello_s", 20.0), ("max_silence_s", 240.0))
"""How long decode greets a prefill rank that is gone: it is all that its requests wait for."""
LONG = 300
"""Tokens of an answer that is still under way when something is killed."""
DRAIN_S = 30
ENDS_S = 240
"""On a busy machine, ended by its own bound."""


def test_clients_that_leave(fleet, request: pytest.FixtureRequest):
    """A third of them, at any moment. Prefill's answer may be lost with a client, and with that the room's name, so
    that its blocks are free when `open_wait_s` is over.
    """
    n = 200 if request.config.getoption("--full") else 60
    row = replace(PAIR, prefill=replace(PAIR.prefill, config=(*PATIENT, ("open_wait_s", 8.0))))
    asked = load.prompts(n, seed=201)
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, asked)
    some = load.ask_all(handed_over(prefill, decode), load.prompts(16, seed=202), 16)
    leaving = faults.leaving(n, 203, 1.2 * faults.median_seconds(some))
    with fleet.timed(f"leaving: {len(leaving)} of {n} clients"):
        answers = load.ask_all(handed_over(prefill, decode), asked, 16, leaves=leaving)
    fleet.note(f"leaving: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=False)
    stayed = [one for index, one in enumerate(answers) if index not in leaving and not one.is_ok]
    assert not stayed, f"clients that stayed got no answer: {stayed[0].status} {stayed[0].body}"
    faults.check_free([prefill, decode], USAGE)
    compare.check(load.ask_all(handed_over(prefill, decode), asked[:16], 8), right)


@pytest.mark.parametrize("policy", rows(["fail", "recompute"], full={"recompute"}))
def test_prefill_dies_before_the_hand_over(fleet, policy: str):
    """Some prompts are prefilled, prefill is killed, and decode is asked for them."""
    row = PAIR.with_policy(policy)
    row = replace(row, decode=replace(row.decode, config=SOON))
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
    faults.check_free([decode], USAGE)
    compare.check(load.ask_all(load.to(decode.url), asked[:1], 1), right)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("transport", ["nixl", "local"])
def test_prefill_dies_under_load_and_comes_back(fleet, policy: str, transport: str):
    """Killed while 16 clients ask, and started again at once: what decode answers is right, and once prefill is back
    everything is handed over again.
    """
    row = pair((1, 128), (1, 128), transport=transport, config=()).with_policy(policy)
    asked = load.prompts(200, seed=231)
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, asked)
    received = decode.metrics()[RECEIVED]

    async def kill() -> None:
        await faults.until(lambda: decode.metrics()[RECEIVED] - received >= 60)
        prefill.restart()

    answers = load.ask_all(handed_over(prefill, decode, again=True), asked, 16, while_=kill())
    fleet.note(f"prefill killed under load, {policy}, {transport}: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=policy == "recompute")
    prefill.wait()
    received = decode.metrics()[RECEIVED]
    decode.post("/reset_prefix_cache")
    compare.check(load.ask_all(handed_over(prefill, decode), asked[:60], 8), right)
    assert wait_until(lambda: decode.metrics()[RECEIVED] - received >= 60, 10)
    faults.check_free([prefill, decode], USAGE)


@pytest.mark.full
def test_decode_dies(fleet):
    """With 24 requests that it has begun: prefill's blocks are free, and it hands over to the next decode."""
    asked = load.prompts(24, seed=251)
    prefill, decode, _ = fleet.fresh(*HASTY.engines)
    right = fleet.right(HASTY.reference, asked)

    async def kill() -> None:
        await faults.until(lambda: n_known(decode) == len(asked))
        decode.kill()

    answers = load.ask_all(handed_over(prefill, decode, n_tokens=LONG), asked, len(asked), while_=kill())
    hanging = [answer for answer in answers if answer.hangs]
    assert not hanging, hanging
    faults.check_free([prefill], USAGE)
    prefill, decode, _ = fleet.fresh(*HASTY.engines)
    compare.check(load.ask_all(handed_over(prefill, decode), asked, 8), right)
    faults.check_free([prefill, decode], USAGE)


@pytest.mark.full
@pytest.mark.parametrize("way", ["serial", "at once"])
def test_a_rolling_restart_of_prefill_loses_no_request(fleet, way: str):
    """Asked to end while 16 clients ask: what it has is computed and handed over, what comes later is decode's to
    compute, and it ends within its bound. Then it starts again, and everything is handed over as before.
    """
    row = pair((1, 128), (1, 128), config=()).with_policy("recompute")
    directory = DIRECTORY_PORT if way == "at once" else 0
    row = replace(row, prefill=replace(row.prefill, shutdown_s=DRAIN_S, directory=directory))
    asked = load.prompts(120, seed=261)
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, asked)
    received = decode.metrics()[RECEIVED]
    ended: list[bool] = []

    async def end() -> None:
        await faults.until(lambda: decode.metrics()[RECEIVED] - received >= 40)
        ended.append(await asyncio.to_thread(prefill.stop, ENDS_S))

    ask = at_once(prefill, decode, directory) if directory else handed_over(prefill, decode, again=True)
    answers = load.ask_all(ask, asked, 16, while_=end())
    fleet.note(f"prefill asked to end under load, {way}: {compare.summary(answers, right)}")
    compare.check(answers, right)
    assert ended == [True], f"it did not end in {ENDS_S} s\n{prefill.tail()}"
    assert directory or not decode.says("was not received"), decode.tail()
    prefill.start().wait()
    received = decode.metrics()[RECEIVED]
    decode.post("/reset_prefix_cache")
    compare.check(load.ask_all(ask, asked[:40], 8), right)
    assert wait_until(lambda: decode.metrics()[RECEIVED] - received >= 40, 10)
    faults.check_free([prefill, decode], USAGE)
