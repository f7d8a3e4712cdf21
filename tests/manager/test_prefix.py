"""Rooms of which decode holds the first tokens already, and rooms sent before their forward pass is done."""

from __future__ import annotations

import numpy as np
import pytest

from pdstage import Items, State
from tests.manager.engine import LAYERS, TOKENS, Event, Rank, drive

both_paths = pytest.mark.parametrize("path", ["staged", "direct"])


@both_paths
@pytest.mark.parametrize(("src_page", "dst_page"), [(4, 16), (16, 4), (8, 8)])
def test_any_prefix(site, src_page, dst_page, path):
    """The first k tokens, page-aligned or not, stay as decode has them; no chunk needs to know of them."""
    pair = site.pair(Rank(page=src_page, n_pages=512), Rank(page=dst_page, n_pages=512, hnd=True), path=path)
    src, dst, rooms = pair.src, pair.dst, []
    for k in range(TOKENS + 1):
        pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
        src.write(k, TOKENS, pages)
        first = k // dst_page if k % 2 else 0  # an engine names the pages of its cached prefix too, or leaves them out
        receiver, sender = pair.receive(k), pair.p.send(k)
        receiver.bind(Items(into[first:], first * dst_page), (min(first * dst_page, TOKENS), TOKENS), prefix_tokens=k)
        sender.chunk(pages, (0, 21))
        sender.chunk(Items(pages[16 // src_page :], 16), (21, TOKENS))
        sender.finish(aux=b"x")
        rooms.append((k, receiver, sender, into))
    drive(site.nodes, lambda: all(r.released and s.released for _, r, s, _ in rooms))
    for k, receiver, sender, into in rooms:
        assert (receiver.wait(0), sender.wait(0)) == (State.SUCCESS, State.SUCCESS), receiver.error
        assert receiver.aux == b"x"
        assert dst.holds(k, TOKENS, into, prefix=k)
        kept = [dst.read(layer, role, TOKENS, into)[:k] for layer in range(LAYERS) for role in "kv"]
        assert not np.any(kept), f"tokens below {k} were sent"


@both_paths
def test_layers_leave_as_they_are_computed(site, path):
    """Each layer has its own event; a layer that is not there yet holds up none that is."""
    pair, computed = site.pair(Rank(page=16), Rank(page=4, hnd=True), path=path), [Event() for _ in range(LAYERS)]
    room = sender, receiver, pages, into = pair.open(1, prefix_tokens=5)
    for layer, event in enumerate(computed):
        sender.chunk(pages, (0, TOKENS), layers=(layer, layer + 1), ready=event)
    sender.finish()

    def there(layer):
        sides = (pair.dst, into), (pair.src, pages)
        return all(np.array_equal(*(rank.read(layer, role, TOKENS, held)[5:] for rank, held in sides)) for role in "kv")

    for at, layer in enumerate((1, 0, 2)):
        computed[layer].done = True
        drive(site.nodes, lambda layer=layer: there(layer))
        assert not any(there(later) for later in (1, 0, 2)[at + 1 :])
    pair.end(room)
    assert receiver.state is State.SUCCESS
