"""Rooms of which decode holds the first tokens already, and rooms sent before their forward pass is done."""

from __future__ import annotations

import numpy as np
import pytest

from pdstage import Items, State
from tests.manager.engine import LAYERS, Rank, drive
from tests.manager.test_transfer import Event

TOKENS = 37


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize(("src_page", "dst_page"), [(4, 16), (16, 4), (8, 8)])
def test_any_prefix(site, src_page, dst_page, path):
    """The first k tokens, page-aligned or not, stay as decode has them; no chunk needs to know of them."""
    src, dst = Rank(page=src_page, n_pages=512), Rank(page=dst_page, n_pages=512, hnd=True)
    p, d = site.prefill(src, path=path), site.decode(dst, path=path)
    rooms = []
    for k in range(TOKENS + 1):
        pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
        src.write(k, TOKENS, pages)
        first = k // dst_page if k % 2 else 0  # an engine names the pages of its cached prefix too, or leaves them out
        receiver = d.receive(k, site.address)
        receiver.bind(Items(into[first:], first * dst_page), (min(first * dst_page, TOKENS), TOKENS), prefix_tokens=k)
        sender = p.send(k)
        sender.chunk(pages, (0, 21))
        sender.chunk(Items(pages[16 // src_page :], 16), (21, TOKENS))
        sender.finish(aux=b"x")
        rooms.append((k, receiver, sender, into))
    drive(site.nodes, lambda: all(r.released and s.released for _, r, s, _ in rooms))
    for k, receiver, sender, into in rooms:
        assert (receiver.wait(0), sender.wait(0)) == (State.SUCCESS, State.SUCCESS), receiver.error
        assert receiver.aux == b"x"
        assert dst.holds(k, TOKENS, into, prefix=k)
        for layer in range(LAYERS):
            for role in "kv":
                assert not dst.read(layer, role, k, into).any() if k else True, f"tokens below {k} were sent"


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_a_cached_prefix_is_there_before_the_rest_is_computed(site, path):
    src, dst = Rank(page=4), Rank(page=16)
    p, d = site.prefill(src, path=path), site.decode(dst, path=path)
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    src.write(1, 22, pages)
    receiver = d.receive(1, site.address)
    receiver.bind(into, TOKENS, prefix_tokens=3)
    sender, computed = p.send(1), Event()
    sender.chunk(pages[:6], (0, 22))
    sender.chunk(Items(pages[5:], 20), (22, TOKENS), ready=computed)
    sender.finish()
    drive(site.nodes, lambda: dst.holds(1, 22, into, prefix=3))
    assert not receiver.released
    assert not dst.read(0, "k", TOKENS, into)[22:].any()
    src.write(1, TOKENS, pages)
    computed.done = True
    drive(site.nodes, lambda: receiver.released)
    assert receiver.wait(0) is State.SUCCESS
    assert dst.holds(1, TOKENS, into, prefix=3)


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_layers_leave_as_they_are_computed(site, path):
    """Each layer has its own event; a layer that is not there yet holds up none that is."""
    src, dst = Rank(page=16), Rank(page=4, hnd=True)
    p, d = site.prefill(src, path=path), site.decode(dst, path=path)
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    receiver = d.receive(1, site.address)
    receiver.bind(into, TOKENS, prefix_tokens=5)
    sender, computed = p.send(1), [Event() for _ in range(LAYERS)]
    for layer, event in enumerate(computed):
        sender.chunk(pages, (0, TOKENS), layers=(layer, layer + 1), ready=event)
    sender.finish()
    src.write(1, TOKENS, pages)

    def there(layer):
        return all(
            np.array_equal(dst.read(layer, role, TOKENS, into)[5:], src.read(layer, role, TOKENS, pages)[5:])
            for role in "kv"
        )

    for at, layer in enumerate((1, 0, 2)):
        computed[layer].done = True
        drive(site.nodes, lambda layer=layer: there(layer))
        assert not any(there(later) for later in (1, 0, 2)[at + 1 :])
    drive(site.nodes, lambda: receiver.released)
    assert receiver.wait(0) is State.SUCCESS
