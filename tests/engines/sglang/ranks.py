"""One rank of SGLang in a process of its own: its arguments, pools, KVArgs, manager, senders and receivers are its own.

What is missing is the model and the scheduler's queues: tests call what the queues call, in their order. The methods of
the queues that build KVArgs and the manager are run as they are, over a namespace that holds what they read.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import threading
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import prometheus_client
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation import decode, prefill, role_switch, utils
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, MetadataBuffers
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from pdstage import environment
from pdstage.errors import UsageError
from tests.engines import calls, stubs
from tests.engines.calls import PATIENCE_S
from tests.engines.sglang import setups
from tests.engines.sglang.pools import Memory
from tests.engines.sglang.setups import Setup
from tests.watch.samples import Samples, get

load_plugins()
MODEL = str(Path(__file__).parent / "model")
ROWS = 16


class Stages:
    """In place of the process group of one TP rank's pipeline stages: what the first stage says at the start."""

    def __init__(self, setup: Setup):
        self.is_first_rank, self.is_last_rank = setup.pp_rank == 0, setup.pp_rank == setup.pp_size - 1
        self._store = torch.distributed.FileStore(setup.meeting) if setup.meeting else None
        self._key = f"of {setup.tp_rank}"

    def broadcast_object(self, said, src):
        assert src == 0
        assert self._store is not None
        if self.is_first_rank:
            self._store.set(self._key, pickle.dumps(said))
        return pickle.loads(self._store.get(self._key))


class Groups:
    """The process groups over which SGLang takes the least of what the ranks of one stage say of a request."""

    def __init__(self, setup: Setup):
        store = torch.distributed.FileStore(f"{setup.meeting}-{setup.mode}-{setup.pp_rank}", setup.tp_size)
        torch.distributed.init_process_group("gloo", store=store, rank=setup.tp_rank, world_size=setup.tp_size)
        self.tp = torch.distributed.group.WORLD
        self.cp = [torch.distributed.new_group([rank]) for rank in range(setup.tp_size)][setup.tp_rank]


class Event(torch.cuda.Event):
    """An event of the streams below."""

    launched: frozenset[str] = frozenset()

    def record(self, stream: Stream):
        super().record(stream)
        self.launched = stream.launched

    def query(self):
        return bool(super().query()) and self.launched.isdisjoint(Stream.under_way)


class Stream(torch.cuda.Stream):
    """A scheduler's stream. Beside the device's work there is some that is over when the test says so."""

    under_way: ClassVar[set[str]] = set()
    launched: frozenset[str] = frozenset()

    def launch(self, work):
        self.under_way.add(work)
        self.launched |= {work}

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Scheduler(prefill.SchedulerDisaggregationPrefillMixin):
    """A scheduler as far as a backend sees it. The methods that send a request's chunks are SGLang's."""

    enable_staging, kv_checksum_computer, rust_server = False, None, None
    req_to_token_pool = None

    def __init__(self, **given):
        vars(self).update(given)
        self.enable_overlap = not runtime_context.get_schedule().disable_overlap_schedule
        self.schedule_stream, self.forward_stream = Stream(stubs.DEVICE), Stream(stubs.DEVICE)
        self.disagg_prefill_pending_chunk_rids: set[str] = set()

    def checkpoint_disagg_prefill(self, request: SimpleNamespace):
        """No tree of prefixes is here."""


class Request(SimpleNamespace):
    """What SGLang's methods read of a request."""

    __hash__ = object.__hash__


