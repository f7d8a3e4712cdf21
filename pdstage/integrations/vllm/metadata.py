"""What the scheduler's side tells the workers' in each step, and what a worker tells the scheduler once.

Everything here is pickled: vLLM's processes pass it on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

if TYPE_CHECKING:
    from pdstage.integrations.vllm.groups import Held


class Remote(NamedTuple):
    """A request's room, and the prefill engine that sends it: its directory's address, its name there.

    A room's name is its own for ever: request ids may come again, and an engine's id with its next process. `is_early`:
    decode hears of it while prefill works, or before.
    """

    room: str
    address: str
    instance: str
    is_early: bool = False


class Chunk(NamedTuple):
    """What this step computes of a request that prefill hands over while it works: its tokens, by component."""

    room: str
    held: dict[str, Held]
    stop: int
    """The request's tokens up to here are computed then."""


class Send(NamedTuple):
    """A request that ended at prefill: what it holds, by component, and what it says of it to decode. `given_up`: it
    was not finished, though a part of it may have been handed over.
    """

    room: str
    held: dict[str, Held]
    says: bytes | None = None
    given_up: bool = False
    open_wait_s: float | None = None
    """How long it is held for who may ask for it; None: as configured."""


class Receive(NamedTuple):
    """A request that decode waits for: where it goes, by component, and what prefill must say of it; None: anything."""

    remote: Remote
    held: dict[str, Held]
    says: bytes | None = None


@dataclass
class PdStageMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's news, by request id. `abandoned` are rooms that decode has no use for: prefill need not hold them.
    `withdrawn` are rooms that prefill will not send, though decode may wait for them.

    `preempted` come before all else, since their blocks are others' in this step; `aborted` come after `receives`: a
    request may be in both.
    """

    preempted: dict[str, bool] = field(default_factory=dict)
    """And whether this step writes their blocks before a worker can wait."""
    chunks: dict[str, Chunk] = field(default_factory=dict)
    sends: dict[str, Send] = field(default_factory=dict)
    receives: dict[str, Receive] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    abandoned: list[Remote] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))


@dataclass
class PdStageHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A prefill rank's advert (`pdstage.control.bootstrap.Advert`) as JSON."""

    advert: bytes
