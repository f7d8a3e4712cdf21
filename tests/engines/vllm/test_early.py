"""Requests that both engines are asked for at once: prefill hands over each step's chunk, decode waits from the start.

As in `test_lives.py`, every byte of both sides' pools is compared, and freed blocks are overwritten.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from vllm import SamplingParams
from vllm.outputs import CompletionOutput  # noqa: F401  (vLLM's lazy modules, loaded before a request is made)
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.request import Request

from pdstage.integrations.vllm import streams
from pdstage.integrations.vllm.metadata import Chunk, PdStageMetadata, Receive, Remote, Send
from pdstage.manager.calibration import Calibration
from pdstage.plan.cost import CostModel
from tests.engines.vllm.caches import HEAD_SIZE, N_HEADS, PATIENCE_S
from tests.engines.vllm.caches import Side as Workers
from tests.engines.vllm.lives import Pair, continuation, prompts
from tests.engines.vllm.models import GEMMA, LLAMA, QWEN, Side
from tests.rows import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdstage import Sender

PRODUCER = Side("kv_producer", 4, 16)
CONSUMER = Side("kv_consumer", 2, 64, layout="LBHNC", n_blocks=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(PRODUCER, CONSUMER, model, tmp_path_factory.mktemp("shared")) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    yield shared
    shared.settle()


@pytest.fixture
def engines(model: Path, tmp_path: Path) -> Callable[..., Pair]:
    def start(producer: Side = PRODUCER, consumer: Side = CONSUMER) -> Pair:
        return Pair(producer, consumer, model, tmp_path)

    return start


def whole(pair: Pair, prompts: dict[str, list[int]], max_tokens: int = 4) -> None:
    """Requests from the proxy's two calls to their last token."""
    for name, prompt in prompts.items():
        pair.both(name, prompt, max_tokens)
    pair.until(lambda: all(name in pair.d.ended for name in prompts), what="requests")
    for name, prompt in prompts.items():
        pair.went_well(name, prompt, max_tokens)


def half_way(pair: Pair, name: str, n: int, seed: int) -> list[int]:
    """Prefill has computed two steps of a prompt, and handed over a part of it; decode waits for the rest."""
    (prompt,) = prompts(n, seed=seed)
    before = pair.p.call("written")
    pair.both(name, prompt)
    pair.d.step()
    assert pair.d.call("status", name) == "WAITING_FOR_REMOTE_KVS"
    pair.p.step()
    pair.until(lambda: pair.p.call("written") > before or pair.p.step(), pair.d, what="the first chunk")
    assert name not in pair.p.ended
    return prompt


def test_requests_of_many_lengths(pair):
    lengths = 1, 2, 15, 16, 17, 63, 64, 65, 100, 200, 300
    whole(pair, {f"length-{len(one)}": one for one in prompts(*lengths, seed=31)})


def test_a_chunk_arrives_while_the_next_is_computed(pair):
    """Before prefill has finished, decode's rank has bytes of the request."""
    prompt = half_way(pair, "chunks", 400, seed=32)
    assert pair.p.call("status", "chunks") == "RUNNING"
    pair.until(lambda: "chunks" in pair.d.ended)
    pair.went_well("chunks", prompt)


def test_decode_comes_after_prefill_has_finished(pair):
    (prompt,) = prompts(150, seed=33)
    pair.both("late", prompt, decode=False)
    pair.until(lambda: "late" in pair.p.ended, pair.p, what="prefill")
    pair.decode_early("late", prompt)
    pair.until(lambda: "late" in pair.d.ended)
    pair.went_well("late", prompt)


def test_decode_comes_before_prefill(pair):
    (prompt,) = prompts(150, seed=34)
    pair.decode_early("first", prompt)
    for _ in range(5):
        pair.d.step()
    pair.both("first", prompt, decode=False)
    pair.until(lambda: "first" in pair.d.ended)
    pair.went_well("first", prompt)


def test_what_prefill_answers_serves_a_proxy_that_waits_for_it(pair):
    """A proxy that names the room, and then hands the answer on all the same."""
    (prompt,) = prompts(150, seed=35)
    pair.both("serial", prompt, decode=False)
    pair.until(lambda: "serial" in pair.p.ended, pair.p, what="prefill")
    pair.decode("serial", prompt)
    pair.until(lambda: "serial" in pair.d.ended)
    pair.went_well("serial", prompt)


