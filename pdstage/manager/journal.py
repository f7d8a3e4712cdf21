"""What happens to a node's rooms, chunks and leases, written down as it happens, for `pdstage judge`.

Every move of a state table goes through one place (`pdstage.protocol.state`), which calls `watch`. A node with a
journal writes a line for each move, and for what the tables do not hold: a room's begin and release, a chunk that came
without staging, and messages that end something. A line is JSON, a `Line`; a file begins with its `Head`.

A line says how many frames of its session this end had sent and received. That orders the lines of both ends without
clocks: what one end did before it sent its frame 7 comes before what the other does after it received that frame. So a
line is in the file before any frame or write leaves that follows from it. What a killed process did last is missing
only if no peer can have seen it.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self
from weakref import WeakKeyDictionary

import msgspec

from pdstage.arguments import sayable
from pdstage.errors import UsageError
from pdstage.protocol import messages as m
from pdstage.protocol import state as states
from pdstage.protocol.decode_rooms import Writer
from pdstage.protocol.destinations import Chunk, Destination
from pdstage.protocol.leases import Lease
from pdstage.protocol.room import Room, room_id
from pdstage.protocol.wire import Tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdstage.plan import Rect
    from pdstage.protocol.session import Session

log = logging.getLogger(__name__)

VERSION = 1
MAX_NBYTES = 64 << 20
"""Of a file. A node keeps two: the older one is dropped when the newer one is full."""
SUFFIX, OLDER = ".journal", ".journal.1"
_ENDINGS = m.Abort | m.Drained | m.CloseOk | m.CloseFailed | m.Bye | m.NoSession
"""Messages after which a peer takes something for over."""


class Piece(NamedTuple):
    """Tokens `[first, end)` of layers `range(start, stop, step)` of a component, as the two ranks number those tokens
    that both hold.
    """

    component: str
    start: int
    stop: int
    step: int
    first: int
    end: int


class Head(msgspec.Struct, kw_only=True):
    """A file's first line. `first` is the number of the line after it; above 0, older lines are in another file or
    gone. `lanes` are the bytes of each of decode's lanes.
    """

    journal: int
    role: str
    rank: int
    incarnation: str
    host: str
    pid: int
    first: int
    lanes: tuple[int, ...] = ()


class Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What happened to one thing. What a thing does not have is left out.

    `what` is "room", "destination", "chunk", "writer" or "lease", with the `event` that brought it from `before` to
    `after`; or "tag", of a chunk that came without staging memory; or "said", to a peer, where `event` is the message;
    or "closed", the node itself, in order: `proved` if nothing can touch its memory any more.

    `room` numbers a node's rooms: a name may be used again. `session`, `epoch` and `chunk` name one chunk on both
    sides. `sent` and `heard` are frames of the session until then, `proved` that its peer is quiet. `needs` is what a
    writer owes a room, `pieces` what a chunk brings, `counts` of how many slots a writer said that it has no more.
    """

    n: int
    at: float
    what: str
    event: str
    before: str = ""
    after: str = ""
    room: int = 0
    name: str = ""
    reason: str = ""
    session: str = ""
    sent: int = 0
    heard: int = 0
    proved: bool = False
    epoch: int = 0
    chunk: int = 0
    lane: int = -1
    cursor: int = 0
    nbytes: int = 0
    direct: bool = False
    row: bool = False
    needs: tuple[Piece, ...] = ()
    pieces: tuple[Piece, ...] = ()
    counts: dict[str, int] = {}


