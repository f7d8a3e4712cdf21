"""Leases at decode: which staging memory is lent to which chunk, who waits for some, and what the writers are told.

    event          called by                    method                    effect
    Reserve came   ChunkReceiver.on_reserve     LeaseTable.enqueue        the request waits
    any input      `Endpoint.settle`            Lender.grant_and_notify   what can be granted is, and Lease is sent
    a tag came     ChunkReceiver._on_tag        LeaseTable.land           the bytes are there, and are scattered
    it was copied  ChunkReceiver.scattered      LeaseTable.release        the watermark may rise; more may be granted

A lease may be granted *in advance*, with Open and for no Reserve, while half of a lane is free and nothing waits
(`Lender.lend_in_advance`): as its writer's last room of such a size was staged. What its chunk is, its tag says. Once
something waits, leases in advance are the first to be recalled.

A lease ends without a tag when its writer returns it (`Lender.on_returned`, often because of a Recall), asks again with
a newer attempt (`on_reserve`), or can no longer write for the room (`release_of`). If the room fails first, a lease
that has not landed is quarantined (`quarantine_of`, called by `DecodeRooms.fail`) until its writer returns it or can no
longer write for the room. If the session is lost, leases that may still be written are quarantined until it is fenced
(`session_lost`, `release_of`); those that never may be are released at once, and landed ones once they are
scattered. So a lease may outlive its room, and rooms are not known here (I2, I15).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from pdstage.protocol import messages as m
from pdstage.protocol.destinations import LEAST_PIECE_NBYTES
from pdstage.protocol.lane import Lane
from pdstage.protocol.state import LEASE, LeaseEvent, LeasePhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdstage.plan import Rect
    from pdstage.protocol.decode_rooms import Writer
    from pdstage.protocol.session import Endpoint, Session

MAX_UNASKED = 256
"""Leases that nobody asked for, of all rooms together."""
_ADVANCE_S = 0.02
"""Such a lease is used within so long, if its room's data is there."""


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """One attempt of one chunk, waiting for a lease."""

    session: Session
    epoch: int
    chunk: int
    attempt: int
    nbytes: int
    rects: tuple[Rect, ...]
    """None of a lease in advance whose tag has not come."""
    priority: int
    place: int = 0
    """In line; 0 while it does not wait."""


class RequestQueue:
    """First come first served within a priority."""

    def __init__(self) -> None:
        self._n_arrived = 0
        self.lines: dict[Session, list[tuple[int, int, LeaseRequest]]] = {}
        """The requests of each session: (priority, place in line, request), ascending."""

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self.lines.values()))

    def add(self, request: LeaseRequest) -> None:
        self._n_arrived += 1
        request.place = self._n_arrived
        insort(self.lines.setdefault(request.session, []), (request.priority, request.place, request))

    def remove(self, request: LeaseRequest) -> None:
        line = self.lines[request.session]
        del line[bisect_left(line, (request.priority, request.place))]
        request.place = 0
        if not line:
            del self.lines[request.session]

    def fronts(self) -> list[tuple[int, int, LeaseRequest]]:
        """The first of each session, the last in line first."""
        return sorted((line[0] for line in self.lines.values()), reverse=True)

    def entries(self) -> Iterator[tuple[int, int, LeaseRequest]]:
        """(priority, place in line, request), in no order."""
        return chain.from_iterable(self.lines.values())


@dataclass(slots=True, eq=False)
class Lease:
    """One live lease: granted, landed or quarantined."""

    request: LeaseRequest
    lane: int
    cursor: int
    granted_at: float
    phase: LeasePhase = LeasePhase.GRANTED
    said_written: bool = False
    """Its writer's CloseOk lists it as written, so its tag is on the way. Set by `decode_chunks`."""
    recalled: bool = False
    nbytes: int = field(init=False)
    """Of its chunk: as many as were asked for; fewer, once its tag says so, of one in advance."""

    def __post_init__(self) -> None:
        self.nbytes = self.request.nbytes

    @property
    def end(self) -> int:
        """Of the bytes asked for; the lane itself counts in multiples of 256."""
        return self.cursor + self.request.nbytes


