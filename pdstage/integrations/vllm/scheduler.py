"""The scheduler's side: vLLM's requests in, a step's metadata out; at prefill also the directory of its ranks.

The nodes belong to the workers, in other processes.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from vllm.v1.request import Request, RequestStatus

from pdstage import PrefillNode, UsageError
from pdstage.control.address import Address
from pdstage.control.bootstrap import BootstrapServer
from pdstage.integrations.model import digest
from pdstage.integrations.vllm.groups import groups_of, recomputed_tokens
from pdstage.integrations.vllm.loads import Loads, Phase, kept_tokens, n_common
from pdstage.integrations.vllm.metadata import (
    PdStageHandshake,
    PdStageMetadata,
    PdStageWorkerMeta,
    Receive,
    Remote,
    Send,
)
from pdstage.integrations.vllm.streams import Stream, Streams
from pdstage.manager.lookup import Directory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

    from pdstage.integrations.vllm.settings import Settings, Turns

log = logging.getLogger(__name__)

Answer: TypeAlias = tuple[bool, dict[str, Any] | None]
"""Whether a request that ended keeps its blocks, and decode's `kv_transfer_params`."""
_DONE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """The scheduler's side of the connector. The engine's one thread makes all calls."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> None:
        self._engine_id: str = vllm_config.kv_transfer_config.engine_id
        self._settings = settings
        self._groups = groups_of(kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size)
        self._left = recomputed_tokens(self._groups, vllm_config.num_prefill_lookahead_tokens)
        self._has_state = any(group.is_state for group in self._groups)
        if settings.turns is not None and any(one.is_state and one.spec.num_speculative_blocks for one in self._groups):
            raise UsageError(
                "bidirectional_kv_xfer for a model with recurrent states that is decoded speculatively: after an "
                "answer its state may be in the block of any draft token",
                remedy="leave out bidirectional_kv_xfer, or speculative decoding",
            )
        self._streams = Streams(self._groups)
        self.news = PdStageMetadata()
        """What the workers are told next; an engine makes a step for it even if idle."""
        self._loads = Loads()
        self._kept: set[str] = set()
        """Requests whose KV is held for their conversation's next turn."""
        self._to_send: set[str] = set()
        """Requests whose rooms are named as they end."""
        self._drains = False
        """Whether an operator drains a rank: no room is named any more, and what comes is computed where it ends."""
        self._shares_blocks = bool(vllm_config.cache_config.enable_prefix_caching)
        self._address = ""
        """Where decode engines find the ranks of this one, once they are there."""
        self._server: BootstrapServer | None = None
        self._first: Directory | None = None
        """Of a data-parallel replica that publishes its ranks in the first one's directory."""

    # The directory.

    def serve(self, handshakes: Mapping[tuple[int, int], PdStageHandshake]) -> None:
        """Serves the adverts of all workers, by (pp rank, tp rank). Called again after they registered anew.

        Data-parallel replicas behind one API server share the first one's directory, if it has a port that they know:
        it is what a router is told. With `keys`, by which no router can read it, each has a directory of its own.
        """
        settings = self._settings
        adverts = [
            msgspec.structs.replace(one, replica=settings.replica)
            for each in handshakes.values()
            for one in each.adverts
        ]
        if not adverts:
            return
        node = settings.node(PrefillNode)
        exposure = {name: node[name] for name in ("keys", "insecure") if name in node}
        if settings.shared and not exposure.get("keys"):
            self._first = self._first or Directory()
            self._address = settings.shared
            self._first.publish(self._address, lambda: adverts, eventually=True)
            return
        if self._server is None:
            self._server = BootstrapServer(str(Address(settings.host, settings.port)), **exposure).start()
            self._address = self._server.address
            log.info("decode engines find this one at %s", self._address)
        for advert in adverts:
            self._server.directory.publish(advert, None)

    def close(self) -> None:
        """Ends the directory."""
        self._address = ""
        for one in (self._first, self._server):
            if one is not None:
                one.close()
        self._first = self._server = None

    # Prefill.

    def arrived(self, request: Request) -> None:
        """A request arrived; only now its room is read. Prefill leaves out the tokens that decode computes again."""
        params = request.kv_transfer_params
        if not params:
            return
        self._announce(request, params)
        if not params.get("do_remote_decode"):
            return
        self._cut(request)
        self._to_send.add(request.request_id)
        room = params.get("transfer_id")
        if room and self._address and not self._drains and self._streams.begin(request, room):
            self.news.arrived[request.request_id] = room

    def _cut(self, request: Request) -> None:
        left = self._left
        if not left or request.num_prompt_tokens <= left or request.get_skip_reading_prefix_cache():
            return
        for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):  # a mixed prompt has all three
            given = getattr(request, name)
            if given is not None:
                setattr(request, name, given[:-left])
        del request._all_token_ids[-left:]
        request.num_prompt_tokens -= left
        request.max_tokens = 1

    def finished(self, request: Request, blocks: Sequence[Sequence[int]]) -> Answer:
        """A request ended with `blocks` of each of vLLM's groups. Returns whether it keeps them, and decode's
        parameters.
        """
        params = request.kv_transfer_params
        if not params:
            return False, None
        if request.request_id in self._loads.running:
            self.news.aborted[request.request_id] = "the request ended"
        self._leave(request)
        self._to_send.discard(request.request_id)
        is_done, turns = request.status in _DONE and any(blocks), self._settings.turns
        if not params.get("do_remote_decode"):
            keeps = is_done and turns is not None
            return self._hand_over(request, blocks, None, turns) if keeps else (False, None)
        stream = self._streams.of.pop(request.request_id, None)
        if is_done:
            is_another_s = stream is None and params.get("transfer_id") is not None and self._address != ""
            return (False, None) if is_another_s else self._hand_over(request, blocks, stream)
        if stream is None:
            return False, None
        if stream.has_begun:
            self.news.sends[request.request_id] = Send(stream.room, {}, given_up=True)
        else:
            self.news.aborted[request.request_id] = "the request ended"
        return stream.has_begun, None

    def _hand_over(
        self, request: Request, blocks: Sequence[Sequence[int]], stream: Stream | None, turns: Turns | None = None
    ) -> Answer:
        """Keeps the request's blocks for decode or, with `turns`, for prefill in the conversation's next turn."""
        # A state is as the last step leaves it: with asynchronous scheduling that is one after the request's end.
        n_in_flight = 0 if self._has_state else request.num_in_flight_tokens
        n_tokens = max(0, request.num_computed_tokens - n_in_flight)
        if self._drains and stream is None:
            return False, None
        if not self._address:
            log.error("request %s ends here: no worker of this engine sends", request.request_id)
            return False, None
        held = {group.component: group.held(blocks[group.index], n_tokens) for group in self._groups}
        adapter = _adapter_of(request.lora_request)
        if stream is not None:
            room, says = stream.room, self._says(n_tokens, adapter)
        else:
            room, says = f"{self._engine_id}:{request.request_id}:{secrets.token_hex(8)}", None
            if turns is not None:
                self._kept.add(request.request_id)
        ttl_s = turns.ttl_s if turns is not None else None
        self.news.sends[request.request_id] = Send(room, held, says, open_wait_s=ttl_s)
        host, port = self._address.rsplit(":", 1)
        return True, {
            "do_remote_prefill": turns is None,
            "do_remote_decode": turns is not None,
            "remote_block_ids": [],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": int(port),
            "remote_room": room,
            "remote_num_tokens": n_tokens,
            "remote_adapter": adapter,
            **({"transfer_id": room} if stream is not None else {}),
            **(kept_tokens(request, n_tokens) if turns is not None else {}),
        }

    def _says(self, n_tokens: int, adapter: str) -> bytes:
        """Prefill's statement about a room that decode opened before it knew; decode must expect the same.

        A state is of exactly `n_tokens`; of KV decode may want fewer.
        """
        return f"{f'{n_tokens} tokens' if self._has_state else 'its tokens'}, adapter {adapter!r}".encode()

    # Decode.

    def _announce(self, request: Request, params: Mapping[str, Any]) -> None:
        """Announces the room that a request names, if it does: prefill's, or that of its conversation's last turn."""
        is_turn = not params.get("do_remote_prefill")
        if is_turn and not (self._settings.turns and params.get("do_remote_decode") and params.get("remote_room")):
            return
        remote = _remote(params, is_turn=is_turn)
        if remote is None:
            return
        here = _adapter_of(request.lora_request)
        if (there := params.get("remote_adapter", here)) != here:
            log.warning(
                "request %s has adapter %r here and %r at prefill: it is computed here", request.request_id, here, there
            )
            self.news.wants.append((remote, False))
        elif not self._drains and self._loads.add(request.request_id, remote):
            self.news.wants.append((remote, True))

    def matched(self, request: Request, n_local: int) -> tuple[int | None, bool]:
        """How many tokens beyond the `n_local` cached ones come from prefill, and whether they are loaded
        asynchronously.

        None while another sample of the same prompt loads them: this request then finds the blocks in the cache. None
        too until it is known whether decode keeps the conversation's last turn still.
        """
        load, params = self._loads.of.get(request.request_id), request.kv_transfer_params
        if load is None:
            return 0, False
        is_asked = load.asked_by in load.requests and load.asked_by != request.request_id
        if is_asked or load.phase is not Phase.ANNOUNCED:
            waits = self._shares_blocks and load.phase not in (Phase.OVER, Phase.SPENT)
            return (None if waits else 0), False
        is_turn = load.remote.is_turn
        n_tokens = self._n_of_turn(request, params, n_local) if is_turn else self._n_of_prefill(request, params)
        if n_tokens <= n_local:
            return 0, False
        if is_turn and not load.is_held:
            return (None if load.is_awaited() else 0), False
        load.asked_by, load.n_local = request.request_id, n_local
        return n_tokens - n_local, True

    def _n_of_prefill(self, request: Request, params: Mapping[str, Any]) -> int:
        """How many first tokens of the request prefill has."""
        there, most = params.get("remote_num_tokens"), max(0, request.num_prompt_tokens - self._left)
        n_tokens: int = most if there is None else there
        # A state is of exactly that many tokens.
        return 0 if self._has_state and n_tokens > most else min(n_tokens, most)

    def _n_of_turn(self, request: Request, params: Mapping[str, Any], n_local: int) -> int:
        """How many first tokens of the request decode kept from the turn before. A window and a state exist only at
        that turn's end, and the token after them is computed.
        """
        assert self._settings.turns is not None
        n_tokens = n_common(request, params)
        if not all(group.is_whole for group in self._groups) and (
            n_tokens != params.get("remote_num_tokens") or n_tokens >= request.num_prompt_tokens
        ):
            return 0
        return n_tokens if n_tokens - n_local >= self._settings.turns.fewest else 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, n_external: int) -> None:
        """The request got `blocks`; `n_external` tokens will come from prefill."""
        load = self._loads.of.get(request.request_id)
        if load is None or n_external <= 0:
            self._leave(request)
            return
        n_tokens, ids = load.n_local + n_external, blocks.get_block_ids()
        held = {
            one.component: one.held(ids[one.index], n_tokens, one.n_cached(blocks.blocks[one.index], load.n_local))
            for one in self._groups
        }
        says = self._says(n_tokens, _adapter_of(request.lora_request)) if load.remote.is_early else None
        self.news.receives[request.request_id] = Receive(load.remote, held, says)
        self._loads.begin(request.request_id)

    def _leave(self, request: Request) -> None:
        """The request ended, or goes on without its room."""
        remote = self._loads.leave(request.request_id)
        if remote is not None:
            self.news.wants.append((remote, False))

    def ended(self, output: KVConnectorOutput) -> None:
        """The workers' results of this step."""
        if isinstance(output.kv_connector_worker_meta, PdStageWorkerMeta):
            self._loads.held(output.kv_connector_worker_meta.held)
            self._drains |= output.kv_connector_worker_meta.drains
        self._loads.ended(output.finished_recving or ())
        self._kept.difference_update(output.finished_sending or ())

    # Both.

    def step(self, output: SchedulerOutput) -> PdStageMetadata:
        """This step's news, returned once; `output` is what it computes."""
        self._loads.step()
        news, self.news = self.news, PdStageMetadata()
        news.names_more = bool(self._to_send) and not self._drains
        news.preempted, news.chunks = self._streams.step(output)
        return news

    def reset(self) -> bool:
        """Gives up what is held for next turns, such as KV of former weights. What a decode engine waits for stays."""
        self.news.aborted |= dict.fromkeys(self._kept, "the cache was reset")
        self._kept.clear()
        return True