class Journal:
    """One node's, in a file of `folder` named by the node. `lock` is to be the node's: what moves while a thread holds
    it is this node's.
    """

    def __init__(
        self, folder: str | os.PathLike[str], role: str, rank: int, incarnation: int, *, max_nbytes: int = MAX_NBYTES
    ) -> None:
        self.lock = _Lock(self)
        self.path = Path(folder) / f"{role}-{rank}-{incarnation:016x}{SUFFIX}"
        self._head = Head(
            journal=VERSION, role=role, rank=rank, incarnation=f"{incarnation:016x}", host=platform.node(),
            pid=os.getpid(), first=0,
        )  # fmt: skip
        self._max_nbytes = max_nbytes
        self._file = -1
        self._nbytes = 0
        self._n_lines = 0
        self._lines: list[bytes] = []
        self._rooms: WeakKeyDictionary[Room, int] = WeakKeyDictionary()
        self._n_rooms = 0

    def open(self, lanes: Sequence[int] = ()) -> Self:
        """Begins the file and starts to watch. Raises `UsageError` if the file cannot be written."""
        self._head.lanes = tuple(lanes)
        try:
            self._begin()
        except OSError as error:
            raise UsageError(
                f"journal {str(self.path.parent)!r} cannot be written ({error.strerror})",
                remedy="name a folder that can be written",
                field="journal",
            ) from error
        _listen(+1)
        return self

    def close(self, *, free: bool = False, in_order: bool = False) -> None:
        """The last line, if the node closed `in_order`, and the file's end. Under no lock."""
        if self._file < 0:
            return
        with self.lock:
            if in_order:
                self._add(what="closed", event="CLOSED", proved=free)
            self.flush()
            if self._file >= 0:
                self._end()

    def flush(self) -> None:
        """Gives the lines to the system, before anything leaves that follows from them. Under the lock."""
        if not self._lines or self._file < 0:
            return
        data, self._lines = b"".join(self._lines), []
        try:
            if self._nbytes and self._nbytes + len(data) > self._max_nbytes:
                os.close(self._file)
                self.path.replace(self.path.with_suffix(OLDER))
                self._begin(self._n_lines - data.count(b"\n"))
            self._write(data)
        except OSError as error:
            self._give_up(error)

    def _begin(self, first: int = 0) -> None:
        self._head.first = first
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._nbytes = 0
        self._write(msgspec.json.encode(self._head) + b"\n")

    def _write(self, data: bytes) -> None:
        self._nbytes += len(data)
        while data:
            data = data[os.write(self._file, data) :]

    def _give_up(self, error: Exception) -> None:
        """A journal with a hole would blame a node for what it did not do."""
        log.error("journal %s is removed: %s", self.path, error)
        self._end()
        for path in (self.path, self.path.with_suffix(OLDER)):
            path.unlink(missing_ok=True)

    def _end(self) -> None:
        os.close(self._file)
        self._file = -1
        self._lines.clear()
        _listen(-1)

    # Lines.

    def note(self, what: str, thing: object, before: str, event: str, after: str) -> None:
        """As `pdstage.protocol.state.watch` is called. Under the lock."""
        if self._file < 0:
            return
        try:
            fields = self._tell(thing, before, event)
            if fields is not None:
                self._add(what=what, event=event, before=before, after=after, **fields)
        except Exception as error:  # a bug here is no room's
            log.exception("a line of the journal failed")
            self._give_up(error)

    def _add(self, **fields: object) -> None:
        line = Line(n=self._n_lines, at=time.monotonic(), **fields)  # type: ignore[arg-type]
        self._n_lines += 1
        self._lines.append(msgspec.json.encode(line) + b"\n")

    def _tell(self, thing: object, before: str, event: str) -> dict[str, object] | None:
        fields: dict[str, object] | None
        match thing:
            case Room():
                epoch = getattr(thing, "epoch", 0) if before else 0  # as it begins it has none yet
                reason = sayable(thing.error) if event == "FAILED" else ""
                fields = {
                    "room": self._number(thing),
                    "name": str(room_id(thing.key)),
                    "epoch": epoch,
                    "reason": reason,
                }
            case Lease():
                fields = _lease(thing, event)
            case Chunk(destination=destination):
                fields = self._claim(destination.session, destination.epoch, destination.room) | _chunk(thing)
            case Destination():
                fields = self._claim(thing.session, thing.epoch, thing.room)
            case Writer():
                fields = self._claim(thing.session, thing.room.epoch, thing.room) | _owed(thing, event)
            case (Writer() as writer, Tag() as tag):
                fields = self._claim(writer.session, tag.epoch, writer.room) | _tag(writer, tag)
            case (m.SessionId() as session_id, message):
                fields = _said(session_id, message) if isinstance(message, _ENDINGS) else None
            case _:
                raise TypeError(f"{thing!r} is not known")
        return fields

    def _claim(self, session: Session, epoch: int, room: Room | None) -> dict[str, object]:
        return _stamps(session, epoch) | {"room": self._number(room) if room is not None else 0}

    def _number(self, room: Room) -> int:
        number = self._rooms.get(room)
        if number is None:
            self._n_rooms += 1
            number = self._rooms[room] = self._n_rooms
        return number


