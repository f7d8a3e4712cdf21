"""SGLang's KV manager over a pdstage node.

`sender` and `receiver` implement one request each. From SGLang's common manager it keeps the registration, the ranks'
topology, the room statuses with their consensus over pipeline stages, and the heartbeat. Its sockets carry no data.

SGLang does not pass a request's adapter (LoRA) to a transfer backend, and a request's KV depends on it. Hooks around
the two methods of SGLang's queues that create a request's sender and receiver pass them the adapter, and pass the
manager its scheduler. Prefill sends the adapter of its KV with the request's row (`rows`), and decode compares.
"""

from __future__ import annotations

import logging
import threading
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from sglang.srt.disaggregation import decode, prefill
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu
from sglang.srt.environ import envs
from sglang.srt.model_loader.weight_utils import kv_cache_scales_loader
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import (
    get_device,
    get_disagg,
    get_memory,
    get_model,
    get_observability,
    get_parallel,
    process_model_config,
)
from sglang.srt.utils.network import NetworkAddress

from pdstage import DecodeNode, PdstageError, PrefillNode, Receiver, Topology, UsageError, environment
from pdstage.control.address import Address
from pdstage.control.bootstrap import PLAIN
from pdstage.integrations.model import digest, facts
from pdstage.integrations.operated import Operated
from pdstage.integrations.options import node_options, trusts_layout
from pdstage.integrations.sglang.gauges import Gauges
from pdstage.integrations.sglang.memory import pool_of
from pdstage.integrations.sglang.pools import Pools
from pdstage.integrations.sglang.writers import probes_of
from pdstage.manager.observer import Event, Origin, RoomBound, RoomEnded
from pdstage.probe import prove_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sglang.srt.server_args import ServerArgs

    from pdstage.manager.handle import CudaEvent

log = logging.getLogger(__name__)

INSTANCE = "sglang"
_STOP_S = 3.0
"""A heartbeat in flight ends by itself within five seconds."""


class _All(NamedTuple):
    """An event that is done when all of `events` are."""

    events: list[CudaEvent]

    def query(self) -> bool:
        return all(event.query() for event in self.events)


