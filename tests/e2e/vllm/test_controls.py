"""Where decode's tokens come from: of a prompt it computes one, and what another connector loads is handed over too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e import compare, load
from tests.e2e.servers import wait_until
from tests.e2e.vllm.engines import BATCHED, FOUND, RECEIVED, handed_over

COMPUTED = "vllm:iteration_tokens_total_sum"
EXTERNAL = "vllm:external_prefix_cache_hits_total"


def test_decode_computes_one_token_of_a_prompt(fleet):
    """One for each of the answer's tokens is all that it computes, of prompts that prefill computes in chunks."""
    prefill, decode, _ = fleet.fresh(*FOUND.engines)
    assert prefill.says(f"Chunked prefill is enabled with max_num_batched_tokens={BATCHED}"), prefill.tail()
    asked = load.prompts(8, seed=105, shortest=2 * BATCHED)
    right = fleet.right(FOUND.reference, asked)
    before = decode.metrics()[COMPUTED]
    answers = load.ask_all(handed_over(prefill, decode), asked, 4)
    compare.check(answers, right)
    n = load.N_TOKENS * len(asked)
    wait_until(lambda: decode.metrics()[COMPUTED] - before >= n, 10)
    assert decode.metrics()[COMPUTED] - before == n


@pytest.mark.full
def test_beside_a_connector_that_offloads(fleet):
    """Prefill's MultiConnector has another one, which keeps the KV of prompts: what that loads is handed over too. It
    keeps one step's part of a prompt, so prompts are of one step, and come one by one.
    """
    prefill, decode, _ = fleet.fresh(replace(FOUND.prefill, offloads=True, directory=0), FOUND.decode, FOUND.reference)
    asked = load.prompts(8, seed=108, shortest=140, longest=BATCHED)
    right = fleet.right(FOUND.reference, asked)
    compare.check(load.ask_all(handed_over(prefill, decode), asked, 1), right)
    for server in (prefill, decode):
        server.post("/reset_prefix_cache")
    before = prefill.metrics(), decode.metrics()
    compare.check(load.ask_all(handed_over(prefill, decode), asked, 1), right)
    loaded, received = (
        server.metrics()[name] - was[name]
        for server, was, name in zip((prefill, decode), before, (EXTERNAL, RECEIVED), strict=True)
    )
    assert received == len(asked)
    assert loaded >= sum((len(prompt) - 1) // 128 * 128 for prompt in asked), f"prefill loaded {loaded} tokens"
