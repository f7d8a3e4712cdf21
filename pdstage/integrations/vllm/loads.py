"""The rooms that requests of this engine load: each from its request's arrival to the end of its load.

A room is announced as its request arrives, so that its sender holds it on while the request waits for blocks here. All
samples of one prompt name one room; the first to be scheduled loads it, and the others find its blocks in the prefix
cache. A router may use a `transfer_id` again: a request that arrives after the room's load has ended is of another try,
and loads what prefill has computed for it. The room of prefill's answer is never used again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdstage.integrations.vllm.metadata import Remote

_MAX_SPENT = 65_536
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
    n_local: int = 0
    """The tokens that the request which is about to load has already."""
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
        self._of: dict[str, Load] = {}
        """Of each request that names a room, until it has ended or gone on without it."""
        self._running: dict[str, Load] = {}
        """By the request that loads."""
        self._caching: list[Load] = []
        self._spent: OrderedDict[str, None] = OrderedDict()

    def of(self, request_id: str) -> Load | None:
        return self._of.get(request_id)

    def add(self, request_id: str, remote: Remote) -> tuple[Load, bool]:
        """The load of a request that arrives, and whether its room is to be announced."""
        load = self._by_room.get(remote)
        is_new = load is None or load.phase is Phase.OVER
        if load is None or is_new:
            load = Load(remote, Phase.SPENT if remote.room in self._spent else Phase.ANNOUNCED)
            self._by_room[remote] = load
        load.requests.add(request_id)
        self._of[request_id] = load
        return load, is_new and load.phase is Phase.ANNOUNCED

    def held(self, rooms: Mapping[Remote, bool]) -> None:
        """What is known of announced rooms: whether their senders have them."""
        for room, is_held in rooms.items():
            load = self._by_room.get(room)
            if load is not None and load.phase is Phase.ANNOUNCED:
                load.is_held = is_held

    def begin(self, request_id: str) -> None:
        """The request has blocks, and loads."""
        load = self._running[request_id] = self._of[request_id]
        load.phase = Phase.RUNNING
        self._spend(load)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def leave(self, request_id: str) -> Remote | None:
        """The request ended, or goes on without the room. The room, if nobody wants it any more: its sender need not
        hold it.
        """
        load = self._of.pop(request_id, None)
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
            load = self._running.pop(request_id, None)
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
