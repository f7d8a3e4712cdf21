"""Whole lives of requests between two of vLLM's engines, TP 4 -> TP 2 and blocks of 16 -> 64, every byte compared.

A step of the model fails its test if a request goes on with bytes that are not its own. What a block held when it was
freed is overwritten at once, on both sides: a write that comes late, or a read that goes on, is seen when pools are
compared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.engines.stubs import DEVICE
from tests.engines.vllm.lives import Pair, continuation, prompts
from tests.engines.vllm.models import DEEPSEEK, GEMMA, LLAMA, QWEN, Side
from tests.rows import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FULL = pytest.mark.full
PRODUCER = Side("kv_producer", 4, 16)
CONSUMER = Side("kv_consumer", 2, 64, layout="LBHNC", n_blocks=24)
IMPATIENT = {"hello_s": 5.0, "open_s": 5.0, "max_silence_s": 5.0, "drain_s": 5.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's config, without weights."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Engines for lives that leave them at rest."""
    with Pair(PRODUCER, CONSUMER, model, tmp_path_factory.mktemp("shared")) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield shared
    shared.settle()


@pytest.fixture
def engines(model: Path, tmp_path: Path) -> Callable[..., Pair]:
    """Engines of a test's own."""

    def start(producer: Side = PRODUCER, consumer: Side = CONSUMER) -> Pair:
        return Pair(producer, consumer, model, tmp_path)

    return start


def prefilled(pair: Pair, name: str, n: int, seed: int) -> list[int]:
    (prompt,) = prompts(n, seed=seed)
    pair.prefill(name, prompt)
    pair.until(lambda: name in pair.p.ended, pair.p, what="prefill")
    return prompt


def loading(pair: Pair, name: str, prompt: list[int]) -> None:
    """Decode has allocated blocks and told its workers to load."""
    pair.decode(name, prompt)
    pair.d.step()
    assert pair.d.call("status", name) == "WAITING_FOR_REMOTE_KVS"


def test_requests_of_many_lengths(pair):
    """One token, whole blocks, ends in the middle, chunked prefill; all at once."""
    lengths = 1, 2, 15, 16, 17, 63, 64, 65, 100, 200
    pair.whole({f"length-{len(one)}": one for one in prompts(*lengths)})


@pytest.mark.skipif(DEVICE == "cpu", reason="work on the CPU is done when its call returns")
def test_without_events_bytes_are_taken_before_they_are_written(engines):
    """What the other tests prove of a model that runs late."""
    with engines() as pair:
        pair.p.call("forget_events")
        asked = {f"early-{len(one)}": one for one in prompts(200, 300, 400, seed=31)}
        for name, prompt in asked.items():
            pair.both(name, prompt)
        with pytest.raises(AssertionError, match="wrong bytes"):
            pair.until(lambda: all(name in pair.d.ended for name in asked), what="early requests")
        pair.p.kill()
        pair.d.kill()


def test_an_abort_before_prefill_is_done(pair):
    (prompt,) = prompts(200, seed=1)
    pair.prefill("early", prompt)
    pair.p.step()  # the first of its chunks
    pair.p.call("abort", "early")
    assert not pair.p.tokens["early"]


def test_an_abort_at_decode_before_it_is_scheduled_frees_prefill(pair):
    prompt = prefilled(pair, "unscheduled", 100, seed=2)
    pair.decode("unscheduled", prompt)
    pair.d.call("abort", "unscheduled")
    assert pair.p.call("busy")  # its blocks are held, until decode says that it does not want them


def test_an_abort_at_decode_while_it_loads(pair):
    prompt = prefilled(pair, "loading", 200, seed=3)
    loading(pair, "loading", prompt)
    pair.d.call("abort", "loading")
    assert pair.d.call("status", "loading") == "FINISHED_ABORTED"  # its blocks are held until nothing can land in them


def test_an_abort_at_decode_after_it_loaded(pair):
    prompt = prefilled(pair, "loaded", 100, seed=4)
    pair.decode("loaded", prompt, max_tokens=50)
    pair.until(lambda: len(pair.d.tokens["loaded"]) > 2)
    pair.d.call("abort", "loaded")
    assert pair.d.tokens["loaded"] == continuation(prompt, len(pair.d.tokens["loaded"]))


def test_an_abort_at_prefill_after_its_answer_takes_nothing_from_decode(pair):
    prompt = prefilled(pair, "handed over", 100, seed=5)
    pair.p.call("abort", "handed over")
    for _ in range(3):
        pair.p.step()
    pair.decode("handed over", prompt)
    pair.until(lambda: "handed over" in pair.d.ended)
    pair.went_well("handed over", prompt)


