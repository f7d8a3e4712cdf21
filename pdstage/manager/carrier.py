"""Effects, carried out: in which order, and by whom.

Messages wait for the end of the turn, so that several to one peer travel as one; none waits for a large copy. Large
copies are carried out one at a time, after everything else: what one of them leads to, the write of the chunk just
gathered or the release of the lease just emptied, is under way before the next begins.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pdstage.control.zmq import MAX_FRAMES
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill_chunks import Gather
from pdstage.protocol.session import Attach, Changed, Detach, HangUp, PeerWarning, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.manager.role import Effect, Role

_LARGE_NBYTES = 128 << 10


class Carrier:
    """One driver's effects. One thread at a time."""

    def __init__(self, node: Role[Any]) -> None:
        self._node = node
        self._outgoing: dict[bytes, list[bytes]] = {}
        self.copies: deque[Gather | Scatter] = deque()
        """Large ones that wait for their turn."""

    def carry_out(self, effects: Sequence[Effect]) -> bool:
        """True if something was done here that the core should hear of at once."""
        large = bool(self.copies)
        for effect in effects:
            if isinstance(effect, Send):
                self._outgoing.setdefault(effect.route, []).append(effect.frame)
            elif not large:
                large = self._node._nbytes(effect) >= _LARGE_NBYTES
        if large:
            self.flush()
        again = False
        for effect in effects:
            again |= self._carry_one(effect)
        if self.copies:
            self._do(self.copies.popleft())
            again = True
        return again

    def flush(self) -> None:
        """Sends what was held back."""
        outgoing, self._outgoing = self._outgoing, {}
        for route, frames in outgoing.items():
            for start in range(0, len(frames), MAX_FRAMES):
                self._node.socket.send(route, frames[start : start + MAX_FRAMES])

    def _carry_one(self, effect: Effect) -> bool:
        node = self._node
        match effect:
            case Send():
                return False
            case Changed(room):
                node._on_changed(room)
                return False
            case PeerWarning(route, error):
                node._complain(route, error)
                return False
            case Attach(session, offers):
                node.sessions.attach(session, offers)
            case Detach(session):
                while self.copies:  # what they need of the session goes with it
                    self._do(self.copies.popleft())
                node.sessions.detach(session)
            case HangUp(route):
                node.sessions.hang_up(route)
                return False
            case Gather() | Scatter() if node._nbytes(effect) >= _LARGE_NBYTES:
                self.copies.append(effect)
            case _:
                self._do(effect)
        return True

    def _do(self, effect: Effect) -> None:
        ranges = self._node._ranges
        if ranges is None:
            self._node._carry(effect)
        else:
            with ranges.of(effect):
                self._node._carry(effect)
