"""Every message between prefill and decode, and the limits that each is held to.

D>P means decode to prefill, P>D prefill to decode. "until X" means that the message is repeated until X arrives; all
others are said once, or again in answer to a repeated question. A field is only ever added at the end of its message,
with a default: docs/wire.md has the rules. Source: msgspec for the schema.
"""

from __future__ import annotations

import sys
from typing import Annotated, NamedTuple, TypeAlias, dataclass_transform

import msgspec
from msgspec import Meta

from pdstage.arguments import MAX_INTEGER, sayable
from pdstage.columns import MAX_COLUMNS, MAX_ROW_NBYTES, Placed
from pdstage.layout import Layout  # noqa: TC001  (msgspec resolves these at run time)
from pdstage.layout.topology import Topology  # noqa: TC001
from pdstage.plan import Rect, Share  # noqa: TC001

MAX_RECTS = 64
MAX_TAG_NBYTES = 56 + MAX_RECTS * 26
"""The largest tag: its header and `MAX_RECTS` rectangles, as `wire` packs them."""
MAX_ROOM_NBYTES = 256
MAX_ADVANCES = 64
"""The most leases in one Open."""
MAX_REASON = 4096
MAX_WORD = 256
MAX_FACTS = 64
MAX_WAITING = 1 << 14
"""The most rooms of each kind in one Heartbeat; more take several."""
FEATURES = DIRECT_FEATURE, CHECKSUM_FEATURE, CONVERT_FEATURE, TAGS_FEATURE = "direct", "checksum-nh", "convert", "tags"
"""What Hello and Welcome offer: decode's pages may be written in place; staged chunks may carry a checksum
(its name changes with its definition: the first one's was "checksum"); formats are converted; tags travel as messages,
since the transport carries none.
"""
DIRECT = 0xFFFF
"""The lane number of a chunk written straight into the destination's pages."""
AUX = 0xFFFE
"""The lane number of the aux row, written straight into the row that Open named."""
IN_USE, IDLE, SPARE = 0, 1, 2
"""What a Heartbeat says of its session: the sender's rooms need it; none does; none does, and please end it."""


def _most(length: int) -> Meta:
    return Meta(max_length=length)


# What a peer may say, by the schema: a number is a count, a cursor or an address of 63 bits; no time is
# endless; no list, name or text is
# longer than any honest peer's.
Number: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Device: TypeAlias = Annotated[int, Meta(ge=0, le=0xFFFF)]
Word: TypeAlias = Annotated[str, _most(MAX_WORD)]
Reason: TypeAlias = Annotated[str, _most(MAX_REASON)]
RoomKey: TypeAlias = Annotated[bytes, _most(MAX_ROOM_NBYTES)]
Described: TypeAlias = Annotated[bytes, _most(4 << 20)]
Features: TypeAlias = Annotated[tuple[Word, ...], _most(64)]
AuxColumns: TypeAlias = Annotated[tuple[Placed, ...], _most(MAX_COLUMNS)]


def brief(reason: str) -> str:
    """`reason` as a message may carry it: a peer's own words may be part of it, so it can be of any length."""
    reason = sayable(reason)
    return reason if len(reason) <= MAX_REASON else f"{reason[: MAX_REASON - 3]}..."


class SessionId(NamedTuple):
    """One agreement of two process lives; a frame of another session is stale.

    `writer` is the prefill process's incarnation; `decode` is drawn anew for each greeting, so that a session once lost
    is never resumed, not even between the same two processes.
    """

    decode: int
    writer: int


class Fact(NamedTuple):
    """One thing that an engine says of its model, such as its `revision`, as text."""

    name: Word
    value: Word


class LaneSpan(NamedTuple):
    """Where one lane lies in decode's staging memory: absolute address, bytes, and the memory's kind and device."""

    base: Number
    nbytes: Size
    kind: Word = "cpu"
    device: Device = 0


class Offer(NamedTuple):
    """One more transport that a node has, and what a peer's needs to reach it."""

    transport: Word
    description: Described


class RowSpan(NamedTuple):
    """Where a rank's aux rows lie: row r is `row_nbytes` bytes at `base + r * row_nbytes`."""

    base: Number
    row_nbytes: Annotated[int, Meta(ge=1, le=MAX_ROW_NBYTES)]
    n_rows: Annotated[int, Meta(ge=1, le=1 << 30)]
    kind: Word = "cpu"
    device: Device = 0


class Asked(NamedTuple):
    """The range that a room wants of one component: tokens (or slots) `[start, stop)`."""

    component: Word
    start: Number
    stop: Number