def test_the_room_comes_before_the_blocks(engines):
    """A consumer with no room left for a request waits; the producer holds what it has computed."""
    with engines(consumer=replace(CONSUMER, n_blocks=6, max_model_len=256)) as pair:
        pair.whole({f"r{number}": one for number, one in enumerate(prompts(150, 150, 150, seed=6))})
        pair.settle()


def test_preempted_requests_are_computed_again(engines):
    """Decoding outgrows the consumer's pool: whoever is preempted is computed there, not loaded a second time."""
    with engines(consumer=replace(CONSUMER, n_blocks=6, max_model_len=256)) as pair:
        names = {f"r{number}": one for number, one in enumerate(prompts(120, 120, seed=7))}
        pair.whole(names, max_tokens=80)
        assert pair.d.call("preemptions") > 0
        pair.settle()


def test_preemption_at_prefill(pair):
    """A prompt half computed is begun anew, and sent once."""
    (prompt,) = prompts(200, seed=8)
    pair.prefill("preempted", prompt)
    pair.p.step()
    pair.p.call("preempt")
    pair.until(lambda: "preempted" in pair.p.ended, pair.p)
    pair.decode("preempted", prompt)
    pair.until(lambda: "preempted" in pair.d.ended)
    pair.went_well("preempted", prompt)


def test_a_producer_smaller_than_its_requests_together(engines):
    """What is handed over makes room for the next prompt."""
    with engines(producer=replace(PRODUCER, n_blocks=20, max_model_len=256)) as pair:
        pair.whole({f"r{number}": one for number, one in enumerate(prompts(150, 150, 150, seed=8))})
        pair.settle()


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
        assert pair.d.call("hits")["second"] == 128


def test_a_prefix_hit_of_full_attention_loads_only_the_rest_beside_a_state(tmp_path):
    """Decode has the prefix's blocks, but no state of it: only ends of prompts are loaded as states."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    consumer = replace(CONSUMER, n_blocks=96, prefix_caching=True, mamba_cache_mode="align")
    with Pair(PRODUCER, consumer, tmp_path, tmp_path) as pair:
        head, tail, other = prompts(140, 30, 50, seed=28)
        pair.whole({"first": head + tail}, max_tokens=12)
        before = pair.p.call("written")
        pair.whole({"second": head + other}, max_tokens=12)
        assert pair.d.call("hits")["second"] == 128
        n_loaded = pair.p.call("written") - before
        pair.whole({"third": prompts_of(190, seed=29)}, max_tokens=12)
        assert n_loaded < (pair.p.call("written") - before - n_loaded) / 2, "all was loaded"
        block = prompts_of(129, seed=30)
        pair.whole({"block": block})
        pair.d.add("whole", block, 4, handed(pair, "whole", block))
        pair.until(lambda: "whole" in pair.d.ended)
        assert pair.d.tokens["whole"] == continuation(block, 4)
        pair.settle()


def prompts_of(n: int, seed: int) -> list[int]:
    return next(prompts(n, seed=seed))


def handed(pair: Pair, name: str, prompt: list[int]) -> dict:
    """Prefill's answer."""
    pair.prefill(name, prompt)
    pair.until(lambda: name in pair.p.ended, pair.p, what="prefill")
    return json.loads(json.dumps(pair.p.params[name]))


@pytest.mark.parametrize("policy", rows(["fail", "recompute"], full={"recompute"}))
def test_a_producer_that_died_before_the_load(engines, policy):
    """No request goes on without its KV: it fails, or is computed, as the operator chose."""
    sides = PRODUCER, replace(CONSUMER, load_failure_policy=policy, limits=IMPATIENT)
    with engines(*sides) as pair:
        prompt = prefilled(pair, "orphan", 100, seed=11)
        pair.p.kill()
        pair.decode("orphan", prompt)
        ended(pair, "orphan", prompt, policy)


@pytest.mark.parametrize("policy", rows(["fail", "recompute"], full={"fail"}))
def test_a_producer_that_dies_during_the_load(engines, policy):
    sides = PRODUCER, replace(CONSUMER, load_failure_policy=policy, limits=IMPATIENT)
    with engines(*sides) as pair:
        prompt = prefilled(pair, "orphan", 300, seed=12)
        loading(pair, "orphan", prompt)
        pair.p.kill()
        ended(pair, "orphan", prompt, policy, perhaps=True)


