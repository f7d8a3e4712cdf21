"""The line of requests is a sorted list of all, however its heaps keep it, and forgets what left it (I14)."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from pdstage.protocol.leases import LeaseRequest, RequestQueue
from pdstage.protocol.messages import SessionId


class Named(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


SESSIONS = [Named(id=SessionId(n, 0)) for n in range(5)]


def ask(session: SimpleNamespace, chunk: int, priority: int = 0) -> LeaseRequest:
    return LeaseRequest(session, 1, chunk, 0, 256, (), priority)


STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), st.integers(0, 2)),
    st.tuples(st.just("remove"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("take"), st.integers(0, 31), st.just(0)),
)


@given(st.lists(STEP, max_size=80))
def test_the_first_is_the_first_of_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    queue, model = RequestQueue(), []
    for n, (what, number, priority) in enumerate(steps):
        if what == "add":
            request = ask(SESSIONS[number], n, priority)
            queue.add(request)
            model.append((priority, n, request))
        elif what == "remove" and model:
            queue.remove(model.pop(number % len(model))[2])
        elif what == "take":
            over = {session for bit, session in enumerate(SESSIONS) if number >> bit & 1}
            left = [entry for entry in sorted(model, key=lambda e: e[:2]) if entry[2].session not in over]
            first = queue.first(over)
            assert first is (left[0][2] if left else None)
            if first is not None:
                queue.remove(first)
                model.remove(left[0])
        assert len(queue) == len(model)
        assert queue.n_sessions == len({request.session for _, _, request in model})
        assert {id(r) for _, _, r in queue.entries()} == {id(r) for _, _, r in model}


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
