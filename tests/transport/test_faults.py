"""Faults on purpose: each does what it says, the same seed does the same, and rooms end as they should."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from transport.endpoint import NBYTES, Endpoint, meet

from pdstage import Config, State, TransportError, UsageError
from pdstage.transport import Done, Inbound, PostFailed, _faults, open_from_config
from tests.manager.conftest import site  # noqa: F401
from tests.manager.engine import Rank, decode_node, drive, prefill_node


class Two:
    """A faulty transport connected to a sound one, of one process."""

    def __init__(self, **faults) -> None:
        self.src, self.b = Endpoint.__new__(Endpoint), Endpoint("local")
        self.src.own(open_from_config({"name": "local", "faults": faults}, "cpu"), np.full(NBYTES, 7, np.uint8))
        self.a = self.src.transport
        meet(self.a, self.b)

    def post(self, tag: bytes = b"tag") -> int:
        return self.src.post("b", [(0, self.b.base, 4096)], tag)

    def events(self, n: int) -> list:
        told = []
        while len(told) < n:
            told += self.a.poll()
        return told

    @property
    def arrived(self) -> bool:
        return self.b.read(0, 4096) == bytes([7]) * 4096

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def two(request):
    made = []

    def make(**faults) -> Two:
        made.append(Two(**faults))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_without_faults_nothing_goes_wrong(two) -> None:
    pair = two()
    tickets = [pair.post(b"%d" % n) for n in range(5)]
    assert [event.ticket for event in pair.events(5)] == tickets
    assert pair.arrived
    assert [event.tag for event in pair.b.poll()] == [b"%d" % n for n in range(5)]
    assert not pair.a.traits.maps, "every write is a post"


def test_a_post_that_is_refused_writes_nothing(two) -> None:
    pair = two(refuse=1.0)
    with pytest.raises(TransportError, match="was refused"):
        pair.post()
    assert not pair.arrived


@pytest.mark.parametrize("written", [False, True])
def test_a_post_that_fails_was_written_whole_or_not_at_all(two, written: bool) -> None:
    pair = two(**{"fail_written" if written else "fail": 1.0})
    ticket = pair.post()
    (event,) = pair.events(1)
    assert isinstance(event, PostFailed)
    assert event.ticket == ticket
    assert pair.arrived == written
    assert pair.b.poll() == ([Inbound(b"tag")] if written else [])


def test_a_tag_may_be_lost(two) -> None:
    pair = two(lose_tag=1.0)
    ticket = pair.post()
    assert pair.events(1) == [Done(ticket)]
    assert pair.arrived
    assert not pair.b.poll()


def test_what_happened_may_be_told_late(two) -> None:
    pair = two(delay=1.0, delay_s=0.05, seed=1)
    tickets = {pair.post(b"") for _ in range(8)}
    told = pair.a.poll()
    assert len(told) < 8
    assert not pair.a.filenos(), "it must be asked"
    assert {event.ticket for event in told + pair.events(8 - len(told))} == tickets
    assert pair.a.filenos()


def test_every_peer_is_gone_after_so_many_posts(two) -> None:
    pair = two(die_after=2)
    for _ in range(2):
        pair.post()
    for _ in range(2):
        with pytest.raises(TransportError, match="was refused"):
            pair.post()


def test_faults_end(two) -> None:
    with mock.patch.object(_faults, "time", mock.Mock(monotonic=mock.Mock(return_value=100.0))) as clock:
        pair = two(refuse=1.0, for_s=2.0)
        clock.monotonic.return_value = 101.9
        with pytest.raises(TransportError, match="was refused"):
            pair.post()
        clock.monotonic.return_value = 102.0
        assert pair.events(pair.post())
    assert pair.arrived


def test_the_same_seed_does_the_same(two) -> None:
    def outcome(seed: int) -> list[str]:
        pair, said = two(seed=seed, refuse=0.2, fail=0.2, fail_written=0.2), []
        for _ in range(40):
            try:
                pair.post(b"")
            except TransportError:
                said.append("refused")
            else:
                said += [type(event).__name__ for event in pair.events(1)]
        return said

    assert outcome(3) == outcome(3)
    assert outcome(3) != outcome(4)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (7, "faults are 7"), ({"typo": 1}, "no fault 'typo'"), ({"fail": 2}, "fault fail is 2"),
        ({"fail": "often"}, "fault fail is 'often'"), ({"seed": -1}, "fault seed is -1"), ({"delay_s": -1}, "delay_s"),
    ],
)  # fmt: skip
def test_faults_that_are_none_are_refused(faults: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_from_config({"name": "local", "faults": faults}, "cpu")


def test_rooms_under_faults_end_and_success_is_true(site) -> None:  # noqa: F811
    """Each room ends, on both sides; where decode says Success every byte is there; and what was held comes back."""
    quick = Config(transfer_s=1.0, wait_s=2.0, retry_s=0.05, drain_s=2.0, write_s=2.0)
    src, dst = Rank(n_pages=256), Rank(n_pages=256, hnd=True)
    faults = {
        "seed": 5,
        "refuse": 0.05,
        "fail": 0.1,
        "fail_written": 0.05,
        "lose_tag": 0.05,
        "delay": 0.2,
        "delay_s": 0.02,
    }
    p = site.keep(prefill_node(src, site.address, transport={"name": "local", "faults": faults}, config=quick))
    d = site.keep(decode_node(dst, config=quick))
    ended = {State.SUCCESS: 0, State.FAILED: 0}
    for room in range(40):
        pages, into = src.allocate(12), dst.allocate(12)
        src.write(room, 12, pages)
        receiver, sender = d.receive(room, site.address), p.send(room)
        receiver.bind(into, 12)
        for start in (0, 4, 8):
            sender.chunk(pages, (start, start + 4))
        sender.finish()
        drive([p, d], lambda r=receiver, s=sender: r.released and s.released)
        ended[receiver.state] += 1
        if receiver.state is State.SUCCESS:
            assert dst.holds(room, 12, into)
        src.free(pages)
        dst.free(into)
    assert min(ended.values()) > 0, ended
