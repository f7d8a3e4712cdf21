"""The timer against a plain dict of moments."""

from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from pdstage.protocol.timers import Timers

KEYS = st.integers(0, 5)
AT = st.integers(0, 20).map(float)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, AT),
        st.tuples(st.just("default"), KEYS, AT),
        st.tuples(st.just("cancel"), KEYS),
        st.tuples(st.just("due"), AT),
        st.tuples(st.just("delay"), AT),
    ),
    max_size=60,
)


@given(STEPS)
def test_matches_a_dict(steps: list[tuple]) -> None:
    timers, model = Timers(), {}
    for what, *args in steps:
        match what, args:
            case "set", (key, at):
                timers.set(key, at)
                model[key] = at
            case "default", (key, at):
                timers.set_default(key, at)
                model.setdefault(key, at)
            case "cancel", (key,):
                timers.cancel(key)
                model.pop(key, None)
            case "due", (now,):
                given_up = list(timers.due(now))
                assert set(given_up) == {key for key, at in model.items() if at <= now}
                assert [model[key] for key in given_up] == sorted(model.pop(key) for key in list(given_up))
            case "delay", (by,):
                timers.delay(by)
                model = {key: at + by for key, at in model.items()}
        assert len(timers) == len(model)
        assert timers.next_at() == min(model.values(), default=None)
        assert all((key in timers) is (key in model) for key in range(6))


def test_a_consumer_may_set_and_cancel_while_it_is_served() -> None:
    timers = Timers()
    for key in "abc":
        timers.set(key, 1.0)
    served = []
    for key in timers.due(1.0):
        served.append(key)
        if key == "a":
            timers.cancel("b")
            timers.set("d", 0.5)
            timers.set("a", 2.0)
    assert served == ["a", "d", "c"]
    assert timers.next_at() == 2.0


def test_memory_is_of_live_moments_only() -> None:
    """A key set again and again, as a repeated question is, leaves nothing behind (I14)."""
    timers = Timers()
    timers.set("far", 1e9)
    for n in range(100_000):
        timers.set("retry", float(n))
    assert len(timers._heap) <= 64 + 4 * len(timers) + 1


def test_a_cancelled_moment_holds_nothing_of_its_key() -> None:
    """A key names a room, and a room holds the engine's index arrays: far deadlines must not keep ended rooms (I14)."""

    class Room:
        pass

    timers, rooms = Timers(), [Room() for _ in range(50)]
    for room in rooms:
        timers.set(("deadline", room), 1e9)
    gone = [weakref.ref(room) for room in rooms]
    for room in rooms[:25]:
        timers.cancel(("deadline", room))
    for room in rooms[25:]:
        timers.set(("deadline", room), 2e9)
        timers.cancel(("deadline", room))
    rooms.clear()
    del room
    assert [ref() for ref in gone] == [None] * 50
