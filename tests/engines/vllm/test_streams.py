"""Requests that are sent while they are computed, call by call: which layers when, and what a preemption does."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput  # noqa: F401  (vLLM's lazy modules, loaded before a request is made)
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import Request

from pdstage.integrations.vllm import streams
from pdstage.integrations.vllm.metadata import Chunk, PdStageMetadata, Receive, Remote, Send
from tests.engines.calls import PATIENCE_S
from tests.engines.vllm.caches import until
from tests.engines.vllm.test_caches import recurrent


class Event:
    """Stands for a CUDA event, which cannot exist without a device: the forward pass goes on until it is `done`."""

    def __init__(self):
        self.done = False

    def query(self):
        return self.done


@pytest.fixture
def on_its_way(src, dst, monkeypatch):
    """Prefill's worker has given a chunk to a room that decode has opened, and the forward pass still computes it."""
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


@pytest.mark.parametrize("draft", [("draft_model.", range(5)), ("", [2])], ids=["from 0", "by the stage's layers"])
def test_the_layers_of_a_draft_model_run_after_all_of_the_models(draft):
    """A layer's number is all that says what is sent. EAGLE's counts from the number of the stage's layers on."""
    named = [("", range(4, 9)), draft]
    names = {f"{prefix}model.layers.{i}.self_attn.attn": i for prefix, numbers in named for i in numbers}
    groups = streams.LayerGroups(names)
    groups.begin(3)
    assert all(groups.passed(name) is None for name in names)
    assert groups.rest() == (0, 9)


def step(src, monkeypatch):
    """Prefill's worker in a step that computes a chunk, and which layers of it it has sent."""
    (worker,), went = src.workers, []
    monkeypatch.setattr(worker.worker_side, "_stream", lambda start, stop, **_: went.append((start, stop)))
    worker.bind_connector_metadata(PdStageMetadata(chunks={"r": Chunk(src.held([[3]], 16), 16)}))
    return worker, went


@pytest.mark.parametrize("ubatch_size", [0, 2])
def test_halves_of_a_batch_pass_each_layer_by_themselves(src, monkeypatch, ubatch_size):
    """vLLM's dual-batch overlap: one half is layers ahead of the other, whose tokens are not written yet."""
    side = src.workers[0].worker_side
    monkeypatch.setattr(side.prefill, "pieces", lambda _: 2)
    monkeypatch.setattr(side._config.parallel_config, "ubatch_size", ubatch_size)
    worker, went = step(src, monkeypatch)
    for i in range(2):
        worker.save_kv_layer(f"model.layers.{i}.self_attn.attn", None, None)
    assert went == ([] if ubatch_size else [(0, 1)])
    worker.wait_for_save()
    assert went == ([(0, 2)] if ubatch_size else [(0, 1), (1, 2)])


@pytest.mark.parametrize("next_step", ["bound", "preempted"])
def test_what_a_step_did_not_say_that_it_computed_goes_before_the_next(src, monkeypatch, next_step):
    """vLLM's first model runner does not, on a pipeline stage before the last, if the last speculates."""
    worker, went = step(src, monkeypatch)
    getattr(worker.worker_side, next_step)(PdStageMetadata(preempted={"r": False}))
    assert went == [(0, 2)]
    worker.wait_for_save()
    assert went == [(0, 2)]


def test_a_preemption_waits_for_what_is_on_its_way(on_its_way, monkeypatch):
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
def test_a_preemption_that_cannot_wait_fails_the_room(on_its_way, monkeypatch, caplog, why):
    src, sender, _ = on_its_way
    monkeypatch.setattr(streams, "_CARRIED_S", 0.05)
    src.workers[0].handle_preemptions(PdStageMetadata(preempted={"r": why == "its blocks are overwritten"}))
    assert sender.room.ended
    assert "request r is computed again, and not sent" in caplog.text
    told = [PdStageMetadata(sends={"r": Send("xfer", src.held([[7, 8, 9]], 40))})]
    until(lambda: any("r" in result.finished_sending for result in src.step(told.pop() if told else None)))
    assert src.workers[0].get_kv_connector_stats().data["not_sent"] == [1]