class LeaseTable:
    """The lanes, the live leases and the requests that wait.

    The request with the lowest priority number is served first, and of equal ones the oldest. While other sessions
    wait, a session that holds part of a busy lane gets no more than half of that lane; its requests are passed over
    where no other lane can serve them. If quarantine leaves a lane too small for the first request, a later one that
    fits may use that lane (I13).

    A lease's state is in `Lease.phase`, and in its `Lane` as far as cursors depend on it. `land`, `quarantine` and
    `release` change both, the lane first.
    """

    def __init__(self, endpoint: Endpoint, spans: Iterable[m.LaneSpan]) -> None:
        self.endpoint = endpoint
        self.spans = tuple(spans)
        self.lanes = [Lane(span.nbytes) for span in self.spans]
        self._of: dict[Session, dict[int, dict[int, Lease | LeaseRequest]]] = {}
        """By session, epoch and chunk: its lease, or its request while that waits."""
        self.queue = RequestQueue()
        self._at: dict[tuple[int, int], Lease] = {}
        """Live leases, by lane and cursor."""
        self.closed: list[deque[Lease]] = [deque() for _ in self.lanes]
        """Of each lane, leases that were closed when granted, in the order in which they open."""
        self._moved_at = [0.0 for _ in self.lanes]
        """When each lane's watermark last rose."""
        self.contended_at: float | None = None
        """Since when something waits; as of the last `note_contention`."""
        self._lent_nbytes: dict[tuple[Session, int], int] = {}
        """What each session has of each lane."""
        self.max_advances = MAX_UNASKED
        self.advances: dict[Lease, None] = {}
        """Leases that nobody asked for, until their tags come."""

    def at(self, lane: int, cursor: int) -> Lease | None:
        return self._at.get((lane, cursor))

    def largest(self) -> int:
        """No lease above this can be granted, now or later, while what is quarantined stays so."""
        return max(map(Lane.largest, self.lanes))

    def is_open(self, lease: Lease) -> bool:
        return self.lanes[lease.lane].is_open(lease.cursor, lease.request.nbytes)

    @property
    def lent(self) -> bool:
        """Whether any lease is live."""
        return bool(self._at)

    def live(self) -> list[Lease]:
        """Every live lease, in no order."""
        return list(self._at.values())

    @property
    def contended(self) -> bool:
        """Something waits: a request for a lease, or a closed lease for its lane."""
        return bool(self.queue.lines) or any(self.closed)

    def find(self, session: Session, epoch: int, chunk: int) -> Lease | LeaseRequest | None:
        """What a chunk has here: a lease, a place in the queue, or nothing."""
        return self._of.get(session, {}).get(epoch, {}).get(chunk)

    def count(self, session: Session, epoch: int) -> int:
        """How many leases and waiting requests one epoch of a session has."""
        return len(self._of.get(session, {}).get(epoch, ()))

    def enqueue(self, request: LeaseRequest) -> None:
        """Queues a request. If one of the same chunk waits already, this one takes its place in the line."""
        older = self.find(request.session, request.epoch, request.chunk)
        if isinstance(older, LeaseRequest):
            older.attempt, older.nbytes, older.rects = request.attempt, request.nbytes, request.rects
            return
        self._note(request, request)
        self.queue.add(request)

    def forget(self, request: LeaseRequest) -> None:
        if not request.place:
            return
        self.queue.remove(request)
        self._forget_entry(request, request)

    def lend_in_advance(self, request: LeaseRequest) -> bool:
        """Grants what was not asked for, to be written at once; False where that could be in another's way."""
        waits = self.contended_at is not None or self.contended
        if waits or len(self.advances) >= self.max_advances or request.nbytes > self.largest():
            return False
        number, _ = self._lane_for(request)
        if number is None:
            return False
        lane = self.lanes[number]
        cursor = lane.cursor_of_next(request.nbytes)
        if cursor is None or cursor + request.nbytes > lane.watermark + lane.capacity // 2:
            return False
        self.advances[self._grant(request, number)] = None
        return True

    def know(self, lease: Lease, rects: tuple[Rect, ...], nbytes: int) -> None:
        """What a lease in advance is used for."""
        lease.request.rects, lease.nbytes = rects, nbytes
        del self.advances[lease]

    def grant_waiting(self) -> Iterator[Lease | LeaseRequest]:
        """Grants what can be granted, in order, and yields each new lease. A request larger than what any lane has that
        is not quarantined leaves the queue, and is yielded as it is: the caller refuses it.
        """
        over: set[Session] = set()
        fronts = self.queue.fronts()
        while fronts:
            *_, request = fronts.pop()
            if request.session in over:
                continue
            if request.nbytes > self.largest():
                self.forget(request)
                yield request
            else:
                lane, limited = self._lane_for(request)
                if limited:
                    over.add(request.session)
                    continue
                if lane is None:
                    overtaker = self._overtaker(request)
                    if overtaker is None:
                        return
                    request, lane = overtaker
                yield self._grant(request, lane)
            if len(self.queue.lines) == 1:  # nobody is left to share with
                over.clear()
            fronts = self.queue.fronts()

    def _overtaker(self, first: LeaseRequest) -> tuple[LeaseRequest, int] | None:
        """A request behind the first that may be granted now, and in which lane; None if there is none (I13).

        It may only use a lane that quarantine leaves too small for every request in front of it: they do not wait for
        that lane. Without quarantine nobody overtakes.
        """
        spare = {number for number, lane in enumerate(self.lanes) if first.nbytes > lane.largest()}
        if not spare:
            return None
        for _, _, request in sorted(self.queue.entries()):
            number, limited = self._lane_for(request, spare)
            if number is not None:
                return request, number
            if not limited:
                spare = {number for number in spare if request.nbytes > self.lanes[number].largest()}
        return None

    def land(self, lease: Lease) -> None:
        self.lanes[lease.lane].land(lease.cursor)
        LEASE.move(lease, LeaseEvent.LAND)

    def quarantine(self, lease: Lease) -> None:
        rose = self.lanes[lease.lane].quarantine(lease.cursor)
        LEASE.move(lease, LeaseEvent.QUARANTINE)
        if rose:
            self._moved_at[lease.lane] = self.endpoint.now

    def release(self, lease: Lease) -> None:
        rose = self.lanes[lease.lane].release(lease.cursor)
        LEASE.move(lease, LeaseEvent.RELEASE)
        self.advances.pop(lease, None)
        del self._at[lease.lane, lease.cursor]
        self._forget_entry(lease.request, lease)
        borrower = (lease.request.session, lease.lane)
        self._lent_nbytes[borrower] -= lease.request.nbytes
        if not self._lent_nbytes[borrower]:
            del self._lent_nbytes[borrower]
        if rose:
            self._moved_at[lease.lane] = self.endpoint.now

    def of(self, session: Session, epoch: int | None = None) -> list[Lease]:
        """Live leases of a session, or of one of its epochs."""
        return [entry for entry in self._entries(session, epoch) if isinstance(entry, Lease)]

    def forget_requests(self, session: Session, epoch: int | None = None) -> None:
        """Takes what waits out of the queue, for a session or one of its epochs."""
        for entry in self._entries(session, epoch):
            if isinstance(entry, LeaseRequest):
                self.forget(entry)

    def _entries(self, session: Session, epoch: int | None) -> list[Lease | LeaseRequest]:
        epochs = self._of.get(session, {})
        held = epochs.values() if epoch is None else (epochs.get(epoch, {}),)
        return [entry for chunks in held for entry in chunks.values()]

    def _note(self, request: LeaseRequest, entry: Lease | LeaseRequest) -> None:
        self._of.setdefault(request.session, {}).setdefault(request.epoch, {})[request.chunk] = entry

    def note_contention(self) -> float | None:
        """Since when something waits; None if nothing does."""
        if not self.contended:
            self.contended_at = None
        elif self.contended_at is None:
            self.contended_at = self.endpoint.now
        return self.contended_at

    def opened(self) -> Iterator[Lease]:
        """Leases that their lane's window has come to cover since the last call."""
        for closed in self.closed:
            while closed:
                lease = closed[0]
                live = self._at.get((lease.lane, lease.cursor)) is lease and lease.phase is LeasePhase.GRANTED
                if live and not self.is_open(lease):
                    break
                closed.popleft()
                if live:
                    yield lease

    def to_recall(self) -> list[Lease]:
        """Leases to ask back: those in the way of their lane's watermark (`Lane.in_the_way`); closed ones whose lane's
        watermark has not risen for `stuck_after_s`, if another lane could serve them at once; and open ones that were
        not written for `recall_after_s` while others wait, for `_ADVANCE_S` if nobody asked for them.
        """
        wanted, now, config = [], self.endpoint.now, self.endpoint.config
        for number, lane in enumerate(self.lanes):
            in_the_way = set(lane.in_the_way())
            stuck = now - self._moved_at[number] >= config.stuck_after_s
            for cursor, *_ in lane.leases():
                lease = self._at.get((number, cursor))
                if lease is None or lease.phase is not LeasePhase.GRANTED or lease.said_written:
                    continue
                early = lease in self.advances and now - lease.granted_at >= _ADVANCE_S
                shut_in = stuck and not self.is_open(lease) and self._elsewhere(lease)
                late = (
                    self.contended_at is not None
                    and self.is_open(lease)
                    and (now - max(lease.granted_at, self.contended_at) >= config.recall_after_s)
                )
                if early or cursor in in_the_way or shut_in or late:
                    wanted.append(lease)
        return wanted

    def _forget_entry(self, request: LeaseRequest, entry: Lease | LeaseRequest) -> None:
        if self.find(request.session, request.epoch, request.chunk) is not entry:
            return
        epochs = self._of[request.session]
        del epochs[request.epoch][request.chunk]
        if not epochs[request.epoch]:
            del epochs[request.epoch]
        if not epochs:
            del self._of[request.session]

    def _elsewhere(self, lease: Lease) -> bool:
        nbytes = lease.request.nbytes
        return any(
            number != lease.lane
            and nbytes <= lane.largest()
            and (at := lane.cursor_of_next(nbytes)) is not None
            and lane.is_open(at, nbytes)
            for number, lane in enumerate(self.lanes)
        )

    def _lane_for(self, request: LeaseRequest, among: set[int] | None = None) -> tuple[int | None, bool]:
        """(lane, limited): where to grant it now, preferring a lane in which it is open at once, then the least loaded.

        If no lane can serve it now, the first is None, and `limited` says whether only its session's share forbids it.
        """
        others = len(self.queue.lines) > 1
        best: tuple[bool, int, int] | None = None
        limited = False
        for number, lane in enumerate(self.lanes):
            if request.nbytes > lane.largest() or (among is not None and number not in among):
                continue
            cursor = lane.cursor_of_next(request.nbytes)
            if cursor is None:
                continue
            lent_nbytes = self._lent_nbytes.get((request.session, number), 0)
            idle = lane.head == lane.watermark  # then all leases in it are carved out, and keep nobody waiting
            if others and lent_nbytes and not idle and lent_nbytes + request.nbytes > lane.capacity // 2:
                limited = True
                continue
            rank = (not lane.is_open(cursor, request.nbytes), lane.head - lane.watermark, number)
            best = rank if best is None else min(best, rank)
        return (best[2] if best else None), limited and best is None

    def _grant(self, request: LeaseRequest, number: int) -> Lease:
        self.forget(request)
        lane = self.lanes[number]
        idle = lane.head == lane.watermark
        cursor = lane.grant(request.nbytes)
        assert cursor is not None, "the lane said it would grant"
        if idle:
            self._moved_at[number] = self.endpoint.now
        lease = Lease(request, number, cursor, self.endpoint.now)
        self._at[number, cursor] = lease
        self._note(request, lease)
        borrower = (request.session, number)
        self._lent_nbytes[borrower] = self._lent_nbytes.get(borrower, 0) + request.nbytes
        if not self.is_open(lease):
            self.closed[number].append(lease)
        return lease


