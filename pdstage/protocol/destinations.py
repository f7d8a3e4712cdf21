"""What a prefill rank has of a room: the chunks its engine gave, and what each destination gets of them.

A *destination* is one decode rank's claim on one room, keyed by (session, epoch). A chunk of the engine becomes one or
more chunks of each destination: of what it asked for, cut to what its lanes and the send buffers hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pdstage.protocol.messages import AUX, DIRECT, Lease, Open, Written
from pdstage.protocol.room import Room
from pdstage.protocol.state import ChunkPhase, DestinationPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pdstage.layout.topology import Range
    from pdstage.plan import Rect, Rects, Shares, Staging
    from pdstage.protocol.session import Session

LEAST_PIECE_NBYTES = 4 << 20
"""So many bytes are one chunk, unless a limit is lower: what overlaps in shorter ones is less than chunks cost."""


@dataclass(slots=True, eq=False)
class SubmittedChunk:
    """One chunk as the engine gave it: rectangles, its items (opaque here), and whether its data exists yet."""

    rects: Rects
    items: Mapping[str, Any]
    ready: bool
    chunks: list[Chunk] = field(default_factory=list)
    """Its copies, one or more a destination."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk of one destination: at most one lease at a time, written at most once (I15)."""

    destination: Destination
    number: int
    source: SubmittedChunk
    rects: Rects
    nbytes: int
    phase: ChunkPhase = ChunkPhase.RESERVING
    direct: bool = False
    attempt: int = 0
    lane: int = 0
    cursor: int = 0
    checksum: int = 0
    """Of its bytes as they were gathered, where the session has checksums."""
    row: bool = False
    """It is the room's aux row, which goes direct."""
    waits_since: float = 0.0
    """Since when its data exists and it has no staging memory that it may write."""
    placed: bool = False
    """Set by the driver: it is gathered straight into its lease, so that only its tag is left to be sent."""

    @property
    def tokens(self) -> dict[str, Range]:
        """The token ranges to stage: the numbers of those that both ranks hold."""
        return self.destination.session.common.tokens(self.rects)

    @property
    def where(self) -> tuple[int, int]:
        """Lane and cursor, as its tag and Close say it."""
        return (self.lane, self.cursor) if not self.direct else (AUX if self.row else DIRECT, 0)


@dataclass(slots=True, eq=False)
class Destination:
    """One destination rank's claim on one room: the state of one (session, epoch)."""

    session: Session
    open: Open
    may_go_direct: bool = True
    """Whether this node lets its pool be read in place."""
    phase: DestinationPhase = DestinationPhase.WAITING
    room: PrefillRoom | None = None
    chunks: dict[int, Chunk] = field(default_factory=dict)
    unwritten: int = 0
    in_flight: int = 0
    written: list[Written] = field(default_factory=list)
    aux: bytes | None = None
    """What its CloseOk carries."""
    packed: bool = False
    reason: str = ""
    parked_nbytes: int = 0
    """What it counts for in its session while its room is not here."""
    epoch: int = field(init=False)
    advances: dict[int, Lease | None] = field(init=False)
    """Leases of chunks that do not exist yet, by their numbers; None: it was recalled."""
    shares: Shares = field(init=False)
    asked: dict[str, Range] = field(init=False)
    _exposed: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.epoch, self.shares = self.open.epoch, self.open.shares
        self.advances = {one.chunk: Lease(self.epoch, one.chunk, 0, *one[1:]) for one in self.open.advances}
        self.asked = {ask.component: (ask.start, ask.stop) for ask in self.open.asked}
        exposed = frozenset([items.component for items in self.open.items] if self.may_go_direct else ())
        self._exposed = exposed - self.session.staged.staged_only

    def may_direct(self, rects: Iterable[Rect]) -> bool:
        """Whether this node may, and the destination told where each of `rects` lies and lets it be written there.
        Nothing verifies what is.
        """
        session = self.session
        return session.in_place and not session.checksums and all(rect.component in self._exposed for rect in rects)


class GivenRow(NamedTuple):
    """An aux row in this rank's memory, unchanged until its room is released; `read` returns its bytes."""

    address: int
    read: Callable[[], memoryview]


