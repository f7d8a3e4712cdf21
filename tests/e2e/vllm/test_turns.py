"""A conversation through vLLM's own proxy for them: prefill loads what decode has of it, and computes what is new."""

from __future__ import annotations

import pytest

from tests.e2e import load
from tests.e2e.vllm import proxies
from tests.e2e.vllm.engines import Engine

N_TURNS = 5
COMPUTED = "vllm:iteration_tokens_total_sum"
PREFILL, DECODE = (Engine("llama", block=block, role="kv_both", turns=True, policy="recompute") for block in (128, 32))
REFERENCE = Engine("llama")


@pytest.mark.full
def test_prefill_computes_what_is_new_of_each_turn(fleet):
    prefill, decode = fleet.fresh(PREFILL, DECODE)
    front = proxies.streamed(decode, fleet.place).start().wait(60)
    proxy = proxies.turns(prefill, front, fleet.place).start().wait(60)
    said: tuple[int, ...] = ()
    for number, new in enumerate(load.prompts(N_TURNS, seed=401, shortest=80, longest=150)):
        before, decoded_before = prefill.metrics()[COMPUTED], decode.metrics()[COMPUTED]
        prompt = (*said, *new)
        prefill.post("/reset_prefix_cache")  # so that nothing but what decode has spares it the work
        (answer,) = load.ask_all(load.to(proxy.url, conversation_id="one"), [prompt], 1)
        assert answer.is_ok, answer.body
        known = len(said) - 1 if number else 0  # nobody has KV of an answer's last token
        assert prefill.metrics()[COMPUTED] - before == len(prompt) - known + 1, "and the token that it samples"
        assert decode.metrics()[COMPUTED] - decoded_before == load.N_TOKENS, "one step for each token of the answer"
        assert answer.tokens == fleet.right(REFERENCE, [prompt])[prompt]
        said = (*prompt, *answer.tokens)
    for server in (proxy, front):
        server.stop()
