"""Whole lives of requests between two of vLLM's engines, TP 4 -> TP 2 and blocks of 16 -> 64, every byte compared.

A proxy asks prefill and then decode with its answer, or both at once (`early`): then prefill hands over each step's
chunk, and decode waits from the start. A step of the model fails its test if a request goes on with bytes that are not
its own. What a block held when it was freed is overwritten at once, on both sides: a write that comes late, or a read
that goes on, is seen when pools are compared.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from msgspec import structs

from pdstage.manager.calibration import Calibration
from pdstage.plan.cost import CostModel
from pdstage.tools.results import save
from tests.engines.calls import PATIENCE_S
from tests.engines.vllm.lives import continuation, prompts
from tests.engines.vllm.models import CONSUMER, DEEPSEEK, GEMMA, LLAMA, PRODUCER, QWEN, Side
from tests.rows import rows

IMPATIENT = {"hello_s": 5.0, "open_s": 5.0, "max_silence_s": 5.0, "drain_s": 5.0}


@pytest.mark.parametrize("early", [False, True], ids=["serial", "at once"])
def test_requests_of_many_lengths(pair, early):
    """One token, whole blocks, ends in the middle, chunked prefill; all at once."""
    pair.lengths(1, 2, 15, 16, 17, 63, 64, 65, 100, 200, 300, seed=31 * early, early=early)


# Who gives up, and when.


def test_an_abort_before_prefill_is_done(pair):
    (prompt,) = prompts(200, seed=1)
    pair.prefill("early", prompt)
    pair.p.step()  # the first of its chunks
    pair.p.call("abort", "early")
    assert not pair.p.tokens["early"]


def test_an_abort_at_decode_before_it_is_scheduled_frees_prefill(pair):
    prompt = pair.prefilled("unscheduled", 100, seed=2)
    pair.decode("unscheduled", prompt)
    pair.d.call("abort", "unscheduled")
    assert pair.p.call("busy")  # its blocks are held, until decode says that it does not want them


def test_an_abort_at_decode_while_it_loads(pair):
    pair.loading("loading", 200, seed=3)
    pair.d.call("abort", "loading")
    assert pair.d.call("status", "loading") == "FINISHED_ABORTED"  # its blocks are held until nothing can land in them


def test_an_abort_at_decode_after_it_loaded(pair):
    prompt = pair.prefilled("loaded", 100, seed=4)
    pair.decode("loaded", prompt, max_tokens=50)
    pair.until(lambda: len(pair.d.tokens["loaded"]) > 2)
    pair.d.call("abort", "loaded")
    assert pair.d.tokens["loaded"] == continuation(prompt, len(pair.d.tokens["loaded"]))


def test_an_abort_at_prefill_after_its_answer_takes_nothing_from_decode(pair):
    prompt = pair.prefilled("handed over", 100, seed=5)
    pair.p.call("abort", "handed over")
    for _ in range(3):
        pair.p.step()
    pair.decode("handed over", prompt)
    pair.served("handed over", prompt)


@pytest.mark.parametrize("when", ["half way", "unscheduled"])
def test_an_abort_at_prefill_fails_what_decode_waits_for(pair, when):
    """Decode does not wait for a deadline."""
    name = f"given up {when}"
    if when == "half way":
        pair.half_way(name, 400, seed=39)
    else:
        pair.both(name, next(prompts(100, seed=40)))
    pair.p.call("abort", name)
    pair.fails(name)


def test_an_abort_at_decode_half_way(pair):
    pair.half_way("unwanted", 400, seed=41)
    pair.d.call("abort", "unwanted")
    pair.until(lambda: "unwanted" in pair.p.ended)


@pytest.mark.parametrize("loads", [False, True], ids=["before the load", "during it"])
@pytest.mark.parametrize("policy", rows(["fail", "recompute"], full={"recompute"}))
def test_a_producer_that_died(engines, policy, loads):
    """No request goes on without its KV: it fails, or is computed, as the operator chose."""
    with engines(consumer=replace(CONSUMER, load_failure_policy=policy, limits=IMPATIENT)) as pair:
        prompt = pair.prefilled("orphan", 300, seed=11)
        if loads:
            pair.load("orphan", prompt)
        pair.p.kill()
        if not loads:
            pair.decode("orphan", prompt)
        pair.until(lambda: "orphan" in pair.d.ended, pair.d)
        arrived = loads and pair.d.ended["orphan"] == "length" and pair.loaded("orphan")
        if policy == "fail" and not arrived:
            assert (pair.d.ended["orphan"], pair.d.tokens["orphan"]) == ("error", [])
        else:
            assert pair.d.tokens["orphan"] == continuation(prompt, 4)
        pair.settle()


def test_blocks_that_nobody_will_load_are_given_back(engines):
    """The proxy lost the request between its halves; or the consumer dies."""
    with engines(replace(PRODUCER, limits={**IMPATIENT, "open_wait_s": 5.0})) as pair:
        pair.prefilled("lost", 100, seed=14)
        assert pair.p.call("busy")
        pair.settle()
        pair.loading("widow", 300, seed=13)
        pair.d.kill()
        pair.settle()


def test_a_request_that_waits_at_decode_is_held_at_prefill_and_one_that_was_lost_is_not(engines):
    """Decode has blocks for one request at a time."""
    producer = replace(PRODUCER, options={"kv_lease_duration": 4.0})
    with engines(producer, replace(CONSUMER, n_blocks=9, limits={"max_silence_s": 4.0})) as pair:
        (long,) = prompts(300, seed=70)
        pair.both("long", long, 200)
        pair.until(lambda: pair.d.tokens["long"])
        pair.prefill("lost", next(prompts(100, seed=72)))
        short = pair.prefilled("short", 250, seed=71)
        pair.decode("short", short)
        pair.d.step()
        assert pair.d.call("status", "short") == "WAITING"
        pair.until(lambda: "lost" in pair.p.ended and pair.p.call("requests") == ["short"], pair.p)
        until = time.monotonic() + 6.0
        pair.until(lambda: time.monotonic() > until, pair.p)
        assert pair.p.call("requests") == ["short"], "decode waits with it"
        pair.until(lambda: {"long", "short"} <= set(pair.d.ended))
        pair.went_well("short", short)
        pair.settle()


@pytest.mark.parametrize("lease_s", [0.5, 10 * PATIENCE_S], ids=["lease", "abort"])
def test_a_request_that_prefill_refused(engines, lease_s):
    """A proxy that asks both at once has sent decode's half already: it ends long before a room's own deadline, or with
    the proxy's abort.
    """
    with engines(producer=replace(PRODUCER, options={"kv_lease_duration": lease_s})) as pair:
        pair.decode_early("refused", next(prompts(100, seed=48)))
        if lease_s < PATIENCE_S:
            pair.fails("refused")
        else:
            pair.until(lambda: pair.d.call("status", "refused") == "WAITING_FOR_REMOTE_KVS", pair.d)
            pair.d.call("abort", "refused")
        pair.settle()


# Pools that are too small, and what is there already.


def test_pools_that_are_smaller_than_the_requests(engines):
    """They wait for each other, and prefill preempts half-computed ones. Then decoding outgrows the consumer's pool:
    whoever is preempted is computed there, not loaded a second time.
    """
    consumer = replace(CONSUMER, n_blocks=6, max_model_len=256)
    with engines(replace(PRODUCER, n_blocks=20, max_model_len=256), consumer) as pair:
        for early in (False, True):
            asked = prompts(150, 150, 150, seed=6 + early)
            pair.whole({f"r{number}-{early}": one for number, one in enumerate(asked)}, early=early)
            pair.settle()
        n_preempted = pair.d.call("watched")[1]
        pair.whole({f"r{number}": one for number, one in enumerate(prompts(120, 120, seed=8))}, max_tokens=80)
        assert pair.d.call("watched")[1] > n_preempted
        pair.settle()


@pytest.mark.parametrize("heard", [True, False])
def test_a_preemption_at_prefill_half_way(pair, heard):
    """What decode has stays right, though its blocks at prefill become others'; the rest comes from new ones."""
    name = f"preempted-{heard}"
    if heard:
        prompt = pair.half_way(name, 400, seed=36)
    else:
        (prompt,) = prompts(400, seed=37)
        pair.both(name, prompt, decode=False)
        pair.p.step()
    pair.p.call("preempt")
    for number in range(3):
        pair.p.step()
        if not heard and number == 1:
            pair.decode_early(name, prompt)
    pair.served(name, prompt)