class Rank:
    """What tests ask of a rank; a method a call of the scheduler's."""

    def __init__(self, setup: Setup):
        torch.cuda.Event = Event  # type: ignore[assignment, misc]
        os.environ[environment.NODE.name] = setup.node
        os.environ.update(setup.environ)
        self.setup = setup
        torch.cuda.set_device(setups.GPU)
        arguments = [
            "--model-path", MODEL, "--device", setups.KIND, "--host", "127.0.0.1", "--skip-tokenizer-init",
            "--disaggregation-mode", setup.mode, "--disaggregation-transfer-backend", "pdstage",
            "--disaggregation-bootstrap-port", str(setup.port), "--tp-size", str(setup.tp_size),
            "--enable-metrics", "--page-size", str(setup.page_size), "--pp-size", str(setup.pp_size), *setup.options,
        ]  # fmt: skip
        self.args = args = prepare_server_args(arguments)
        ranks = runtime_context.SpawnRanks(world_rank=setup.tp_size * setup.pp_rank + setup.tp_rank, gpu_id=setups.GPU)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
        runtime_context.get_parallel().override_permanently(pp_group=Stages(setup))
        self.backend = utils.TransferBackend(runtime_context.get_disagg().disaggregation_transfer_backend)
        self.memory = Memory(setup)
        self.metadata = MetadataBuffers(ROWS, 64, torch.bfloat16, 1)
        self.metrics = SchedulerMetricsCollector.init_new(
            server_args=args, enable_priority_scheduling=False, enable_lora=False, enable_hierarchical_cache=False
        )
        self.adapters: dict[str, LoRARef] = {}
        self.manager = self._manager(args)
        self.port = setup.port
        self.groups = Groups(setup) if setup.meeting else None  # a rank by itself is asked for no request
        self.rooms: dict[int, object] = {}
        self.items: dict[int, dict[str, tuple[np.ndarray, int]]] = {}

    def _manager(self, args):
        model = runtime_context.process_model_config()
        model.hf_text_config.full_attention_layer_ids = [0, 3]  # what a hybrid model's config says
        kind = args.kv_cache_dtype if args.kv_cache_dtype != "auto" else "bfloat16"
        runner = SimpleNamespace(kv_cache_dtype_str=kind, lora_manager=SimpleNamespace(lora_refs=self.adapters))
        self.scheduler = scheduler = Scheduler(
            tp_worker=SimpleNamespace(model_runner=runner), model_config=model, server_args=args,
            metrics_collector_context=self.metrics, enable_hisparse=self.memory.host is not None,
            hisparse_coordinator=SimpleNamespace(mem_pool_host=self.memory.host),
        )  # fmt: skip
        parallel = runtime_context.get_parallel()
        queue = SimpleNamespace(
            transfer_backend=self.backend, tp_rank=parallel.tp_rank, pp_rank=parallel.pp_rank, scheduler=scheduler,
            token_to_kv_pool=self.memory.pool, draft_token_to_kv_pool=None, metadata_buffers=self.metadata,
            is_mla_backend=utils.is_mla_backend(self.memory.pool), enable_staging=False, queue=[],
            _check_if_req_exceed_kv_capacity=lambda req: False, _process_req=lambda req: None,
        )  # fmt: skip
        which = prefill.PrefillBootstrapQueue if self.setup.mode == "prefill" else decode.DecodePreallocQueue
        queue.kv_manager, self.queue = which._init_kv_manager(queue), queue
        return queue.kv_manager

    def _request(self, room, adapter: str | None) -> SimpleNamespace:
        return SimpleNamespace(
            rid=f"request {room}", bootstrap_room=room, bootstrap_host="127.0.0.1", bootstrap_port=self.port,
            disagg_prefill_dp_rank=None, lora_id=adapter, return_logprob=False,
        )  # fmt: skip

    # Both sides.

    def allocate(self, room, n_tokens, prefix):
        self.items[room] = self.memory.allocate(room, self.setup.mode == "prefill", n_tokens, prefix)

    def _state_indices(self, room) -> list[object] | None:
        """As the schedulers make them: arrays of pages, and a list of one array for mamba."""
        kinds = [kind.value for kind in self.manager.kv_args.state_types]
        items = self.items[room]
        return [[items[kind][0]] if kind == "mamba" else items[kind][0] for kind in kinds]

    def poll(self, room):
        """SGLang's own least of all TP ranks, which all of them must be asked for at once."""
        if self.setup.mode == "prefill":
            return utils.poll_and_all_reduce_attn_cp_tp_group([self.rooms[room]], self.groups.cp, self.groups.tp)[0]
        return utils.poll_and_all_reduce([self.rooms[room]], self.groups.tp)[0]

    def poll_alone(self, room):
        """What this rank says, whatever became of the others."""
        return int(self.rooms[room].poll())

    def poll_stages(self, room):
        """What SGLang asks the first stage alone until a request begins: the least of what all stages said."""
        sender = self.rooms[room]
        return int(sender.poll() if self.setup.pp_size == 1 else sender.poll_pp_consensus())

    def abort(self, room):
        self.rooms[room].abort()

    def failure(self, room):
        """What the scheduler does first with a room that failed."""
        try:
            self.rooms[room].failure_exception()
        except Exception as error:  # noqa: BLE001  (so does the scheduler)
            return str(error)
        raise AssertionError("a failure is raised")

    def clear(self, room):
        self.rooms.pop(room).clear()

    def clear_and_hear_late(self, room):
        """The room's state reaches the sender after the scheduler has cleared it; whether SGLang keeps nothing then."""
        sender = self.rooms.pop(room)
        sender.clear()
        sender.publish()
        return room not in self.manager.request_status

    def leftovers(self) -> dict[str, int]:
        """What a manager keeps of rooms that are over: nothing."""
        kept = {name: len(getattr(self.manager, name)) for name in ("failure_records", "_unsafe")}
        statuses = self.manager.request_status
        if self.setup.pp_size > 1:  # what this stage says, and at the first what the others said
            kept["stages"] = sum(map(len, statuses._peer_map.values()))
            statuses = statuses._local_map
        return kept | {"statuses": len(statuses), "handles": len(self.manager.node.handles())}

    def lacks(self, room, of_manager: list[str], of_room: list[str]) -> tuple[list[str], list[str]]:
        """Which of these names the manager has not, and which of those the room's sender or receiver."""
        asked = (self.manager, of_manager), (self.rooms[room], of_room)
        return tuple([name for name in names if not hasattr(one, name)] for one, names in asked)

    def released(self, room):
        """Whether pdstage itself says that nothing touches the room's memory."""
        handle = self.rooms[room]._room
        return handle is None or handle.released

    # What a test does to a rank, to see what its scheduler is told then.

    def load_adapter(self, adapter, name, path):
        """SGLang's record of an adapter (LoRA) that it has loaded."""
        self.adapters[adapter] = LoRARef(lora_id=adapter, lora_name=name, lora_path=path, pinned=False)

    def withhold(self, room):
        """The room ended, and a peer may still touch its memory, as far as its handle says."""
        handle = self.rooms[room]._room
        handle.wait_released(PATIENCE_S)
        handle.status &= 0x7F

    def release_withheld(self, room):
        self.rooms[room]._room.status |= 0x80

    def hold_writes(self):
        """From now on the node does not learn that its writes are over."""
        transport = self.manager.node.transport
        self._poll, transport.poll = transport.poll, list

    def let_go(self):
        self.manager.node.transport.poll = self._poll
        self.manager.node.driver.kick()

    def waits(self) -> tuple[float, float]:
        return self.manager.node.config.wait_s, self.manager.node.config.transfer_s

    def break_node(self):
        self.manager.node.driver.fail(RuntimeError("a turn failed"))

    def prefix(self, room):
        return self.rooms[room].pop_decode_prefix_len()

    def refuse_to_wait(self):
        """From now on whoever waits for the node fails: SGLang's scheduler has other requests to serve."""

        def waits(*_):
            raise AssertionError("the scheduler waits")

        self.manager.node.wait_for = waits

    def call(self, room, other):
        """The test knows that request by another number from now on: its own comes again."""
        for known in (self.rooms, self.items):
            if room in known:
                known[other] = known.pop(room)

    def errors_of(self, name, room) -> list[str]:
        """What pdstage logs as errors during that call."""
        said: list[str] = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("pdstage").addHandler(handler)
        try:
            getattr(self, name)(room)
        finally:
            logging.getLogger("pdstage").removeHandler(handler)
        return said

    def launch(self, stream, work):
        """The scheduler launches `work` on that stream of its device."""
        getattr(self.scheduler, stream).launch(work)

    def end(self, work):
        """It is over, and what was computed is in the caches."""
        self.scheduler.forward_stream.synchronize()
        Stream.under_way.discard(work)

    def latency(self, room) -> float | None:
        return self.rooms[room].get_transfer_metric().transfer_latency_s

    def given_up(self, room):
        """Whether the node has ended the room, or the room was complete before it could."""
        return self.rooms[room]._room.state in (KVPoll.Failed, KVPoll.Success)

    # Prefill.

    def send_to(self, room, adapter: str | None = None):
        request = self._request(room, adapter)
        self.queue.bootstrap_port = self.port
        prefill.PrefillBootstrapQueue.create_sender(self.queue, request, num_kv_heads=4)
        self.rooms[room] = request.disagg_kv_sender

    def compute(self, room, start, stop):
        """Prefill's forward pass: tokens `[start, stop)` are in the caches, and the states are those after them."""
        with torch.cuda.stream(self.scheduler.forward_stream):
            for _, held, at, positions in self._all(room, start, stop):
                held.put(at, held.expected(room, positions))

    def begin(self, room, n_tokens):
        """`finalize_bootstrap`: the prefix that decode has, then `init`."""
        sender = self.rooms[room]
        prefix = sender.pop_decode_prefix_len()
        sender.init(prefill.kv_to_page_num(n_tokens - prefix, self.setup.page_size), room % ROWS)
        return prefix

    def send(self, room, start, stop, last):
        """`_send_kv_chunk`: whole pages, but for the last chunk, which carries states and metadata."""
        if last or self.scheduler.enable_overlap:
            self._result()
        page = self.setup.page_size
        pages, first = self.items[room]["kv"]
        if last:
            row = room % ROWS
            self.metadata.output_ids[row, 0] = room + 1000
            self.metadata.output_hidden_states[row] = float(room)
            self.metadata.bootstrap_room[row, 0] = room
        stop_page = -(-stop // page) if last else stop // page
        chunk = pages[start // page - first : stop_page - first]
        self.rooms[room].send(chunk, self._state_indices(room) if last else None, num_kv_tokens=stop - start)

    def chunked(self, room, n_tokens, stop):
        """The request's chunk up to `stop` was launched: `process_prefill_chunk`, and with overlap its result."""
        request = self._in_chunks(room, n_tokens)
        request.extend_end, self.scheduler.chunked_req = stop, request
        self.scheduler.process_prefill_chunk(None, SimpleNamespace())
        if self.scheduler.enable_overlap:
            self._result()
            self.scheduler.send_kv_chunk(request, last_chunk=False, end_idx=request.tmp_end_idx)

    def _result(self):
        """The step's result is there: `process_batch_result_disagg_prefill` waits for it."""
        self.scheduler.forward_stream.synchronize()

    def cached(self, room, n_tokens, stop):
        """`run_batch` of a request whose tokens up to `stop` were in the cache; up to where it was sent."""
        request = self._in_chunks(room, n_tokens)
        request.prefix_len = stop
        self.scheduler.maybe_send_cached_prefix_chunk(request, allow_send=True)
        return request.start_send_idx

    def _in_chunks(self, room, n_tokens) -> Request:
        """The request as SGLang's methods read it; its pages are in the scheduler's table."""
        page, size = self.setup.page_size, self.memory.pool.size
        pages, first = self.items[room]["kv"]
        table = ReqToTokenPool(1, 64 * page, "cpu", enable_memory_saver=False)
        slots = (pages[:, None] * page + np.arange(page)).reshape(-1)
        table.req_to_token[0, first * page : first * page + len(slots)] = torch.from_numpy(slots)
        self.scheduler.req_to_token_pool = table
        self.scheduler.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
            size, page, torch.bfloat16, "cpu", self.memory.pool, need_sort=False
        )
        return Request(
            rid=f"request {room}", kv=SimpleNamespace(req_pool_idx=0), disagg_kv_sender=self.rooms[room],
            origin_input_ids=range(n_tokens), start_send_idx=first * page, host_hit_length=0, pending_bootstrap=False,
        )  # fmt: skip

    # Decode.

    def ensure(self):
        return self.manager.try_ensure_parallel_info(f"127.0.0.1:{self.port}")

    def receive(self, room, adapter: str | None = None):
        made = decode.DecodePreallocQueue._create_receiver_and_enqueue(self.queue, self._request(room, adapter))
        self.rooms[room] = made.kv_receiver
        self.rooms[room].init(0)

    def bind(self, room, prefix=0):
        pages = self.items[room]["kv"][0]
        self.rooms[room].send_metadata(pages, room % ROWS, self._state_indices(room), decode_prefix_len=prefix)

    def wrong(self, room, n_tokens) -> list[str]:
        """Which tensors are not what the oracle says, and what of the metadata row is wrong."""
        found = []
        for component, held, at, positions in self._all(room, 0, n_tokens):
            if not torch.equal(held.take(at), held.expected(room, positions)):
                found.append(f"{component} {held.role} of layer {held.layer}")
        row = room % ROWS
        if int(self.metadata.output_ids[row, 0]) != room + 1000 or int(self.metadata.bootstrap_room[row, 0]) != room:
            found.append("metadata")
        if not bool((self.metadata.output_hidden_states[row] == float(room)).all()):
            found.append("hidden states")
        return found

    def fill(self, room, n_tokens, number):
        """The engine gives the room's memory to another request, which writes it."""
        with torch.cuda.stream(self.scheduler.forward_stream):
            for _, held, at, _ in self._all(room, 0, n_tokens):
                held.put(at, number)

    def holds(self, room, n_tokens, number):
        """Whether the room's memory is all `number`."""
        torch.cuda.synchronize()
        return all(bool((held.take(at) == number).all()) for _, held, at, _ in self._all(room, 0, n_tokens))

    def _all(self, room, start, stop):
        """Of each component and tensor: the entries that hold these tokens of the room, and their positions."""
        for component, (items, first) in self.items[room].items():
            for held in self.memory.held[component]:
                yield component, held, *self.memory.entries(held, items, first, range(start, stop))

    def defer(self, room):
        """`pop_transferred` of a failed room: the abort is told if decode did not tell it, and memory is kept."""
        receiver = self.rooms[room]
        assert receiver.kv_mgr.enable_deferred_decode_kv_release
        if not receiver.abort_notified:
            receiver.ensure_abort_notified(force_arm=True)

    def safe(self, room):
        """`resolve_deferred_releases`: whether the room's memory may go back to the pool."""
        receiver = self.rooms[room]
        return self.manager.is_abort_release_safe(receiver.number, len(receiver.bootstrap_infos))

    def release(self, room):
        """`_do_release`."""
        self.manager.clear_deferred_abort_state(self.rooms[room].number)
        self.rooms.pop(room).clear()

    def find(self, port):
        """Prefill's bootstrap server is there now."""
        self.port = port

    def switch(self) -> tuple[str, bool] | None:
        """What `handle_pd_role_switch` does of an idle engine; why SGLang rejects it, if it does."""
        scheduler = SimpleNamespace(
            server_args=self.args, disaggregation_mode=utils.DisaggregationMode(self.setup.mode),
            disagg_prefill_bootstrap_queue=SimpleNamespace(kv_manager=self.manager),
            disagg_decode_prealloc_queue=SimpleNamespace(kv_manager=self.manager),
            _pd_role_switch_unhealthy=False, _pd_role_switch_in_progress=False, disable_radix_cache=True,
        )  # fmt: skip
        mode = {"prefill": "decode", "decode": "prefill"}[self.setup.mode]
        if rejection := role_switch._reject_reason(scheduler, mode):
            return rejection
        role_switch.teardown_disaggregation(scheduler)
        runtime_context.get_context().override("role_switch.flip", disaggregation_mode=mode)
        self.setup = self.setup._replace(mode=mode)
        self.metadata = MetadataBuffers(ROWS, 64, torch.bfloat16, 1)
        self.manager = self._manager(self.args)
        return None

    def kept(self) -> tuple[int, int]:
        """Threads and open files of this process."""
        gc.collect()
        torch.cuda.synchronize()
        torch.ones(1, device=stubs.DEVICE).item()  # with an operator the double frees what those before it held
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    def enqueue(self, room, restore):
        """The request is in SGLang's own queue of those in transfer; `restore` is what became of the part of its prefix
        that decode's HiCache was to load itself.
        """
        request = decode.DecodeRequest(self._request(room, None), self.rooms[room], metadata_buffer_index=room % ROWS)
        request.hicache_restore_status = decode.HiCacheRestoreResult(restore)
        self.transfers = Transfers(self, request)

    def step(self) -> list[str]:
        """One step of decode's scheduler; what became of requests in transfer up to now."""
        self.transfers.pop_transferred()
        self.transfers.resolve_deferred_releases()
        return self.transfers.told

    def told(self, name) -> float | None:
        """What SGLang's metrics say of this rank, as they are scraped."""
        labels = {label: str(value) for label, value in self.metrics.collector.labels.items()}
        return prometheus_client.REGISTRY.get_sample_value(f"sglang:kv_transfer_{name}", labels)

    def exported(self, name, labels: dict[str, str]):
        """The same of all that its node exports."""
        return Samples(get(self.manager.operated.address))(name, **labels)

    def sleep(self):
        self.manager.deregister_buffer_to_engine()

    def wake(self):
        self.manager.register_buffer_to_engine()

    def refusal(self, node, host="", pools=True) -> tuple[str, str, str] | None:
        """What a node with those settings is refused with: the error's kind, the culprit and the remedy; on a host of
        that address, if given; without `pools` SGLang gave addresses only.
        """
        self.sleep()
        if host:
            self.manager.bootstrap_host = self.manager.local_ip = host
        if not pools:
            del self.manager.kv_args.pdstage_pools
        os.environ[environment.NODE.name] = node
        try:
            self.wake()
        except UsageError as error:
            return type(error).__name__, error.what, error.remedy
        return None


class Transfers(decode.DecodeTransferQueue):
    """SGLang's queue of one request; its scheduler, trees and allocators only keep in mind what they are told."""

    def __init__(self, rank: Rank, request: decode.DecodeRequest):
        self.told: list[str] = []
        nothing = SimpleNamespace(unlock=lambda lock: None, free=lambda row: None)
        self.queue, self._deferred_releases = [request], []
        self.gloo_group, self.tp_rank = rank.groups.tp, rank.setup.tp_rank
        self.metadata_buffers, self.tree_cache = rank.metadata, nothing
        self.req_to_metadata_buffer_idx_allocator = nothing
        self.enable_staging, self.enable_deferred_kv_release = False, True
        self.deferred_kv_release_timeout = 3600.0
        self.scheduler = SimpleNamespace(
            enable_decode_hicache=True, enable_hisparse=False,
            output_streamer=SimpleNamespace(stream_output=lambda requests, logprobs: self.told.append("answered")),
            metrics_reporter=SimpleNamespace(enable_metrics=True),
            metrics_collector=SimpleNamespace(
                increment_transfer_failed_reqs=lambda: None,
                observe_decode_deferred_kv_release=lambda duration_seconds, outcome: self.told.append(outcome),
            ),
        )  # fmt: skip

    def _release_request(self, request: decode.DecodeRequest):
        self.told.append("pages freed")

    def _process_hicache_local_restores(self, requests: list[decode.DecodeRequest]):
        """What became of them, the test says."""


def server(port):
    """SGLang's bootstrap server, in a process of its own: its launcher's."""
    return utils.get_kv_class(utils.TransferBackend("pdstage"), KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)


def serve(pipe: Connection, kind, what):
    """A child's life."""
    os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
    calls.serve(pipe, partial({"rank": Rank, "server": server}[kind], what))
    os._exit(0)
