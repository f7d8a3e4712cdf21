"""Several transports as one: which of them a peer is reached by, and what may be counted on then."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from transport.endpoint import NBYTES, Endpoint, Log, Remote

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport import open_transport
from pdstage.transport._auto import AutoTransport
from pdstage.transport._device import Views
from pdstage.transport.base import Done, Figures, read_description, write_description
from pdstage.transport.local import LocalTransport, _Description
from tests import descriptors


class Near(LocalTransport):
    traits = replace(LocalTransport.traits, name="near", fences=True, max_descriptors=7)


class Far(LocalTransport):
    """Moves device memory as well; a stand-in for a fabric, without a library."""

    traits = replace(LocalTransport.traits, name="far", kinds=frozenset({"cpu", "cuda"}), post_blocks=False)

    def _views(self, link: object, regions: object) -> Views:
        return Views()  # no device is looked for


def auto() -> AutoTransport:
    return AutoTransport([Near(), Far()])


def end(transport: object) -> Endpoint:
    endpoint = Endpoint.__new__(Endpoint)
    endpoint.own(transport, np.zeros(NBYTES, np.uint8))
    return endpoint


@pytest.fixture
def ends() -> object:
    a, b = end(auto()), end(auto())
    yield a, b
    a.close()
    b.close()


def elsewhere(offers: dict[str, bytes], name: str) -> dict[str, bytes]:
    """The same offers, but transport `name` lives on another host."""
    told = read_description("b", offers[name], _Description, LocalTransport.traits)
    moved = msgspec.structs.replace(
        told, inbox="pdstage.moon", identity=msgspec.structs.replace(told.identity, boot_id="moon")
    )
    return offers | {name: write_description(moved)}


def connect(a: Endpoint, b: Endpoint, offers: dict[str, bytes]) -> None:
    a.connect("b", a.transport.described(offers))
    a.prepare("b", [b.region()])


def delivers(a: Endpoint, b: Endpoint, tag: bytes) -> None:
    log = Log(a, b)
    ticket = a.post("b", [(0, b.base, 8)], tag)
    log.until(lambda: log.done(a) == [ticket] and log.tags(b) == [tag])


def test_the_most_preferred_that_both_have_and_that_gets_there(ends):
    a, b = ends
    offers = b.transport.offers()
    for told, over in (
        (offers, "near"),
        (dict(reversed(offers.items())), "near"),
        ({"far": offers["far"]}, "far"),
        (elsewhere(offers, "near"), "far"),
        (offers, "near"),
    ):
        a.disconnect("b")
        connect(a, b, told)
        assert a.traits("b").name == over
        delivers(a, b, over.encode())


def test_a_peer_in_reach_of_none_is_refused_with_what_each_says(ends):
    a, b = ends
    offers = elsewhere(elsewhere(b.transport.offers(), "near"), "far")
    for verb in (a.transport.connect, a.transport.identify):
        with pytest.raises(PeerError, match=r"another host.*another host"):
            verb("b", a.transport.described(offers))
        with pytest.raises(PeerError, match="no transport in common"):
            verb("b", a.transport.described({"pigeon": b"coo"}))


def test_a_peer_that_moved_out_of_reach_is_reached_by_the_other(ends):
    a, b = ends
    connect(a, b, b.transport.offers())
    connect(a, b, elsewhere(b.transport.offers(), "near"))
    assert a.traits("b").name == "far"
    delivers(a, b, b"moved")
    connect(a, b, b.transport.offers())
    assert a.traits("b").name == "far"  # a life stays where it is
    delivers(a, b, b"stays")


@pytest.mark.parametrize("whose", ["own", "the peer's"])
def test_memory_of_a_kind_that_it_does_not_move_goes_to_the_other(ends, whose):
    a, b = ends
    device = Region(1 << 40, 4096, "cuda")
    (a if whose == "own" else b).register([device])
    a.connect("b", b.describe())
    a.prepare("b", [b.region(), *([device] if whose != "own" else [])])
    assert a.traits("b").name == "far"
    delivers(a, b, b"far")
    a.unregister([device]) if whose == "own" else b.unregister([device])


def test_what_no_transport_moves_is_refused(ends):
    a, b = ends
    with pytest.raises(UsageError, match="auto moves cpu, cuda"):
        a.register([Region(1 << 40, 4096, "floppy")])
    a.connect("b", b.describe())
    with pytest.raises(PeerError, match="not registered"):
        a.prepare("b", [Region(b.base + 64, 1 << 40)])
    assert a.traits("b").name == "near"
    a.prepare("b", [b.region()])
    delivers(a, b, b"unharmed")


def test_nothing_is_registered_if_one_of_them_cannot(ends):
    class Full(Far):
        def register(self, regions):
            raise TransportError("full", remedy="free some")

    near = Near()
    both = AutoTransport([near, Full()])
    with pytest.raises(TransportError, match="full"):
        both.register([ends[0].region()])
    assert not near.own.regions
    with pytest.raises(UsageError, match="not registered"):
        both.unregister([ends[0].region()])
    both.close()


def test_traits_are_of_the_peer_and_the_weakest_where_its_way_is_not_known(ends):
    a, b = ends
    weakest = a.transport.traits
    assert (weakest.fences, weakest.max_descriptors, weakest.post_blocks) == (False, 7, True)
    assert weakest.kinds == {"cpu", "cuda"}
    assert a.traits("nobody") == weakest
    connect(a, b, b.transport.offers())
    assert a.traits("b") == Near.traits
    a.disconnect("b")
    assert a.traits("b") == Near.traits  # the driver asks whether the disconnect was a fence
    a.forget("b")
    a.transport.identify("b", b.describe())
    assert a.traits("b") == replace(weakest, name="near+far")  # it may write by either
    assert not a.traits("b").fences


def test_tickets_of_different_ways_are_different(ends):
    a, b = ends
    a.connect("n", a.transport.described({"near": b.transport.offers()["near"]}))
    a.connect("f", a.transport.described({"far": b.transport.offers()["far"]}))
    log, tickets = Log(a, b), []
    for i in range(6):
        a.prepare(peer := "nf"[i % 2], [b.region()])
        tickets.append(a.post(peer, [(0, b.base, 8)], b"%d" % i))
    log.until(lambda: len(log.done(a)) == 6 == len(log.tags(b)))
    assert sorted(log.done(a)) == sorted(tickets)
    assert len(set(tickets)) == 6


def test_ranks_of_one_host_use_local_and_death_is_proved_by_each_that_may_have_written():
    a, b = Endpoint("auto"), Remote("auto")
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    assert a.traits("b").name == "local"
    a.identify("b", b.describe())
    assert not a.proved_dead("b")
    b.kill()
    Log(a).until(lambda: a.proved_dead("b"))
    a.forget("b")
    assert not a.proved_dead("b")
    a.close()


@pytest.mark.parametrize("dead", ["local", "far"])
def test_one_way_on_which_a_peer_is_dead_proves_nothing(dead, monkeypatch):
    """It may have written by the other, where its bytes may still be on their way."""
    b = Remote("local")
    with AutoTransport([LocalTransport(), Far()]) as a:
        a.identify("b", a.described(dict.fromkeys(("local", "far"), b.describe())))
        for way in a._met["b"].values():
            monkeypatch.setattr(way, "proved_dead", lambda _, way=way: way.traits.name == dead)
        assert not a.proved_dead("b")
        for way in a._met["b"].values():
            monkeypatch.setattr(way, "proved_dead", lambda _: True)
        assert a.proved_dead("b")
    b.kill()


class Ended(Far):
    """Finds that the peer's process has ended since it was looked at first."""

    def identify(self, peer: str, description: bytes) -> None:
        raise TransportError("has ended")


