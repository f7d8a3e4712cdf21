"""Several transports as one: which of them a peer is reached by, and what may be counted on then."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import msgspec
import pytest
from transport.endpoint import Endpoint, Log, Remote, altered, delivers, described, meet

from pdstage import PeerError, Region, TransportError, UsageError
from pdstage.transport._auto import AutoTransport
from pdstage.transport._device import Views
from pdstage.transport.local import LocalTransport, _Description
from tests import descriptors


class Near(LocalTransport):
    traits = replace(LocalTransport.traits, name="near", fences=True, max_descriptors=7)


class Far(LocalTransport):
    """Moves device memory as well; a stand-in for a fabric, without a library."""

    traits = replace(LocalTransport.traits, name="far", kinds=frozenset({"cpu", "cuda"}), post_blocks=False)

    def _views(self, link, regions):
        return Views()  # no device is looked for


class End(Endpoint):
    """Over an auto of those two."""

    def __init__(self):
        self.own(AutoTransport([Near(), Far()]), self.allocate())


@pytest.fixture
def ends():
    a, b = End(), End()
    yield a, b
    a.close()
    b.close()


def elsewhere(b, *names):
    """What `b` offers, but its transports of these names live on another host."""
    moved = {}
    for name in names:
        way = b.transport._ways[name]
        identity = msgspec.structs.replace(described(way, _Description).identity, boot_id="moon")
        moved[name] = altered(way, _Description, life="pdstage.moon", identity=identity)
    return b.offers() | moved


def connect(a, b, offers):
    a.connect("b", a.described(offers))
    a.prepare("b", [b.region()])


def test_the_most_preferred_that_both_have_and_that_gets_there(ends):
    """A peer that moves out of reach is reached by another, and its life stays there."""
    a, b = ends
    offers, moved = b.offers(), elsewhere(b, "near")
    for is_new, told, over in (
        (True, offers, "near"),
        (True, dict(reversed(offers.items())), "near"),
        (True, {"far": offers["far"]}, "far"),
        (True, moved, "far"),
        (True, offers, "near"),
        (False, moved, "far"),
        (False, offers, "far"),
    ):
        if is_new:
            a.disconnect("b")
        connect(a, b, told)
        assert a.traits_of("b").name == over
        assert a.mapped("b", b.base, 8).address == b.base
        delivers(a, b)


def test_a_peer_in_reach_of_none_is_refused_with_what_each_says(ends):
    a, b = ends
    for verb in (a.connect, a.identify):
        with pytest.raises(PeerError, match=r"another host.*another host"):
            verb("b", a.described(elsewhere(b, "near", "far")))
        with pytest.raises(PeerError, match="no transport in common"):
            verb("b", a.described({"pigeon": b"coo"}))


@pytest.mark.parametrize("whose", ["own", "the peer's"])
def test_memory_of_a_kind_that_it_does_not_move_goes_to_the_other(ends, whose):
    a, b = ends
    device = Region(1 << 40, 4096, "cuda")
    (a if whose == "own" else b).register([device])
    meet(a, b, more=[device] if whose != "own" else [])
    assert a.traits_of("b").name == "far"
    delivers(a, b)
    a.unregister([device]) if whose == "own" else b.unregister([device])


def test_what_no_transport_moves_is_refused(ends):
    a, b = ends
    with pytest.raises(UsageError, match="auto moves cpu, cuda"):
        a.register([Region(1 << 40, 4096, "floppy")])
    a.connect("b", b.describe())
    with pytest.raises(PeerError, match="not registered"):
        a.prepare("b", [Region(b.base + 64, 1 << 40)])
    assert a.traits_of("b").name == "near"
    a.prepare("b", [b.region()])
    delivers(a, b)


def test_nothing_is_registered_if_one_of_them_cannot():
    """Nor what that one has registered before."""
    near, full, regions = Near(), Far(), [Region(4096, 64), Region(8192, 64)]
    full._register = mock.Mock(side_effect=[None, TransportError("full")])
    full._unregister = mock.Mock()
    with AutoTransport([near, full]) as both:
        with pytest.raises(TransportError, match="full"):
            both.register(regions)
        assert not near.own.regions
        full._unregister.assert_called_once_with(regions[0])
        with pytest.raises(UsageError, match="not registered"):
            both.unregister(regions)


def test_traits_are_of_the_peer_and_the_weakest_where_its_way_is_not_known(ends):
    a, b = ends
    weakest = a.transport.traits
    assert (weakest.fences, weakest.max_descriptors, weakest.post_blocks) == (False, 7, True)
    assert weakest.kinds == {"cpu", "cuda"}
    assert a.traits_of("nobody") == weakest
    with pytest.raises(UsageError, match="'nobody'"):
        a.prepare("nobody", [])
    meet(a, b)
    assert a.traits_of("b") == Near.traits
    a.disconnect("b")
    assert a.traits_of("b") == Near.traits  # the driver asks whether the disconnect was a fence
    a.forget("b")
    a.identify("b", b.describe())
    assert a.traits_of("b") == replace(weakest, name="near+far")  # it may write by either


def test_tickets_of_different_ways_are_different(ends):
    a, b = ends
    for name, offer in b.offers().items():
        a.connect(name[0], a.described({name: offer}))
    log, tickets = Log(a, b), []
    for i in range(6):
        a.prepare(peer := "nf"[i % 2], [b.region()])
        tickets.append(a.post(peer, [(0, b.base, 8)], b"%d" % i))
    log.until(lambda: len(log.done(a)) == 6 == len(log.tags(b)))
    assert sorted(log.done(a)) == sorted(tickets)
    assert len(set(tickets)) == 6


@pytest.mark.parametrize("dead", ["local", "far"])
def test_one_way_on_which_a_peer_is_dead_proves_nothing(dead, monkeypatch):
    """It may have written by the other, where its bytes may still be on their way."""
    with Remote("local") as b, AutoTransport([LocalTransport(), Far()]) as a:
        a.identify("b", a.described(dict.fromkeys(("local", "far"), b.describe())))
        for way in a._met["b"].values():
            monkeypatch.setattr(way, "proved_dead", lambda _, way=way: way.traits.name == dead)
        assert not a.proved_dead("b")
        for way in a._met["b"].values():
            monkeypatch.setattr(way, "proved_dead", lambda _: True)
        assert a.proved_dead("b")


class Ended(Far):
    """Finds that the peer's process has ended since it was looked at first."""

    def identify(self, peer, description):
        raise TransportError("has ended")


@pytest.mark.parametrize("second", [Far, Ended])
def test_a_peer_that_none_may_write_leaves_nothing_once_it_is_forgotten(second):
    """I14: the next transport was tried, and knows the peer's process since then."""
    before = descriptors.count("pidfd")
    with Remote("local") as b, AutoTransport([LocalTransport(), second()]) as a:
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