def begun(groups, n_tokens, names="a"):
    """Requests that are sent while they are computed."""
    many = streams.Streams(groups)
    requests = [Request(name, list(range(n_tokens)), SamplingParams(max_tokens=1), None) for name in names]
    for request in requests:
        many.begin(request, f"room-{request.request_id}")
    return many, requests


def stepped(state, scheduled, **more):
    """What vLLM's scheduler says of a step."""
    said = {
        "preempted_req_ids": set(), "num_scheduled_tokens": scheduled, "kv_connector_block_state": state,
        "new_block_ids_to_zero": [], "kv_cache_block_copies": [], "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(new_block_ids=[]),
    }  # fmt: skip
    return SimpleNamespace(**said | more)


def test_a_step_that_ends_inside_a_row_leaves_that_row_to_the_next(src):
    """A compressed cache's row is not whole before all of its tokens are computed."""
    many, (request,) = begun([replace(group, row_tokens=4) for group in src.groups], 62)
    state = KVConnectorBlockState({"a"}, lambda _: ([7, 8, 9, 10],), {})
    went = []
    for computed, scheduled in ((0, 30), (30, 32)):
        request.num_computed_tokens = computed
        went.append(many.step(stepped(state, {"a": scheduled}))[1]["a"].held["kv"].tokens)
    assert went == [(0, 28), (28, 62)]


def test_blocks_that_this_step_writes_are_lost(src):
    """vLLM's second model runner zeroes new blocks, and copies into them, before it calls `handle_preemptions`."""
    many, _ = begun(src.groups, 64, "abc")
    state = KVConnectorBlockState({"a", "b", "c"}, lambda name: ([ord(name), ord(name) + 10],), {})
    step = stepped(
        state, dict.fromkeys("abc", 32),
        new_block_ids_to_zero=[ord("a") + 10], kv_cache_block_copies=[KVCacheBlockCopy(1, ord("b"))],
    )  # fmt: skip
    preempted, chunks = many.step(step)
    assert (preempted, {one.stop for one in chunks.values()}) == ({}, {32})
    step.preempted_req_ids, step.num_scheduled_tokens = {*"abc", "d"}, {"c": 16}
    preempted, chunks = many.step(step)
    assert preempted == {"a": True, "b": True, "c": False}
    assert chunks["c"].held["kv"].tokens == (0, 16), "from its first token again"


def test_states_are_copied_to_blocks_before_a_worker_can_wait(sides):
    """By vLLM's second model runner, where a request comes to another block of states."""
    side = sides("kv_producer", recurrent("MAMBA2", 0))
    (many, _), kv = begun(side.groups, 64), next(group.index for group in side.groups if not group.is_state)
    n, state = len(side.groups), KVConnectorBlockState({"a"}, lambda _: [[7], [8], [9]][: len(side.groups)], {})
    step = stepped(state, {"a": 16})
    many.step(step)
    (held,) = many.of["a"].blocks
    step.preempted_req_ids, step.num_scheduled_tokens = {"a"}, {}
    step.scheduled_cached_reqs.new_block_ids = [None, tuple([] if at == kv else [held] for at in range(n))]
    assert many.step(step)[0] == {"a": True}


def test_what_another_connector_failed_to_load_is_sent_anew(src):
    """vLLM computes such blocks again where they are."""
    many, (request,) = begun(src.groups, 100)
    step = stepped(KVConnectorBlockState({"a"}, lambda _: (list(range(1, 8)),), {}), {"a": 64})
    assert many.step(step)[1]["a"].stop == 64
    request.num_computed_tokens = 16
    step.num_scheduled_tokens = {"a": 64}
    preempted, chunks = many.step(step)
    assert preempted == {"a": True}, "what was sent of it is wrong"
    assert chunks["a"].held["kv"].tokens == (0, 80)
