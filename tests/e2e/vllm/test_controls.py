"""What makes the other tests worth something: tokens depend on all of a prompt, and on the cache that was moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e import compare, load
from tests.e2e.servers import wait_until
from tests.e2e.vllm.engines import BATCHED, RECEIVED, Engine, handed_over, pair, swapped

PAIR = pair((1, 128), (1, 128))
N_COUPLES = 8
COMPUTED = "vllm:iteration_tokens_total_sum"
EXTERNAL = "vllm:external_prefix_cache_hits_total"


def test_one_prompt_token_changes_the_answer(fleet):
    """Any token of it, by the engine that knows the right answers."""
    plain = load.prompts(N_COUPLES, seed=101, shortest=100)
    changed = [
        (*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :])
        for n, prompt in enumerate(plain)
        for at in [len(prompt) * n // N_COUPLES]
    ]
    right = fleet.right(PAIR.reference, plain + changed)
    same = [len(a) for a, b in zip(plain, changed, strict=True) if right[a] == right[b]]
    assert not same, f"prompts of {same} tokens have the same answer with one token changed"


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_of_an_engine_do_not_change_the_answer(fleet, dtype: str):
    """One engine of two ranks and other blocks answers as that of one rank, in bf16 too: so a pair of unequal sizes has
    right answers at all.
    """
    asked = load.prompts(60, seed=107)
    one, other = (Engine("llama", dtype, tp=tp, block=block) for tp, block in ((1, 128), (2, 32)))
    fleet.up(one, other)
    right, same = fleet.right(one, asked), fleet.right(other, asked)
    different = [len(prompt) for prompt in asked if right[prompt] != same[prompt]]
    assert not different, f"{len(different)} of {len(asked)} answers differ, to prompts of {different} tokens"


def test_another_rooms_cache_gives_other_tokens(fleet):
    """Decode is given the `kv_transfer_params` of another prompt, as long: it answers, and not rightly."""
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    lengths = [len(prompt) for prompt in load.prompts(N_COUPLES, seed=102, shortest=100)]
    one, other = ([load.prompts(1, seed, shortest=n, longest=n)[0] for n in lengths] for seed in (103, 104))
    right = fleet.right(PAIR.reference, one + other)

    answers = load.ask_all(swapped(prefill, decode, dict(zip(one, other, strict=True))), one, 4)
    decode.post("/reset_prefix_cache")  # it has the other prompts' KV under these prompts' names
    assert all(answer.is_ok for answer in answers), compare.summary(answers, right)
    assert len(compare.wrong(answers, right)) == len(answers), compare.summary(answers, right)


def test_decode_computes_one_token_of_a_prompt(fleet):
    """One for each of the answer's tokens is all that it computes, of prompts that prefill computes in chunks."""
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    assert prefill.says(f"Chunked prefill is enabled with max_num_batched_tokens={BATCHED}"), prefill.tail()
    asked = load.prompts(8, seed=105, shortest=2 * BATCHED)
    right = fleet.right(PAIR.reference, asked)
    before = decode.metrics()[COMPUTED]
    answers = load.ask_all(handed_over(prefill, decode), asked, 4)
    compare.check(answers, right)
    n = load.N_TOKENS * len(asked)
    wait_until(lambda: decode.metrics()[COMPUTED] - before >= n, 10)
    assert decode.metrics()[COMPUTED] - before == n


def test_prefixes_that_decode_has_cached(fleet):
    """Prompts that share their first 256 tokens, and then the same prompts again: decode asks for the rest only."""
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    asked = load.prompts(16, seed=106, shortest=300, shared=256)
    right = fleet.right(PAIR.reference, asked)
    before = decode.metrics()
    for again in range(2):
        answers = load.ask_all(handed_over(prefill, decode), asked, 8 if again else 1)
        compare.check(answers, right)
    after = decode.metrics()
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    moved = after[EXTERNAL] - before[EXTERNAL]
    total = 2 * sum(map(len, asked))
    whole = sum(len(prompt) // 128 * 128 for prompt in asked)
    assert hits >= (len(asked) - 1) * 256 + whole - 128 * len(asked), f"{hits} of {total} prompt tokens were cached"
    assert hits + moved <= total, f"{hits} cached and {moved} moved are more than {total}"


def test_samples_of_one_prompt_share_its_blocks(fleet):
    """Prefill is asked for one, decode for three: the first loads the prompt, the others find it in decode's cache."""
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    asked = load.prompts(8, seed=107, shortest=300)
    right = fleet.right(PAIR.reference, asked)
    before = decode.metrics()
    # Of one candidate: vLLM refuses greedy samples, and the CPU has no seeds.
    answers = load.ask_all(handed_over(prefill, decode, n=3, temperature=1.0, top_k=1), asked, 2)
    compare.check(answers, right)
    for answer in answers:
        assert [tuple(one["token_ids"]) for one in answer.body["choices"]] == [right[answer.prompt]] * 3
    after = decode.metrics()
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    whole = sum(len(prompt) // 128 * 128 for prompt in asked)
    assert hits >= 2 * whole, f"{hits} tokens were found in the cache, of {whole} in each sample's whole blocks"
    assert after[RECEIVED] - before[RECEIVED] == len(asked)


@pytest.mark.full
def test_beside_a_connector_that_offloads(fleet):
    """Prefill's MultiConnector has another one, which keeps the KV of prompts: what that loads is handed over too. It
    keeps one step's part of a prompt, so prompts are of one step, and come one by one.
    """
    prefill, decode, _ = fleet.fresh(replace(PAIR.prefill, offloads=True), PAIR.decode, PAIR.reference)
    asked = load.prompts(8, seed=108, shortest=140, longest=BATCHED)
    right = fleet.right(PAIR.reference, asked)
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


@pytest.mark.full
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_model_of_the_same_shape_with_other_weights_is_refused(fleet, policy: str):
    """Its KV would fit, and answers be wrong: decode fails the request and its log says why, or computes it."""
    other = replace(PAIR, decode=replace(PAIR.decode, model="llama-twin", policy=policy))
    prefill, decode, _ = fleet.fresh(*other.engines)
    asked = load.prompts(4, seed=105, shortest=100)
    right = fleet.right(other.reference, asked)
    answers = load.ask_all(handed_over(prefill, decode), asked, 4)
    if policy == "recompute":
        compare.check(answers, right)
    else:
        assert [answer.status for answer in answers] == [500] * len(asked), compare.summary(answers, right)
    assert decode.says("prefill refused this node: the model's name is '")
