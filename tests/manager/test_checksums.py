"""A staged chunk that changes on its way between real nodes. That both sides find the same sums: test_convert.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdstage import State, TransportError
from tests.manager.engine import QUICK, Rank, altering


@pytest.mark.parametrize("checksums", [True, False])
def test_a_byte_that_changes_on_its_way_is_noticed(site, checksums):
    pair = site.pair(path="staged", config=replace(QUICK, checksums=checksums))
    altering(pair.d)
    room = pair.begin(1)
    pair.end(room)
    assert room.receiver.state is (State.FAILED if checksums else State.SUCCESS)
    if checksums:
        with pytest.raises(TransportError, match="was altered on its way"):
            room.receiver.wait(0)
        assert pair.d.stats()["chunks_altered"] == 1


def test_auto_writes_nothing_in_place_that_is_to_be_verified(site):
    pair = site.pair(Rank(mappable=True), Rank(mappable=True), path="auto", config=replace(QUICK, checksums=True))
    pair.move(1)
    stats = pair.p.stats()
    assert (stats["chunks_staged"], stats["chunks_direct"]) == (1, 0)
