"""The ledger of leases: order, shares, windows, recall rules, quarantine (I3, I12, I13, I15)."""

from __future__ import annotations

from pdstage import Config
from pdstage.protocol.lane import Lease
from pdstage.protocol.leases import Leases
from pdstage.protocol.messages import LaneSpan, SessionId
from pdstage.protocol.session import Endpoint
from pdstage.protocol.state import LEASE, LeaseEvent

LANE = 2048


class Session:
    def __init__(self, n: int) -> None:
        self.id = SessionId(n, 0)
        self.lent_nbytes: dict[int, int] = {}


A, B = Session(1), Session(2)


def leases(*sizes: int, recall_after_s: float = 1000.0, stuck_after_s: float = 1000.0) -> Leases:
    for one in (A, B):
        one.lent_nbytes.clear()
    config = Config(recall_after_s=recall_after_s, stuck_after_s=stuck_after_s)
    endpoint = Endpoint(1, config, None)  # type: ignore[arg-type]
    return Leases(endpoint, (LaneSpan(n << 20, size) for n, size in enumerate(sizes or (LANE,))))


def ask(who: Session, chunk: int, nbytes: int, *, priority: int = 0) -> Lease:
    return Lease(who, 1, chunk, 0, nbytes, (), priority)


def grant(held: Leases, *requests: Lease) -> list[Lease]:
    for request in requests:
        held.enqueue(request)
    granted = list(held.grant_waiting())
    list(held.opened())
    held.contended_at = held.endpoint.now if held.contended else None
    return granted


def recalled(held: Leases, now: float) -> list[Lease]:
    held.endpoint.now = now
    return list(held.to_recall())


def test_first_come_first_served_within_a_priority() -> None:
    held = leases()
    full = grant(held, ask(A, 0, LANE), ask(A, 1, LANE))
    assert [g.chunk for g in full] == [0, 1], "one lap ahead is granted closed"
    order = [ask(A, 2, 256, priority=1), ask(A, 3, 256), ask(A, 4, 256, priority=1), ask(A, 5, 256)]
    assert not grant(held, *order)
    held.release(full[0])
    assert [g.chunk for g in grant(held)] == [3, 5, 2, 4]


def test_half_of_a_lane_at_most_while_others_wait() -> None:
    held = leases()
    first = grant(held, ask(A, 0, LANE // 2), ask(A, 1, LANE // 2), ask(A, 2, LANE // 2), ask(A, 3, LANE // 2))
    assert len(first) == 4, "alone, a session may have it all, both laps"
    assert not grant(held, ask(A, 4, 256), ask(A, 5, 256), ask(B, 6, 256))
    held.release(first[0])
    assert [g.chunk for g in grant(held)] == [6, 4, 5], "B is not behind A's backlog; then A is alone again"


def test_what_no_lane_can_ever_serve_is_given_back_at_once() -> None:
    held = leases(1024, 2048)
    grant(held, ask(A, 0, 2048), ask(A, 1, 2048), ask(A, 2, 1024), ask(A, 3, 1024))
    refused = grant(held, ask(A, 4, 2049), ask(A, 5, 2048))
    assert [(r.phase, r.chunk) for r in refused] == [("waiting", 4)]
    assert 4 not in held.held(A, 1)
    assert held.held(A, 1)[5] in held.waiting


def test_quarantine_carves_out_and_delays_none() -> None:
    """I12, I13: with half of the only lane quarantined the other half still serves, again and again."""
    held = leases()
    (stuck,) = grant(held, ask(A, 0, LANE // 2))
    held.quarantine(stuck)
    assert held.largest() == LANE // 2
    for chunk in range(1, 50):
        (mine,) = grant(held, ask(B, chunk, LANE // 2))
        assert held.is_open(mine), "it never waits for the stuck one"
        assert mine.cursor % LANE == LANE // 2
        LEASE.move(mine, LeaseEvent.LAND)
        held.release(mine)
    assert grant(held, ask(B, 50, LANE))[0].phase == "waiting", "told at once that it does not fit"
    held.release(stuck)
    assert held.largest() == LANE
    assert grant(held, ask(B, 51, LANE))[0].phase == "granted"


def test_recall_a_open_without_a_tag_while_something_waits() -> None:
    held = leases(recall_after_s=2.0, stuck_after_s=9.0)
    (idle,) = grant(held, ask(A, 0, 1024))
    assert not recalled(held, 100.0), "nothing waits: let it be late"
    grant(held, ask(B, 1, LANE))
    assert not recalled(held, 101.9)
    assert recalled(held, 102.0) == [idle]
    idle.said_written = True
    assert not recalled(held, 102.0), "its writer says it was written"
    idle.said_written = False
    LEASE.move(idle, LeaseEvent.LAND)
    assert not recalled(held, 102.0), "landed is ours to finish"


def test_recall_b_closed_behind_a_stuck_head_when_another_lane_would_grant() -> None:
    held = leases(2048, 2048, stuck_after_s=1.0)
    first = grant(held, ask(A, 0, 2048), ask(A, 1, 2048), ask(B, 2, 1024))
    head, other, closed = first
    assert (head.lane, other.lane, closed.lane) == (0, 1, 0)
    assert not held.is_open(closed)
    assert not recalled(held, 50.0), "no other lane would grant it"
    LEASE.move(other, LeaseEvent.LAND)
    held.release(other)
    assert recalled(held, 50.0) == [closed]
    assert not recalled(held, 0.5), "lane 0 has not stood still for long enough"


def test_recall_c_on_the_bytes_of_a_quarantined_span_one_lap_on() -> None:
    held = leases()
    stuck, other = grant(held, ask(A, 0, 1024), ask(A, 1, 1024))
    (above,) = grant(held, ask(B, 2, 1024))
    assert above.cursor == 2048
    held.quarantine(stuck)
    assert recalled(held, 0.0) == [above], "at once: it can only come back"
    held.release(above)
    assert not recalled(held, 0.0)
    assert held.lanes[0].watermark == other.cursor, "the watermark passed the stuck span as if padding"
