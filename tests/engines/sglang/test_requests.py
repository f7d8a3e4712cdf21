"""Requests through SGLang's own sender and receiver life cycle, prefill and decode ranks in processes of their own."""

from __future__ import annotations

import json

import pytest

from pdstage import Keys
from tests.engines.sglang.fleet import Fleet

STAGED, DIRECT = '{"path": "staged", "transport": "nixl"}', '{"path": "direct", "transport": "local"}'


@pytest.mark.parametrize(
    "engines",
    [
        pytest.param((4, 2, "mha", STAGED), id="heads, TP 4 to 2, staged"),
        pytest.param((1, 2, "mha", DIRECT), id="heads, TP 1 to 2, direct"),
        pytest.param((2, 2, "mha", DIRECT), id="heads, TP 2 to 2, direct"),
        pytest.param((2, 2, "hybrid", STAGED), id="conv and SSM states, TP 2 to 2, staged"),
        pytest.param((2, 1, "swa", STAGED), id="sliding window, TP 2 to 1"),
        pytest.param((2, 1, "hybrid", STAGED), id="conv and SSM states, TP 2 to 1"),
        pytest.param((1, 2, "hybrid", DIRECT), id="conv and SSM states, TP 1 to 2"),
        pytest.param((2, 1, "mla"), id="latents, TP 2 to 1"),
        pytest.param((1, 2, "dsa", "", 64), id="latents and index keys, TP 1 to 2"),
        pytest.param((1, 2, "hisparse", STAGED, 64), id="latents to HiSparse's pages in host memory, TP 1 to 2"),
    ],
)
def test_every_byte_of_whole_requests(engines):
    """Prompts that end in a page and at its end, in chunks, behind prefixes that decode has; at once and in turn."""
    with Fleet(*engines) as fleet:
        page = fleet.page_size
        fleet.run(1, 6 * page + 4)
        fleet.run(2, 8 * page, chunks=3)
        fleet.run(3, 9 * page + 1, prefix=4 * page, chunks=2)
        fleet.run(4, 5 * page + 1, prefix=5 * page)
        for room in (5, 6, 7):
            fleet.open(room, 7 * page - room)
        for room in (7, 5, 6):
            fleet.compute(room, 0, 7 * page - room, True)
        for room in (6, 7, 5):
            fleet.finish(room, 7 * page - room)
        fleet.forgets_all()


def test_unequal_pages_stop_decode_by_name():
    """SGLang's own refusal, at its first request, whatever a backend could do."""
    with pytest.raises(AssertionError, match="Page size mismatch: prefill server has page_size=16.*page_size=32"):
        Fleet(2, 2, "mha", DIRECT, decode_page_size=32)


def test_with_a_key_file(tmp_path):
    """Nodes are encrypted and let nobody else in, though SGLang's own bootstrap server is plain HTTP."""
    Keys.make(tmp_path / "cluster.key")
    with Fleet(1, 1, "mha", json.dumps({"keys": str(tmp_path / "cluster.key")})) as fleet:
        fleet.run(1, 40)


def test_pages_that_go_back_while_a_peer_may_write_to_them_are_refused():
    """I2: with this setting SGLang would ask nobody before it takes a failed request's pages."""
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    with pytest.raises(AssertionError, match=name):
        Fleet(1, 1, "mha", **{name: "0"})
