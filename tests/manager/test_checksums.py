"""Checksums of staged chunks, made and verified by real kernels between real nodes."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from pdstage import State
from pdstage.errors import TransportError
from tests.manager.engine import QUICK, Rank, drive
from tests.rigs import HOST_CODES, host_code

CONFIG = replace(QUICK, checksums=True)
TOKENS = 37


def transfer(site, ps, ds):
    """One room from all of `ps` to all of `ds`, run to its end; its receivers, and where each put it."""
    into = [rank.allocate(TOKENS) for rank, _ in ds]
    receivers = [node.receive("room", site.address) for _, node in ds]
    for receiver, pages in zip(receivers, into, strict=True):
        receiver.bind(pages, TOKENS)
    senders = []
    for rank, node in ps:
        pages = rank.allocate(TOKENS)
        rank.write(5, TOKENS, pages)
        senders.append(node.send("room"))
        senders[-1].chunk(pages, TOKENS)
        senders[-1].finish()
    drive(site.nodes, lambda: all(handle.released for handle in (*receivers, *senders)))
    return receivers, into


@pytest.mark.parametrize("code", HOST_CODES)
@pytest.mark.parametrize(("src_tp", "dst_tp", "hnd"), [(4, 2, True), (1, 4, False), (1, 1, True)])
def test_both_sides_find_the_same_sums_whatever_their_layouts(site, src_tp, dst_tp, hnd, code):
    with host_code(code):
        src = [Rank(src_tp, r, hnd=src_tp == dst_tp) for r in range(src_tp)]
        dst = [Rank(dst_tp, r, page=8, hnd=hnd) for r in range(dst_tp)]
        ps = [(rank, site.prefill(rank, path="staged", config=CONFIG)) for rank in src]
        ds = [(rank, site.decode(rank, path="staged", config=CONFIG)) for rank in dst]
        receivers, into = transfer(site, ps, ds)
    for (rank, node), receiver, pages in zip(ds, receivers, into, strict=True):
        assert receiver.wait(0) is State.SUCCESS
        assert rank.holds(5, TOKENS, pages)
        assert all(session.checksums for session in node.core.sessions.values())
        assert node.stats()["chunks_altered"] == 0


@pytest.mark.parametrize("checksums", [True, False])
def test_a_byte_that_changes_on_its_way_is_noticed(site, checksums):
    config = replace(QUICK, checksums=checksums)
    src, dst = Rank(), Rank(page=8)
    p = site.prefill(src, path="staged", config=config)
    d = site.decode(dst, path="staged", config=config)
    scatter = d.stager.scatter

    def altered(*args, src, **how):
        ctypes.c_uint8.from_address(src.base + 100).value ^= 4
        scatter(*args, src=src, **how)

    d.stager.scatter = altered
    (receiver,), _ = transfer(site, [(src, p)], [(dst, d)])
    assert receiver.state is (State.FAILED if checksums else State.SUCCESS)
    if checksums:
        with pytest.raises(TransportError, match="was altered on its way"):
            receiver.wait(0)
        assert d.stats()["chunks_altered"] == 1