@pytest.mark.parametrize("heard", [True, False])
def test_a_preemption_at_prefill_half_way(pair, heard):
    """What decode has stays right, though its blocks at prefill become others'; the rest comes from new ones."""
    name = f"preempted-{heard}"
    if heard:
        prompt = half_way(pair, name, 400, seed=36)
    else:
        (prompt,) = prompts(400, seed=37)
        pair.both(name, prompt, decode=False)
        pair.p.step()
    pair.p.call("preempt")
    for number in range(3):
        pair.p.step()
        if not heard and number == 1:
            pair.decode_early(name, prompt)
    pair.until(lambda: name in pair.d.ended)
    pair.went_well(name, prompt)


def test_blocks_run_out_at_prefill(engines):
    """The scheduler preempts one of several half-computed prompts for another's next chunk."""
    with engines(producer=replace(PRODUCER, n_blocks=24, max_model_len=320)) as pair:
        whole(pair, {f"r{number}": one for number, one in enumerate(prompts(290, 290, 290, 60, seed=38))})
        pair.settle()


def test_an_abort_at_prefill_half_way(pair):
    half_way(pair, "given-up", 400, seed=39)
    pair.p.call("abort", "given-up")
    pair.until(lambda: "given-up" in pair.d.ended)
    assert (pair.d.ended["given-up"], pair.d.tokens["given-up"]) == ("error", [])


def test_an_abort_at_prefill_before_it_is_scheduled(pair):
    """Decode does not wait for a deadline."""
    (prompt,) = prompts(100, seed=40)
    pair.both("never", prompt)
    pair.p.call("abort", "never")
    pair.until(lambda: "never" in pair.d.ended)
    assert (pair.d.ended["never"], pair.d.tokens["never"]) == ("error", [])


def test_a_room_begins_before_its_request_is_scheduled(pair):
    """However long prefill's queue is, decode knows that its room will come."""
    first, second = prompts(400, 100, seed=47)
    pair.both("scheduled", first)
    pair.p.step()
    pair.both("queued", second)
    pair.p.step()
    pair.until(lambda: pair.p.call("sending") == [2] * PRODUCER.tp, pair.d, what="both rooms")
    assert pair.p.call("status", "queued") == "WAITING"
    pair.until(lambda: {"scheduled", "queued"} <= set(pair.d.ended))
    pair.went_well("scheduled", first)
    pair.went_well("queued", second)


@pytest.mark.parametrize("serial", [False, True], ids=["at-once", "serial"])
@pytest.mark.parametrize("meanwhile", [False, True], ids=["after", "during"])
def test_a_routers_retry_under_its_transfer_id_loads(pair, serial: bool, meanwhile: bool):
    """Prefill has computed the prompt again; what it held would be held in vain."""
    (prompt,) = prompts(150, seed=60 + 2 * serial + meanwhile)
    name = f"retried-{serial}-{meanwhile}"
    pair.both(name, prompt, 60, decode=not serial)
    if serial:
        pair.until(lambda: name in pair.p.ended, pair.p, what="prefill")
        pair.decode(name, prompt, 60)
    pair.until(lambda: name in pair.d.ended or (meanwhile and pair.d.tokens[name]), what="the first try")
    assert (name in pair.d.ended) != meanwhile
    told = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{name}"}
    again = f"{name}-again"
    pair.p.add(again, prompt, 1, told)
    if serial:
        pair.until(lambda: again in pair.p.ended, what="prefill")
        pair.decode(again, prompt)
    else:
        address, engine = pair.p.call("directory")
        where = {"remote_bootstrap_addr": address, "remote_engine_id": engine}
        pair.d.add(again, prompt, 4, told | where | {"do_remote_decode": False, "do_remote_prefill": True})
    pair.until(lambda: {name, again} <= set(pair.d.ended), what="both tries")
    pair.went_well(again, prompt)
    assert pair.d.tokens[name] == continuation(prompt, 60)