def _stamps(session: Session, epoch: int) -> dict[str, object]:
    return {
        "session": _name(session.id), "epoch": epoch, "sent": session.n_sent, "heard": session.last_seq,
        "proved": session.quiet,
    }  # fmt: skip


@functools.lru_cache(256)
def _name(session_id: m.SessionId) -> str:
    return f"{session_id.decode:016x}-{session_id.writer:016x}"


def _chunk(chunk: Chunk) -> dict[str, object]:
    where = {"direct": True, "row": chunk.row} if chunk.direct else {"lane": chunk.lane, "cursor": chunk.cursor}
    return {"chunk": chunk.number, "nbytes": chunk.nbytes, **where}


def _tag(writer: Writer, tag: Tag) -> dict[str, object]:
    """Of a chunk that was written in place."""
    session, nbytes = writer.session, 0
    if tag.rects:
        nbytes = session.stagings.of(writer.shares, tag.rects).nbytes(session.common.tokens(tag.rects))
    fields = {"chunk": tag.chunk, "nbytes": nbytes, "direct": True, "row": tag.lane == m.AUX}
    return fields | _brought(session, tag.rects)


def _said(session_id: m.SessionId, message: m.AnyMessage) -> dict[str, object]:
    proved = not isinstance(message, m.NoSession) or message.incarnation == session_id.writer
    return {"session": _name(session_id), "epoch": getattr(message, "epoch", 0), "proved": proved}


def _lease(lease: Lease, event: str) -> dict[str, object]:
    request = lease.request
    fields = {"chunk": request.chunk, "lane": lease.lane, "cursor": lease.cursor, "nbytes": lease.nbytes}
    pieces = _brought(request.session, request.rects) if event == states.LeaseEvent.LAND.name else {}
    return _stamps(request.session, request.epoch) | fields | pieces


def _owed(writer: Writer, event: str) -> dict[str, object]:
    """Of a writer that is opened, all that its room needs of it; of one that closed, how many slots it says it has."""
    session = writer.session
    fields: dict[str, object] = {"direct": writer.direct, "row": writer.has_aux}
    if event == states.WriterEvent.OPEN.name:
        asked = {ask.component: ask for ask in writer.room.asked}
        needs = {
            Piece(share.component, *share.layers, *_numbers(session, share.component, ask.start, ask.stop))
            for share in writer.shares
            if (ask := asked.get(share.component)) is not None
        }
        fields["needs"] = tuple(sorted(needs))
    elif event == states.WriterEvent.QUIET.name and writer.closing is not None:
        counts = {name: _numbers(session, name, 0, n)[1] for name, n in writer.closing.slots}
        fields["counts"] = counts
    return fields


def _brought(session: Session, rects: Iterable[Rect]) -> dict[str, object]:
    pieces = (
        Piece(r.component, r.layer_start, r.layer_stop, 1, *_numbers(session, r.component, r.start, r.stop))
        for r in rects
    )
    return {"pieces": tuple(pieces)}


def _numbers(session: Session, component: str, start: int, stop: int) -> tuple[int, int]:
    numbers = session.common.numbers(component)
    return numbers.count(start), numbers.count(stop)


# Whose it is. The cores know no node; but whoever touches one holds its node's lock.

_here = threading.local()
_n_open = 0
_counting = threading.Lock()


class _Lock:
    """A node's lock, which may be taken again by who has it."""

    def __init__(self, journal: Journal) -> None:
        self._lock = threading.RLock()
        self._journal = journal
        self._before: list[Journal | None] = []

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._before.append(getattr(_here, "journal", None))
        _here.journal = self._journal
        return True

    def __exit__(self, *_: object) -> None:
        _here.journal = self._before.pop()
        self._lock.release()


def _listen(more: int) -> None:
    """While a journal is open somewhere in this process."""
    global _n_open  # noqa: PLW0603  (one number of the process, as is who watches)
    with _counting:
        _n_open += more
        states.watch = _note if _n_open else None


def _note(what: str, thing: object, before: str, event: str, after: str) -> None:
    journal: Journal | None = getattr(_here, "journal", None)
    if journal is not None:
        journal.note(what, thing, before, event, after)
