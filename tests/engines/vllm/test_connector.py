"""The connector by itself: what its sides say to vLLM, call by call, with vLLM's real requests, configs and factory."""

from __future__ import annotations

import json
import os
import pickle
import threading
from urllib.request import urlopen

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pydantic import TypeAdapter
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import EngineEntry
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput  # noqa: F401  (vLLM's lazy modules, loaded before a request is made)
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from pdstage.control.address import Address
from pdstage.control.bootstrap import BootstrapServer, client_of
from pdstage.control.keys import Keys
from pdstage.control.operate import drain, members
from pdstage.errors import UsageError
from pdstage.integrations.vllm import PdStageConnector
from pdstage.integrations.vllm.groups import Group, recomputed_tokens
from pdstage.integrations.vllm.metadata import PdStageMetadata, Receive, Remote, Send
from pdstage.integrations.vllm.stats import PdStagePromMetrics, PdStageStats
from pdstage.integrations.vllm.worker import Tasks
from tests.engines.calls import PATIENCE_S
from tests.engines.vllm.caches import attention, transfer, until
from tests.engines.vllm.lives import TO_DECODE, TO_PREFILL
from tests.engines.vllm.test_caches import windowed
from tests.processes import free_port
from tests.watch.samples import Samples, get

N_TOKENS = 40
ANSWER = TO_DECODE | {
    "remote_engine_id": "p", "remote_room": "r", "remote_host": "h", "remote_port": 8998, "remote_num_tokens": N_TOKENS,
}  # fmt: skip
EARLY = TO_DECODE | {"remote_engine_id": "p", "transfer_id": "xfer", "remote_bootstrap_addr": "h:8998"}
"""What a proxy hands on of an answer, and what one says that asks both engines at once."""
BLOCKS = [[3, 5, 2]]


def blocks_of(*ids, n_cached=0):
    """What `update_state_after_alloc` is told, with `n_cached` blocks of each group found in the prefix cache."""
    groups = tuple([KVCacheBlock(block_id) for block_id in group] for group in ids)
    for at, group in enumerate(groups):
        for block in group[:n_cached]:
            block.set_block_hash(make_block_hash_with_group_id(BlockHash(bytes([block.block_id])), at))
    return KVCacheBlocks(groups)


def arrived(side, params, *, name="req-1", lora=None):
    adapter = LoRARequest(lora, 1, f"/no/{lora}") if lora is not None else None
    sampling = SamplingParams(max_tokens=1)
    made = Request(name, list(range(N_TOKENS)), sampling, None, lora_request=adapter)
    made.kv_transfer_params = params
    side.scheduler.on_new_request(made)
    return made


def answered(src, *, lora=None, is_alone=True):
    """What a prefill engine answers for a request that it has computed, through JSON as a proxy passes it on.
    `is_alone`: the connector is not beside one that knows no groups, in vLLM's MultiConnector.
    """
    return ended(src, arrived(src, TO_PREFILL, lora=lora), is_alone=is_alone)


def ended(src, done, *, is_alone=True):
    """The same, for a request that arrived before."""
    done.num_computed_tokens, done.status = done.num_prompt_tokens, RequestStatus.FINISHED_LENGTH_CAPPED
    if is_alone:
        _, params = src.scheduler.request_finished_all_groups(done, tuple(BLOCKS))
    else:
        _, params = src.scheduler.request_finished(done, *BLOCKS)
    return json.loads(json.dumps(params))


def moved(src, dst, name="r"):
    """A request goes from one to the other; that request, if it fails."""
    return transfer(src, dst, name, src.held(BLOCKS, N_TOKENS), dst.held(BLOCKS, N_TOKENS))


def asks(side, request, n_cached=0):
    """What vLLM's scheduler asks first: how many more tokens are to come, and whether they load beside other steps."""
    return side.scheduler.get_num_new_matched_tokens(request, n_cached)


def stats(side):
    return side.workers[0].get_kv_connector_stats()