def test_a_request_that_waits_at_decode_is_held_at_prefill_and_one_that_was_lost_is_not(engines):
    """Decode has blocks for one request at a time."""
    long, short, lost = prompts(300, 250, 100, seed=70)
    producer = replace(PRODUCER, options={"kv_lease_duration": 1.0})
    with engines(producer, replace(CONSUMER, n_blocks=9, limits={"max_silence_s": 1.5})) as pair:
        pair.prefill("long", long)
        pair.until(lambda: "long" in pair.p.ended, pair.p, what="prefill")
        pair.decode("long", long, 200)
        pair.until(lambda: pair.d.tokens["long"], what="the first")
        for name, prompt in (("short", short), ("lost", lost)):
            pair.prefill(name, prompt)
        pair.until(lambda: "short" in pair.p.ended, pair.p, what="prefill")
        pair.decode("short", short)
        pair.d.step()
        assert pair.d.call("status", "short") == "WAITING"
        pair.until(lambda: "lost" in pair.p.ended and pair.p.call("requests") == ["short"], pair.p, what="the lost one")
        until = time.monotonic() + 2.0
        pair.until(lambda: time.monotonic() > until, pair.p, what="two leases")
        assert pair.p.call("requests") == ["short"], "decode waits with it"
        pair.until(lambda: {"long", "short"} <= set(pair.d.ended), what="both")
        pair.went_well("short", short)
        pair.settle()


def test_an_abort_by_the_proxy_ends_what_prefill_refused(engines):
    """Decode has opened the room of a request that prefill never saw, and every deadline is far."""
    with engines(producer=replace(PRODUCER, options={"kv_lease_duration": 10 * PATIENCE_S})) as pair:
        (prompt,) = prompts(100, seed=71)
        pair.decode_early("refused", prompt)
        pair.until(lambda: pair.d.call("status", "refused") == "WAITING_FOR_REMOTE_KVS", pair.d, what="a load")
        pair.d.call("abort", "refused")
        pair.settle()


def test_a_request_that_prefill_refused(engines):
    """A proxy that asks both at once has sent decode's half already: it ends long before a room's own deadline."""
    with engines(producer=replace(PRODUCER, options={"kv_lease_duration": 0.5})) as pair:
        (prompt,) = prompts(100, seed=48)
        pair.decode_early("refused", prompt)
        pair.until(lambda: "refused" in pair.d.ended)
        assert (pair.d.ended["refused"], pair.d.tokens["refused"]) == ("error", [])
        pair.settle()


def test_an_abort_at_decode_half_way(pair):
    half_way(pair, "unwanted", 400, seed=41)
    pair.d.call("abort", "unwanted")
    pair.until(lambda: "unwanted" in pair.p.ended, what="prefill goes on to its end")


def test_a_prompt_that_decode_has_already(engines):
    with engines(consumer=replace(CONSUMER, prefix_caching=True)) as pair:
        (prompt,) = prompts(128, seed=42)
        whole(pair, {"first": prompt})
        whole(pair, {"again": prompt})
        pair.settle()


def test_a_prefix_that_prefill_has_already(engines):
    """Its first chunk is all that is cached, and what the first step computes."""
    with engines(producer=replace(PRODUCER, prefix_caching=True)) as pair:
        head, tail, other = prompts(200, 90, 90, seed=43)
        whole(pair, {"first": head + tail})
        whole(pair, {"second": head + other, "third": head + tail})
        pair.settle()


def test_two_requests_of_one_room_are_sent_once(pair):
    """Samples of one prompt carry one transfer_id: at prefill the others are computed, and not handed over."""
    (prompt,) = prompts(150, seed=44)
    pair.both("sample", prompt)
    told = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-sample"}
    pair.p.add("twin", prompt, 1, told)
    pair.until(lambda: {"sample", "twin"} <= set(pair.p.ended) and "sample" in pair.d.ended)
    pair.went_well("sample", prompt)
    assert pair.p.params["twin"] is None


def by_layers(folder: Path) -> Side:
    """A producer that hands over each layer by itself: it takes a chunk to cost next to nothing."""
    costs = {"nixl": replace(CostModel.linear(1e9, 1e-6, 1e-5), chunk_s=1e-9)}
    path = folder / "costs.json"
    Calibration(version=1, made_at="now", prefill_host="p", decode_host="d", transports=costs).write(path)
    return replace(PRODUCER, options={"calibration": str(path)})


