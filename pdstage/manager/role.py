"""What the driver and its parts ask of the role their node plays, and of each other.

An interface: `prefill` and `decode` fill it in, `node` makes what it is moved with, `driver` moves it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from pdstage.protocol.decode import DecodeCore, DecodeEffect
from pdstage.protocol.prefill import PrefillCore, PrefillEffect

if TYPE_CHECKING:
    import threading

    from pdstage.control.zmq import ControlSocket
    from pdstage.errors import PdstageError
    from pdstage.layout import Layout
    from pdstage.manager.lookup import Directory
    from pdstage.manager.nvtx import Ranges
    from pdstage.manager.observer import Observation
    from pdstage.manager.sessions import Sessions
    from pdstage.protocol.config import Config
    from pdstage.protocol.room import Room
    from pdstage.protocol.session import Session
    from pdstage.stager import Copied, Stager
    from pdstage.transport import Done, Inbound, PostFailed, Transport

AnyCore = TypeVar("AnyCore", bound=PrefillCore | DecodeCore)
Effect: TypeAlias = PrefillEffect | DecodeEffect


class Role(ABC, Generic[AnyCore]):
    """One core, what it is moved with, and what only its role knows.

    `_lock` is held whenever the core is touched. `_observed` is None where nobody observes: then nothing is timed.
    """

    config: Config
    core: AnyCore
    socket: ControlSocket
    transport: Transport
    stager: Stager
    directory: Directory
    sessions: Sessions
    _lock: threading.RLock
    _observed: Observation | None
    _ranges: Ranges | None

    # Effects and events.

    @abstractmethod
    def _carry(self, effect: Any) -> None:  # noqa: ANN401
        """Carries out an effect that only this role's core asks for; ends in `assert_never`."""

    @abstractmethod
    def _nbytes(self, effect: Effect) -> int:
        """Bytes that carrying out an effect copies or writes before it returns."""

    @abstractmethod
    def _on_staged(self, copied: Copied, now: float) -> None: ...

    @abstractmethod
    def _on_transport(self, event: Done | PostFailed | Inbound, now: float) -> None: ...

    def _on_refused(self, route: bytes, error: PdstageError, now: float) -> None:
        """A connection came to nothing for want of keys; `route` is empty where the other side tried it."""

    # What is waited for.

    @abstractmethod
    def _in_flight(self) -> bool:
        """Whether bytes are under way here: then a transport without descriptors is asked more often."""

    @abstractmethod
    def _must_ask(self) -> bool:
        """Whether a transport without descriptors may have something to say."""

    @abstractmethod
    def _expects(self) -> bool:
        """Whether an engine's event, which nobody announces, is waited for."""

    # Sessions.

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

    def _forget(self, session: Session) -> None:
        """A session is lost: lets go of what only this role made for it."""

    @abstractmethod
    def _is_fenced(self, session: Session) -> bool:
        """Whether the transport's disconnect alone makes a lost session harmless to this role."""

    @abstractmethod
    def _holds_nothing(self, session: Session) -> bool:
        """Whether a lost session keeps no memory of this node from use."""

    # What the driver does for its parts, and the node and its role add to.

    @abstractmethod
    def _on_changed(self, room: Room) -> None:
        """Brings the room's handle up to date."""

    @abstractmethod
    def _complain(self, route: bytes, error: PdstageError) -> None:
        """Logs what a peer did, within limits."""