class Items(NamedTuple):
    """Destination pages or slots of one component, little-endian int32; item i starts at token `first_token + i*T`,
    counted as the destination stores its tokens (`layout.TokenShard`).
    """

    component: Word
    first_token: Number
    data: memoryview


class Wanted(NamedTuple):
    """A room that decode has announced, and the epoch in which it will open it."""

    epoch: Number
    room: RoomKey


Offers: TypeAlias = Annotated[tuple[Offer, ...], _most(16)]
Model: TypeAlias = Annotated[tuple[Fact, ...], _most(MAX_FACTS)]


@dataclass_transform(frozen_default=True)
class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the closed union `AnyMessage`; all are frozen, as it is."""


class OfEpoch(Message):
    epoch: Number


class _OfChunk(OfEpoch):
    chunk: Number
    attempt: Number


class OfLease(_OfChunk):
    lane: Number
    cursor: Number


class Hello(Message, tag=1):
    """D>P until Welcome or HelloRefused: what decode has, and where prefill may write.

    `transport` is the one its sender prefers, `others` the rest: the writer chooses of those that both have.
    `columns`: of the aux rows that decode takes. `rows`: where they lie, if they may be written there; an Open then
    names one. `model`: what its engine says of the model.
    """

    topology: Topology
    layout: Layout
    transport: Word
    description: Described
    lanes: Annotated[tuple[LaneSpan, ...], Meta(min_length=1, max_length=AUX - 1)]
    max_silence_s: Seconds
    features: Features
    columns: AuxColumns = ()
    rows: RowSpan | None = None
    others: Offers = ()
    model: Model = ()


class Welcome(Message, tag=2):
    """P>D, answer to Hello. `columns`: of the aux rows that prefill gives. `model`: as Hello's."""

    topology: Topology
    layout: Layout
    transport: Word
    description: Described
    max_silence_s: Seconds
    features: Features
    columns: AuxColumns = ()
    others: Offers = ()
    model: Model = ()


Greeting: TypeAlias = Hello | Welcome


def offers(greeting: Greeting) -> dict[str, bytes]:
    """The transports that a greeting names, best first, each with what `connect` needs of it."""
    return {greeting.transport: greeting.description} | dict(greeting.others)


class HelloRefused(Message, tag=3):
    """P>D, answer to Hello: the reason in words. Read whatever the version; so neither its type number, nor Hello's,
    nor the frame's header ever change.
    """

    reason: Reason


class Ask(OfEpoch, tag=4):
    """D>P, then in each Heartbeat until Asking says finished, or Open. Is this room there yet? Lets decode allocate
    late. CloseFailed answers it where the room is not to be sent.
    """

    room: RoomKey


class Asking(OfEpoch, tag=5):
    """P>D, answer to Ask, and to a Heartbeat that asks if `finished`: every chunk is computed and held for an Open."""

    finished: bool


class Advance(NamedTuple):
    """A lease that nobody asked for yet: of the first attempt of that chunk of the room, if it has no more bytes."""

    chunk: Number
    lane: Number
    cursor: Number
    nbytes: Number
    watermark: Number


class Open(OfEpoch, tag=6):
    """D>P until Opened, CloseOk or CloseFailed. One destination rank wants its `shares` of a room, now.

    `asked`: the ranges wanted from this writer, of which it sends the tokens that both ranks hold.
    `items` is empty unless the direct path may be taken. `destinations` counts the decode ranks that open this room
    with this writer; `rank` is the asking one's number among its group. `aux`: this writer brings the request's aux:
    in its CloseOk, or by a write into `row`, the number of one of Hello's `rows`. `advances`: leases that the writer
    need not ask for; a chunk that does not fit its own asks by its second attempt, once its data exists.
    """

    room: RoomKey
    shares: Annotated[tuple[Share, ...], _most(4096)]
    asked: Annotated[tuple[Asked, ...], _most(MAX_RECTS)]
    items: Annotated[tuple[Items, ...], _most(MAX_RECTS)]
    rank: Number
    destinations: Number
    aux: bool
    priority: int
    deadline_s: Seconds
    row: Number | None = None
    advances: Annotated[tuple[Advance, ...], _most(MAX_ADVANCES)] = ()


class Opened(OfEpoch, tag=7):
    """P>D, answer to Open. `state` is "waiting" (not submitted yet), "accepted" or "refused" with the `reason`."""

    state: Word
    reason: Reason