def given_back(src, name):
    """Waits until prefill gives that request's blocks back."""
    until(lambda: any(name in result.finished_sending for result in src.step()))


def failed(dst, told):
    """The requests whose loads end in failure, once one has ended."""
    results = dst.step(told)
    until(lambda: results.extend(dst.step()) or any(one.finished_recving for one in results))
    (ended_with,) = [one for one in results if one.finished_recving]
    assert ended_with.finished_recving == ended_with.failed_recving
    return ended_with.failed_recving


def allocate(dst, wanted, n):
    """vLLM has given the request blocks, and `n` tokens are to come; what the workers are told."""
    dst.scheduler.update_state_after_alloc(wanted, blocks_of([7, 8, 9]), n)
    return dst.scheduler.build_connector_meta(None)


def test_what_vllm_asks_of_the_class():
    assert supports_hma(PdStageConnector)
    assert PdStageConnector.get_required_kvcache_layout(None) is None
    assert not PdStageConnector.supports_sleep_mode(None)
    # The older method has no place for failures: who asked it would go on from KV that is not there.
    assert PdStageConnector.get_finished is KVConnectorBase_V1.get_finished


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_prefilled_request_keeps_its_blocks_and_tells_decode_where(src, is_alone):
    params = answered(src, is_alone=is_alone)
    assert params["do_remote_prefill"]
    assert params["remote_num_tokens"] == N_TOKENS
    told = src.scheduler.build_connector_meta(None)
    assert pickle.loads(pickle.dumps(told)) == told
    assert told.sends["req-1"].held["kv"] == ((3, 5, 2), 0, (0, N_TOKENS), (2,))
    assert not src.scheduler.has_pending_push_work()
    assert params["remote_room"] != answered(src)["remote_room"], "an id that comes again is another room"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("fd00::1", "[fd00::1]:8998"),
        ("[fd00::1]", "[fd00::1]:8998"),
        ("prefill-0.pods", "prefill-0.pods:8998"),
        (f"{'a' * 64}@fd00::1", f"{'a' * 64}@[fd00::1]:8998"),
    ],
)
def test_a_router_writes_an_ipv6_host_with_or_without_brackets(dst, host, address):
    wanted = arrived(dst, ANSWER | {"remote_host": host})
    assert asks(dst, wanted) == (N_TOKENS, True)
    (receive,) = allocate(dst, wanted, N_TOKENS).receives.values()
    assert receive.remote.address == address
    assert str(Address.parse(address, "tcp")) == address.rpartition("@")[2]


@pytest.mark.parametrize(("there", "here"), [(None, "sql"), ("sql", None), ("sql", "chat"), ("sql", "sql")])
def test_kv_of_another_adapter_is_computed_here(src, dst, there, here):
    """Prefill and decode may know different LoRA adapters by the name that a client gave, or one of them none."""
    params = answered(src, lora=there)
    wanted = arrived(dst, params, lora=here)
    matched = asks(dst, wanted)
    if there == here:
        assert matched == (N_TOKENS, True)
        return
    assert matched == (0, False)
    wants = [(remote.room, is_wanted) for remote, is_wanted in allocate(dst, wanted, 0).wants]
    assert wants == [(params["remote_room"], False)], "prefill need not hold it"


def test_another_model_of_the_same_shape_is_refused(sides, caplog):
    """Its KV would fit, and every answer be wrong; unless the operator says that the two go together."""
    other = sides("kv_consumer", extra={"model": {"weights": "0123", "name": "llama"}})
    same = sides("kv_consumer", extra={"model": {"name": None}})
    for decode, wait_s, failed in ((same, 300.0, set()), (other, 2.0, {"b"})):
        model = {"weights": "4567", "name": "llama"}
        source = sides("kv_producer", extra={"model": model, "config": {"open_wait_s": wait_s}})
        assert moved(source, decode, "b") == failed
    assert "the model's weights is '4567' at prefill and '0123' at decode" in caplog.text


