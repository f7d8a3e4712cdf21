"""What a transport measured of its posts is counted by the node that posted them."""

from __future__ import annotations

import pytest

from pdstage import State
from pdstage.transport import available, open_transport
from tests.manager.engine import Rank, drive

TOKENS = 50


@pytest.mark.parametrize("asked", [True, False])
def test_posts_are_counted_by_what_nixl_measured(site, asked):
    if available()["nixl"]:
        pytest.skip(available()["nixl"])
    src, dst = Rank(), Rank()
    p = site.prefill(src, transport=open_transport("nixl", telemetry=asked), path="staged")
    d = site.decode(dst, transport="nixl", path="staged")
    into, pages = dst.allocate(TOKENS), src.allocate(TOKENS)
    src.write(1, TOKENS, pages)
    receiver, sender = d.receive(1, site.address), p.send(1)
    receiver.bind(into, TOKENS)
    sender.chunk(pages, (0, 20))
    sender.chunk(pages, (20, TOKENS))
    sender.finish()
    drive([p, d], lambda: receiver.released and sender.released)
    assert receiver.state is State.SUCCESS
    stats = p.stats()
    measured = [stats[name] for name in ("posts_measured", "posts_measured_bytes")]
    assert measured == ([2, stats["bytes_written"]] if asked else [0, 0])
    assert stats["bytes_written"] > 0
    assert stats["writes_measured_us"] >= stats["posts_measured_us"]
    assert d.stats()["posts_measured"] == 0