class Lender:
    """What the core does with leases, and tells their writers: grants, watermarks, recalls; what it releases and
    quarantines as rooms and sessions end.
    """

    def __init__(self, endpoint: Endpoint, leases: LeaseTable) -> None:
        self.endpoint = endpoint
        self.leases = leases
        self._marks_sent: dict[Session, dict[int, int]] = {}
        self._staged: dict[Session, dict[int, tuple[int, int]]] = {}
        """Of each session, by a room's size as a power of two: how many chunks its last such room staged, and the bytes
        of the largest.
        """

    def lend_in_advance(self, writer: Writer) -> None:
        """Lends memory for the chunks that a writer will make of what it owes a room, as it made them of its last room
        of that size; without one it is one chunk, or none if it may go direct.
        """
        owed, room = writer.owed_nbytes, writer.room
        first = (int(not writer.direct and 0 < owed <= LEAST_PIECE_NBYTES), owed)
        n, nbytes = self._staged.get(writer.session, {}).get(owed.bit_length(), first)
        for chunk in range(min(n, m.MAX_ADVANCES)):
            request = LeaseRequest(writer.session, room.epoch, chunk, 0, min(nbytes, owed), (), room.priority)
            if not self.leases.lend_in_advance(request):
                return
            self.endpoint.counters.leases_granted += 1

    def learn(self, writer: Writer, n_staged: int) -> None:
        """A writer closed a room of which it staged so many chunks."""
        sizes = self._staged.setdefault(writer.session, {})
        sizes[writer.owed_nbytes.bit_length()] = n_staged, writer.most_nbytes

    def advances_of(self, session: Session, epoch: int) -> tuple[m.Advance, ...]:
        """The leases in advance that a room's writer has, as Open says them. None that was recalled: a writer that had
        not heard of it has said that nothing writes it, or will.
        """
        return tuple(
            m.Advance(
                lease.request.chunk, lease.lane, lease.cursor, lease.request.nbytes,
                self._mark_to_send(session, lease.lane),
            )
            for lease in (self.leases.of(session, epoch) if self.leases.advances else ())
            if lease in self.leases.advances and not lease.recalled and lease.phase is LeasePhase.GRANTED
        )  # fmt: skip

    def send_lease(self, lease: Lease) -> None:
        request = lease.request
        mark = self._mark_to_send(request.session, lease.lane)
        answer = m.Lease(request.epoch, request.chunk, request.attempt, lease.lane, lease.cursor, request.nbytes, mark)
        self.endpoint.send(request.session, answer)

    def _mark_to_send(self, session: Session, lane: int) -> int:
        """The lane's watermark, noted as sent to `session`: it bounds what that session may still begin."""
        mark = self.leases.lanes[lane].watermark
        self._marks_sent.setdefault(session, {})[lane] = mark
        return mark

    def on_returned(self, session: Session, returned: m.Returned) -> None:
        lease = self.leases.at(returned.lane, returned.cursor)
        if lease is None or lease.request.session is not session or lease.phase is LeasePhase.LANDED:
            return
        if (lease.request.epoch, lease.request.chunk) == (returned.epoch, returned.chunk):
            self.endpoint.counters.leases_returned += 1
            self.leases.release(lease)

    def release_of(self, session: Session, epoch: int | None) -> None:
        """The writer can no longer write for this epoch, or None, for any: each of its leases is free whose bytes do
        not wait for their scatter.
        """
        for lease in self.leases.of(session, epoch):
            if lease.phase is not LeasePhase.LANDED:
                self.leases.release(lease)

    def quarantine_of(self, session: Session, epoch: int) -> None:
        """The room failed: its writer may still write what it was granted."""
        for lease in self.leases.of(session, epoch):
            if lease.phase is LeasePhase.GRANTED:
                self._quarantine(lease)

    def _quarantine(self, lease: Lease) -> None:
        self.endpoint.counters.leases_quarantined += 1
        self.leases.quarantine(lease)
        self.endpoint.after(0.0, self.recall_all)

    def session_lost(self, session: Session) -> None:
        """Quarantines what the session's writer may still write. A lease beyond the window that it was last told was
        never open to it, and is free at once.
        """
        marks = self._marks_sent.pop(session, {})
        self._staged.pop(session, None)
        self.leases.forget_requests(session)
        for lease in self.leases.of(session):
            capacity = self.leases.lanes[lease.lane].capacity
            never_writable = lease.end > marks.get(lease.lane, 0) + capacity
            if lease.phase is not LeasePhase.LANDED and never_writable:
                self.leases.release(lease)
            elif lease.phase is LeasePhase.GRANTED:
                self._quarantine(lease)

    def grant_and_notify(self) -> None:
        """After every input: grants what waits, tells whose window opened, and arms recall while something waits."""
        leases = self.leases
        if leases.contended_at is None and not leases.queue.lines and not any(leases.closed):
            return  # nothing waits, nor did the last time
        for granted in self.leases.grant_waiting():
            if isinstance(granted, Lease):
                self.endpoint.counters.leases_granted += 1
                self.send_lease(granted)
            else:
                most = self.leases.largest()
                refused = m.Refused(granted.epoch, granted.chunk, granted.attempt, "too_big", most)
                self.endpoint.send(granted.session, refused)
        notified = set()
        for lease in self.leases.opened():
            session = lease.request.session
            if (session, lease.lane) not in notified and session.id in self.endpoint.sessions:
                notified.add((session, lease.lane))
                self.endpoint.send(session, m.Watermark(lease.lane, self._mark_to_send(session, lease.lane)))
        since = self.leases.note_contention()
        if since == self.endpoint.now and self.leases.advances:
            self.endpoint.after(_ADVANCE_S, self.recall_all)
        elif since is not None:
            soon = min(self.endpoint.config.recall_after_s, self.endpoint.config.stuck_after_s)
            self.endpoint.after(soon, self.recall_all, anew=False)

    def recall_all(self) -> None:
        """Recalls the leases that `LeaseTable.to_recall` names, and again while something waits."""
        for lease in self.leases.to_recall():
            if lease.request.session.id in self.endpoint.sessions:
                self._recall(lease)
        if self.leases.contended:
            self.endpoint.repeat(self.recall_all)

    def _recall(self, lease: Lease) -> None:
        request = lease.request
        lease.recalled = True
        self.endpoint.counters.leases_recalled += 1
        mark = self._mark_to_send(request.session, lease.lane)
        recall = m.Recall(request.epoch, request.chunk, request.attempt, lease.lane, lease.cursor, mark)
        self.endpoint.send(request.session, recall)
