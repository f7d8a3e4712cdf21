"""A node holds nothing of peers that are gone: a share of what `python -m tests.soak` does (I14)."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdstage.protocol.state import State
from tests.rows import rows
from tests.soak.long import Long
from tests.soak.real import RealPeers
from tests.soak.star import DECODE_WAYS, PREFILL_WAYS, Crowd, Star

WENT_WELL = {"bye", "killed", "silent", "idle"}


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_nothing_grows_with_peers_that_come_and_go(role: str) -> None:
    """Descriptors, sockets, threads and every table (I14); and each room ended as its peer's way has it (I10)."""
    with ExitStack() as stack:
        star = Star(role, stack)
        star.serve(60)
        before = star.gauge()
        star.serve(300)
        assert not star.gauge(before).grown(before)
        ways = PREFILL_WAYS if role == "decode" else DECODE_WAYS
        assert {way for way, _ in star.ended} == set(ways)
        assert all((state is State.SUCCESS) == (way in WENT_WELL) for way, state in star.ended), star.ended
        stats = star.node.stats()
        n_in_order = sum(n for (way, _), n in star.ended.items() if way in ("bye", "idle"))
        assert stats["sessions_ended"] == n_in_order
        assert stats["sessions_idle"] == (star.ended["idle", State.SUCCESS] if role == "decode" else 0)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_crowd_is_served_over_one_socket_and_leaves_nothing(role: str) -> None:
    with ExitStack() as stack:
        crowd = Crowd(role, stack, 150)
        crowd.serve(8, ("bye",))
        before = crowd.gauge()
        crowd.gather()
        crowd.again()
        crowd.part()
        assert not crowd.gauge(before).grown(before)


@pytest.mark.full
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_real_nodes_that_come_and_go_leave_nothing(role: str) -> None:
    """Real bytes over a real transport, whose own tables are looked at too (I14)."""
    with ExitStack() as stack:
        peers = RealPeers(role, stack, "local")
        peers.serve(3)
        before = peers.gauge()
        peers.serve(6)
        assert not peers.gauge(before).grown(before)


@pytest.mark.parametrize("role", rows(["decode", "prefill"], full={"decode"}))
def test_rooms_one_after_the_other_leave_nothing(role: str) -> None:
    """A share of `python -m tests.soak long`: rooms succeed, are aborted, and lose their peer (I14)."""
    with ExitStack() as stack:
        node = Long(role, stack, "local")
        node.serve_rooms(120, 40)
        before = node.gauge()
        node.serve_rooms(360, 60)
        assert not node.gauge(before).grown(before)
        assert node.ended["SUCCESS"] > 400
        assert set(node.lives.values()) == {3}