def test_a_room_that_decode_does_not_want_frees_prefill_at_once(src, dst):
    """All of it was cached."""
    wanted = arrived(dst, answered(src))
    src.turn()
    assert asks(dst, wanted, N_TOKENS) == (0, False)
    dst.step(allocate(dst, wanted, 0))
    given_back(src, "req-1")
    assert stats(src).data["not_sent"] == []


@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_one_prompt_load_it_once(src, dst, caching):
    """vLLM gives each its own copy of one answer, and a proxy may send it again: a room is received once. The others
    wait for it, and find its blocks in the prefix cache; without one they compute the prompt.
    """
    dst.scheduler.scheduler_side._shares_blocks = caching
    params = answered(src)
    first, second = (arrived(dst, params, name=name) for name in ("s0", "s1"))
    assert asks(dst, first) == (N_TOKENS, True)
    assert dst.scheduler.has_pending_push_work()
    n_waits = (None, False) if caching else (0, False)
    assert asks(dst, second) == n_waits, "HiSparse gives blocks later"
    dst.scheduler.update_state_after_alloc(first, blocks_of([7, 8, 9]), N_TOKENS)
    assert asks(dst, second) == n_waits, "while the first one loads"
    step = dst.scheduler.build_connector_meta(None)
    assert set(step.receives) == {"s0"}
    assert [is_wanted for _, is_wanted in step.wants] == [True], "announced once, and not given up"
    dst.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"s0"}))
    assert asks(dst, second) == n_waits, "vLLM has not cached it yet"
    assert not dst.scheduler.build_connector_meta(None)
    assert asks(dst, second, 32 * caching) == (0, False)
    assert not allocate(dst, second, 0)


def test_data_parallel_replicas_share_the_first_one_s_directory(sides, dst):
    """It is all that a router is told of, which sends a request to one by its number; the first may start last."""
    port = free_port()
    replicas = [sides("kv_producer", extra={"port": port}, replica=number) for number in (1, 0)]
    told = {}

    def asked():
        with urlopen(f"http://127.0.0.1:{port}/query", timeout=PATIENCE_S) as answer:
            entries = TypeAdapter(dict[int, EngineEntry]).validate_json(answer.read())
        told.update({number: entry.engine_id for number, entry in entries.items()})
        return len(told) == 2

    until(asked)
    assert told == {number: f"kv_producer-engine_dp{number}" for number in range(2)}
    for side in replicas:
        assert not moved(side, dst, f"r{side.replica}")
        assert side.scheduler.scheduler_side._address == f"127.0.0.1:{port}"


@pytest.mark.parametrize("why", ["external load balancing", "keys"])
def test_replicas_behind_api_servers_of_their_own_have_directories_of_their_own(sides, tmp_path, why):
    """With external load balancing each of a host's processes has local data-parallel rank 0. With keys no router can
    ask a directory, and each answer names its own.
    """
    port = free_port()
    Keys.make(tmp_path / "cluster.key")
    keys = {"keys": str(tmp_path / "cluster.key")} if why == "keys" else {}
    for number in (1, 0):
        side = sides("kv_producer", extra={"port": port, **keys}, replica=number, external_lb=not keys)
        address = side.scheduler.scheduler_side._address
        assert address.rpartition("@")[2] == f"127.0.0.1:{port + number}"
        assert ("@" in address) == (why == "keys")


def test_an_abort_in_the_step_of_the_announcement(src, dst):
    """Both are in one step's metadata; decode's blocks come back all the same, as a load that failed."""
    wanted = arrived(dst, answered(src))
    asks(dst, wanted)
    dst.scheduler.update_state_after_alloc(wanted, blocks_of([7, 8, 9]), N_TOKENS)
    wanted.status = RequestStatus.FINISHED_ABORTED
    dst.scheduler.request_finished_all_groups(wanted, ([7, 8, 9],))
    told = dst.scheduler.build_connector_meta(None)
    assert set(told.aborted) == {"req-1"} == set(told.receives)
    assert failed(dst, told) == {"req-1"}
    dst.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"req-1"}))
    dst.scheduler.request_finished_all_groups(wanted, ([],))
    assert not dst.scheduler.build_connector_meta(None)
    src.turn()
    given_back(src, "req-1")