def test_layers_go_by_themselves(engines, tmp_path):
    with engines(producer=by_layers(tmp_path)) as pair:
        whole(pair, {f"length-{len(one)}": one for one in prompts(1, 16, 64, 65, 200, 300, seed=50)})
        prompt = half_way(pair, "preempted", 400, seed=51)
        pair.p.call("preempt")
        pair.until(lambda: "preempted" in pair.d.ended)
        pair.went_well("preempted", prompt)
        pair.settle()


@pytest.mark.parametrize("layered", rows([False, True], full={False}))
def test_sliding_windows(tmp_path, layered: bool):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    producer = by_layers(tmp_path) if layered else PRODUCER
    with Pair(producer, replace(CONSUMER, n_blocks=48), tmp_path, tmp_path) as pair:
        lengths = 2, 16, 64, 69, 70, 71, 72, 135, 200, 300
        whole(pair, {f"length-{len(one)}": one for one in prompts(*lengths, seed=45)}, max_tokens=12)
        prompt = half_way(pair, "preempted", 400, seed=46)
        pair.p.call("preempt")
        pair.until(lambda: "preempted" in pair.d.ended)
        pair.went_well("preempted", prompt)
        pair.settle()


def test_recurrent_states(tmp_path):
    """Decode goes on from the state of the last token but one, and knows that prefill's is of just that many."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with Pair(by_layers(tmp_path), replace(CONSUMER, n_blocks=48), tmp_path, tmp_path) as pair:
        whole(pair, {f"length-{len(one)}": one for one in prompts(2, 17, 64, 65, 200, seed=47)}, max_tokens=12)
        (prompt,) = prompts(100, seed=48)
        pair.both("longer", prompt, decode=False)
        pair.decode_early("longer", [*prompt, 5])
        pair.until(lambda: "longer" in pair.d.ended, what="a state of fewer tokens")
        assert (pair.d.ended["longer"], pair.d.tokens["longer"]) == ("error", [])
        pair.settle()


class Event:
    """Stands for a CUDA event, which cannot exist without a device: the forward pass goes on until it is `done`."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def full(tp: int, block_size: int) -> dict[str, KVCacheSpec]:
    given = {"block_size": block_size, "head_size": HEAD_SIZE, "dtype": torch.float16, "num_kv_heads": N_HEADS // tp}
    return {f"model.layers.{i}.self_attn.attn": FullAttentionSpec(**given) for i in range(2)}


@pytest.fixture
def on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Workers, Sender, Event]]:
    """Prefill's worker has given a chunk to a room that decode has opened, and the forward pass still computes it."""
    src, dst = Workers(tmp_path, "kv_producer", full), Workers(tmp_path, "kv_consumer", full)
    side, event = src.workers[0].worker_side, Event()
    held = src.held([[3, 5, 2]], 40)
    src.step(PdStageMetadata(arrived={"r": "xfer"}, chunks={"r": Chunk(src.held([[3]], 16), 16)}))
    remote = Remote("xfer", src.scheduler.scheduler_side._address, "kv_producer-engine", is_early=True)
    dst.step(PdStageMetadata(receives={"r": Receive(remote, held)}))
    until(lambda: "r" in side._early and side._early["r"].sender.opened)
    monkeypatch.setattr(side, "_event", lambda: event)
    src.step(PdStageMetadata(chunks={"r": Chunk(src.held([[3, 5]], 32, 16), 32)}))
    sender = side._early["r"].sender
    until(lambda: sender.backlog_nbytes)
    yield src, sender, event
    event.done = True
    for one in (src, dst):
        one.close()


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_group_of_layers_goes_once_a_later_layer_is_computed():
    """The layers of one number may have several caches, written one after the other."""
    names = {f"model.layers.{i}.{part}": i for i in range(5) for part in ("indexer", "attn")}
    groups = streams.LayerGroups(names)
    groups.begin(3)
    went = {name: layers for name in names if (layers := groups.passed(name)) is not None}
    assert went == {"model.layers.1.indexer": (0, 1), "model.layers.3.indexer": (1, 3)}
    assert groups.rest() == (3, 5)
    groups.begin(3)
    assert groups.passed("model.layers.4.attn") == (0, 3), "a captured graph may say little"
    assert groups.rest() == (3, 5)
    groups.begin(99)
    assert [groups.passed(f"model.layers.{i}.attn") for i in range(5)] == [None, (0, 1), (1, 2), (2, 3), (3, 4)]
    groups.begin(1)
    assert all(groups.passed(name) is None for name in names)
    assert groups.passed("model.layers.7.of_no_cache") is None
    assert groups.rest() == (0, 5)