class PdStageKVManager(CommonKVManager):  # type: ignore[misc]
    """One rank's manager, in either role."""

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
    reports_transfer_latency = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        _refuse_what_is_not_supported(disaggregation_mode)
        _install_hooks()
        self.status_lock = threading.RLock()
        self.owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The sender or receiver that each number stands for."""
        self._spare = count(-1, -1)
        """Numbers that no router gives."""
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if self.enable_all_cp_ranks_for_transfer and self.attn_cp_size > 1:
            raise UsageError("every context-parallel rank would send a part", remedy="use another transfer backend")
        self.is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        self.node: Any = None
        self.gauges: Gauges | None = None
        self.operated: Operated | None = None
        self.scheduler: Any = None
        """This rank's, from its first request on."""
        self._unsafe: dict[Receiver, int] = {}
        """Failed rooms to whose memory a peer may still write, and the numbers that SGLang knows them by."""
        self.register_buffer_to_engine()
        self._heartbeat = None if self.is_prefill else self._start_heartbeat_checker_thread()

    # The node. It is closed while SGLang releases its KV memory, and made anew when that memory is resumed.

    def register_buffer_to_engine(self) -> None:
        """Makes the node over the KV memory: at start, and when SGLang's memory is resumed."""
        if self.node is not None or (self.is_prefill and self.is_dummy_cp_rank):
            return
        kind = PrefillNode if self.is_prefill else DecodeNode
        meeting_s = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        waiting_s = float(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get())
        deadlines = {
            "open_wait_s": meeting_s,
            "send_wait_s": meeting_s,
            "wait_s": waiting_s,
            "transfer_s": waiting_s,
        }
        model = process_model_config()
        scales = _kv_scales(model.hf_text_config) if self.kv_cache_dtype_str == "fp8_e4m3" else None
        known = facts(model, model.model_path, kv_scales=scales, dummy=self.server_args.load_format == "dummy")
        # SGLang has no option for a backend's settings.
        options = node_options(kind, {}, where=environment.NODE.name, deadlines=deadlines, model=known)
        if cards := self.kv_args.ib_device:
            options["transport"] = over_devices(options.get("transport", "auto"), cards, self.kv_args.gpu_id)
        if self.is_prefill:
            # SGLang's server speaks plain HTTP.
            options["directory"] = PLAIN + Address.joined(_bootstrap_host(self), self.bootstrap_port)
            options["instance"] = INSTANCE
        is_one = self.system_dp_size == 1
        place = Topology(
            tp_size=self.attn_tp_size, tp_rank=self.attn_tp_rank, pp_size=self.pp_size, pp_rank=self.pp_rank,
            dp_size=self.attn_dp_size if is_one else self.system_dp_size,
            dp_rank=self.attn_dp_rank if is_one else self.system_dp_rank,
        )  # fmt: skip
        pool = pool_of(
            self.kv_args, place, model, is_mla=bool(self.is_mla_backend), device=str(get_device().device)
        )  # fmt: skip
        probes = probes_of(pool.layout, Pools.of(self.kv_args))
        log.info("KV memory: %s", prove_layout(pool.layout, probes, trust_layout=trusts_layout({}, where="")))
        if get_disagg().enable_pd_role_switch:  # a switch that fails ends the engine
            later = Address.parse(self._bind(reached=True), "tcp", listening=True)
            later.check_exposure(bool(options.get("insecure")), options.get("keys"))
        if self.operated is None:
            name = str(Address(self.local_ip, self.server_args.port))
            self.operated = Operated(
                {}, where=environment.NODE.name, engine="sglang", name=name, rank=place.unique_rank
            )
        observers = [*self.operated.observers, *([self] if self.is_prefill and self.pp_rank else [])]
        bind = self._bind(reached=self.is_prefill or "keys" in options)
        self.node = kind(pool, place, bind=bind, progress="thread", observers=observers, **options)
        self.operated.add(self.node)

    def awake(self) -> Any:  # noqa: ANN401  (a node of either kind)
        """The node. Raises `UsageError` while SGLang's memory is released: then only the request fails."""
        if self.node is None:
            raise UsageError("SGLang's KV memory is released", remedy="send the request again once it is resumed")
        return self.node

    def meet(self, scheduler: Any) -> None:  # noqa: ANN401  (SGLang's)
        """Called with this rank's scheduler at each request. The first call adds the node's metrics to SGLang's."""
        self.scheduler = scheduler
        if self.gauges is None and scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
            self.gauges = Gauges(lambda: self.node, scheduler.metrics_collector_context.collector)

    def launched(self) -> CudaEvent | None:
        """An event after all work that the scheduler has launched; None on the CPU.

        On its own stream it zeroes states. On the other one, with overlap, the step of a request may go on that has
        ended: it writes to pages that are free by now, and the scheduler's stream waits for its reads only.
        """
        streams = self.scheduler.schedule_stream, self.scheduler.forward_stream
        events = [event for stream in streams if (event := stream.record_event()) is not None]
        return _All(events) if events else None

    def deregister_buffer_to_engine(self) -> None:
        """Ends the node, since SGLang releases its KV memory. Open rooms fail."""
        if self.node is not None:
            self.node.close()  # which reports the failed rooms to `observe`
            self.node = None

    def teardown(self) -> None:
        """The engine changes its role: releases everything but SGLang's own memory. No room is open then."""
        if self.gauges is not None:
            self.gauges.close()
        self.deregister_buffer_to_engine()
        if self.operated is not None:
            self.operated.close()
        if self._heartbeat is not None:
            self._heartbeat_shutdown.set()
            self._heartbeat.join(_STOP_S)
            if self._prefill_recompute_executor is not None:
                self._prefill_recompute_executor.shutdown(wait=False, cancel_futures=True)
            for session in self.session_pool.values():
                session.close()
        self._zmq_ctx.destroy(linger=0)

    def _bind(self, *, reached: bool) -> str:
        """The address on which a node listens: one that is to be `reached` from elsewhere, by its peers and nothing
        further.

        Decode connects to prefill, and nothing connects to decode but operators, from elsewhere with keys. Prefill is
        found in the directory of SGLang's bootstrap server. If that server listens on loopback only, so does the node,
        and one host needs no keys.
        """
        if not reached:
            return "tcp://127.0.0.1:0"
        if not all(Address(host, 0).is_loopback for host in (self.bootstrap_host, _bootstrap_host(self))):
            return f"tcp://{Address.joined(self.local_ip, 0)}"
        return f"tcp://{Address('::1' if self.bootstrap_host == '::1' else '127.0.0.1', 0)}"

    # Memory of failed rooms, which SGLang's decode scheduler keeps until `is_abort_release_safe`. Another thread of
    # SGLang's asks prefill to compute a retracted request again. If that fails, it aborts the request.

    def hold(self, room: int, receiver: Receiver) -> None:
        """The room failed here, and a peer may still write to its memory."""
        with self.status_lock:
            held = {one: name for one, name in self._unsafe.items() if not one.released}
            self._unsafe = held | {receiver: room}

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can write to the memory of failed rooms of that name; acknowledgements are not counted."""
        with self.status_lock:
            return all(one.released for one, room in self._unsafe.items() if room == bootstrap_room)

    def let_go(self, bootstrap_room: int, receiver: Receiver) -> None:
        """SGLang takes back the memory of the failed room."""
        with self.status_lock:
            self._unsafe.pop(receiver, None)
        if not receiver.released:
            log.error(
                "room %s: SGLang reuses its memory though a peer may still write to it; fence %s, or raise %s",
                bootstrap_room, "its peers" if self.node is None else list(self.node.unfenced()),
                "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
            )  # fmt: skip

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """True where both ranks hold the same bytes, so that digests can be compared."""
        info = self.prefill_info_table.get(bootstrap_addr)
        return info is not None and info.attn_tp_size == self.attn_tp_size

    # Statuses of rooms. SGLang's scheduler writes them; on a later pipeline stage the node's thread does too. The first
    # stage takes the minimum of what all stages have written, and the others are not polled until a request begins.

    def observe(self, origin: Origin, event: Event) -> None:
        """Publishes a room's new state, on the node's thread.

        Another request may have the room's number by now. So the event only triggers a look-up, and the request gives
        the state.
        """
        is_told = isinstance(event, RoomBound | RoomEnded)
        request = self.owners.get(event.room) if is_told else None  # type: ignore[arg-type]  # SGLang's are numbers
        if request is not None:
            request.publish()

    def update_status(self, bootstrap_room: int, status: KVPoll) -> None:
        """Applies SGLang's rules for transitions, for one writer at a time: it reads, compares and writes."""
        with self.status_lock:
            super().update_status(bootstrap_room, status)

    # Whose a number is. A router may give one again while an earlier request has it. Then that one goes on, and the
    # later one fails, under a number of its own. An earlier one that is over gets another number, with its failure.

    def number_for(self, room: int, request: Any) -> int:  # noqa: ANN401  (a sender or a receiver)
        """By what SGLang's dicts know the request from now on: `room`, but while an unfinished request has that."""
        with self.status_lock, self.failure_lock:
            earlier = self.owners.get(room)
            if earlier is not None and earlier.conclude_state is None:
                return next(self._spare)
            reason = self.failure_records.pop(room, None)
            self.request_status.pop(room, None)
            if earlier is not None:
                earlier.bootstrap_room = next(self._spare)
                if reason is not None:
                    self.failure_records[earlier.bootstrap_room] = reason
                if not self.is_prefill:
                    self.addr_to_rooms_tracker[earlier.bootstrap_addr].discard(room)
            self.owners[room] = request
            return room

    def refuse(self, request: Any, room: int) -> None:  # noqa: ANN401
        """Fails a request that did not get its number."""
        reason = f"an earlier request has bootstrap_room {room}: give each request a number of its own"
        self.record_failure(request.bootstrap_room, reason)
        request.conclude_state = KVPoll.Failed

    def fail(self, request: Any, error: PdstageError | None) -> None:  # noqa: ANN401
        """Marks the request as failed, by `error` unless a reason is recorded already."""
        with self.failure_lock:
            self.failure_records.setdefault(request.bootstrap_room, str(error))
        self.update_status(request.bootstrap_room, KVPoll.Failed)


