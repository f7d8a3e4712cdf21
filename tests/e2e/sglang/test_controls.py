"""What makes the other tests worth something: tokens depend on all of a prompt, and on the cache that was moved."""

from __future__ import annotations

import asyncio
import random

import aiohttp

from tests.e2e import load
from tests.e2e.sglang import right
from tests.e2e.sglang.engines import CHUNKED, SglangServer, check_free, handed_over, legs, pair, room

PAIR = pair({"tp": 2, "options": CHUNKED}, {})
N_COUPLES = 8


def test_one_prompt_token_changes_the_answer(fleet):
    """Any token of it, by the pair and by the engine that knows the right answers."""
    drawn = random.Random(102)
    plain = load.prompts(N_COUPLES, seed=101, shortest=100)
    changed = []
    for prompt in plain:
        at = drawn.randrange(len(prompt))
        changed.append((*prompt[:at], 4 + (prompt[at] - 3) % (load.VOCABULARY - 4), *prompt[at + 1 :]))
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, [*plain, *changed])
    same = [one for one, other in zip(plain, changed, strict=True) if answered[one] == answered[other]]
    assert not same, f"{len(same)} of {N_COUPLES} answers do not depend on every token"
    right.check(load.ask_all(handed_over(prefill, decode), changed, 8), answered)


def _other_for_decode(prefill: SglangServer, decode: SglangServer, others: dict[load.Prompt, load.Prompt]) -> load.Ask:
    """Prefill is asked for the prompt, and decode, under the same room, for another of the same length."""

    async def ask(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
        told = legs(prefill, room())
        _, answer = await asyncio.gather(
            load.post(session, prefill.url, prompt, load.body(prompt, **told)),
            load.post(session, decode.url, prompt, load.body(others[prompt], **told)),
        )
        return answer

    return ask


def test_decode_goes_by_the_cache_that_was_moved(fleet):
    """Given another request's cache, it answers as to that request, whatever prompt it was told."""
    drawn = load.prompts(N_COUPLES, seed=103, shortest=200, longest=200)
    others = dict(zip(drawn, [*drawn[1:], drawn[0]], strict=True))
    prefill, decode, _ = fleet.up(PAIR.prefill, PAIR.decode, PAIR.reference)
    answered = right.tokens(fleet, PAIR.reference, drawn)
    right.check(load.ask_all(_other_for_decode(prefill, decode, others), drawn, 4), answered)
    check_free(prefill, decode)