def _adapter_of(lora: LoRARequest | None) -> str:
    """Identifies the adapter (LoRA) that a request's KV is computed with: a digest of its weights, else its name."""
    return "" if lora is None else digest(lora.lora_path) or lora.lora_name


class _Named(msgspec.Struct):
    """What of `kv_transfer_params` names a room. They may be a client's own words."""

    transfer_id: str | int | None = None
    remote_bootstrap_addr: str | None = None
    remote_engine_id: str | None = None
    remote_room: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_num_tokens: int | None = None


def _remote(params: Mapping[str, Any], *, is_turn: bool) -> Remote | None:
    """The room that prefill's answer names, or a router that asks both engines at once; `is_turn`: decode's answer. If
    none is named, logs it and returns None.
    """
    try:
        it = msgspec.convert(params, _Named)
    except msgspec.ValidationError:
        it = _Named()
    early, engine, room = it.transfer_id, it.remote_engine_id, it.remote_room
    if early and it.remote_bootstrap_addr and engine:
        return Remote(early, it.remote_bootstrap_addr, engine, is_early=True, is_routers=True)
    if not (room and engine and it.remote_host and it.remote_port):
        log.warning("kv_transfer_params %s name no request of a prefill engine: it is computed here", dict(params))
        return None
    address = Address.joined(it.remote_host, it.remote_port)
    return Remote(room, address, engine, is_routers=room == early, is_turn=is_turn)
