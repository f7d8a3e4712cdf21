"""Checksums of staged chunks, made and verified by real kernels between real nodes. Ranks that differ in TP and convert
as well: test_convert.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from pdstage import State
from pdstage.errors import TransportError
from tests.manager.engine import QUICK, Rank
from tests.rigs import HOST_CODES, host_code


@pytest.mark.parametrize("code", HOST_CODES)
@pytest.mark.parametrize(("src_hnd", "dst_hnd"), [(True, True), (False, True), (False, False)])
def test_both_sides_find_the_same_sums_whatever_their_layouts(site, src_hnd, dst_hnd, code):
    with host_code(code):
        config = replace(QUICK, checksums=True)
        pair = site.pair(Rank(hnd=src_hnd), Rank(page=8, hnd=dst_hnd), path="staged", config=config)
        pair.move(5)
    assert all(session.checksums for session in pair.d.core.sessions.values())
    assert pair.d.stats()["chunks_altered"] == 0


@pytest.mark.parametrize("checksums", [True, False])
def test_a_byte_that_changes_on_its_way_is_noticed(site, checksums):
    pair = site.pair(path="staged", config=replace(QUICK, checksums=checksums))
    scatter = pair.d.stager.scatter

    def altered(*args, src, **how):
        ctypes.c_uint8.from_address(src.base + 100).value ^= 4
        scatter(*args, src=src, **how)

    pair.d.stager.scatter = altered
    room = pair.begin(1)
    pair.end(room)
    assert room.receiver.state is (State.FAILED if checksums else State.SUCCESS)
    if checksums:
        with pytest.raises(TransportError, match="was altered on its way"):
            room.receiver.wait(0)
        assert pair.d.stats()["chunks_altered"] == 1