def test_a_prefix_hit_at_decode_loads_only_the_rest(engines):
    with engines(consumer=replace(CONSUMER, prefix_caching=True)) as pair:
        head, tail, other = prompts(140, 30, 50, seed=9)
        pair.whole({"first": head + tail})
        pair.whole({"second": head + other})  # two blocks of 64 are there
        pair.whole({"again": head + tail})
        (short,) = prompts(64, seed=10)
        pair.whole({"block": short})
        pair.whole({"whole": short})  # nothing is missing: prefill is told so, and frees its blocks
        pair.settle()
        assert pair.d.call("watched")[0]["second"] == 128


def test_a_prefix_that_both_have_already(engines):
    """Prefill's first chunk is all that is cached, and what the first step computes."""
    with engines(replace(PRODUCER, prefix_caching=True), replace(CONSUMER, prefix_caching=True)) as pair:
        head, tail, other = prompts(200, 90, 90, seed=43)
        pair.whole({"first": head + tail}, early=True)
        pair.whole({"second": head + other, "third": head + tail}, early=True)
        pair.settle()


def test_a_prefix_hit_of_full_attention_loads_only_the_rest_beside_a_state(engines):
    """Decode has the prefix's blocks, but no state of it: only ends of prompts are loaded as states."""
    consumer = replace(CONSUMER, n_blocks=96, prefix_caching=True, mamba_cache_mode="align")
    with engines(PRODUCER, consumer, QWEN) as pair:
        head, tail, other, whole, block = prompts(140, 30, 50, 190, 129, seed=28)
        pair.whole({"first": head + tail}, max_tokens=12)
        before = pair.written()
        pair.whole({"second": head + other}, max_tokens=12)
        assert pair.d.call("watched")[0]["second"] == 128
        n_loaded = pair.written() - before
        pair.whole({"third": whole}, max_tokens=12)
        assert n_loaded < (pair.written() - before - n_loaded) / 2, "all was loaded"
        pair.whole({"block": block})
        pair.prefill("again", block)
        pair.answered("again")
        pair.decode("again", block)
        pair.ends("again")
        assert pair.d.tokens["again"] == continuation(block, 4)
        pair.settle()