def ended(pair: Pair, name: str, prompt: list[int], policy: str, *, perhaps: bool = False) -> None:
    """What became of a request whose producer is gone; `perhaps` all of it had arrived before."""
    pair.until(lambda: name in pair.d.ended, pair.d)
    arrived = perhaps and pair.d.ended[name] == "length" and pair.loaded(name)
    if policy == "fail" and not arrived:
        assert pair.d.ended[name] == "error"
        assert not pair.d.tokens[name]
    else:
        assert pair.d.tokens[name] == continuation(prompt, 4)
    pair.settle()


def test_a_consumer_that_dies_gives_the_blocks_back(engines):
    with engines(replace(PRODUCER, limits={**IMPATIENT, "open_wait_s": 5.0})) as pair:
        prompt = prefilled(pair, "widow", 300, seed=13)
        loading(pair, "widow", prompt)
        pair.d.kill()
        pair.settle()


def test_a_room_that_nobody_opens_gives_the_blocks_back(engines):
    """The proxy lost the request between its halves."""
    with engines(replace(PRODUCER, limits={"open_wait_s": 2.0})) as pair:
        prefilled(pair, "lost", 100, seed=14)
        assert pair.p.call("busy")
        pair.settle()


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        pytest.param(
            Side("kv_producer", 2, 16, dcp=2), Side("kv_consumer", 2, 64, n_blocks=24), marks=pytest.mark.full
        ),
        (Side("kv_producer", 4, 16, dcp=2), CONSUMER),
        pytest.param(PRODUCER, Side("kv_consumer", 4, 32, dcp=2, n_blocks=48), marks=FULL),
        pytest.param(
            Side("kv_producer", 2, 16, dcp=2), Side("kv_consumer", 4, 32, dcp=4, n_blocks=96), marks=pytest.mark.full
        ),
    ],
    ids=["2 of 2 to TP 2", "2 of 4 to TP 2", "TP 4 to 2 of 4", "2 of 2 to 4 of 4"],
)
def test_tokens_dealt_to_ranks(tmp_path, producer: Side, consumer: Side, interleave: int):
    """Decode context parallelism on either side: ranks with the same head have every other run of tokens."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": 1}))
    sides = [replace(side, interleave=interleave if side.dcp > 1 else 1) for side in (producer, consumer)]
    with Pair(*sides, tmp_path, tmp_path) as pair:
        lengths = 1, 2, 15, 16, 17, 31, 33, 64, 100, 200
        pair.whole({f"length-{len(one)}": one for one in prompts(*lengths, seed=19)}, max_tokens=12)
        prompt = prefilled(pair, "loading", 200, seed=20)
        loading(pair, "loading", prompt)
        pair.d.call("abort", "loading")
        pair.settle()


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (Side("kv_producer", 1, 16, pcp=2), Side("kv_consumer", 2, 64, n_blocks=24)),
        pytest.param(
            Side("kv_producer", 2, 16), Side("kv_consumer", 1, 32, pcp=2, n_blocks=48), marks=pytest.mark.full
        ),
        pytest.param(
            Side("kv_producer", 1, 16, pcp=2, pp=2), Side("kv_consumer", 2, 64, n_blocks=24), marks=pytest.mark.full
        ),
        pytest.param(
            Side("kv_producer", 2, 16, pcp=2, dcp=4), Side("kv_consumer", 1, 64, n_blocks=24), marks=pytest.mark.full
        ),
        (Side("kv_producer", 2, 16, pcp=2, dcp=2), Side("kv_consumer", 2, 32, dcp=2, n_blocks=48)),
    ],
    ids=["replicas to TP 2", "TP 2 to replicas", "replicas of stages", "shards of TP x PCP", "shards of PCP"],
)
def test_a_prompt_computed_by_several_ranks(tmp_path, producer: Side, consumer: Side):
    """Prefill context parallelism on either side: alone each rank keeps all latents, with DCP a share of the tokens."""
    sparse = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 64,
              "index_n_heads": 4, "index_head_dim": 16}  # fmt: skip
    shape = DEEPSEEK | (sparse if producer.dcp > 1 else {})
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with Pair(producer, consumer, tmp_path, tmp_path) as pair:
        lengths = 1, 2, 15, 16, 17, 31, 33, 64, 100, 200
        pair.whole({f"length-{len(one)}": one for one in prompts(*lengths, seed=25)}, max_tokens=12)
        of_stages(pair, seed=26)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        pytest.param(Side("kv_producer", 2, 16, pp=2), Side("kv_consumer", 2, 64, n_blocks=24), marks=FULL),
        pytest.param(Side("kv_producer", 2, 16), Side("kv_consumer", 1, 32, pp=2, n_blocks=48), marks=FULL),
        (Side("kv_producer", 1, 16, pp=3), Side("kv_consumer", 2, 32, pp=2, n_blocks=48)),
    ],
    ids=["2x2 to 2x1", "2x1 to 1x2", "1x3 to 2x2"],
)
def test_layers_split_over_stages(tmp_path, producer: Side, consumer: Side):
    """Pipeline parallelism on either side (TP x PP): each stage has the layers that vLLM gives it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    with Pair(producer, consumer, tmp_path, tmp_path) as pair:
        lengths = 1, 2, 15, 16, 17, 63, 64, 65, 100, 200
        pair.whole({f"length-{len(one)}": one for one in prompts(*lengths, seed=21)}, max_tokens=12)
        of_stages(pair, seed=22)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        pytest.param(Side("kv_producer", 2, 16, pp=2), replace(CONSUMER, n_blocks=48), marks=FULL),
        (PRODUCER, Side("kv_consumer", 2, 64, pp=2, n_blocks=48)),
    ],
    ids=["2x2 to 2x1", "4x1 to 2x2"],
)
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [(GEMMA, ["sliding_attention", "full_attention"]), (QWEN, ["linear_attention", "full_attention"])],
    ids=["windows", "states"],
)
def test_stages_without_layers_of_a_group(tmp_path, producer: Side, consumer: Side, shape: dict, kinds: list[str]):
    """The first stage has all windows or states, the second all full attention: each names blocks of both groups."""
    layers = [kinds[0]] * 2 + [kinds[1]] * 2
    (tmp_path / "config.json").write_text(json.dumps(shape | {"layer_types": layers}))
    with Pair(producer, consumer, tmp_path, tmp_path) as pair:
        assert pair.p.call("groups") == pair.d.call("groups")
        assert len(pair.p.call("groups")) == 2
        lengths = 2, 16, 64, 70, 72, 135, 200
        pair.whole({f"length-{len(one)}": one for one in prompts(*lengths, seed=23)}, max_tokens=12)
        of_stages(pair, seed=24)


