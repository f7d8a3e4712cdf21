"""Each alert fires while its incident is played on real nodes, and no more once somebody did what the runbook says."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from pdstage import Keys, State, UsageError
from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control import etcd
from pdstage.control.bootstrap import BootstrapServer
from pdstage.manager import lookup
from tests import promtool
from tests.control.sockets import raw_dealer
from tests.manager.engine import QUICK, TOKENS, Event, Rank, altering, drive, unheard
from tests.watch.conftest import Watched
from tests.watch.samples import get

pytestmark = pytest.mark.skipif(promtool.PROMTOOL is None, reason="there is no promtool: make servers")


class Play:
    """Nodes that are scraped, and what alerts do."""

    def __init__(self, stack: ExitStack, monkeypatch, folder) -> None:
        self.stack, self.monkeypatch, self.folder = stack, monkeypatch, folder
        self.history, self.fired = promtool.History(), []

    def pair(self, **options) -> Watched:
        """A prefill and a decode node, in the place of those before them."""
        self.watched = Watched(self.stack, **options)
        return self.watched

    def lasts(self, minutes: float) -> None:
        self.history.add({"pair": get(self.watched.endpoint.address)}, minutes)

    def fires(self, *alerts: str, after: float = 1) -> None:
        """These do, after so many minutes like this."""
        self.lasts(after)
        self.history.expect([promtool.firing(alert) for alert in alerts])
        self.fired += alerts

    def quiet(self, after: float = 15) -> None:
        """No alert fires, after so many minutes like this."""
        self.lasts(after)
        self.history.expect([promtool.firing(".*")], value=False)

    def until(self, name: str, least: float, **labels: str) -> None:
        """Both nodes get turns until the series is as large."""
        drive(self.watched.nodes, lambda: self.watched.scrape()(name, **labels) >= least)

    def rooms_fail(self, **named: str) -> None:
        """For twelve minutes, one after the other."""
        for room in range(6):
            receiver = self.watched.receive(room, **named)
            drive(self.watched.nodes, lambda one=receiver: one.state is State.FAILED)
            self.lasts(2)

    def later(self, seconds: float) -> None:
        """For all but this, so many seconds pass."""
        clock = time.monotonic
        self.monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)


def a_bug(play: Play) -> None:
    pair = play.pair()
    play.quiet()
    pair.d.driver.fail(RuntimeError("a bug"))
    play.fires("PdstageNodeFailed")
    play.pair()
    play.quiet()


def a_drain_without_an_end(play: Play) -> None:
    pair = play.pair()
    play.quiet()
    pair.p.drain(0.0)
    play.fires("PdstageDraining", after=62)
    play.pair()
    play.quiet()


def another_model(play: Play) -> None:
    pair = play.pair()
    pair.move(1)
    play.quiet()
    play.pair(dst=Rank(layers=4))
    play.rooms_fail()
    play.fires("PdstageRoomsFail")
    play.pair().move(1)
    play.quiet(6)


def a_lost_tag(play: Play) -> None:
    """As if: prefill sends half of a room, and no more."""
    pair = play.pair()
    pair.move(1)
    play.quiet()
    room = pair.open(2)
    room.sender.chunk(room.pages, (0, 12))
    drive(pair.nodes, lambda: room.receiver.state is State.TRANSFERRING)
    play.fires("PdstageRoomsStuck", after=4)
    room.sender.abort()
    pair.end(room)
    play.quiet()


def a_silent_peer(play: Play) -> None:
    """A live one, in the middle of a chunk: nothing proves that it does not write."""
    pair = play.pair(staging_nbytes=32 << 10)
    pair.move(1)
    play.quiet()
    room = pair.open(2)
    room.sender.chunk(room.pages, TOKENS, ready=Event())
    drive(pair.nodes, lambda: pair.d.stats()["leases_granted"] > 1)
    unheard(pair.d)
    drive([pair.d], lambda: bool(pair.d.unfenced()))
    play.fires("PdstageSessionsLost")
    play.fires("PdstageSessionsUnfenced", "PdstageQuarantine", after=11)
    assert pair.d.fence(*pair.d.unfenced()) == 1
    pair.d.turn()
    assert room.receiver.released
    play.quiet()


def a_directory_that_is_gone(play: Play) -> None:
    play.monkeypatch.setattr(lookup, "_RETRY_CAP_S", 0.1)
    with BootstrapServer() as directory:
        play.pair(prefill={"directory": directory.address})
        play.until("pdstage_directory_publications_total", 1, outcome="success")
        play.quiet()
        said = play.watched.scrape()("pdstage_directory_publications_total", outcome="success")
    play.later(10)
    play.until("pdstage_directory_publications_total", 5, outcome="failed")
    play.later(10)
    play.fires("PdstageNotRegistered", "PdstageRegistrationFails", after=3)
    with BootstrapServer(directory.address):
        play.until("pdstage_directory_publications_total", said + 1, outcome="success")
        play.quiet(6)


def an_instance_that_is_none(play: Play) -> None:
    play.pair(decode={"config": replace(QUICK, hello_s=0.1)}).move(100)
    play.quiet()
    play.rooms_fail(instance="nobody")
    play.fires("PdstageLookupsFail")
    play.pair().move(100)
    play.quiet(11)


def keys_rotated_at_prefill_alone(play: Play) -> None:
    old, new = play.folder / "old.key", play.folder / "new.key"
    Keys.make(old), Keys.make(new)
    play.pair(prefill={"directory": None, "keys": old}, decode={"keys": old}).move(100)
    play.quiet()
    pair = play.pair(prefill={"directory": None, "keys": new}, decode={"keys": old})
    for room in range(6):
        with pytest.raises(UsageError, match="is not let in here"):
            pair.receive(room)
        play.lasts(2)
    play.fires("PdstageLookupsFail")
    play.pair(prefill={"directory": None, "keys": new}, decode={"keys": new}).move(100)
    play.quiet(11)


def etcd_that_ends(play: Play) -> None:
    """Again and again, then for more than a minute."""
    play.monkeypatch.setattr(etcd, "_EVERY_S", 0.05)
    with Servers(play.folder) as servers:
        (member,) = servers.ready().members
        pair = play.pair(prefill={"directory": servers.address()})
        pair.move(1)
        play.quiet()
        for n in range(1, 8):
            member.kill()
            play.until("pdstage_directory_watch_restarts_total", n)
            if n < 7:
                member.start()
                servers.ready()
                drive(pair.nodes, lambda: pair.scrape()("pdstage_directory_watch_age_seconds") < 0.1)
        play.later(70)
        play.fires("PdstageDirectoryAway", "PdstageWatchUnsteady", after=2)
        member.start()
        drive(pair.nodes, lambda: pair.scrape()("pdstage_directory_watch_age_seconds") < 1)
        play.until("pdstage_directory_lease_seconds", 1)
        play.quiet(11)


def a_slow_link(play: Play) -> None:
    """Writes take more than a second, and chunks wait for the staging memory that they hold."""
    pair = play.pair(staging_nbytes=32 << 10)
    pair.move(100)
    play.quiet()
    for turn in range(7):
        rooms = [pair.begin(4 * turn + n, 32) for n in range(4)]
        with play.monkeypatch.context() as held:
            held.setattr(pair.d.transport, "poll", list)
            drive(pair.nodes, lambda: all(lane.ahead_nbytes for lane in pair.d.status().lanes))
        play.later(1.5)
        pair.end(*rooms)
        for one in rooms:
            pair.src.free(one.pages)
            pair.dst.free(one.into)
        play.lasts(2)
    play.fires("PdstageStagingStarved")
    play.until("pdstage_directory_lease_seconds", 1)
    play.quiet()


def a_chunk_that_is_altered(play: Play) -> None:
    pair = play.pair(config=replace(QUICK, checksums=True))
    play.quiet()
    altering(pair.d)
    pair.end(pair.begin(1))
    play.fires("PdstageChunksAltered")
    play.quiet(61)


def a_stranger(play: Play) -> None:
    pair = play.pair()
    play.quiet()
    dealer = raw_dealer(pair.p.socket.endpoint, b"p-stranger")
    dealer.send_multipart([b"GET / HTTP/1.1"])
    play.until("pdstage_frames_dropped_total", 1, role="prefill", reason="malformed")
    dealer.close()
    play.fires("PdstageMalformed")
    play.quiet(11)


INCIDENTS = {
    a_bug: {"PdstageNodeFailed"},
    a_drain_without_an_end: {"PdstageDraining"},
    another_model: {"PdstageRoomsFail"},
    a_lost_tag: {"PdstageRoomsStuck"},
    a_silent_peer: {"PdstageSessionsLost", "PdstageSessionsUnfenced", "PdstageQuarantine"},
    a_directory_that_is_gone: {"PdstageNotRegistered", "PdstageRegistrationFails"},
    an_instance_that_is_none: {"PdstageLookupsFail"},
    keys_rotated_at_prefill_alone: {"PdstageLookupsFail"},
    etcd_that_ends: {"PdstageDirectoryAway", "PdstageWatchUnsteady"},
    a_slow_link: {"PdstageStagingStarved"},
    a_chunk_that_is_altered: {"PdstageChunksAltered"},
    a_stranger: {"PdstageMalformed"},
}


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda one: one.__name__)
def test_alerts_fire_while_their_incident_lasts(incident, monkeypatch, tmp_path):
    if incident is etcd_that_ends and ETCD is None:
        pytest.skip("there is no etcd: make servers")
    with ExitStack() as stack:
        play = Play(stack, monkeypatch, tmp_path)
        incident(play)
    assert set(play.fired) == INCIDENTS[incident]
    play.history.check(tmp_path)


def test_every_alert_has_its_incident():
    assert set().union(*INCIDENTS.values()) == set(promtool.ALERTS)