# A proxy that asks both engines at once, or thinks that it does.


@pytest.mark.parametrize("order", ["after", "before", "with the answer"])
def test_decode_may_come_at_any_time(pair, order):
    """Before prefill, after it, and by a proxy that named the room and hands the answer on all the same."""
    name = f"comes {order}"
    (prompt,) = prompts(150, seed=33)
    if order == "before":
        pair.decode_early(name, prompt)
        for _ in range(5):
            pair.d.step()
    pair.both(name, prompt, decode=False)
    if order != "before":
        pair.answered(name)
        pair.decode_early(name, prompt) if order == "after" else pair.decode(name, prompt)
    pair.served(name, prompt)


def test_a_room_begins_before_its_request_is_scheduled(pair):
    """However long prefill's queue is, decode knows that its room will come."""
    first, second = prompts(400, 100, seed=47)
    pair.both("scheduled", first)
    pair.p.step()
    pair.both("queued", second)
    pair.p.step()
    pair.until(lambda: pair.p.call("ranks", "sending") == [2] * PRODUCER.tp, pair.d)
    assert pair.p.call("status", "queued") == "WAITING"
    pair.served("scheduled", first)
    pair.served("queued", second)


@pytest.mark.parametrize("serial", [False, True], ids=["at-once", "serial"])
@pytest.mark.parametrize("meanwhile", [False, True], ids=["after", "during"])
def test_a_routers_retry_under_its_transfer_id_loads(pair, serial, meanwhile):
    """Prefill has computed the prompt again; what it held would be held in vain."""
    (prompt,) = prompts(150, seed=60 + 2 * serial + meanwhile)
    name = f"retried-{serial}-{meanwhile}"
    again = f"{name}-again"
    pair.both(name, prompt, 60, decode=not serial)
    if serial:
        pair.answered(name)
        pair.decode(name, prompt, 60)
    pair.until(lambda: name in pair.d.ended or (meanwhile and pair.d.tokens[name]))
    assert (name in pair.d.ended) != meanwhile
    pair.both(again, prompt, decode=False, room=name)
    if serial:
        pair.answered(again)
        pair.decode(again, prompt)
    else:
        pair.decode_early(again, prompt, room=name)
    pair.served(again, prompt)
    pair.ends(name)
    assert pair.d.tokens[name] == continuation(prompt, 60)


def test_two_requests_of_one_room_are_sent_once(pair):
    """Samples of one prompt carry one transfer_id: at prefill the others are computed, and not handed over."""
    (prompt,) = prompts(150, seed=44)
    pair.both("sample", prompt)
    pair.both("twin", prompt, decode=False, room="sample")
    pair.until(lambda: {"sample", "twin"} <= set(pair.p.ended) and "sample" in pair.d.ended)
    pair.went_well("sample", prompt)
    assert pair.p.params["twin"] is None


# Engines and models that are less alike.