def of_stages(pair: Pair, seed: int) -> None:
    """Sent while it is computed, and given up: each stage ends a request by itself."""
    early, loading_one = prompts(200, 150, seed=seed)
    pair.both("early", early)
    pair.until(lambda: "early" in pair.d.ended, what="early")
    pair.went_well("early", early)
    pair.prefill("loading", loading_one)
    pair.until(lambda: "loading" in pair.p.ended, pair.p, what="prefill")
    loading(pair, "loading", loading_one)
    pair.d.call("abort", "loading")
    pair.settle()


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (Side("kv_producer", 2, 16, dcp=2), CONSUMER),
        pytest.param(Side("kv_producer", 1, 64), Side("kv_consumer", 4, 32, dcp=2), marks=FULL),
    ],
    ids=["2 of 2 to TP 2", "TP 1 to 2 of 4"],
)
def test_states_where_tokens_are_dealt(tmp_path, producer: Side, consumer: Side):
    """Decode context parallelism shares the tokens of full attention only: states are sharded over all of TP."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"num_key_value_heads": 1}))
    with Pair(producer, replace(consumer, n_blocks=96), tmp_path, tmp_path) as pair:
        assert pair.p.call("groups") == pair.d.call("groups") == ["FullAttentionSpec", "MambaSpec"]
        pair.whole({f"length-{len(one)}": one for one in prompts(2, 17, 64, 65, 200, seed=27)}, max_tokens=12)
        pair.settle()


def test_sliding_windows_beside_full_attention(tmp_path):
    """Two groups, of which one keeps the blocks of its last 70 tokens only."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    with Pair(PRODUCER, replace(CONSUMER, n_blocks=48), tmp_path, tmp_path) as pair:
        assert pair.p.call("groups") == pair.d.call("groups") == ["FullAttentionSpec", "SlidingWindowSpec"]
        lengths = 2, 16, 64, 69, 70, 71, 72, 135, 200, 300
        pair.whole({f"length-{len(one)}": one for one in prompts(*lengths, seed=15)}, max_tokens=12)
        prompt = prefilled(pair, "loading", 200, seed=16)
        loading(pair, "loading", prompt)
        pair.d.call("abort", "loading")
        pair.settle()


def test_recurrent_states_beside_full_attention(tmp_path):
    """A gated delta net's states: prefill stops a token short, decode goes on from there."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with Pair(PRODUCER, replace(CONSUMER, n_blocks=48), tmp_path, tmp_path) as pair:
        assert pair.p.call("groups") == pair.d.call("groups") == ["FullAttentionSpec", "MambaSpec"]
        pair.whole({f"length-{len(one)}": one for one in prompts(2, 17, 64, 65, 200, seed=17)}, max_tokens=12)
        pair.settle()