@pytest.mark.parametrize(
    ("at", "address", "why"),
    [("dst", "no port in this", "no port in this"), ("src", "127.0.0.1:1", "this engine does not decode")],
)
def test_a_room_that_cannot_be_announced_fails_its_request_only(src, dst, caplog, at, address, why):
    side, remote = {"src": src, "dst": dst}[at], Remote("room", address, "engine")
    assert failed(side, PdStageMetadata(receives={"r": Receive(remote, side.held(BLOCKS, N_TOKENS))})) == {"r"}
    assert stats(side).data["not_received"] == [1]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("request r is not received: ") and why in said


def test_a_router_may_try_another_engine_under_its_transfer_id(dst):
    """The first one's engine is dead, and its request waits: the other loads from the engine that its own try names."""
    for name in ("dead", "alive"):
        wanted = arrived(dst, EARLY | {"remote_bootstrap_addr": f"{name}:8998"}, name=f"req-{name}")
        assert asks(dst, wanted) == (N_TOKENS, True)
    news = dst.scheduler.build_connector_meta(None)
    wants = [(remote.address, is_wanted) for remote, is_wanted in news.wants]
    assert wants == [("dead:8998", True), ("alive:8998", True)]
    (receive,) = allocate(dst, wanted, N_TOKENS).receives.values()
    assert receive.remote.address == "alive:8998"


@pytest.mark.parametrize(
    ("told", "name", "wrong"),
    [
        (EARLY, "transfer_id", ["x"]),
        (EARLY, "remote_bootstrap_addr", {}),
        (EARLY, "remote_engine_id", 7),
        (ANSWER, "remote_engine_id", None),
        (ANSWER, "remote_room", ["r"]),
        (ANSWER, "remote_room", None),
        (ANSWER, "remote_host", ["h"]),
        (ANSWER, "remote_host", None),
        (ANSWER, "remote_port", None),
        (ANSWER, "remote_num_tokens", "12"),
        (ANSWER, "remote_num_tokens", 0.5),
    ],
)
def test_a_clients_own_words_end_no_engine(dst, caplog, told, name, wrong):
    """vLLM takes `kv_transfer_params` as they come, and an exception here ends all requests."""
    wanted = arrived(dst, told | {name: wrong})
    assert asks(dst, wanted) == (0, False)
    assert "name no request of a prefill engine: it is computed here" in caplog.text
    assert not allocate(dst, wanted, 0)


def test_a_node_that_failed_ends_the_worker_and_leaves_no_request_waiting(src):
    src.step(PdStageMetadata(sends={"r": Send("room", src.held(BLOCKS, N_TOKENS))}))
    src.workers[0].worker_side.prefill.driver.fail(RuntimeError("a bug"))
    with pytest.raises(UsageError, match="this node failed before"):
        src.step()


def test_a_call_that_raises_ends_the_worker_and_no_later_one_is_made(caplog):
    """Calls are made by a thread whose waking takes no processor from the worker, and which nobody waits for."""
    tasks, may, made = Tasks(), threading.Event(), []
    tasks.put(lambda: made.append(may.wait(PATIENCE_S)))
    tasks.put(lambda: made.append(os.sched_getscheduler(0)))
    tasks.put(lambda: made.remove("a mistake"))
    tasks.put(lambda: made.append("later"))
    tasks.check()
    may.set()
    tasks.close()
    assert made == [True, os.SCHED_BATCH]
    with pytest.raises(ValueError, match="not in list"):
        tasks.check()
    assert "a task of a worker's step failed" in caplog.text


def test_decode_never_goes_on_from_less_than_it_asked_for(src, dst):
    sent, wanted = src.held(BLOCKS, N_TOKENS - 1), dst.held(BLOCKS, N_TOKENS)
    assert transfer(src, dst, "r", sent, wanted) == {"r"}
    assert stats(dst).data["not_received"] == [1]


