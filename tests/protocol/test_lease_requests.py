"""The line of requests is a sorted list of all, however its heaps keep it, and forgets what left it (I14)."""

from __future__ import annotations

from types import SimpleNamespace

from pdstage.protocol.leases import LeaseRequest, RequestQueue
from pdstage.protocol.messages import SessionId


class Named(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


SESSIONS = [Named(id=SessionId(n, 0)) for n in range(5)]


def ask(session: SimpleNamespace, chunk: int, priority: int = 0) -> LeaseRequest:
    return LeaseRequest(session, 1, chunk, 0, 256, (), priority)


def test_urgent_requests_in_front_of_one_that_waits_leave_nothing_behind() -> None:
    """Each is a new front of its session, and the one that waits is the front again after each."""
    queue = RequestQueue()
    queue.add(ask(SESSIONS[0], 0, priority=9))
    blocker = ask(SESSIONS[1], 1, priority=5)
    queue.add(blocker)
    for chunk in range(2, 2000):
        queue.add(ask(SESSIONS[0], chunk))
        first = queue.first(())
        assert first is not None
        assert first.chunk == chunk
        queue.remove(first)
        assert queue.first(()) is blocker
    assert len(queue._fronts) <= 64 + 4 * 2
    assert len(queue._queues[SESSIONS[0]]) <= 64 + 4 * 2
