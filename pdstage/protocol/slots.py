"""What follows when the two sides of a room name different numbers of slots (I9).

Layer 2, pure. Must not know rooms, messages or leases: both cores ask here, so that both say the same.

Items without token positions are matched by order, so the side with fewer says how many there are, and the other keeps
as many of its own; SGLang trims its state indices so. A component that needs exact lengths refuses instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import PeerError
from pdstage.protocol.effects import PeerWarning

if TYPE_CHECKING:
    from pdstage.layout import Layout
    from pdstage.protocol.session import Core, Session


class Slots:
    """A node's components without positions, and which of them it has warned of."""

    def __init__(self, layout: Layout) -> None:
        self._of = {component.name: component for component in layout.components if not component.positional}
        self.exact = frozenset(name for name, component in self._of.items() if component.exact)
        self._warned: set[str] = set()

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def compare(self, core: Core, session: Session, name: str, at_prefill: int, at_decode: int) -> str:
        """Why a room with these numbers of slots cannot be, in words that name both; empty if it can.

        Where they differ and may, that is counted, and complained of the first time for each component.
        """
        if at_prefill == at_decode:
            return ""
        what = "slots" if self._of[name].tokens_per_item == 1 else "rows of slots"
        both = f"{at_prefill} {what} at prefill and {at_decode} at decode"
        if name in self.exact:
            return f"component {name!r} has {both}, and must have as many on both sides"
        core.counters.slots_trimmed += 1
        if name not in self._warned:
            self._warned.add(name)
            kept = f"component {name!r} has {both}: the first {min(at_prefill, at_decode)} are used"
            core.emit(PeerWarning(session.route, PeerError(kept, remedy="this is said once; see slots_trimmed")))
        return ""