class Reserve(_OfChunk, tag=8):
    """P>D while the chunk has no lease or its window is closed."""

    nbytes: Number
    rects: Annotated[tuple[Rect, ...], _most(MAX_RECTS)]


class Lease(OfLease, tag=9):
    """D>P, answer to Reserve: `nbytes` of staging memory for this attempt of this chunk, at `cursor` modulo the size of
    `lane`: a cursor only grows.
    """

    nbytes: Number
    watermark: Number


class Refused(_OfChunk, tag=10):
    """D>P, answer to Reserve: `why` is "gone", "covered" or "too_big" (then no lease above `max_nbytes` can be granted
    while what is carved out of the lanes stays so).
    """

    why: Word
    max_nbytes: Number


class Watermark(Message, tag=11):
    """D>P: a lease that ends at most one lane size above `watermark` may be written, since what lay there is free.

    A hint, which may be lost: Reserve is repeated, and Lease and Recall carry the watermark too.
    """

    lane: Number
    watermark: Number


class Recall(OfLease, tag=12):
    """D>P: give this lease back unless you use it. Repeated while others wait for memory, until the lease has landed,
    or was returned or released.
    """

    watermark: Number


class Returned(OfLease, tag=13):
    """P>D: nothing writes this lease, nor ever will."""


class Written(NamedTuple):
    """One chunk that a writer wrote: its lease, or `lane` DIRECT or, of the aux row, AUX."""

    chunk: Number
    lane: Number
    cursor: Number


class Given(NamedTuple):
    """How many slots of one component without positions a writer's engine gave for a room."""

    component: Word
    n: Number


class CloseOk(OfEpoch, tag=14):
    """P>D until Closed or Abort: all this writer owes is written; here is what, and the aux bytes if asked for.

    `slots`: of each component without positions that this writer owes, how many there are; no more will come.
    `packed`: `aux` is a row: the columns that both sides have, one after the other in the order of their names.
    """

    written: Annotated[tuple[Written, ...], _most(1 << 20)]
    aux: bytes | None
    slots: Annotated[tuple[Given, ...], _most(MAX_RECTS)] = ()
    packed: bool = False


class CloseFailed(OfEpoch, tag=15):
    """P>D until Abort, or once to who asks or opens: the writer gives the room up. Proves nothing of its writes."""

    reason: Reason


class Closed(OfEpoch, tag=16):
    """D>P, answer to CloseOk."""


class Abort(OfEpoch, tag=17):
    """D>P until Drained or CloseOk: stop writing for this epoch. `finished`: all was delivered, only CloseOk is
    missing.

    `room`: said once, of a room that was never opened and never will be: given up, or its writers do not fit.
    """

    reason: Reason
    finished: bool
    room: RoomKey = b""


class Drained(OfEpoch, tag=18):
    """P>D, answer to Abort: nothing of this epoch is in flight, nothing will begin."""


class Heartbeat(Message, tag=19):
    """Both ways, when nothing else was said for a while, and by decode while it waits with rooms. `idle`: IN_USE, IDLE
    or SPARE.

    An idle prefill answers SPARE with IDLE. If both sides are idle and either said SPARE, decode says Bye. `asks` and
    `waits`: the rooms that decode has announced and not opened; of `asks` it has not heard that they are finished.
    Prefill holds them all on.
    """

    idle: Number = IN_USE
    asks: Annotated[tuple[Wanted, ...], _most(MAX_WAITING)] = ()
    waits: Annotated[tuple[RoomKey, ...], _most(MAX_WAITING)] = ()


class Bye(Message, tag=20):
    """Both ways: this process ends this session in order. Prefill answers it with its own."""


class NoSession(Message, tag=21):
    """Both ways, in answer to a frame of an unknown session.

    If `incarnation` is the writer's own, nothing of the session is in flight. Any other value proves nothing: another
    process answers, or (0) one of the writer's writes ended without proof that its bytes will never land.
    """

    incarnation: int


class Tagged(Message, tag=22):
    """P>D, once a write is done, where both sides offered `TAGS_FEATURE`: its tag, which the transport does not carry.

    Sent again in answer to a Recall of a written chunk, and with each repeated CloseOk. A known tag is dropped.
    """

    tag: Annotated[bytes, _most(MAX_TAG_NBYTES)]


# fmt: off
AnyMessage: TypeAlias = (
    Hello | Welcome | HelloRefused | Ask | Asking | Open | Opened | Reserve | Lease | Refused | Watermark | Recall
    | Returned | CloseOk | CloseFailed | Closed | Abort | Drained | Heartbeat | Bye | NoSession | Tagged
)
# fmt: on