FULL, SWA = attention(1, 16), attention(1, 16, SlidingWindowSpec, sliding_window=32)


def test_a_group_loads_what_it_lacks_of_what_is_read():
    """A window's blocks may be gone where full attention's are cached: vLLM says so beside recurrent states."""
    cached, lacking = (blocks_of([7, 8, 9], n_cached=n).blocks[0] for n in (2, 0))
    full, window = Group(0, "kv", FULL), Group(1, "swa", SWA)
    assert full.n_cached(cached, 32) == 32
    assert (window.n_cached(cached, 32), window.n_cached(lacking, 32)) == (32, 0)
    assert window.n_cached([KVCacheBlock(0, is_null=True), *lacking[1:]], 32) == 16
    assert window.held([0, 8, 9], 40, 16).tokens == (16, 40)
    assert window.held([0, 0, 0, 8, 9], 70) == ((8, 9), 48, (48, 70), (9,)), "tokens of null blocks are not asked for"
    state = Group(2, "mamba", MambaSpec(block_size=16, shapes=((3, 8),), dtypes=(torch.float16,)))
    assert state.held([0, 0, 4], 40) == ((4,), 0, None, ())
    assert [recomputed_tokens([full], n) for n in (0, 1, 3)] == [0, 0, 2]
    assert [recomputed_tokens([full, state], n) for n in (0, 1, 3)] == [1, 1, 2]


def test_what_an_operator_says(sides, monkeypatch):
    monkeypatch.setenv("PDSTAGE_NODE", '{"staging_nbytes": 524288, "config": {"drain_s": 7, "hello_s": 3}}')
    side = sides("kv_both", extra={"config": {"hello_s": 4.0}, "path": "staged"})
    nodes = side.workers[0].worker_side.prefill, side.workers[0].worker_side.decode
    assert [(node.path, node.config.drain_s, node.config.hello_s) for node in nodes] == [("staged", 7, 4.0)] * 2
    with pytest.raises(UsageError, match="kv_connector_extra_config has pah"):
        sides("kv_producer", extra={"pah": "staged"})