def _refuse_what_is_not_supported(mode: DisaggregationMode) -> None:
    """Raises `UsageError` for settings that break this backend's assumptions about rooms."""
    parallel = get_parallel()
    may_decode = mode == DisaggregationMode.DECODE or get_disagg().enable_pd_role_switch
    refused = {
        "decode context parallelism (--dcp-size)": parallel.attn_dcp_size > 1,
        "prefill context parallelism (--attn-cp-size) at decode":
            may_decode and parallel.attn_cp_size > 1,
        "--enable-hisparse at prefill": get_memory().enable_hisparse and mode == DisaggregationMode.PREFILL,
        "--enable-hisparse with --enable-pd-role-switch":
            get_memory().enable_hisparse and get_disagg().enable_pd_role_switch,
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "--enable-dsa-cache-layer-split": parallel.enable_dsa_cache_layer_split,
        "context- and tensor-parallel group sharing": parallel.enable_cp_tp_group_sharing,
        "--kv-canary (its rows are among the layers)": get_observability().kv_canary != "none",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0 (peers may still write to pages of failed requests)":
            not envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get(),
        "SGLANG_RUST_SERVER (its registry takes the bootstrap server's place)": envs.SGLANG_RUST_SERVER.get(),
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK (metadata on the device)":
            envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get() == "INTRA_NODE_NVLINK",
    }  # fmt: skip
    for what, asked in refused.items():
        if asked:
            raise UsageError(f"transfer backend pdstage does not support {what}", remedy="unset it")


