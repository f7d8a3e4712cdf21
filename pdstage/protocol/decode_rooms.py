"""What a decode rank has of a room: its writers, and what of it has arrived.

What arrived of one writer is a set of rectangles, never a count (I5, I7). Rectangles name absolute tokens; what arrived
is kept by the numbers of those that both ranks hold (`ownership`), so that nobody waits for the others.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdstage.plan import Rect, Rects, Share, Shares
from pdstage.plan.ownership import EVERYTHING, Common, CommonTokens
from pdstage.protocol.room import Room
from pdstage.protocol.state import WriterPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pdstage.columns import Shared
    from pdstage.layout.topology import Range
    from pdstage.protocol import messages as m
    from pdstage.protocol.session import Session


class Intervals(list[int]):
    """A set of integers: the bounds of disjoint, ascending half-open intervals."""

    __slots__ = ()

    def add(self, start: int, stop: int) -> None:
        low, high = bisect_left(self, start), bisect_left(self, stop + 1)
        self[low:high] = ([start] if low % 2 == 0 else []) + ([stop] if high % 2 == 0 else [])

    def first_gap(self, start: int, stop: int) -> int | None:
        """The first number of `[start, stop)` that is missing."""
        at = bisect_left(self, start + 1)
        reached = self[at] if at % 2 == 1 else start
        return reached if reached < stop else None


@dataclass(slots=True, eq=False)
class _Need:
    """One component's tokens `[start, stop)` over a writer's layers, in bands of layers that arrived alike."""

    layers: list[int]
    start: int
    stop: int
    numbers: CommonTokens
    begins: list[int]
    """Where each band begins, as a place in `layers`, and where the last ends."""
    bands: list[Intervals]

    def numbered(self, start: int, stop: int) -> Range:
        numbers = self.numbers
        return (start, stop) if numbers.whole else (numbers.count(start), numbers.count(stop))

    def span(self, rect: Rect) -> Range:
        """The owned layers of `rect`, as places in `layers`."""
        return bisect_left(self.layers, rect.layer_start), bisect_left(self.layers, rect.layer_stop)

    def add(self, rect: Rect) -> None:
        low, high = map(self._cut, self.span(rect))
        for tokens in self.bands[low:high]:
            tokens.add(*self.numbered(rect.start, rect.stop))

    def gap(self, start: int, stop: int, low: int, high: int) -> tuple[int, int] | None:
        """(layer, token) of the first thing missing of tokens `[start, stop)` of the layers at `[low, high)`."""
        start, stop = self.numbered(start, stop)
        for begin, end, tokens in zip(self.begins, self.begins[1:], self.bands, strict=False):
            token = tokens.first_gap(start, stop) if begin < high and low < end else None
            if token is not None:
                return self.layers[max(begin, low)], self.numbers.token(token)
        return None

    def _cut(self, place: int) -> int:
        """The number of the band that begins at `place`, from now on."""
        at = bisect_left(self.begins, place)
        if self.begins[at] != place:
            self.begins.insert(at, place)
            self.bands.insert(at, Intervals(self.bands[at - 1]))
        return at


class Coverage:
    """What one writer owes one room, and what of it has arrived: of the tokens in `common` with it."""

    __slots__ = ("_complete", "_needs", "_uncounted")

    def __init__(
        self,
        shares: Iterable[Share],
        asked: tuple[m.Asked, ...],
        common: Common = EVERYTHING,
        exact: Iterable[str] = (),
    ) -> None:
        """Of the components in `exact` nothing is complete before `count` was called."""
        layers: dict[str, set[int]] = {}
        for share in shares:
            layers.setdefault(share.component, set()).update(range(*share.layers))
        self._needs = {
            name: _Need(sorted(layers[name]), start, stop, common.numbers(name), [0, len(layers[name])], [Intervals()])
            for name, start, stop in asked
            if name in layers
        }
        self._uncounted = self._needs.keys() & exact
        self._complete = False

    def whole(self) -> Rects:
        """All that is owed, as one chunk."""
        return tuple(
            Rect(component, need.start, need.stop, need.layers[0], need.layers[-1] + 1)
            for component, need in self._needs.items()
            if need.start < need.stop
        )

    def problem(self, rects: Iterable[Rect]) -> str:
        """Why `rects` were not asked of this writer, in words; empty if they were."""
        for rect in rects:
            need = self._needs.get(rect.component)
            if need is None:
                return f"{rect.component!r} was not asked of it"
            if not need.start <= rect.start < rect.stop <= need.stop:
                return f"{rect.component!r} {rect.start}..{rect.stop} is outside {need.start}..{need.stop}"
            first, end = need.numbered(rect.start, rect.stop)
            if first == end:
                return f"of {rect.component!r} {rect.start}..{rect.stop} the two ranks hold no token both"
            low, high = need.span(rect)
            if low >= high:
                return f"{rect.component!r} layers {rect.layer_start}..{rect.layer_stop} are not its own"
        return ""

    def add(self, rects: Iterable[Rect]) -> None:
        for rect in rects:
            self._needs[rect.component].add(rect)

    def covers(self, rects: Iterable[Rect]) -> bool:
        for rect in rects:
            need = self._needs[rect.component]
            if need.gap(rect.start, rect.stop, *need.span(rect)) is not None:
                return False
        return True

    def stops(self) -> Iterator[tuple[str, int]]:
        """Where what is needed of each component ends."""
        for component, need in self._needs.items():
            yield component, need.stop

    def count(self, component: str, n: int) -> None:
        """The writer has `n` slots of `component`, so that no more can be needed of it."""
        need = self._needs[component]
        need.stop = min(need.stop, n)
        self._uncounted.discard(component)

    def missing(self) -> str:
        """The first thing missing, in words. Once empty, always: no more is needed later."""
        if self._complete:
            return ""
        for component, need in self._needs.items():
            gap = need.gap(need.start, need.stop, 0, len(need.layers))
            if gap is not None:
                return f"{component!r} layer {gap[0]} from token {gap[1]}"
        self._complete = not self._uncounted
        return "" if self._complete else f"the number of slots of {min(self._uncounted)!r}"


@dataclass(slots=True, eq=False)
class Writer:
    """One writer of one room."""

    room: DecodeRoom
    number: int
    session: Session
    shares: Shares
    phase: WriterPhase = WriterPhase.UNOPENED
    coverage: Coverage = field(init=False)
    """Once its room is bound."""
    owed_nbytes: int = 0
    """All that it owes, staged as one chunk."""
    most_nbytes: int = 0
    """Of its largest staged chunk."""
    arrived: set[int] = field(default_factory=set)
    closing: m.CloseOk | None = None
    has_aux: bool = False
    row_arrived: bool = False
    reason: str = "finished"
    """Of its Abort after a success."""

    @property
    def direct(self) -> bool:
        """Whether it may write the room's pages."""
        return bool(self.room.wire_items and self.shares)

    @property
    def asks(self) -> bool:
        """Whether it is asked if its room is finished."""
        return self.has_aux and not self.room.ready_to_bind

    def staged_nbytes(self, rects: Rects) -> int:
        """What a chunk of `rects` has in staging memory; 0 for none that could be one."""
        if len({rect.component for rect in rects}) != len(rects) or not rects:
            return 0
        session = self.session
        return session.stagings.of(self.shares, rects).nbytes(session.common.tokens(rects))


@dataclass(slots=True, eq=False)
class DecodeRoom(Room):
    """One room as its decode rank sees it. `items` are the engine's, opaque here."""

    epoch: int
    deadline_s: float
    wait_s: float
    routes: dict[int, bytes] = field(default_factory=dict)
    """Of each writer, by its number; none while they are looked up."""
    writers: dict[m.SessionId, Writer] = field(default_factory=dict)
    bound: bool = False
    ready_to_bind: bool | None = None
    """Whether prefill has finished it; None until it has answered."""
    waits_to_bind: bool = False
    """Its engine looks whether prefill has finished it."""
    items: Mapping[str, Any] = field(default_factory=dict)
    wire_items: tuple[m.Items, ...] = ()
    asked: tuple[m.Asked, ...] = ()
    aux: bytes | None = None
    row: int | None = None
    """The number of the aux row that its writer may write."""
    shared: Shared | None = None
    """Once the aux is here, if it is a row: of which columns. Its bytes are in the row itself if `aux` is None."""
    pending: int = 0
    priority: int = 0
