"""A node holds nothing of peers that are gone: a share of what `python -m tests.chaos.soak` does (I14)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdstage.protocol.state import State
from tests.chaos.soak import PATIENT, WAYS, Star
from tests.rows import rows


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_nothing_grows_with_peers_that_come_and_go(role: str) -> None:
    """Descriptors, sockets, threads and every table (I14); and each room ended as its peer's way has it (I10)."""
    with ExitStack() as stack:
        star = Star(role, stack)
        star.serve(24)
        before = star.gauge()
        star.serve(96)
        assert not star.gauge(before).grown(before)
        assert {way for way, _ in star.ended} == set(WAYS)
        assert all((state is State.SUCCESS) == (way != "mute") for way, state in star.ended), star.ended
        idle = star.ended["idle", State.SUCCESS]
        stats = star.node.stats()
        assert stats["sessions_ended"] == star.ended["bye", State.SUCCESS] + idle
        assert stats["sessions_idle"] == (idle if role == "decode" else 0)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_crowd_is_served_over_one_socket_and_leaves_nothing(role: str) -> None:
    with ExitStack() as stack:
        star = Star(role, stack, config=PATIENT)
        star.crowd(4)
        before = star.gauge()
        star.crowd(32)
        assert not star.gauge(before).grown(before)


@pytest.mark.parametrize("role", rows(["decode", "prefill"], full={"decode"}))
def test_rooms_one_after_the_other_leave_nothing(role: str) -> None:
    """Rooms succeed, are aborted at either end, and their peers go in order (I14)."""
    with ExitStack() as stack:
        star = Star(role, stack, config=PATIENT)
        star.serve(3, 40, ways=("bye",))
        before = star.gauge()
        star.serve(6, 60, ways=("bye",))
        assert not star.gauge(before).grown(before)
        assert star.ended["bye", State.SUCCESS] > 400
        assert star.ended["bye", State.FAILED] > 10