def test_the_first_layers_are_on_their_way_before_the_step_ends(on_its_way, monkeypatch):
    src, sender, event = on_its_way
    event.done = True
    (worker,) = src.workers
    until(lambda: not sender.backlog_nbytes)
    before = worker.worker_side.prefill.stats()["bytes_written"]
    monkeypatch.setattr(worker.worker_side.prefill, "pieces", lambda nbytes: 2 if nbytes else 0)
    worker.bind_connector_metadata(PdStageMetadata(chunks={"r": Chunk(src.held([[3, 5, 2]], 40, 32), 40)}))
    for i in range(2):
        worker.save_kv_layer(f"model.layers.{i}.self_attn.attn", None, None)
    until(lambda: worker.worker_side.prefill.stats()["bytes_written"] > before)
    half = worker.worker_side.prefill.stats()["bytes_written"] - before
    worker.wait_for_save()
    worker.clear_connector_metadata()
    until(lambda: worker.worker_side.prefill.stats()["bytes_written"] == before + 2 * half)


def test_a_preemption_waits_for_what_is_on_its_way(on_its_way, monkeypatch: pytest.MonkeyPatch):
    src, sender, event = on_its_way
    monkeypatch.setattr(streams, "_CARRIED_S", PATIENCE_S)
    told = PdStageMetadata(preempted={"r": False, "another's": False})
    thread = threading.Thread(target=src.workers[0].handle_preemptions, args=(told,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "its blocks are read when the step is done"
    event.done = True
    thread.join(PATIENCE_S)
    assert not sender.backlog_nbytes
    assert sender.error is None


@pytest.mark.parametrize("why", ["it takes too long", "its blocks are overwritten"])
def test_a_preemption_that_cannot_wait_fails_the_room(on_its_way, monkeypatch, caplog, why: str):
    src, sender, _ = on_its_way
    monkeypatch.setattr(streams, "_CARRIED_S", 0.05)
    src.workers[0].handle_preemptions(PdStageMetadata(preempted={"r": why == "its blocks are overwritten"}))
    assert sender.room.ended
    assert "request r is preempted, and not sent" in caplog.text
    src.step(PdStageMetadata(sends={"r": Send("xfer", src.held([[7, 8, 9]], 40))}))
    until(lambda: any("r" in result.finished_sending for result in src.step()))
    assert src.workers[0].get_kv_connector_stats().data["not_sent"] == [1]


def test_blocks_that_this_step_writes_are_lost(tmp_path: Path):
    """vLLM's second model runner zeroes new blocks, and copies into them, before it calls `handle_preemptions`."""
    src = Workers(tmp_path, "kv_producer", full)
    many = streams.Streams(src.groups)
    state = KVConnectorBlockState({"a", "b", "c"}, lambda name: ([ord(name), ord(name) + 10],), {})
    made = {name: Request(name, list(range(64)), SamplingParams(max_tokens=1), None) for name in "abc"}
    for name, request in made.items():
        many.begin(request, f"room-{name}")
    step = SimpleNamespace(
        preempted_req_ids=set(), num_scheduled_tokens=dict.fromkeys("abc", 32), kv_connector_block_state=state,
        new_block_ids_to_zero=[ord("a") + 10], kv_cache_block_copies=[KVCacheBlockCopy(1, ord("b"))],
    )  # fmt: skip
    preempted, chunks = many.step(step)
    assert (preempted, {one.stop for one in chunks.values()}) == ({}, {32})
    step.preempted_req_ids, step.num_scheduled_tokens = {*"abc", "d"}, {"c": 16}
    preempted, chunks = many.step(step)
    assert preempted == {"a": True, "b": True, "c": False}
    assert chunks["c"].held["kv"].tokens == (0, 16), "from its first token again"
    src.close()
