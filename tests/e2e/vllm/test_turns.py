"""A conversation: prefill loads what decode has of it, and computes what is new.

The test hands decode's `kv_transfer_params` on from turn to turn, as vLLM's disagg_proxy_multiturn.py does. That proxy
reads them from decode's stream, and vLLM puts them there from 0.33 on; the engine for the CPU is 0.32.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.e2e import load
from tests.e2e.vllm.engines import TO_PREFILL, Engine, decoded

N_TURNS = 5
COMPUTED = "vllm:iteration_tokens_total_sum"
PREFILL, DECODE = (Engine("llama", block=block, role="kv_both", turns=True, policy="recompute") for block in (128, 32))
REFERENCE = Engine("llama")


async def say(urls: tuple[str, str], prompt: load.Prompt, kept: dict[str, Any]) -> load.Answer:
    """One turn; `kept` is what decode said of the turn before."""
    prefill, decode = urls
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=load.DEADLINE_S)) as session:
        told = load.body(prompt, n_tokens=1, kv_transfer_params=kept | TO_PREFILL)
        return await decoded(session, decode, prompt, await load.post(session, prefill, prompt, told))


@pytest.mark.full
def test_prefill_computes_what_is_new_of_each_turn(fleet):
    prefill, decode = fleet.fresh(PREFILL, DECODE)
    said: tuple[int, ...] = ()
    kept: dict[str, Any] = {}
    for number, new in enumerate(load.prompts(N_TURNS, seed=401, shortest=80, longest=150)):
        before, decoded_before = prefill.metrics()[COMPUTED], decode.metrics()[COMPUTED]
        prompt = (*said, *new)
        prefill.post("/reset_prefix_cache")  # so that nothing but what decode has spares it the work
        answer = asyncio.run(say((prefill.url, decode.url), prompt, kept))
        assert answer.is_ok, answer.body
        known = len(said) - 1 if number else 0  # nobody has KV of an answer's last token
        assert prefill.metrics()[COMPUTED] - before == len(prompt) - known + 1, "and the token that it samples"
        assert decode.metrics()[COMPUTED] - decoded_before == load.N_TOKENS, "one step for each token of the answer"
        assert answer.tokens == fleet.right(REFERENCE, [prompt])[prompt]
        said, kept = (*prompt, *answer.tokens), answer.body["kv_transfer_params"]
