"""Send buffers: sessions take turns, none holds all of them, and nothing that was dropped keeps a place (I14)."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from pdstage.protocol.prefill_chunks import SendBuffers
from pdstage.protocol.state import ChunkPhase


class Named(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


SESSIONS = [Named(n=n) for n in range(6)]


def chunk(session: SimpleNamespace, number: int, *, direct: bool = False) -> SimpleNamespace:
    return Named(destination=SimpleNamespace(session=session), number=number, direct=direct, phase=ChunkPhase.READY)


def begin(buffers: SendBuffers) -> list[tuple[SimpleNamespace, int]]:
    begun = list(buffers.pop())
    for one, _ in begun:
        one.phase = ChunkPhase.WRITING
    return begun


STEP = st.tuples(st.sampled_from(["queue", "direct", "drop", "done"]), st.integers(0, 59))


@given(st.lists(STEP, max_size=120), st.integers(2, 4))
def test_any_order_of_events_serves_what_may_be_served(steps: list[tuple[str, int]], n_buffers: int) -> None:
    buffers = SendBuffers(n_buffers, max_direct=2)
    waiting, under_way = [], []
    for n, (what, number) in enumerate(steps):
        if what in ("queue", "direct"):
            waiting.append(chunk(SESSIONS[number % 6], n, direct=what == "direct"))
            buffers.queue(waiting[-1])
        elif what == "drop" and waiting:
            waiting.pop(number % len(waiting)).phase = ChunkPhase.DROPPED
        elif what == "done" and under_way:
            buffers.done(*under_way.pop(number % len(under_way)))
        for one, buffer in begin(buffers):
            first = next(
                w for w in waiting if (w.destination.session, w.direct) == (one.destination.session, one.direct)
            )
            assert one is first, "in order within a session"
            waiting.remove(one)
            under_way.append((one, buffer))
        busy = Counter((one.destination.session, one.direct) for one, _ in under_way)
        taken = [buffer for _, buffer in under_way if buffer >= 0]
        assert sorted(taken + buffers.free) == list(range(n_buffers))
        assert all(held <= (2 if direct else n_buffers - 1) for (_, direct), held in busy.items())
        for one in waiting:
            held = busy[one.destination.session, one.direct]
            assert held == 2 if one.direct else not buffers.free or held == n_buffers - 1, "could have begun"
    while under_way:
        buffers.done(*under_way.pop())
        under_way += begin(buffers)
    assert buffers.idle
