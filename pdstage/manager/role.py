"""What the driver and the sessions ask of the node they serve; prefill and decode fill it in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from pdstage.manager.effects import Gathers
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import ChunkEffect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.control.drain import Draining
    from pdstage.control.zmq import ControlSocket
    from pdstage.errors import PdstageError
    from pdstage.layout import Layout
    from pdstage.manager.effects import Carried
    from pdstage.manager.handle import Handle, Roster
    from pdstage.manager.lookup import Directory
    from pdstage.manager.observer import Observation
    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session
    from pdstage.stager import Copied, Stager
    from pdstage.transport import Done, Inbound, PostFailed, Transport

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
    socket: ControlSocket
    transport: Transport
    stager: Stager
    directory: Directory
    roster: Roster
    observed: Observation | None

    # For the driver; the first five under its lock.

    @abstractmethod
    def _take_asked(self, now: float) -> None:
        """In a turn: gives the core what engines asked for, once what it waited for is there."""

    @abstractmethod
    def _take_given(self, now: float) -> None:
        """In an engine's call: gives the core at once what must not wait for a turn."""

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
    def _layouts(self, session: Session) -> tuple[Layout, Layout]:
        """A session's layouts: prefill's, decode's."""

    @abstractmethod
    def _peer_name(self, session: Session) -> str:
        """A session's peer for people: its role and its place."""

    @abstractmethod
    def _path_to(self, session: Session) -> str:
        """Which path a session's chunks take, as far as this side knows, for people."""

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
