"""Nodes of engines that are cut differently, or that hold a part already."""

from __future__ import annotations

import pytest

from pdstage import State, Topology
from tests.manager.engine import drive
from tests.manager.places import SLOTS, TOKENS, Stage


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize(("prefix", "n_slots"), [(24, 2), (TOKENS, 2), (TOKENS, 0)])
def test_what_decode_holds_already_is_not_computed_for_it(site, path, prefix, n_slots):
    """Slots have no positions, so they say nothing of the first token wanted; and a room may want aux alone."""
    src, dst = Stage(Topology()), Stage(Topology(), page=8)
    p, d = site.prefill(src, path=path), site.decode(dst, path=path)
    into, items = dst.allocate(n_slots), src.allocate(SLOTS["prefill"])
    receiver = d.receive(1, site.address)
    receiver.bind(into, dict.fromkeys(("kv", "draft"), (0, TOKENS)), prefix_tokens=prefix)
    sender = p.send(1)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == prefix
    src.write(1, items)
    state = items.pop("state")
    if prefix < TOKENS:
        sender.chunk(items, dict.fromkeys(items, (prefix, TOKENS)))
    sender.finish(aux=b"first token", states={"state": state})
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.wait(0) is sender.wait(0) is State.SUCCESS
    assert receiver.aux == b"first token"
    assert not dst.wrong(1, into, n_slots, prefix)
    moved = p.stats()["chunks_staged"] + p.stats()["chunks_direct"]
    assert (moved > 0) is (prefix < TOKENS or n_slots > 0)
