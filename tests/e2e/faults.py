"""What befalls a pair of engines: clients that leave, and processes that are killed. And what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.e2e import compare, load
from tests.e2e.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.e2e.fleet import Fleet, Spec


def clients_leave(fleet: Fleet, reference: Spec, ask: load.Ask, n: int, check_free: Callable[[], None]) -> None:
    """A third of `n`, at any moment: those who stay are answered, and nothing is held afterwards."""
    asked = load.prompts(n, seed=201)
    right = fleet.right(reference, asked)
    some = load.ask_all(ask, load.prompts(16, seed=202), 16)
    longest = 1.2 * sorted(one.seconds for one in some)[len(some) // 2]
    drawn = random.Random(203)
    leaving = {index: drawn.uniform(0.0, longest) for index in drawn.sample(range(n), n // 3)}
    with fleet.timed(f"leaving: {len(leaving)} of {n} clients"):
        answers = load.ask_all(ask, asked, 16, leaves=leaving)
    fleet.note(f"leaving: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=False)
    stayed = [one for index, one in enumerate(answers) if index not in leaving and not one.is_ok]
    assert not stayed, f"clients that stayed got no answer: {stayed[0].status} {stayed[0].body}"
    check_free()
    compare.check(load.ask_all(ask, asked[:16], 8), right)


def ends_under_load(
    fleet: Fleet, reference: Spec, ask: load.Ask, end: Callable[[], object], *, n_tokens: int, all_ok: bool
) -> list[load.Answer]:
    """An engine ends while 16 clients ask: each of them hears of its request, and what came is right."""
    asked = load.prompts(60, seed=231)
    right = fleet.right(reference, asked, n_tokens)
    n_answered = 0

    async def counted(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
        nonlocal n_answered
        answer = await ask(session, prompt)
        n_answered += 1
        return answer

    async def later() -> None:
        assert await asyncio.to_thread(wait_until, lambda: n_answered >= 12, 60.0, every_s=0.05), "nobody is answered"
        assert await asyncio.to_thread(end) is not False, "it did not end"

    with fleet.timed(f"an end under load: {len(asked)} prompts"):
        answers = load.ask_all(counted, asked, 16, while_=later())
    fleet.note(f"an end under load: {compare.summary(answers, right)}")
    compare.check(answers, right, all_ok=all_ok)
    return answers