@dataclass(slots=True, eq=False)
class PrefillRoom(Room):
    """One room as its prefill rank sees it."""

    sources: list[SubmittedChunk] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    """Of components without positions, how many slots the engine gave; one it never named is not here."""
    destinations: dict[int, Destination] = field(default_factory=dict)
    n_destinations: int = 0
    finished: bool = False
    aux: bytes | GivenRow | None = None
    in_flight: int = 0
    open_wait_s: float = 0.0
    waits_since: float = 0.0
    """When its wait for the last Open began."""
    carried: bool = False
    """The engine was told that all destinations have its chunks: their pages may hold something else."""
    deadline_s: float = 0.0
    """The last Open's. It holds for the engine too: a room that is never finished ends as well."""

    @property
    def opened(self) -> bool:
        """Whether every decode rank that will take part of the room has said so."""
        return 0 < self.n_destinations <= len(self.destinations)


def clip(rects: Rects, destination: Destination) -> Rects:
    """The part of `rects` that `destination` asked for, owns and holds tokens of; may be empty."""
    kept, common, stagings = [], destination.session.common, destination.session.stagings
    for rect in rects:
        low, high = destination.asked.get(rect.component, (0, 0))
        start, stop = max(rect.start, low), min(rect.stop, high)
        if start >= stop or not stagings.of(destination.shares, (rect,)).select:
            continue
        numbers = common.numbers(rect.component)
        if numbers.whole or numbers.count(start) < numbers.count(stop):
            kept.append(rect if (start, stop) == (rect.start, rect.stop) else rect._replace(start=start, stop=stop))
    return tuple(kept)


PieceLength: TypeAlias = "Callable[[Destination, Rects, int], int]"
"""How long the chunks are to be into which rectangles of so many bytes for a destination are split."""


def split(
    rects: Rects, destination: Destination, limit: int, piece: PieceLength | None = None
) -> Iterator[tuple[Rects, int]]:
    """`rects` in order as chunks of at most `limit` staged bytes: by component, then by tokens, then by layers. Each
    with its staged bytes. `piece` may say a smaller limit for more than `LEAST_PIECE_NBYTES`.

    A single row of a single layer that is larger still comes whole: the caller sees its size. No two chunks share a
    row.
    """
    if not rects:
        return
    shares, common, stagings = destination.shares, destination.session.common, destination.session.stagings
    tokens, staging = common.tokens(rects), stagings.of(shares, rects)
    nbytes = staging.nbytes(tokens)
    if piece is not None and nbytes > LEAST_PIECE_NBYTES:
        limit = min(limit, piece(destination, rects, nbytes))
    if nbytes <= limit and len(rects) <= 16:  # as many components as a GPU's kernels take
        yield rects, nbytes
        return
    if len(rects) > 1:
        for rect in rects:
            yield from split((rect,), destination, limit)
        return
    rect = rects[0]
    most = _whole_rows(staging, rect.component, limit)
    if most:
        numbers, (first, end) = common.numbers(rect.component), tokens[rect.component]
        cuts = (numbers.token(number) for number in range(first - first % most + most, end, most))
        for start, stop in pairwise(chain((rect.start,), cuts, (rect.stop,))):
            part = (rect._replace(start=start, stop=stop),)
            yield part, staging.nbytes(common.tokens(part))
    elif rect.layer_stop - rect.layer_start > 1:
        middle = (rect.layer_start + rect.layer_stop) // 2
        for half in (rect._replace(layer_stop=middle), rect._replace(layer_start=middle)):
            if stagings.of(shares, (half,)).select:
                yield from split((half,), destination, limit)
    else:
        yield rects, nbytes


def _whole_rows(staging: Staging, component: str, limit: int) -> int:
    """The most tokens that fit `limit` in rows that no piece shares with another: each row travels once."""
    row = staging.row_tokens(component)
    most = staging.tokens_within(component, limit)
    if most < row:
        return row if staging.nbytes({component: (0, row)}) <= limit else 0
    return most - most % row
