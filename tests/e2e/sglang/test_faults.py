"""Clients that leave and engines that die: answers are right or an error, in time, and both pools are empty after."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.e2e import faults, load
from tests.e2e.sglang import right
from tests.e2e.sglang.engines import CHUNKED, SglangServer, check_free, handed_over, pair

PAIR = pair({"tp": 2, "options": CHUNKED}, {})
LONG = 300
"""Tokens of an answer that is still under way when something is killed."""


def ranks_of(server: SglangServer) -> list[int]:
    """The processes of a server that are its ranks, by tensor-parallel rank."""
    assert server.process is not None
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            name = (place / "cmdline").read_bytes().split(b"\\0")[0].decode()
            group = os.getpgid(int(place.name))
        except (OSError, ProcessLookupError):  # it ended meanwhile
            continue
        if group == server.process.pid and name.startswith("sglang::scheduler"):
            found[name] = int(place.name)
    return [found[name] for name in sorted(found)]


@pytest.mark.full
def test_clients_that_leave(fleet, request: pytest.FixtureRequest):
    """A third of them, at any moment; both legs' connections close at once, as a router's do."""
    n = 200
    asked = load.prompts(n, seed=201)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, asked)
    some = load.ask_all(handed_over(prefill, decode), load.prompts(16, seed=202), 16)
    drawn, longest = random.Random(203), 1.2 * faults.median_seconds(some)
    leaving = {index: drawn.uniform(0.0, longest) for index in drawn.sample(range(n), n // 3)}
    with fleet.timed(f"leaving: {len(leaving)} of {n} clients"):
        answers = load.ask_and_leave(handed_over(prefill, decode), asked, 16, leaving.get)
    fleet.note(f"leaving: {right.summary(answers, answered)}")
    right.check(answers, answered, all_ok=False)
    stayed = [one for index, one in enumerate(answers) if index not in leaving and not one.is_ok]
    assert not stayed, f"clients that stayed got no answer: {stayed[0].status} {stayed[0].body}"
    check_free(prefill, decode)
    right.check(load.ask_all(handed_over(prefill, decode), asked[:16], 8), answered)


def _under_load(
    fleet, what: str, do, *, n_tokens: int = load.N_TOKENS
) -> tuple[SglangServer, SglangServer, list[load.Answer]]:
    """`do(prefill, decode)` in a thread while 16 clients ask; every client hears of its request, and what came is
    right.
    """
    asked = load.prompts(60, seed=231)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, asked, n_tokens)
    n_answered = 0
    ask = handed_over(prefill, decode, n_tokens=n_tokens)

    async def counted(session, prompt: load.Prompt) -> load.Answer:
        nonlocal n_answered
        answer = await ask(session, prompt)
        n_answered += 1
        return answer

    async def do_it() -> None:
        await faults.until(lambda: n_answered >= 12)
        await asyncio.to_thread(do, prefill, decode)

    with fleet.timed(f"{what}: {len(asked)} prompts"):
        answers = load.ask_all(counted, asked, 16, while_=do_it())
    fleet.note(f"{what}: {right.summary(answers, answered)}")
    right.check(answers, answered, all_ok=False)
    return prefill, decode, answers


def _kill_under_load(fleet, what: str, kill, *, n_tokens: int = load.N_TOKENS) -> tuple[SglangServer, SglangServer]:
    prefill, decode, answers = _under_load(fleet, what, kill, n_tokens=n_tokens)
    assert not all(one.is_ok for one in answers), "nothing was under way when it was killed"
    return prefill, decode


def _all_right_again(fleet) -> None:
    """With both engines up, all is handed over, and nothing is held afterwards."""
    asked = load.prompts(32, seed=232)
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, asked)
    right.check(load.ask_all(handed_over(prefill, decode), asked, 8), answered)
    check_free(prefill, decode)


@pytest.mark.full
def test_prefill_dies_under_load(fleet):
    """Decode goes on, with the next prefill at the same address."""
    _, decode = _kill_under_load(fleet, "prefill killed", lambda prefill, _: prefill.kill())
    check_free(decode)
    _all_right_again(fleet)


@pytest.mark.full
def test_prefill_is_asked_to_end_under_load(fleet):
    """It serves what it has and ends; decode goes on, with the next prefill at the same address."""
    ended: list[bool] = []
    _, decode, _ = _under_load(fleet, "prefill asked to end", lambda prefill, _: ended.append(prefill.stop(240)))
    assert ended == [True]
    check_free(decode)
    _all_right_again(fleet)


@pytest.mark.full
def test_decode_dies_under_load(fleet):
    """Prefill goes on, with the next decode."""
    prefill, _ = _kill_under_load(fleet, "decode killed", lambda _, decode: decode.kill(), n_tokens=LONG)
    check_free(prefill)
    _all_right_again(fleet)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_two_dies_under_load(fleet, rank: int):
    """SGLang ends an engine of which a rank has died; decode goes on."""

    def kill(prefill: SglangServer, _: SglangServer) -> None:
        os.kill(ranks_of(prefill)[rank], signal.SIGKILL)

    _, decode = _kill_under_load(fleet, f"rank {rank} of prefill killed", kill)
    check_free(decode)
    fleet.stop(PAIR.prefill)
    _all_right_again(fleet)
