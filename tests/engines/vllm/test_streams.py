"""Requests that are sent while they are computed, call by call: which layers when, and what a preemption does."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput  # noqa: F401  (vLLM's lazy modules, loaded before a request is made)
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import Request

from pdstage.integrations.vllm import streams
from pdstage.integrations.vllm.metadata import Chunk, PdStageMetadata, Receive, Remote, Send
from tests.engines.calls import PATIENCE_S
from tests.engines.vllm.caches import Side, until
from tests.engines.vllm.test_caches import recurrent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdstage import Sender


class Event:
    """Stands for a CUDA event, which cannot exist without a device: the forward pass goes on until it is `done`."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


@pytest.fixture
def on_its_way(src: Side, dst: Side, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Sender, Event]]:
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
def test_the_layers_of_a_draft_model_run_after_all_of_the_models(draft: tuple[str, Sequence[int]]):
    """A layer's number is all that says what is sent. EAGLE's counts from the number of the stage's layers on."""
    named = [("", range(4, 9)), draft]
    names = {f"{prefix}model.layers.{i}.self_attn.attn": i for prefix, numbers in named for i in numbers}
    groups = streams.LayerGroups(names)
    groups.begin(3)
    assert all(groups.passed(name) is None for name in names)
    assert groups.rest() == (0, 9)


@pytest.fixture
def step(src: Side, monkeypatch: pytest.MonkeyPatch):
    """Prefill's worker in a step that computes a chunk, and which layers of it it has sent."""
    side, went = src.workers[0].worker_side, []
    monkeypatch.setattr(side, "_stream", lambda start, stop, **_: went.append((start, stop)))
    return side, PdStageMetadata(chunks={"r": Chunk(src.held([[3]], 16), 16)}), went


@pytest.mark.parametrize("ubatch_size", [0, 2])
def test_halves_of_a_batch_pass_each_layer_by_themselves(step, monkeypatch, ubatch_size: int):
    """vLLM's dual-batch overlap: one half is layers ahead of the other, whose tokens are not written yet."""
    side, told, went = step
    monkeypatch.setattr(side.prefill, "pieces", lambda _: 2)
    monkeypatch.setattr(side._config.parallel_config, "ubatch_size", ubatch_size)
    side.bound(told)
    for i in range(2):
        side.passed(f"model.layers.{i}.self_attn.attn")
    side.computed()
    assert went == ([(0, 2)] if ubatch_size else [(0, 1), (1, 2)])


@pytest.mark.parametrize("next_step", ["bound", "preempted"])
def test_what_a_step_did_not_say_that_it_computed_goes_before_the_next(step, next_step: str):
    """vLLM's first model runner does not, on a pipeline stage before the last, if the last speculates."""
    side, told, went = step
    side.bound(told)
    getattr(side, next_step)(PdStageMetadata(preempted={"r": False}))
    assert went == [(0, 2)]
    side.computed()
    assert went == [(0, 2)]


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
    assert "request r is computed again, and not sent" in caplog.text
    told = [PdStageMetadata(sends={"r": Send("xfer", src.held([[7, 8, 9]], 40))})]
    until(lambda: any("r" in result.finished_sending for result in src.step(told.pop() if told else None)))
    assert src.workers[0].get_kv_connector_stats().data["not_sent"] == [1]


def stepped(state: KVConnectorBlockState, scheduled: dict[str, int], **more: object) -> SimpleNamespace:
    """What vLLM's scheduler says of a step."""
    said = {
        "preempted_req_ids": set(), "num_scheduled_tokens": scheduled, "kv_connector_block_state": state,
        "new_block_ids_to_zero": [], "kv_cache_block_copies": [], "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(new_block_ids=[]),
    }  # fmt: skip
    return SimpleNamespace(**said | more)


def test_a_step_that_ends_inside_a_row_leaves_that_row_to_the_next(src: Side):
    """A compressed cache's row is not whole before all of its tokens are computed."""
    many = streams.Streams([replace(group, row_tokens=4) for group in src.groups])
    state = KVConnectorBlockState({"a"}, lambda _: ([7, 8, 9, 10],), {})
    request = Request("a", list(range(62)), SamplingParams(max_tokens=1), None)
    many.begin(request, "room")
    went = []
    for computed, scheduled in ((0, 30), (30, 32)):
        request.num_computed_tokens = computed
        went.append(many.step(stepped(state, {"a": scheduled}))[1]["a"].held["kv"].tokens)
    assert went == [(0, 28), (28, 62)]


def test_blocks_that_this_step_writes_are_lost(src: Side):
    """vLLM's second model runner zeroes new blocks, and copies into them, before it calls `handle_preemptions`."""
    many = streams.Streams(src.groups)
    state = KVConnectorBlockState({"a", "b", "c"}, lambda name: ([ord(name), ord(name) + 10],), {})
    made = {name: Request(name, list(range(64)), SamplingParams(max_tokens=1), None) for name in "abc"}
    for name, request in made.items():
        many.begin(request, f"room-{name}")
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
    many, kv = streams.Streams(side.groups), next(group.index for group in side.groups if not group.is_state)
    n, state = len(side.groups), KVConnectorBlockState({"a"}, lambda _: [[7], [8], [9]][: len(side.groups)], {})
    request = Request("a", list(range(64)), SamplingParams(max_tokens=1), None)
    many.begin(request, "room")
    step = stepped(state, {"a": 16})
    many.step(step)
    (held,) = many.of["a"].blocks
    step.preempted_req_ids, step.num_scheduled_tokens = {"a"}, {}
    step.scheduled_cached_reqs.new_block_ids = [None, tuple([] if at == kv else [held] for at in range(n))]
    assert many.step(step)[0] == {"a": True}


def test_what_another_connector_failed_to_load_is_sent_anew(src: Side):
    """vLLM computes such blocks again where they are."""
    many = streams.Streams(src.groups)
    request = Request("a", list(range(100)), SamplingParams(max_tokens=1), None)
    many.begin(request, "room")
    step = stepped(KVConnectorBlockState({"a"}, lambda _: (list(range(1, 8)),), {}), {"a": 64})
    assert many.step(step)[1]["a"].stop == 64
    request.num_computed_tokens = 16
    step.num_scheduled_tokens = {"a": 64}
    preempted, chunks = many.step(step)
    assert preempted == {"a": True}, "what was sent of it is wrong"
    assert chunks["a"].held["kv"].tokens == (0, 80)
