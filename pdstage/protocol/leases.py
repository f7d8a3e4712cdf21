"""Leases at decode: which staging memory is lent to which chunk, who waits for some, and what the writers are told.

    event          called by                    method                    effect
    Reserve came   ChunkReceiver.on_reserve     Leases.enqueue        the request waits
    any input      `DecodeCore.settle`          Leases.settle         what can be granted is, and Lease is sent
    a tag came     ChunkReceiver._on_tag        LEASE.move            the bytes are there, and are scattered
    it was copied  ChunkReceiver.scattered      Leases.release        the watermark may rise; more may be granted

A lease may be granted *in advance*, with Open and for no Reserve, while half of a lane is free and nothing waits
(`Leases.lend_in_advance`): as its writer's last room of such a size was staged. What its chunk is, its tag says. Once
something waits, leases in advance are the first to be recalled.

A lease ends without a tag when its writer returns it (`Leases.on_returned`, often because of a Recall), asks again with
a newer attempt (`on_reserve`), or can no longer write for the room (`release_of`). If the room fails first, a lease
that has not landed is quarantined (`quarantine_of`, called by `DecodeCore.fail_room`) until its writer returns it or
can no longer write for the room. If the session is lost, leases that may still be written are quarantined until it is
fenced (`session_lost`, `release_of`); those that never may be are released at once, and landed ones once they are
scattered. So a lease may outlive its room, and rooms are not known here (I2, I15).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from pdstage.protocol import messages as m
from pdstage.protocol.destinations import LEAST_PIECE_NBYTES
from pdstage.protocol.lane import Lane, Lease
from pdstage.protocol.state import LeasePhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pdstage.protocol.decode_rooms import Writer
    from pdstage.protocol.session import Endpoint, Session

_ADVANCE_S = 0.02
"""Such a lease is used within so long, if its room's data is there."""


