"""What strangers may make a prefill rank hold: rooms nobody submits, greetings nobody follows up."""

from __future__ import annotations

from pdstage.protocol import messages as m
from tests.sim.fleet import Fleet

N_PARKED, N_HALF_OPEN = 64, 32


def parked(n_rooms: int) -> None:
    """Rooms opened that prefill never submits: so many are parked, the others refused, and in the end all are gone."""
    fleet = Fleet(seed=1, max_parked=N_PARKED, send_wait_s=5, drain_s=5)
    hub, peer = fleet.add("prefill", b"hub"), fleet.add("decode", b"peer")
    rooms = []
    for n in range(n_rooms):
        rooms.append(peer.core.announce(b"room %d" % n, {0: hub.route}, fleet.now, deadline_s=60.0))
        peer.core.bind(rooms[-1], (m.Asked("kv", 0, 64),), {}, fleet.now)
    fleet.deliver(peer)
    fleet.run(fleet.now + 1.0)
    assert len(hub.core.rooms.pending) <= N_PARKED
    n_refused = sum(room.ended for room in rooms)
    fleet.run(fleet.now + 10.0)
    assert all(room.ended and room.released for room in rooms)
    assert hub.core.idle and not hub.core.rooms.pending
    assert peer.core.idle
    print(f"parked: of {n_rooms:,} rooms never submitted {n_refused:,} were refused; the rest parked, then failed")
    assert n_refused >= n_rooms - N_PARKED


def half_open(n_greetings: int) -> None:
    """Greetings whose sender is never heard of again: so many are held, the oldest makes room, and all expire."""
    fleet = Fleet(seed=1, max_half_open=N_HALF_OPEN, hello_s=5)
    hub = fleet.add("prefill", b"hub")
    for n in range(n_greetings):
        ghost = fleet.add("decode", b"ghost %d" % n)
        ghost.core.announce(b"room", {0: hub.route}, fleet.now, deadline_s=60.0)
        ghost.alive = False
        hello = next(effect.frame for effect in ghost.core.take_effects())
        hub.core.receive(ghost.route, hello, fleet.now)
        assert len(hub.core.sessions) <= N_HALF_OPEN
    fleet.deliver(hub)
    assert not fleet.sent["HelloRefused"], "who greets without end keeps nobody out"
    assert len(hub.core.sessions) == N_HALF_OPEN
    fleet.run(fleet.now + 6.0)
    assert not hub.core.sessions and not len(hub.core.endpoint.timers)
    late = fleet.add("decode", b"late")
    late.core.announce(b"room", {0: hub.route}, fleet.now, deadline_s=60.0)
    fleet.deliver(late)
    fleet.run(fleet.now + 1.0)
    assert len(hub.core.sessions) == 1, "there is room again for who means it"
    print(
        f"half-open: of {n_greetings:,} greetings without a sequel {N_HALF_OPEN:,} were held at most, and all expired"
    )
