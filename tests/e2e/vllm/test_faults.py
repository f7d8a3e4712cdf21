"""Clients that leave and engines that die: answers are right or an error, in time, and all blocks are free after."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from tests.e2e import compare, faults, load
from tests.e2e.servers import Server, wait_until
from tests.e2e.vllm.engines import (
    DIRECTORY_PORT,
    PATIENT,
    RECEIVED,
    TO_PREFILL,
    USAGE,
    at_once,
    decoded,
    handed_over,
    n_known,
    pair,
    prefilled,
)

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


class Proxy:
    """As `handed_over`, for clients that leave. It loses no room: where prefill has answered, decode is asked, and
    asked once more when all is over, for a decode engine that saw the first question's connection close may never have
    read it. An engine that has asked for the room before does not ask again.
    """

    def __init__(self, prefill: Server, decode: Server, asked: list[load.Prompt], leaving: dict[int, faults.Leaving]):
        self.prefill, self.decode = prefill, decode
        self.leaving = {asked[index]: how for index, how in leaving.items()}
        self.rooms: list[tuple[load.Prompt, load.Answer]] = []

    async def ask(self, session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
        how = self.leaving.get(prompt)
        if how is None:
            return await handed_over(self.prefill, self.decode)(session, prompt)
        left = load.Answer(prompt, -1)
        if how.part == "prefill":  # of many tokens, so that it has not answered when the client leaves
            told = load.body(prompt, n_tokens=LONG, kv_transfer_params=TO_PREFILL)
            with contextlib.suppress(TimeoutError):
                first = await asyncio.wait_for(load.post(session, self.prefill.url, prompt, told), how.seconds)
                self.rooms.append((prompt, first))
            return left
        first = await prefilled(session, self.prefill.url, prompt)
        if not first.is_ok:
            return first
        self.rooms.append((prompt, first))
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(decoded(session, self.decode.url, prompt, first), how.seconds)
        return left

    def sweep(self) -> None:
        """Asks decode once more for each room that was left."""
        rooms = dict(self.rooms)

        async def again(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
            return await decoded(session, self.decode.url, prompt, rooms[prompt], n_tokens=1)

        answers = load.ask_all(again, list(rooms), 8)
        hanging = [answer for answer in answers if answer.hangs]
        assert not hanging, hanging


def test_clients_that_leave(fleet, request: pytest.FixtureRequest):
    """A third of them, at any moment of prefill, between the two, and at any moment of decode."""
    n = 200 if request.config.getoption("--full") else 60
    asked = load.prompts(n, seed=201)
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    right = fleet.right(PAIR.reference, asked)
    some = load.prompts(16, seed=202)
    seconds = faults.median_seconds(load.ask_all(handed_over(prefill, decode), some, 16))
    leaving = faults.leaving(n, 203, seconds)
    proxy = Proxy(prefill, decode, asked, leaving)
    with fleet.timed(f"leaving: {len(leaving)} of {n} clients"):
        answers = load.ask_all(proxy.ask, asked, 16)
    proxy.sweep()
    fleet.note(f"leaving: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=False)
    unasked = [one for index, one in enumerate(answers) if index not in leaving and not one.is_ok]
    assert not unasked, f"clients that stayed got no answer: {unasked[0].status} {unasked[0].body}"
    faults.check_free([prefill, decode], USAGE)
    again = load.ask_all(handed_over(prefill, decode), asked[:16], 8)
    compare.check(again, right)


@pytest.mark.full
def test_clients_that_leave_without_a_word(fleet):
    """As a client that is its own proxy leaves: prefill's answer may be lost with it, and with that the room's name, so
    that its blocks are free when `open_wait_s` is over.
    """
    row = replace(PAIR, prefill=replace(PAIR.prefill, config=(*PATIENT, ("open_wait_s", 8.0))))
    asked = load.prompts(200, seed=211)
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, asked)
    some = load.ask_all(handed_over(prefill, decode), load.prompts(16, seed=212), 16)
    leaving = faults.leaving(len(asked), 213, 0.0)
    longest = 1.2 * faults.median_seconds(some)
    moments = {index: longest * place / len(leaving) for place, index in enumerate(leaving)}
    answers = load.ask_and_leave(handed_over(prefill, decode), asked, 16, moments.get)
    fleet.note(f"leaving without a word: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=False)
    faults.check_free([prefill, decode], USAGE)


def _decode_after_prefill_died(fleet, policy: str, n: int) -> tuple[list[load.Answer], Any, Server]:
    """`n` prompts are prefilled, prefill is killed, and decode is asked for them."""
    row = PAIR.with_policy(policy)
    row = replace(row, decode=replace(row.decode, config=SOON))
    asked = load.prompts(n, seed=221)
    prefill, decode, _ = fleet.fresh(*row.engines)
    right = fleet.right(row.reference, asked)
    waiting = asyncio.Event()
    n_prefilled = 0

    async def last() -> None:
        nonlocal n_prefilled
        n_prefilled += 1
        if n_prefilled == n:
            prefill.kill()
            waiting.set()
        await waiting.wait()

    answers = load.ask_all(handed_over(prefill, decode, between=last), asked, n)
    fleet.note(f"prefill killed before the hand-over, {policy}: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=False)
    return answers, right, decode


def test_prefill_dies_before_the_hand_over_and_decode_fails_those(fleet):
    answers, _, decode = _decode_after_prefill_died(fleet, "fail", 8)
    assert all(answer.status >= 500 for answer in answers), [answer.status for answer in answers]
    faults.check_free([decode], USAGE)
    (prompt,) = load.prompts(1, seed=222)
    right = fleet.right(PAIR.reference, [prompt])
    compare.check(load.ask_all(load.to(decode.url), [prompt], 1), right)


@pytest.mark.full
def test_prefill_dies_before_the_hand_over_and_decode_computes_those(fleet):
    answers, right, decode = _decode_after_prefill_died(fleet, "recompute", 24)
    compare.check(answers, right)
    faults.check_free([decode], USAGE)


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
def test_prefill_dies_after_the_hand_over(fleet):
    """All has been received: decode goes on as if nothing had happened."""
    asked = load.prompts(16, seed=241)
    prefill, decode, _ = fleet.fresh(*HASTY.engines)
    right = fleet.right(HASTY.reference, asked, LONG)
    received = decode.metrics()[RECEIVED]

    async def kill() -> None:
        await faults.until(lambda: decode.metrics()[RECEIVED] - received >= len(asked))
        assert n_known(decode) > 0, "decode was through before prefill could be killed"
        prefill.kill()

    ask = handed_over(prefill, decode, n_tokens=LONG)
    answers = load.ask_all(ask, asked, len(asked), while_=kill())
    compare.check(answers, right)
    faults.check_free([decode], USAGE)


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
