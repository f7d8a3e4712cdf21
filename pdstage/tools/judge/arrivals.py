"""What a room needs from its writers and what has arrived: tokens of layers, never a count (I5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdstage.manager.journal import Piece


@dataclass(slots=True)
class Arrivals:
    """Arrivals from one writer of one room."""

    needs: tuple[Piece, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    """By component: how many slots the writer said are its last."""
    _came: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    """By component and layer."""

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            for layer in range(piece.start, piece.stop, piece.step):
                self._came.setdefault((piece.component, layer), []).append((piece.first, piece.end))

    def missing(self) -> str:
        """Describes the first thing that never arrived; empty if everything did."""
        for need in self.needs:
            end = min(need.end, self.counts.get(need.component, need.end))
            for layer in range(need.start, need.stop, need.step):
                at = need.first
                for first, stop in sorted(self._came.get((need.component, layer), ())):
                    if first > at:
                        break
                    at = max(at, stop)
                if at < end:
                    return f"{need.component!r} layer {layer} from token {at} of {need.first}..{end}"
        return ""
