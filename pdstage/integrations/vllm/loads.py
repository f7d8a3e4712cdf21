"""The rooms that requests of this engine load: each from its request's arrival to the end of its load.

A room is announced as its request arrives, so that its sender holds it on while the request waits for blocks here. All
samples of one prompt name one room; the first to be scheduled loads it, and the others find its blocks in the prefix
cache. A router may use a `transfer_id` again: a request that arrives after the room's load has ended is of another try,
and loads what prefill has computed for it. The room of prefill's answer is never used again.

Prefill loads what decode keeps of a conversation for its next turn, instead of computing it again. The next prompt
contains the last answer as text, and its tokens may differ: a chat template drops the reasoning, a tokenizer joins
pieces. So decode's answer identifies its tokens by digests (`kept_tokens`), and prefill loads those that are the same.
Whether decode has them still, it is asked when the next turn arrives: no clock of another host is believed.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm.v1.request import Request

    from pdstage.integrations.vllm.metadata import Remote

_MAX_SPENT = 65_536
_EVERY = 256
"""Tokens between two digests."""
_DIGEST_NBYTES = 8
_ANSWER_S, _BEGINS_S = 5.0, 1.0
"""How long a request waits to learn whether the room of its conversation's last turn is held, and how long it does not
believe a no: decode's workers begin the room a step after the client has decode's answer.
"""


class Phase(Enum):
    """A load's. SPENT: it is of a room that was loaded, or given up, for another request."""

    ANNOUNCED = auto()
    RUNNING = auto()
    CACHING = auto()  # it ended in the last step, and vLLM caches its blocks in the next
    OVER = auto()
    SPENT = auto()


@dataclass(eq=False)
class Load:
    """One room. `requests` are those that name it."""

    remote: Remote
    phase: Phase = Phase.ANNOUNCED
    requests: set[str] = field(default_factory=set)
    asked_by: str = ""
    """The request that is about to load, if vLLM gives it blocks: in this step, or in a later one (HiSparse)."""
    n_local: int = 0
    """The tokens that it has already."""
    is_held: bool | None = None
    """Of a turn: whether its sender has it; None until that is known."""
    since: float = field(default_factory=time.monotonic)

    def is_awaited(self) -> bool:
        """Whether a request should wait for `is_held` to become true."""
        return time.monotonic() - self.since < (_ANSWER_S if self.is_held is None else _BEGINS_S)


class Loads:
    """The loads of one scheduler."""

    def __init__(self) -> None:
        self._by_room: dict[Remote, Load] = {}
        """By engine too: a router may try another one under the same `transfer_id`."""
        self.of: dict[str, Load] = {}
        """Of each request that names a room, until it has ended or gone on without it."""
        self.running: dict[str, Load] = {}
        """By the request that loads."""
        self._caching: list[Load] = []
        self._spent: OrderedDict[str | int, None] = OrderedDict()

    def add(self, request_id: str, remote: Remote) -> bool:
        """A request that names a room arrives. Whether the room is to be announced: it is by its first request."""
        load = self._by_room.get(remote)
        if load is None or load.phase is Phase.OVER:
            load = Load(remote, Phase.SPENT if remote.room in self._spent else Phase.ANNOUNCED)
            self._by_room[remote] = load
        load.requests.add(request_id)
        self.of[request_id] = load
        return load.phase is Phase.ANNOUNCED and len(load.requests) == 1

    def held(self, rooms: Mapping[Remote, bool]) -> None:
        """What is known of announced rooms: whether their senders have them."""
        for room, is_held in rooms.items():
            load = self._by_room.get(room)
            if load is not None and load.phase is Phase.ANNOUNCED:
                load.is_held = is_held

    def begin(self, request_id: str) -> None:
        """The request has blocks, and loads."""
        load = self.running[request_id] = self.of[request_id]
        load.phase = Phase.RUNNING
        self._spend(load)

    def leave(self, request_id: str) -> Remote | None:
        """The request ended, or goes on without the room. The room, if nobody wants it any more: its sender need not
        hold it.
        """
        load = self.of.pop(request_id, None)
        if load is None:
            return None
        load.requests.discard(request_id)
        if load.requests or load.phase in (Phase.RUNNING, Phase.CACHING):
            return None
        self._forget(load)
        if load.phase is not Phase.ANNOUNCED:
            return None
        self._spend(load)
        return load.remote

    def ended(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests ended in this step."""
        for request_id in request_ids:
            load = self.running.pop(request_id, None)
            if load is not None:
                load.phase = Phase.CACHING
                self._caching.append(load)

    def step(self) -> None:
        """A step was scheduled: in it vLLM caches what had been loaded before."""
        for load in self._caching:
            load.phase = Phase.OVER
            if not load.requests:
                self._forget(load)
        self._caching.clear()

    def _forget(self, load: Load) -> None:
        if self._by_room.get(load.remote) is load:
            del self._by_room[load.remote]

    def _spend(self, load: Load) -> None:
        if not load.remote.is_routers:
            self._spent[load.remote.room] = None
            if len(self._spent) > _MAX_SPENT:
                self._spent.popitem(last=False)


def kept_tokens(request: Request, n_tokens: int) -> dict[str, Any]:
    """For `kv_transfer_params`: digests of the first `n_tokens`."""
    return {"remote_token_digests": "".join(digest for _, digest in _digests(request, n_tokens))}


def n_common(request: Request, params: Mapping[str, Any]) -> int:
    """How many first tokens of this request are those in `params`."""
    there, n_there = params.get("remote_token_digests"), params.get("remote_num_tokens")
    if not isinstance(there, str) or not isinstance(n_there, int):
        return 0
    at = 0
    for number, (stop, digest) in enumerate(_digests(request, n_there)):
        if stop > request.num_prompt_tokens or not there.startswith(digest, len(digest) * number):
            break
        at = stop
    return at


def _digests(request: Request, n_tokens: int) -> Iterator[tuple[int, str]]:
    """Digests after every 256 tokens and at the end: of all tokens so far, and of the images and other inputs that
    begin in them. Nothing for a prompt with embeddings, which no token identifies.
    """
    tokens = np.asarray(request.all_token_ids, np.int64)
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return
    hashed = hashlib.blake2b(str(request.cache_salt or "").encode(), digest_size=_DIGEST_NBYTES)
    others = sorted((one.mm_position.offset, one.identifier) for one in request.mm_features)
    for start in range(0, n_tokens, _EVERY):
        stop = min(start + _EVERY, n_tokens)
        if stop > len(tokens):
            return
        hashed.update(tokens[start:stop].tobytes())
        for offset, identifier in others:
            if start <= offset < stop:
                hashed.update(f"{offset}:{identifier}\0".encode())
        yield stop, hashed.hexdigest()