class Leases:
    """The lanes, the live leases and those that wait, and what their writers are told: grants, watermarks, recalls.

    The lease with the lowest priority number is granted first, and of equal ones the oldest. While other sessions
    wait, a session that holds part of a busy lane gets no more than half of that lane; its leases are passed over
    where no other lane can serve them. If quarantine leaves a lane too small for the first that waits, a later one that
    fits may use that lane (I13).
    """

    def __init__(self, endpoint: Endpoint, spans: Iterable[m.LaneSpan]) -> None:
        self.endpoint = endpoint
        self.spans = tuple(spans)
        self.lanes = [Lane(span.nbytes) for span in self.spans]
        self.closed: list[deque[Lease]] = [deque() for _ in self.lanes]
        """Of each lane, leases that were closed when granted, in the order in which they open."""
        self.waiting: list[Lease] = []
        """In the order in which they are served."""
        self._of: dict[tuple[Session, int], dict[int, Lease]] = {}
        """What each epoch of a session has, granted or waiting, by chunk."""
        self.contended_at: float | None = None
        """Since when something waits; as of the last `settle`."""
        self.max_advances = 256
        """Of all rooms together."""
        self.advances: set[Lease] = set()
        """Leases that nobody asked for, until their tags come."""

    # What there is.

    def at(self, lane: int, cursor: int) -> Lease | None:
        return self.lanes[lane].at(cursor) if lane < len(self.lanes) else None

    def largest(self) -> int:
        """No lease above this can be granted, now or later, while what is quarantined stays so."""
        return max(map(Lane.largest, self.lanes))

    def is_open(self, lease: Lease) -> bool:
        return self.lanes[lease.lane].is_open(lease.end)

    def live(self) -> list[Lease]:
        """Every live lease."""
        return [lease for lane in self.lanes for lease in lane.leases()]

    @property
    def contended(self) -> bool:
        """Something waits: for a lease, or a closed lease for its lane."""
        return bool(self.waiting) or any(self.closed)

    def held(self, session: Session, epoch: int) -> Mapping[int, Lease]:
        """What each chunk of one epoch of a session has: a lease, or a place in line."""
        return self._of.get((session, epoch), {})

    def of(self, session: Session, epoch: int | None = None) -> list[Lease]:
        """Live leases of a session, or of one of its epochs."""
        held = self.live() if epoch is None else self.held(session, epoch).values()
        return [lease for lease in held if lease.session is session and lease.phase is not LeasePhase.WAITING]

    # Those that wait.

    def enqueue(self, request: Lease) -> None:
        """`request` waits, the last of its priority."""
        self._note(request)
        insort(self.waiting, request, key=attrgetter("priority"))

    def forget_requests(self, session: Session, epoch: int | None = None) -> None:
        """Takes what waits out of the line, for a session or one of its epochs."""
        held = self.waiting if epoch is None else self.held(session, epoch).values()
        for request in list(held):
            if request.session is session and request.phase is LeasePhase.WAITING:
                self.waiting.remove(request)
                self._forget(request)

    def _note(self, lease: Lease) -> None:
        self._of.setdefault((lease.session, lease.epoch), {})[lease.chunk] = lease

    def _forget(self, lease: Lease) -> None:
        held = self._of[lease.session, lease.epoch]
        del held[lease.chunk]
        if not held:
            del self._of[lease.session, lease.epoch]

    def settle(self) -> None:
        """After every input: grants what waits, tells whose window opened, and arms recall while something waits."""
        if self.contended_at is None and not self.contended:
            return  # nothing waits, nor did the last time
        endpoint = self.endpoint
        for lease in self.grant_waiting():
            if lease.phase is LeasePhase.GRANTED:
                self.send_lease(lease)
            else:
                refused = m.Refused(lease.epoch, lease.chunk, lease.attempt, "too_big", self.largest())
                endpoint.send(lease.session, refused)
        for session, lane in dict.fromkeys((lease.session, lease.lane) for lease in self.opened()):
            if session.id in endpoint.sessions:
                endpoint.send(session, m.Watermark(lane, self._mark_to_send(session, lane)))
        if not self.contended:
            self.contended_at = None
            return
        if self.contended_at is None:
            self.contended_at = endpoint.now
        if self.contended_at == endpoint.now and self.advances:
            endpoint.after(_ADVANCE_S, self.recall_all)
        else:
            soon = min(endpoint.config.recall_after_s, endpoint.config.stuck_after_s)
            endpoint.after(soon, self.recall_all, anew=False)

    def grant_waiting(self) -> Iterator[Lease]:
        """Grants what can be granted, in order, and yields each. One that is larger than what any lane has that is not
        quarantined leaves the line, and is yielded as it is: the caller refuses it.
        """
        over: set[Session] = set()
        while (found := self._next(over)) is not None:
            request, place = found
            self.waiting.remove(request)
            if place is not None:
                self._grant(request, *place)
            else:
                self._forget(request)
            yield request
            if self.waiting and not self._others_wait(self.waiting[0].session):  # nobody is left to share with
                over.clear()

    def _others_wait(self, session: Session) -> bool:
        return any(one.session is not session for one in self.waiting)

    def _next(self, over: set[Session]) -> tuple[Lease, tuple[int, int] | None] | None:
        """The first that need not wait, and its lane and cursor, or None if it is too large for every lane.

        Who waits does so for every lane that could serve it: those behind may only use a lane that quarantine leaves
        too small for it (I13). A session that only its share forbids a lease joins `over`, and delays nobody.
        """
        lanes = list(enumerate(self.lanes))
        for request in self.waiting:
            if request.session in over:
                continue
            if request.nbytes > self.largest():
                return request, None
            place, limited = self._place(request, lanes)
            if place is not None:
                return request, place
            if limited:
                over.add(request.session)
                continue
            lanes = [(number, lane) for number, lane in lanes if request.nbytes > lane.largest()]
            if not lanes:
                break
        return None

    def _place(self, request: Lease, among: Iterable[tuple[int, Lane]]) -> tuple[tuple[int, int] | None, bool]:
        """The lane and cursor of a lease that can be granted now, preferring a lane in which it is open at once, then
        the least loaded; and whether its session's share forbids one.
        """
        others = self._others_wait(request.session)
        places = []
        limited = False
        for number, lane in among:
            cursor = lane.place(request.nbytes)
            if cursor is None:
                continue
            lent_nbytes = request.session.lent_nbytes.get(number, 0)
            if others and lent_nbytes and not lane.idle and lent_nbytes + request.nbytes > lane.capacity // 2:
                limited = True
            else:
                closed = not lane.is_open(cursor + request.nbytes)
                places.append((closed, lane.head - lane.watermark, number, cursor))
        return (min(places)[2:] if places else None), limited

    def _grant(self, lease: Lease, number: int, cursor: int) -> None:
        self.endpoint.counters.leases_granted += 1
        self.lanes[number].grant(lease, cursor, self.endpoint.now)
        lease.lane = number
        lease.session.lent_nbytes[number] = lease.session.lent_nbytes.get(number, 0) + lease.nbytes
        if not self.is_open(lease):
            self.closed[number].append(lease)

    def opened(self) -> Iterator[Lease]:
        """Leases that their lane's window has come to cover since the last call."""
        for closed in self.closed:
            while closed and (closed[0].phase is not LeasePhase.GRANTED or self.is_open(closed[0])):
                lease = closed.popleft()
                if lease.phase is LeasePhase.GRANTED:
                    yield lease

    # In advance.

    def lend_in_advance(self, writer: Writer) -> None:
        """Lends memory for the chunks that a writer will make of what it owes a room, as it made them of its last room
        of that size; without one it is one chunk, or none if it may go direct. They are to be written at once: nothing
        is lent where that could be in another's way.
        """
        owed, room = writer.owed_nbytes, writer.room
        first = (int(not writer.direct and 0 < owed <= LEAST_PIECE_NBYTES), owed)
        n, nbytes = writer.session.staged_before.get(owed.bit_length(), first)
        for chunk in range(min(n, m.MAX_ADVANCES)):
            if self.contended_at is not None or self.contended or len(self.advances) >= self.max_advances:
                return
            lease = Lease(writer.session, room.epoch, chunk, 0, min(nbytes, owed), (), room.priority)
            place, _ = self._place(lease, enumerate(self.lanes))
            if place is None:
                return
            number, cursor = place
            lane = self.lanes[number]
            if cursor + lease.nbytes > lane.watermark + lane.capacity // 2:
                return
            self._note(lease)
            self._grant(lease, number, cursor)
            self.advances.add(lease)

    def advances_of(self, session: Session, epoch: int) -> tuple[m.Advance, ...]:
        """The leases in advance that a room's writer has, as Open says them. None that was recalled: a writer that had
        not heard of it has said that nothing writes it, or will.
        """
        return tuple(
            m.Advance(lease.chunk, lease.lane, lease.cursor, lease.nbytes, self._mark_to_send(session, lease.lane))
            for lease in (self.of(session, epoch) if self.advances else ())
            if lease in self.advances and not lease.recalled
        )

    # What writers are told.

    def send_lease(self, lease: Lease) -> None:
        mark = self._mark_to_send(lease.session, lease.lane)
        answer = m.Lease(lease.epoch, lease.chunk, lease.attempt, lease.lane, lease.cursor, lease.nbytes, mark)
        self.endpoint.send(lease.session, answer)

    def _mark_to_send(self, session: Session, lane: int) -> int:
        """The lane's watermark, noted as sent to `session`: it bounds what that session may still begin."""
        mark = self.lanes[lane].watermark
        session.marks[lane] = mark
        return mark

    def recall_all(self) -> None:
        """Recalls what `to_recall` names, and again while something waits."""
        for lease in self.to_recall():
            if lease.session.id in self.endpoint.sessions:
                lease.recalled = True
                self.endpoint.counters.leases_recalled += 1
                mark = self._mark_to_send(lease.session, lease.lane)
                recall = m.Recall(lease.epoch, lease.chunk, lease.attempt, lease.lane, lease.cursor, mark)
                self.endpoint.send(lease.session, recall)
        if self.contended:
            self.endpoint.repeat(self.recall_all)

    def to_recall(self) -> Iterator[Lease]:
        """Leases to ask back: those in the way of their lane's watermark (`Lane.in_the_way`); closed ones whose lane's
        watermark has not risen for `stuck_after_s`, if another lane could serve them at once; and open ones that were
        not written for `recall_after_s` while others wait, for `_ADVANCE_S` if nobody asked for them.
        """
        now, config = self.endpoint.now, self.endpoint.config
        for lane in self.lanes:
            in_the_way = lane.in_the_way()
            stuck = now - lane.moved_at >= config.stuck_after_s
            for lease in lane.leases():
                if lease.phase is not LeasePhase.GRANTED or lease.said_written:
                    continue
                early = lease in self.advances and now - lease.granted_at >= _ADVANCE_S
                shut_in = stuck and not self.is_open(lease) and self.elsewhere(lease)
                late = (
                    self.contended_at is not None
                    and self.is_open(lease)
                    and (now - max(lease.granted_at, self.contended_at) >= config.recall_after_s)
                )
                if early or lease in in_the_way or shut_in or late:
                    yield lease

    def elsewhere(self, lease: Lease) -> bool:
        """Whether another lane could serve it at once."""
        return any(
            number != lease.lane and (at := lane.place(lease.nbytes)) is not None and lane.is_open(at + lease.nbytes)
            for number, lane in enumerate(self.lanes)
        )

    # How they end.

    def release(self, lease: Lease) -> None:
        self.lanes[lease.lane].release(lease, self.endpoint.now)
        self.advances.discard(lease)
        self._forget(lease)
        lease.session.lent_nbytes[lease.lane] -= lease.nbytes

    def quarantine(self, lease: Lease) -> None:
        self.endpoint.counters.leases_quarantined += 1
        self.lanes[lease.lane].quarantine(lease, self.endpoint.now)
        self.endpoint.after(0.0, self.recall_all)

    def on_returned(self, session: Session, _: Writer | None, returned: m.Returned) -> None:
        lease = self.at(returned.lane, returned.cursor)
        if lease is None or lease.session is not session or lease.phase is LeasePhase.LANDED:
            return
        if (lease.epoch, lease.chunk) == (returned.epoch, returned.chunk):
            self.endpoint.counters.leases_returned += 1
            self.release(lease)

    def release_of(self, session: Session, epoch: int | None) -> None:
        """The writer can no longer write for this epoch, or None, for any: each of its leases is free whose bytes do
        not wait for their scatter.
        """
        for lease in self.of(session, epoch):
            if lease.phase is not LeasePhase.LANDED:
                self.release(lease)

    def quarantine_of(self, session: Session, epoch: int) -> None:
        """The room failed: its writer may still write what it was granted."""
        for lease in self.of(session, epoch):
            if lease.phase is LeasePhase.GRANTED:
                self.quarantine(lease)

    def session_lost(self, session: Session) -> None:
        """Quarantines what the session's writer may still write. A lease beyond the window that it was last told was
        never open to it, and is free at once.
        """
        self.forget_requests(session)
        for lease in self.of(session):
            never_writable = lease.end > session.marks.get(lease.lane, 0) + self.lanes[lease.lane].capacity
            if lease.phase is not LeasePhase.LANDED and never_writable:
                self.release(lease)
            elif lease.phase is LeasePhase.GRANTED:
                self.quarantine(lease)