@pytest.mark.parametrize("second", [Far, Ended])
def test_a_peer_that_none_may_write_leaves_nothing_once_it_is_forgotten(second):
    """I14: the next transport was tried, and knows the peer's process since then."""
    b, before = Remote("local"), descriptors.count("pidfd")
    with AutoTransport([LocalTransport(), second()]) as a:
        told = a.described(dict.fromkeys(("local", "far"), b.describe()))
        if second is Far:
            a.connect("b", told)
            with pytest.raises(PeerError, match="no transport reaches peer 'b'"):
                a.prepare("b", [Region(b.base + 64, 1 << 40)])
        else:
            with pytest.raises(TransportError, match="has ended"):
                a.identify("b", told)
        a.disconnect("b")
        a.forget("b")
        assert descriptors.count("pidfd") == before
    b.kill()


def test_closed_twice_and_open_ones_of_the_same_name_apart():
    first, second = open_transport("auto"), open_transport("auto")
    first.close()
    first.close()
    assert second.describe()
    second.close()


def test_what_a_way_measured_of_a_post_comes_through(monkeypatch):
    way = LocalTransport()
    monkeypatch.setattr(way, "poll", lambda: [Done(7, Figures(1, 4096, 1e-6, 2e-6))])
    auto = AutoTransport([way])
    (done,) = auto.poll()
    assert done.figures == Figures(1, 4096, 1e-6, 2e-6)
    auto.close()