def test_stats_add_up_and_reach_prometheus(src, dst):
    assert not moved(src, dst)
    told = [stats(side) for side in (src, dst)]
    assert stats(src) is None
    both = PdStageConnector.build_kv_connector_stats().aggregate(told[0]).aggregate(told[1])
    shown = PdStageStats(data=json.loads(json.dumps(both.to_dict()))).reduce()
    assert shown["rooms sent"] == shown["rooms received"] == 1
    assert shown["rooms not sent"] == shown["rooms not received"] == 0
    assert shown["bytes transferred"] == src.workers[0].worker_side.prefill.stats()["bytes_written"] > 0
    registry = CollectorRegistry()
    kinds = {kind: lambda kind=kind, **given: kind(**given, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = PdStagePromMetrics(src.configs[0], kinds, ["engine"], {0: ["0"]})
    metrics.observe(both.to_dict() | {"not_received": [1, 1], "held_blocks": [3, 4]}, 0)
    read = lambda name: registry.get_sample_value(f"vllm:pdstage_{name}", {"engine": "0"})  # noqa: E731
    assert (read("sent_seconds_count"), read("received_seconds_count"), read("not_received_total")) == (1, 1, 2)
    assert read("bytes_transferred_total") == shown["bytes transferred"]
    assert (read("requests_sending"), read("held_blocks")) == (0, 4), "the most that any rank has"
    metrics.observe({"not_received": [1]}, 0)
    assert read("held_blocks") == 4, "a gauge stays until it is said anew"


def test_an_engine_s_nodes_are_found_and_watched_by_name(sides):
    ports = [free_port(), free_port()]
    with BootstrapServer() as directory:
        extra, client = {"directory": directory.address, "metrics_host": "0.0.0.0"}, client_of(directory.address)
        src = sides("kv_producer", extra=extra | {"metrics_port": ports[0]})
        with pytest.raises(UsageError, match=f"no metrics endpoint at 0.0.0.0:{ports[0]}"):
            sides("kv_producer", extra=extra | {"metrics_port": ports[0]})
        dst = sides("kv_consumer", extra=extra | {"metrics_port": ports[1] - 1, "instance": "d0"}, replica=1)
        until(lambda: len(members(client)) == 2, "both are listed")
        prefill, decode = sorted((one.advert for one in members(client)), key=lambda one: one.role, reverse=True)
        assert (prefill.instance, decode.instance, prefill.engine) == ("kv_producer-engine", "d0", "vllm")
        assert prefill.model == decode.model != ""
        assert not moved(src, dst)
        for one, port in zip((prefill, decode), ports, strict=True):
            assert one.metrics.endswith(f":{port}")
            told = Samples(get(one.metrics))
            for name in ("pdstage_rooms_ended_total", "pdstage_room_seconds_count"):
                assert told(name, engine="vllm", role=one.role, rank="0", outcome="success") == 1


def test_a_room_that_decode_was_told_of_is_sent_though_prefill_drains(src, dst):
    """Asked to drain while a request is computed, it serves that one, and names none afterwards."""
    node = src.workers[0].worker_side.prefill
    done = arrived(src, TO_PREFILL)
    src.turn()
    assert not drain([node.socket.endpoint], wait_s=2.0)[node.socket.endpoint].drained
    wanted = arrived(dst, ended(src, done))
    asks(dst, wanted)
    told = dst.step(allocate(dst, wanted, N_TOKENS))
    src.turn()
    until(lambda: told.extend(dst.step()) or any(one.finished_recving for one in told))
    assert not any(one.failed_recving for one in told)
    src.scheduler.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=src.workers[0].build_connector_worker_meta())
    )
    assert answered(src) is None
    assert not src.scheduler.build_connector_meta(None)
    given_back(src, "req-1")
    assert drain([node.socket.endpoint], wait_s=PATIENCE_S)[node.socket.endpoint].drained


def test_what_lasts_is_seen_while_it_lasts(sides):
    """A finished prefill that nobody asks for: its blocks and their age, until they are free."""
    src = sides("kv_producer", extra={"config": {"open_wait_s": 1.0}})
    held = src.held([[1, 2, 3]], N_TOKENS)
    src.step(PdStageMetadata(sends={"r": Send("room", held)}))
    seen = []

    def ended():
        over = any("r" in result.finished_sending for result in src.step())
        told = None if over else stats(src)
        if told is not None and told.data["requests_sending"] == [1]:
            seen.append((told.data["held_blocks"], told.data["oldest_held_s"]))
        return over

    until(ended)
    assert all(n_blocks == [3] for n_blocks, _ in seen)
    ages = [age for _, (age,) in seen]
    assert ages == sorted(ages) and ages[-1] > ages[0] >= 0
    last = stats(src).data
    assert (last["num_kv_expired_reqs"], last["not_sent"]) == ([1], [1])
    assert [last[name] for name in ("requests_sending", "held_blocks", "oldest_held_s")] == [[0], [0], [0.0]]
    assert stats(src) is None


def test_a_prompt_of_tokens_and_embeddings_is_cut_as_a_whole(sides):
    """vLLM's first model runner ends where they differ in length."""
    side = sides("kv_producer", windowed)
    mixed = Request("r", [1, 0, 0, 2], SamplingParams(max_tokens=9), None)
    mixed.prompt_embeds, mixed.prompt_is_token_ids = torch.zeros(4, 8), [True, False, False, True]
    mixed.kv_transfer_params = {"do_remote_decode": True}
    side.scheduler.on_new_request(mixed)
    assert length_from_prompt_token_ids_or_embeds(mixed.prompt_token_ids, mixed.prompt_embeds) == 3
    assert mixed.prompt_is_token_ids == [True, False, False]
    assert (mixed.num_prompt_tokens, mixed.num_tokens) == (3, 3)
