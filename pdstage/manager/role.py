"""What the driver carries out, and what it and the sessions ask of their node; prefill and decode fill it in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from pdstage.protocol.decode import DecodeCore, DecodeEffect
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill import PrefillCore, PrefillEffect
from pdstage.protocol.prefill_chunks import ChunkEffect, Gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.control.drain import Draining
    from pdstage.control.zmq import ControlSocket
    from pdstage.errors import PdstageError
    from pdstage.kernels import Pool
    from pdstage.manager.handle import Handle, Roster
    from pdstage.manager.lookup import Directory
    from pdstage.manager.observer import Observation
    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session
    from pdstage.stager import Copied, Stager
    from pdstage.transport import Done, Inbound, PostFailed, Transport


class Gathers(NamedTuple):
    """Gathers of one turn that read the same bytes: done as one; each is answered by its own ticket."""

    members: tuple[Gather, ...]


Effect: TypeAlias = PrefillEffect | DecodeEffect
Carried: TypeAlias = Effect | Gathers

AnyCore = TypeVar("AnyCore", bound=PrefillCore | DecodeCore)
Own = TypeVar("Own", bound=ChunkEffect | Gathers | Scatter)


class Role(ABC, Generic[AnyCore, Own]):
    """One core with its transport and stager, and what differs by role. `Own` are the effects of this role's core only.

    `observed` is None where nobody observes: then nothing is timed.
    """

    role: ClassVar[str]
    """ "prefill" or "decode"."""
    config: Config
    core: AnyCore
    pool: Pool
    path: str
    """ "auto", "direct" or "staged"."""
    socket: ControlSocket
    transport: Transport
    stager: Stager
    directory: Directory
    roster: Roster
    observed: Observation | None

    # For the driver; the first four under its lock.

    @abstractmethod
    def _take_asked(self, now: float) -> None:
        """In a turn: gives the core what engines asked for, once what it waited for is there."""

    @abstractmethod
    def _on_staged(self, copied: Copied, now: float) -> None: ...

    @abstractmethod
    def _on_transport(self, event: Done | PostFailed | Inbound, now: float) -> None: ...

    @abstractmethod
    def _on_refused(self, route: bytes, error: PdstageError, now: float) -> None:
        """A connection came to nothing for want of keys; `route` is empty where the other side tried it."""

    @abstractmethod
    def _on_changed(self, handle: Handle, status: int) -> None:
        """Brings `handle` to `status`, its room's as it was read once: an engine's call may end the room
        meanwhile, and tells that by another effect.
        """

    @abstractmethod
    def _joined(self, effects: Sequence[Carried]) -> Sequence[Carried]:
        """A turn's effects, where the pool is on a device: as one those that cost less so."""

    @abstractmethod
    def _carry(self, effect: Own) -> None:
        """Copies or writes."""

    @abstractmethod
    def _nbytes(self, effect: Own) -> int:
        """Bytes that carrying out an effect copies or writes before it returns."""

    @abstractmethod
    def _expects(self) -> bool:
        """Whether an engine's event, which nobody announces, is waited for."""

    @abstractmethod
    def _in_flight(self) -> bool:
        """Whether a transport without descriptors may have something to say, or bytes to move."""

    @abstractmethod
    def _asked_to_drain(self) -> Draining:
        """In a turn: an operator asks the node to drain. Begins it, and says how far it is."""

    # For the sessions.

    @abstractmethod
    def _identify_peer(self, session: Session, description: bytes) -> None:
        """Tells the transport who a session's peer is; raises `PdstageError` if that cannot be."""

    @abstractmethod
    def _is_fenced(self, session: Session) -> bool:
        """Whether a lost session is harmless to this role: by the transport's disconnect alone, or since the directory
        says that the peer has ended.
        """

    @abstractmethod
    def _holds_nothing(self, session: Session) -> bool:
        """Whether a lost session keeps no memory of this node from use."""

    @abstractmethod
    def _copies_to(self, session: Session) -> bool:
        """Whether copies of this node's own are under way to the session's peer: nothing but their end ends them."""
