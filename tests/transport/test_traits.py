"""Traits are measured, not only declared: what moves after `disconnect`, how long a post holds, who carries the tag.

A transport that promises a thing breaks its promise in no variant. One that does not promise it is seen not to keep it
in some variant here. docs/transports.md has what was seen.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from transport.conftest import VARIANTS, Pair
from transport.endpoint import NBYTES, Endpoint, Log, Saying, meet

from pdstage.transport import Done, available

if TYPE_CHECKING:
    from collections.abc import Iterator

N_POSTS = 40
HANGS_S = 2.0
BY_TRANSPORT: dict[str, list[str]] = defaultdict(list)
for _name, _variant in VARIANTS.items():
    if _variant.where != "same":
        BY_TRANSPORT[_variant.transport].append(_name)


@pytest.fixture(params=BY_TRANSPORT)
def pairs(request: pytest.FixtureRequest, stock: object) -> Iterator[list[Pair]]:
    """One transport over all of its variants with two processes: `a` in this process or another, `b` in another."""
    why_not = available().get(request.param, "")
    if why_not:
        pytest.skip(why_not)
    made = []
    for name in BY_TRANSPORT[request.param]:
        variant = VARIANTS[name]
        a = stock.remote(variant, "a") if variant.where == "apart" else Endpoint(variant.transport)
        made.append(Pair(variant, a, stock.remote(variant, "b")))
    yield made
    for pair in made:
        pair.a.close()
        pair.b.close()


def judge(pairs: list[Pair], trait: str, broken: list[bool], *, promise: bool = True) -> None:
    """A promise (the trait being `promise`) is kept everywhere; where there is none, that shows."""
    transport = pairs[0].variant.transport
    names = BY_TRANSPORT[transport]
    seen = dict(zip(names, broken, strict=True))
    if getattr(pairs[0].a.traits_of("b"), trait) is promise:
        assert not any(broken), f"{transport} declares {trait}={promise}, which is not so: {seen}"
    else:
        assert any(broken), f"{transport} keeps {trait} wherever it was looked at: promise it"


def test_fences(pairs):
    """I2: nothing of a peer lands after `disconnect`."""
    judge(pairs, "fences", [lands_after_disconnect(pair) for pair in pairs])


def test_stops_reads(pairs):
    """I8: posts to a peer read nothing after `disconnect`."""
    judge(pairs, "stops_reads", [reads_after_disconnect(pair) for pair in pairs])


def test_post_blocks(pairs):
    judge(pairs, "post_blocks", [post_is_the_write(pair) for pair in pairs], promise=False)


def test_notifies(pairs):
    """Who carries the tag: the post itself, or the caller once it is done."""
    for pair in pairs:
        a, b = (end._endpoint if isinstance(end, Saying) else end for end in (pair.connect().a, pair.b))
        log = Log(a, b)
        ticket = a.post("b", [(0, b.base, NBYTES)], b"tag")
        log.until(lambda log=log, a=a, b=b: log.ended(a) and (log.tags(b) or not a.notifies()))
        for _ in range(100):
            log.poll()
        assert log.ended(a) == [Done(ticket)]
        assert log.tags(b) == [b"tag"] * a.notifies()


def lands_after_disconnect(pair: Pair) -> bool:
    """A peer writes without end; once some of it is there it is disconnected, and watched until it gives up."""
    a, b = pair.a, pair.b
    a.connect("b", b.describe())
    meet(b, a, "a")
    b.begin("stream", "a", a.region().base, N_POSTS)
    log = Log(a)
    log.until(lambda: a.read(NBYTES - 1, 1) != b"\0")
    a.disconnect("b")
    before = a.read(0, NBYTES)
    log.until(b.has_answered)
    b.finish()
    return a.read(0, NBYTES) != before


def reads_after_disconnect(pair: Pair) -> bool:
    """The memory that posts in flight read is overwritten after `disconnect`: which bytes arrive?"""
    pair.connect().deliver(b"connected")
    pair.a.fill(0, b"\x55" * NBYTES)
    before = len(pair.log.ended(pair.a))
    tickets = [pair.post([(0, 0, NBYTES)], b"") for _ in range(4)]
    pair.a.disconnect("b")
    pair.a.fill(0, b"\xaa" * NBYTES)
    pair.log.until(lambda: len(pair.log.ended(pair.a)) == before + len(tickets))
    return b"\xaa" in pair.b.read(0, NBYTES)


def post_is_the_write(pair: Pair) -> bool:
    """Whether a post returns only once all its bytes are there: at a stopped process, who takes nothing itself."""
    pair.connect().deliver(b"connected")
    pair.a.fill(0, data := b"\x55" * NBYTES)
    before = len(pair.log.ended(pair.a))
    post = threading.Thread(target=pair.post, args=([(0, 0, NBYTES)], b""))
    pair.b.stop()
    try:
        post.start()
        post.join(HANGS_S)
        late = post.is_alive() or pair.b.peek(0, NBYTES) == data
    finally:
        pair.b.resume()
        post.join()
    pair.log.until(lambda: len(pair.log.ended(pair.a)) > before)
    return late