def by_layers(folder, side):
    """A producer that hands over each layer by itself: it takes a chunk to cost next to nothing."""
    costs = {"nixl": structs.replace(CostModel.linear(1e9, 1e-6, 1e-5), chunk_s=1e-9)}
    path = folder / "costs.json"
    made = Calibration(version=1, made_at="now", prefill_host="p", decode_host="d", transports=costs)
    save(made, path)
    return replace(side, options={"calibration": str(path)})


def producer(tp, **more):
    return Side("kv_producer", tp, more.pop("block_size", 16), **more)


def consumer(tp, block_size=64, **more):
    return Side("kv_consumer", tp, block_size, n_blocks=96, **more)


ONE_HEAD = LLAMA | {"num_key_value_heads": 1}
THREE_LAYERS = LLAMA | {"num_hidden_layers": 3}
SPARSE = DEEPSEEK | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 64, "index_n_heads": 4,
    "index_head_dim": 16,
}  # fmt: skip
WINDOWS_FIRST = GEMMA | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
STATES_FIRST = QWEN | {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}
STATES = QWEN | {"num_key_value_heads": 1}
TURNS = {"interleave": 16}
SHAPES = {
    "tokens dealt in 16s, 2 of 4 to TP 2": (ONE_HEAD, producer(4, dcp=2, **TURNS), consumer(2)),
    "tokens dealt, 2 of 2 to 4 of 4": (ONE_HEAD, producer(2, dcp=2, **TURNS), consumer(4, 32, dcp=4, **TURNS)),
    "tokens dealt beside states, 2 of 2 to TP 2": (STATES, producer(2, dcp=2), consumer(2)),
    "a prompt on replicas to TP 2": (DEEPSEEK, producer(1, pcp=2), consumer(2)),
    "a prompt on TP 2 to replicas": (DEEPSEEK, producer(2), consumer(1, 32, pcp=2)),
    "a prompt on shards of PCP": (SPARSE, producer(2, pcp=2, dcp=2), consumer(2, 32, dcp=2)),
    "stages, 1x3 to 2x2": (THREE_LAYERS, producer(1, pp=3), consumer(2, 32, pp=2)),
    "windows in one stage, 4x1 to 2x2": (WINDOWS_FIRST, PRODUCER, consumer(2, pp=2)),
    "states in one stage, 4x1 to 2x2": (STATES_FIRST, PRODUCER, consumer(2, pp=2)),
}
# What others of the rows have too.
SELDOM = {"tokens dealt, 2 of 2 to 4 of 4", "a prompt on TP 2 to replicas"}
KINDS = {"sliding_attention": "SlidingWindowSpec", "linear_attention": "MambaSpec"}


@pytest.mark.parametrize("shape", rows(SHAPES, full=SELDOM))
def test_engines_that_are_less_alike(engines, shape):
    """Two groups, of which one keeps its last 70 tokens or a state only; ranks that share the tokens, or a prompt's
    computation; stages, and those without layers of a group. Serial and at once; and given up, as each rank ends a
    request by itself.
    """
    model, first, second = SHAPES[shape]
    with engines(first, second, model) as pair:
        kinds = {KINDS[kind] for kind in model.get("layer_types", ()) if kind in KINDS}
        if kinds:
            assert pair.p.call("groups") == pair.d.call("groups") == ["FullAttentionSpec", *kinds]
        pair.lengths(2, 15, 16, 17, 31, 33, 64, 65, 69, 70, 71, 72, 100, 135, 200, seed=15)
        early = next(prompts(200, seed=22))
        pair.both("early", early)
        pair.served("early", early)
        pair.loading("loading", 150, seed=24)
        pair.d.call("abort", "loading")
        pair.settle()


@pytest.mark.parametrize("model", [GEMMA, QWEN], ids=["windows", "states"])
def test_layers_go_by_themselves(engines, tmp_path, model):
    """Each as it is computed. A window's are preempted. A state is of just so many tokens: prefill's of fewer fails the
    request.
    """
    with engines(by_layers(tmp_path, PRODUCER), replace(CONSUMER, n_blocks=48), model) as pair:
        pair.lengths(2, 16, 17, 64, 65, 69, 70, 71, 72, 135, 200, 300, seed=45, early=True)
        if model is GEMMA:
            prompt = pair.half_way("preempted", 400, seed=46)
            pair.p.call("preempt")
            pair.served("preempted", prompt)
        else:
            (prompt,) = prompts(100, seed=48)
            pair.both("longer", prompt, decode=False)
            pair.decode_early("longer", [*prompt, 5])
            pair.fails("longer")
        pair.settle()
