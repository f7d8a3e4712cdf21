"""Requests through SGLang's own sender and receiver life cycle, prefill and decode ranks in processes of their own."""

from __future__ import annotations

import json

import pytest

from pdstage import Keys
from tests.engines.sglang.fleet import DIRECT, FAILED, SUCCESS, Fleet

STAGED = '{"path": "staged", "transport": "nixl"}'
ENGINES = {
    "heads, TP 4 to 2, staged": (4, 2, "mha", STAGED),
    "heads, TP 1 to 2, direct": (1, 2),
    "heads, TP 2 to 2, direct": (2, 2),
    "conv and SSM states, TP 2 to 2, staged": (2, 2, "hybrid", STAGED),
    "sliding window, TP 2 to 1": (2, 1, "swa", STAGED),
    "conv and SSM states, TP 2 to 1": (2, 1, "hybrid", STAGED),
    "conv and SSM states, TP 1 to 2": (1, 2, "hybrid", DIRECT),
    "latents, TP 2 to 1": (2, 1, "mla", ""),
    "latents and index keys, TP 1 to 2": (1, 2, "dsa", "", 64),
    "latents to HiSparse's pages in host memory, TP 1 to 2": (1, 2, "hisparse", STAGED, 64),
    "two stages": (1, 1, "mha", DIRECT, 16, 0, 2),
    "two stages of TP 2": (2, 1, "mha", STAGED, 16, 0, 2),
}


@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
def test_every_byte_of_whole_requests(engines):
    """Prompts that end in a page and at its end, in chunks, behind prefixes that decode has; at once and in turn; and
    under a number that was used before.
    """
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
        fleet.run(1, 6 * page + 4)
        fleet.forgets_all()


def test_unequal_pages_stop_decode_by_name():
    """SGLang's own refusal, at its first request, whatever a backend could do."""
    with pytest.raises(AssertionError, match="Page size mismatch: prefill server has page_size=16.*page_size=32"):
        Fleet(2, 2, decode_page_size=32)


def scale_file(path, tp_size, scale):
    """What `--quantization-param-path` reads: a scale for each layer of each rank."""
    of_ranks = {rank: dict.fromkeys(range(2), scale) for rank in range(tp_size)}
    said = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": of_ranks}}
    path.write_text(json.dumps(said))
    return str(path)


@pytest.mark.parametrize(
    ("here", "there"), [(0.5, 0.5), (0.5, 0.25), (0.5, 1.0)], ids=["equal", "others", "on one side"]
)
def test_quantized_pages_are_sent_between_equal_scales_only(tmp_path, here, there):
    """The same bytes under another scale are another cache (sglang#18818)."""
    name = "--quantization-param-path"
    options = "--kv-cache-dtype", "fp8_e4m3", name, scale_file(tmp_path / "prefill", 2, here)
    others = (name, scale_file(tmp_path / "decode", 1, there))
    with Fleet(2, 1, "mha", STAGED, options=options, decode_options=others) as fleet:
        if here == there:
            fleet.run(1)
            return
        fleet.announce(1)
        assert fleet.decode.until(1, FAILED, SUCCESS) == FAILED
        (said,) = fleet.decode.each("failure", 1)
        assert 'the model\'s kv_scales is \'{"0": 0.5, "1": 0.5}\' at prefill and' in said


def test_with_a_key_file(tmp_path):
    """Nodes are encrypted and let nobody else in, though SGLang's own bootstrap server is plain HTTP."""
    Keys.make(tmp_path / "cluster.key")
    with Fleet(1, 1, "mha", json.dumps({"keys": str(tmp_path / "cluster.key")})) as fleet:
        fleet.run(1, 40)


def test_pages_that_go_back_while_a_peer_may_write_to_them_are_refused():
    """I2: with this setting SGLang would ask nobody before it takes a failed request's pages."""
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    with pytest.raises(AssertionError, match=name):
        Fleet(1, 1, **{name: "0"})
