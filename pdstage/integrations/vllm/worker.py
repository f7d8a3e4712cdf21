"""A worker's side: one rank's nodes, the rooms of its requests, and their results.

The scheduler's metadata names the requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank, get_pcp_group

from pdstage import (
    DeadlineExceeded,
    DecodeNode,
    Items,
    PdstageError,
    Pool,
    PrefillNode,
    Receiver,
    Sender,
    State,
    Topology,
    UsageError,
)
from pdstage.arguments import quotient
from pdstage.integrations.model import facts
from pdstage.integrations.vllm.caches import Caches
from pdstage.integrations.vllm.metadata import (
    Chunk,
    PdStageHandshake,
    PdStageMetadata,
    PdStageWorkerMeta,
    Receive,
    Remote,
    Send,
)
from pdstage.integrations.vllm.stats import NOW, PdStageStats
from pdstage.integrations.vllm.streams import EarlySender, LayerGroups, Layers
from pdstage.integrations.vllm.writers import probes_of
from pdstage.probe import prove_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pdstage.integrations.operated import Operated
    from pdstage.integrations.vllm.groups import Held
    from pdstage.integrations.vllm.settings import Settings
    from pdstage.layout.topology import Range
    from pdstage.manager.handle import CudaEvent, Handle

log = logging.getLogger(__name__)

_EARLY_S = 600.0
"""How long prefill may take to compute a request whose room it has begun, until its first chunk."""
_LONGEST_S = 86_400.0
"""How long a request may wait for blocks here, and its load last: vLLM ends it, if nothing else does."""


class Tasks:
    """Makes calls in order, in one thread: those to nodes, for which the forward pass must not wait. The node's own
    thread may hold its lock for milliseconds, and a call to a node sends its messages itself. After a call that raises
    none is made.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pdstage-vllm-worker", _as_batch_thread)
        self._failure: Exception | None = None

    def put(self, task: Callable[[], None]) -> Future[None]:
        """Queues `task`, and returns at once."""
        return self._thread.submit(self._call, task)

    def check(self) -> None:
        """Raises the error of an earlier call."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Makes the calls that are queued, then ends."""
        self._thread.shutdown()

    def _call(self, task: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                task()
            except Exception as error:
                log.exception("a task of a worker's step failed")
                self._failure = error


def _as_batch_thread() -> None:
    """Waking this thread must not cost the worker its processor. If all are busy, a waking thread preempts a running
    one, often the one that woke it, for milliseconds; under Linux's SCHED_BATCH it does not (sched(7)).
    """
    with contextlib.suppress(AttributeError, OSError):  # only Linux has it, and a sandbox may refuse it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: this thread


class WorkerSide:
    """The worker's side of the connector. The worker's one thread makes all calls; the nodes have their own threads.

    One more thread carries out a step's news, in the order of steps. It asks the nodes for rooms, so the forward pass
    does not wait for them. A refusal by pdstage fails one request. Any other error is a bug here and ends the worker,
    and vLLM with it.
    """

    _caches: Caches
    _groups: LayerGroups
    """Both from `register` on, which vLLM calls before any step."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self._config, self._kv_cache_config, self._settings = vllm_config, kv_cache_config, settings
        self._transfer = vllm_config.kv_transfer_config
        settings.node(PrefillNode if self._transfer.is_kv_producer else DecodeNode)  # refused before a thread starts
        self.topology = topology_of(vllm_config.parallel_config)
        self._operated: Operated | None = None
        self.prefill: PrefillNode | None = None
        self.decode: DecodeNode | None = None
        self._computed: CudaEvent | None = None
        # The task thread fills these three and the worker's thread empties them, by atomic calls.
        self._sending: dict[str, Sender | None] = {}
        """By request; None for a room that could not begin."""
        self._receiving: dict[str, tuple[Receiver | None, bytes | None]] = {}
        """The same, and the statement required of prefill; None: any."""
        self._turns: dict[Remote, tuple[Receiver | None, bool | None]] = {}
        """Announced rooms of turns, or None where that was refused, and what was told of each."""
        self._announced: dict[Remote, Receiver] = {}
        """Rooms whose requests wait for blocks. Only the task thread uses it."""
        self._early: dict[str, EarlySender] = {}
        """Requests that are sent while they are computed. Only the task thread uses it."""
        self._chunks: Mapping[str, Chunk] = {}
        """The chunks of this step, while its forward pass runs."""
        self._held: dict[str, tuple[int, float]] = {}
        """For each request that is being sent: how many blocks it holds, and since when. The oldest come first."""
        self._written: tuple[int, int] = (0, 0)
        """Bytes and descriptors that were reported."""
        self._lasting: tuple[int, ...] = ()
        """The gauges as last reported."""
        self._naming = self._begun = 0
        """The last step before which rooms to send may have been named, counted, and up to which they are all begun."""
        self._drains = False
        """Whether the scheduler was told so."""
        self._tasks = Tasks()
        self._stats = PdStageStats()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers vLLM's caches, by layer; rooms may come from now on. Raises `UsageError` for unsupported caches."""
        self._caches = Caches(kv_caches, self._kv_cache_config, self._config, self.topology)
        probes = probes_of(self._caches, self._config)
        proof = prove_layout(self._caches.layout, probes, trust_layout=self._settings.trust_layout)
        log.info("KV cache layout of rank %d: %s", self.topology.tp_rank, proof)
        at = {name: n for n, name in enumerate(self._config.compilation_config.static_forward_context)}
        keys = sorted(self._caches.keys.items(), key=lambda one: at.get(one[0], -1))  # as vLLM made the layers
        self._groups = LayerGroups({name: key.layer for name, (key, *_) in keys if key.component in self._caches.paged})
        pool = Pool.of(self._caches.layout, str(self._caches.device), keep=tuple(kv_caches.values()))
        model, is_dummy = self._config.model_config, self._config.load_config.load_format == "dummy"
        said = facts(model, model.model, dummy=is_dummy)
        self._operated = operated = self._settings.operated(self.topology.unique_rank, self._transfer.engine_id)
        if self._transfer.is_kv_producer:
            options = {"instance": self._transfer.engine_id, **self._settings.node(PrefillNode, said)}
            self.prefill = PrefillNode(pool, self.topology, publish=False, observers=operated.observers, **options)
            self.prefill.expects_rooms = lambda: self._begun != self._naming
            operated.add(self.prefill)
        if self._transfer.is_kv_consumer:
            options = self._settings.node(DecodeNode, said)
            self.decode = DecodeNode(pool, self.topology, observers=operated.observers, **options)
            operated.add(self.decode)

    def handshake(self) -> PdStageHandshake | None:
        """This rank's advert, if it prefills. Under prefill context parallelism vLLM keeps one answer a TP rank: each
        rank gives the adverts of its whole group.
        """
        if self.prefill is None:
            return None
        advert = self.prefill.advert
        if self._config.parallel_config.prefill_context_parallel_size == 1:
            return PdStageHandshake((advert,))
        group = get_pcp_group()
        ranks = range(group.world_size)
        return PdStageHandshake(
            tuple(group.broadcast_object(advert if rank == group.rank_in_group else None, src=rank) for rank in ranks)
        )

    # A step.

    def preempted(self, metadata: PdStageMetadata) -> None:
        """Called before anything else of this step, which may write the blocks of preempted requests."""
        if metadata.preempted:
            self.computed()
            self._tasks.put(partial(self._preempt, metadata.preempted)).result()
            self._tasks.check()

    def _preempt(self, names: Mapping[str, bool]) -> None:
        for name, is_overwritten in names.items():
            if (early := self._early.get(name)) is not None:
                early.preempted(name, is_overwritten=is_overwritten)

    def bound(self, metadata: PdStageMetadata) -> None:
        """Called before this step's forward pass: earlier passes computed the blocks of finished requests."""
        assert hasattr(self, "_caches") or not metadata, "a request before register_kv_caches"
        self._naming += metadata.names_more
        self._computed = self._event() if metadata.sends else None
        self.computed()  # vLLM's first model runner does not say so of a pipeline stage before a speculating one
        if metadata.arrived:
            self._tasks.put(partial(self._arrive, metadata.arrived))
        own = {name: one._replace(held=self._caches.own(one.held)) for name, one in metadata.chunks.items()}
        self._chunks = {name: chunk for name, chunk in own.items() if chunk.held}
        if self._chunks:
            assert self.prefill is not None, "a chunk of an engine that does not prefill"
            nbytes = sum(self._caches.nbytes(chunk.held) for chunk in self._chunks.values())
            # Each half of a batch that overlaps with the other passes a layer by itself.
            is_halved = self._config.parallel_config.use_ubatching
            self._groups.begin(1 if is_halved else self.prefill.pieces(nbytes))

    def passed(self, layer_name: str) -> None:
        """The forward pass has computed that layer, or launched it."""
        if self._chunks and (layers := self._groups.passed(layer_name)) is not None:
            self._stream(*layers, is_last=False)

    def computed(self) -> None:
        """Called after this step's forward pass, or its launch: sends what is sent early."""
        if self._chunks:
            self._stream(*self._groups.rest(), is_last=True)
            self._chunks = {}

    def _stream(self, start: int, stop: int, *, is_last: bool) -> None:
        layers = Layers(start, stop, self._event(), is_last)
        self._tasks.put(partial(self._send_early, self._chunks, layers))

    def begin(self, metadata: PdStageMetadata) -> None:
        """Queues this step's news. Raises errors that are bugs here, of an earlier step's too."""
        self._tasks.check()
        if metadata:
            for request_id, send in metadata.sends.items():
                n_blocks = sum(len(one.blocks) for one in send.held.values())
                self._held[request_id] = n_blocks, time.monotonic()
            self._clear(metadata)
            # Launched kernels may still zero or read the blocks to be loaded.
            after = self._event() if metadata.receives else None
            self._tasks.put(partial(self._carry_out, metadata, self._computed, after))
        if self._begun != self._naming and not metadata.names_more:
            self._tasks.put(partial(setattr, self, "_begun", self._naming))

    def _clear(self, metadata: PdStageMetadata) -> None:
        """Zeroes blocks that a request's tokens fill only in part, if vLLM zeroes new blocks. vLLM leaves out blocks
        that a connector loads, since it assumes that whole blocks are loaded (`record_for_zeroing`). Their other
        content, such as another layer's state, may be NaN as K and V, and a masked NaN is a NaN.
        """
        if not self._kv_cache_config.needs_kv_cache_zeroing:
            return
        for receive in metadata.receives.values():
            for component, one in self._caches.own(receive.held).items():
                if one.partly:
                    self._caches.clear(component, one.partly)

    def _carry_out(self, metadata: PdStageMetadata, computed: CudaEvent | None, after: CudaEvent | None) -> None:
        for request_id, send in metadata.sends.items():
            self._send(request_id, send, computed)
        for remote, is_wanted in metadata.wants:
            (self._want if is_wanted else self._abandon)(remote)
        for request_id, receive in metadata.receives.items():
            self._receive(request_id, receive, after)
        for request_id, why in metadata.aborted.items():
            if (early := self._early.pop(request_id, None)) is not None:
                early.sender.abort(why)
            receiver, _ = self._receiving.get(request_id, (None, None))
            for handle in (receiver, self._sending.get(request_id)):
                if handle is not None:
                    handle.abort(why)

    def _arrive(self, rooms: Mapping[str, str]) -> None:
        """Begins rooms before their requests are scheduled: decode, which may have opened them, knows that they come.
        Not in `begin`, which vLLM 0.33 calls after the forward pass.
        """
        for request_id, room in rooms.items():
            try:
                self._early[request_id] = self._begin(room, _EARLY_S)
            except PdstageError as error:
                log.warning("request %s is not sent: %s", request_id, error)

    def _send_early(self, chunks: Mapping[str, Chunk], layers: Layers) -> None:
        for request_id, chunk in chunks.items():
            early = self._early.get(request_id)
            if early is None:
                continue  # refused as it arrived
            try:
                for held, some in early.computed(chunk, layers):
                    items, tokens, _ = self._named(held)
                    early.sender.chunk(items, tokens, layers=(some.start, some.stop), ready=some.ready)
            except PdstageError as error:
                log.warning("request %s is not sent: %s", request_id, error)
                early.sender.abort(str(error))

    def _send(self, request_id: str, send: Send, computed: CudaEvent | None) -> None:
        sender = None
        try:
            early = self._early.pop(request_id, None) or self._begin(send.room, send.open_wait_s)
            sender = early.sender
            if send.given_up:
                sender.abort("the request ended")
            else:
                items, tokens, states = self._named(early.rest_of(send.held))
                if items:
                    sender.chunk(items, tokens, ready=computed)
                hold_s = send.open_wait_s or early.hold_s
                sender.finish(send.says, states=states or None, ready=computed, open_wait_s=hold_s)
        except PdstageError as error:
            log.warning("request %s is not sent: %s", request_id, error)
            if sender is not None:
                sender.abort(str(error))
        self._sending[request_id] = sender

    def _begin(self, room: str, open_wait_s: float | None) -> EarlySender:
        assert self.prefill is not None, "a request to send at an engine that does not prefill"
        return EarlySender(self.prefill.send(room, open_wait_s=open_wait_s), self.prefill.config.open_wait_s)

    def _receive(self, request_id: str, receive: Receive, after: CudaEvent | None) -> None:
        receiver = None
        try:
            receiver = self._announce(receive.remote)
            items, tokens, states = self._named(receive.held)
            receiver.bind(items | states, tokens, after=after)
        except PdstageError as error:
            log.warning("request %s is not received: %s", request_id, error)
            if receiver is not None:
                receiver.abort(str(error))
        self._receiving[request_id] = receiver, receive.says

    def _want(self, remote: Remote) -> None:
        """Announces a room whose request waits here for blocks: its sender holds it on. Where that is refused, its
        load is, with the reason.
        """
        receiver = None
        with contextlib.suppress(PdstageError):
            receiver = self._announced[remote] = self._announce(remote)
        if remote.is_turn:
            self._turns[remote] = receiver, None

    def _abandon(self, remote: Remote) -> None:
        """A room that asks for nothing succeeds at once, and frees prefill's blocks."""
        try:
            self._announce(remote).bind({}, {})
        except PdstageError as error:
            log.warning("room %s is left to its deadline at prefill: %s", remote.room, error)

    def _announce(self, remote: Remote) -> Receiver:
        """The room, which may have been announced already; whoever binds it keeps it."""
        if (known := self._announced.pop(remote, None)) is not None:
            return known
        if self.decode is None:
            raise UsageError(
                "this engine does not decode", remedy='send such requests to one whose kv_role is "kv_consumer"'
            )
        longest_s = _EARLY_S if remote.is_early else None
        return self.decode.receive(
            remote.room, directory=remote.address, instance=remote.instance, deadline_s=_LONGEST_S, wait_s=longest_s
        )

    def _named(self, held: dict[str, Held]) -> tuple[dict[str, Items], dict[str, Range], dict[str, Items]]:
        """Pages and their tokens, and states, as nodes expect them."""
        items, tokens, states = {}, {}, {}
        for component, one in self._caches.own(held).items():
            if one.tokens is None:
                states[component] = Items(np.array(one.blocks, np.int64))
            else:
                items[component] = Items(self._caches.pages(component, one.blocks), one.first_token)
                tokens[component] = one.tokens
        return items, tokens, states

    def _event(self) -> CudaEvent | None:
        if self._caches.device.type == "cpu":
            return None
        # Not torch.Event, which forgets the device's index and is recorded on whatever device is current.
        event: CudaEvent = torch.cuda.current_stream(self._caches.device).record_event()
        return event

    # What became of them.

    def results(self) -> KVConnectorTransferResults:
        """The results of rooms whose memory became free since the last call."""
        self._tasks.check()
        for node in (self.prefill, self.decode):
            if node is not None:
                node.progress_inline()  # raises if it has failed: its rooms would never end
        results = KVConnectorTransferResults()
        for request_id, sender in list(self._sending.items()):
            if sender is None or sender.released:
                del self._sending[request_id], self._held[request_id]
                self._note(sender, request_id, "sent")
                results.finished_sending.add(request_id)
        for request_id, (receiver, says) in list(self._receiving.items()):
            if receiver is None or receiver.released:
                del self._receiving[request_id]
                results.finished_recving.add(request_id)
                is_received = self._note(receiver, request_id, "received")
                if is_received and receiver is not None and says not in (None, receiver.aux):
                    log.warning("request %s is not received: prefill sent %r, not %r", request_id, receiver.aux, says)
                    is_received = False
                if not is_received:
                    results.failed_recving.add(request_id)
        return results

    def told(self) -> PdStageWorkerMeta | None:
        """What is new of announced rooms of turns: whether their senders have them; and whether this rank drains."""
        held = {}
        for room, (receiver, told) in list(self._turns.items()):
            if receiver is None or receiver.state is State.FAILED:
                held[room] = False
                del self._turns[room]
                continue
            if (is_held := receiver.ready_to_bind) not in (None, told):
                held[room] = is_held
                self._turns[room] = receiver, is_held
            if receiver.bound:
                del self._turns[room]
        drains = not self._drains and any(node is not None and node.draining for node in (self.prefill, self.decode))
        self._drains |= drains
        return PdStageWorkerMeta(held, drains) if held or drains else None

    def _note(self, handle: Handle | None, request_id: str, what: str) -> bool:
        """Counts a room that is over, or that could not begin; whether it succeeded."""
        if handle is not None and handle.state is State.SUCCESS:
            self._stats.add(f"{what}_s", time.monotonic() - handle.began_at)
            return True
        self._stats.add(f"not_{what}", 1)
        if handle is not None:
            log.warning("request %s was not %s: %s", request_id, what, handle.error)
            if what == "sent" and isinstance(handle.error, DeadlineExceeded):
                self._stats.add("num_kv_expired_reqs", 1)
        return False

    def stats(self) -> PdStageStats | None:
        """Counts since the last call, and gauges; None if there is nothing to report."""
        before, self._written = self._written, self.prefill.written if self.prefill is not None else (0, 0)
        for name, total, was in zip(("bytes_transferred", "num_descriptors"), self._written, before, strict=True):
            if total > was:
                self._stats.add(name, total - was)
        lasting = (len(self._held), len(self._receiving), sum(n_blocks for n_blocks, _ in self._held.values()))
        if self._stats.is_empty() and not any(lasting + self._lasting):
            return None
        self._lasting = lasting
        oldest_s = max((time.monotonic() - since for _, since in self._held.values()), default=0.0)
        ended, self._stats = self._stats, PdStageStats()
        for name, value in zip(NOW, (*lasting, oldest_s), strict=True):
            ended.add(name, value)
        return ended

    def close(self) -> None:
        """Fails the open rooms and releases the memory."""
        self._tasks.close()
        for held in (self.prefill, self.decode, self._operated):
            if held is not None:
                held.close()
        self.prefill = self.decode = None


def topology_of(parallel: ParallelConfig) -> Topology:
    """This worker's place in its engine. A data-parallel replica of vLLM is a separate engine with its own directory.

    vLLM numbers a stage's ranks by prefill context, then by tensor parallelism, to form the groups of decode context
    parallelism: a group shares the tokens. Without such groups, ranks that share a prompt's computation each keep all
    of its KV: they are replicas here, as tensor-parallel ranks are of a latent.
    """
    tp_size, pcp_size = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
    pcp_rank = get_pcp_group().rank_in_group if pcp_size > 1 else 0
    cp_size, cp_rank = get_dcp_world_size_and_rank()
    return Topology(
        tp_size=quotient("tensor times prefill context parallel size", tp_size * pcp_size, cp_size),
        tp_rank=(parallel.rank % tp_size * pcp_size + pcp_rank) // cp_size,
        cp_size=cp_size, cp_rank=cp_rank, pp_size=parallel.pipeline_parallel_size,
        pp_rank=parallel.rank // (tp_size * pcp_size) % parallel.pipeline_parallel_size,
    )  # fmt: skip
