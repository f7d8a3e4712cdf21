"""What the scheduler's side tells the workers' side in each step, and what a worker tells the scheduler once.

Everything here is pickled, since vLLM sends it between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from pdstage.control.bootstrap import Advert
    from pdstage.integrations.vllm.groups import Held


class Remote(NamedTuple):
    """A request's room and the prefill engine that sends it: its directory's address, and its name there.

    A room's name is never reused, unlike request ids and, after a restart, engine ids, unless it is a router's
    `transfer_id` (`is_routers`). `is_early`: decode learns of it while prefill works, or before. `is_turn`: a decode
    engine keeps it for its conversation's next turn.
    """

    room: str | int
    address: str
    instance: str
    is_early: bool = False
    is_routers: bool = False
    is_turn: bool = False


class Chunk(NamedTuple):
    """The tokens of a request that this step computes and prefill sends early, by component."""

    held: dict[str, Held]
    stop: int
    """The step computes the request's tokens up to here."""


class Send(NamedTuple):
    """A request that ended at prefill: its blocks by component, and its statement to decode. `given_up`: it was not
    finished, though a part of it may have been sent.
    """

    room: str
    held: dict[str, Held]
    says: bytes | None = None
    given_up: bool = False
    open_wait_s: float | None = None
    """How many seconds it is held for a decode that may ask; None: as configured."""


class Receive(NamedTuple):
    """A request that decode waits for: its blocks by component, and the statement required of prefill; None: any."""

    remote: Remote
    held: dict[str, Held]
    says: bytes | None = None


@dataclass
class PdStageMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's news, by request id. `arrived` are requests that prefill will send early, and their rooms. `aborted`
    are requests that ended, or are held no longer, and why: while they load, before any of them was sent, or after.

    `preempted` come first, since their blocks are written in this step, `arrived` before its chunks, and `wants`
    before `receives`. `aborted` come last, since a request may have arrived, or got its blocks, in the same step.
    """

    preempted: dict[str, bool] = field(default_factory=dict)
    """By request: whether this step writes their blocks before a worker can wait."""
    arrived: dict[str, str] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    sends: dict[str, Send] = field(default_factory=dict)
    receives: dict[str, Receive] = field(default_factory=dict)
    aborted: dict[str, str] = field(default_factory=dict)
    wants: list[tuple[Remote, bool]] = field(default_factory=list)
    """Rooms that a request here will load (true), or that none will: their senders need not hold them."""
    names_more: bool = False
    """Whether rooms to send may be named, to decode, before the next step's news has them."""

    def __bool__(self) -> bool:
        return any(value for name, value in vars(self).items() if name != "names_more")


@dataclass
class PdStageWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker learned in a step of the rooms of turns that it announced: whether their decode engines have them
    still. And whether an operator drains it.
    """

    held: dict[Remote, bool]
    drains: bool

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PdStageWorkerMeta:
        assert isinstance(other, PdStageWorkerMeta)
        for room, is_held in other.held.items():
            self.held[room] = is_held and self.held.get(room, True)
        self.drains |= other.drains
        return self


@dataclass
class PdStageHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Adverts of prefill ranks."""

    adverts: tuple[Advert, ...]
