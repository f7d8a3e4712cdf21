"""What the scheduler's side tells the workers' in each step, and what a worker tells the scheduler once.

Everything here is pickled: vLLM's processes pass it on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

if TYPE_CHECKING:
    from pdstage.integrations.vllm.groups import Held


class Remote(NamedTuple):
    """A request's room, and the prefill engine that sends it: its directory's address, its name there.

    A room's name is its own for ever: request ids may come again, and an engine's id with its next process.
    """

    room: str
    address: str
    instance: str


class Send(NamedTuple):
    """A request that prefill has finished: what it holds, by component."""

    room: str
    held: dict[str, Held]


class Receive(NamedTuple):
    """A request that decode waits for: where it goes, by component."""

    remote: Remote
    held: dict[str, Held]


@dataclass
class PdStageMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's news, by request id. `abandoned` are rooms that decode has no use for: prefill need not hold them.

    `aborted` come after `receives`: a request may be in both.
    """

    sends: dict[str, Send] = field(default_factory=dict)
    receives: dict[str, Receive] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    abandoned: list[Remote] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives or self.aborted or self.abandoned)


@dataclass
class PdStageHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A prefill rank's advert (`pdstage.control.bootstrap.Advert`) as JSON."""

    advert: bytes