def over_devices(transport: str | Mapping[str, object], ib_device: str, gpu: int) -> str | Mapping[str, object]:
    """`transport` from PDSTAGE_NODE, combined with the devices that `--disaggregation-ib-device` has for this GPU."""
    if transport != "nixl":
        log.warning(
            '--disaggregation-ib-device %s is ignored: it is for "transport": "nixl", and PDSTAGE_NODE has %s',
            ib_device, transport,
        )  # fmt: skip
        return transport
    devices = get_ib_devices_for_gpu(ib_device, gpu)
    return {"name": transport, "devices": [name.strip() for name in devices.split(",")]} if devices else transport


def _bootstrap_host(manager: CommonKVManager) -> str:
    """Of SGLang's bootstrap server, where the base class's `register_to_bootstrap` registers."""
    host: str = manager.bootstrap_host
    if manager.dist_init_addr:
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _kv_scales(config: Any) -> dict[int, float]:  # noqa: ANN401  (Transformers')
    """What `--quantization-param-path` has for this rank's layers, as SGLang's models read it."""
    path, parallel = get_model().quantization_param_path, get_parallel()
    if path is None:
        return {}
    of_layers = kv_cache_scales_loader(
        path, parallel.tp_rank, parallel.tp_size, config.num_hidden_layers, type(config).model_type
    )
    return {layer: scale for layer, scale in of_layers if scale != 1.0}


def adapter_of(scheduler: Any, lora_id: str | None) -> str | None:  # noqa: ANN401  (SGLang's)
    """Identifies the adapter that a request's KV is computed with: a digest of its weights if readable, else its name.

    Empty for a request without one; None for an adapter that this engine does not know yet.
    """
    if lora_id is None:
        return ""
    loaded = scheduler.tp_worker.model_runner.lora_manager
    known = None if loaded is None else loaded.lora_refs.get(lora_id)
    return None if known is None else digest(known.lora_path) or known.lora_name


def told(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Around the methods that create a request's sender, which `req` has then, and its receiver, which is returned."""
    made = original(queue, req, *args, **kwargs)
    one = getattr(made, "kv_receiver", None) or req.disagg_kv_sender
    if hasattr(one, "adapter"):  # not SGLang's fake transfer, nor a request that got no sender
        one.adapter = adapter_of(queue.scheduler, req.lora_id)
        one.kv_mgr.meet(queue.scheduler)
    return made


@cache
def _install_hooks() -> None:
    """Hooks the creation of every request's sender and receiver in this process."""
    queues = prefill.PrefillBootstrapQueue, decode.DecodePreallocQueue
    for method in (queues[0].create_sender, queues[1]._create_receiver_and_enqueue):
        HookRegistry.register(f"{method.__module__}.{method.__qualname__}", told, HookType.AROUND)
    HookRegistry.apply_hooks()
