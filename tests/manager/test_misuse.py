"""Bad input: one clear typed error that names the culprit; nothing lost, nothing hung."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest

from pdstage import (
    Config,
    DeadlineExceeded,
    Items,
    Pool,
    Region,
    RowLevel,
    State,
    Topology,
    UsageError,
)
from pdstage.control.bootstrap import Advert, BootstrapClient, BootstrapServer
from pdstage.tensors import build, paged_nhd
from tests.manager.engine import Rank, decode_node, drive, prefill_node
from tests.manager.test_settings import VIEW

IMPATIENT = Config(retry_s=0.05, hello_s=0.5, open_s=0.5, wait_s=0.5, open_wait_s=0.5, send_wait_s=0.5, drain_s=1.0)


@pytest.mark.parametrize(
    ("items", "tokens", "culprit"),
    [
        (np.zeros((2, 2), np.int64), 4, "shape"),
        (np.zeros(2), 4, "float64"),
        ([0, 64], 8, "item 1 of 'kv' is 64"),
        ([0, -1], 8, "item 1 of 'kv' is -1"),
        ([3, 5, 3], 12, "item 2 of 'kv' is 3, named twice"),
        ([0, 1], 9, "tokens 0..9"),
        ([0, 1], (5, 3), r"tokens is \(5, 3\)"),
        (Items([0, 1], first_token=8), (4, 12), "tokens 4..12"),
        (Items([0, 1], first_token=2), (4, 8), "first_token 2 of 'kv' is inside an item"),
        ({"swa": [0]}, None, "no component 'swa'"),
        ({"kv": [0]}, {"kv": (0, 4), "swa": (0, 4)}, "'swa'"),
        ([2**40], 4, "item 0 of 'kv' is 1099511627776, out of range"),
    ],
)
def test_items(site, items, tokens, culprit):
    pair = site.pair(dst=Rank())
    receiver, sender = pair.receive(1), pair.p.send(1)
    with pytest.raises(UsageError, match=culprit):
        receiver.bind(items, tokens)
    if "twice" not in culprit:
        with pytest.raises(UsageError, match=culprit):
            sender.chunk(items, tokens)
    # Nothing was lost: the same room goes on.
    receiver.bind([0, 1], 8)
    sender.chunk([0, 1], 8)
    sender.finish()
    site.ends(receiver)
    assert receiver.state is State.SUCCESS


def test_calls_out_of_order(site):
    pair = site.pair()
    sender, receiver = pair.p.send("r"), pair.receive("r")
    with pytest.raises(UsageError, match="room 'r' is being sent already"):
        pair.p.send("r")
    with pytest.raises(UsageError, match="'r' is being received already"):
        pair.receive("r")
    receiver.bind([0], 4)
    with pytest.raises(UsageError, match="bound already"):
        receiver.bind([0], 4)
    sender.chunk([0], (0, 2))
    with pytest.raises(UsageError, match="each token of a layer once"):
        sender.chunk([0], 4)
    with pytest.raises(UsageError, match="layers"):
        sender.chunk([0], (2, 4), layers=(2, 1))
    with pytest.raises(UsageError, match="aux bytes for room 'r'"):
        sender.finish(bytes(pair.p.config.max_aux_nbytes + 1))
    sender.finish()
    with pytest.raises(UsageError, match="after finish"):
        sender.chunk([0], 4)
    with pytest.raises(UsageError, match="finished already"):
        sender.finish()
    with pytest.raises(UsageError, match="room id"):
        pair.p.send(1.5)
    with pytest.raises(UsageError, match="deadline_s"):
        pair.receive("s", deadline_s=float("inf"))


def test_chunks_that_share_a_compressed_row(site):
    """A row is written once: a later chunk's half of it would race the earlier one's."""
    rows = np.zeros((64, 8), np.uint8)
    view = replace(VIEW, rows=(RowLevel(4, 8),), shard_stride=8, width=8)
    rank = Rank()
    rank.pool = Pool([Region(rows.ctypes.data, rows.nbytes)], [view], keep=rows)
    sender = site.prefill(rank).send(1)
    sender.chunk([0, 1], (0, 7))
    with pytest.raises(UsageError, match=r"start=7, .* after Rect.*begin at multiples of the 4 tokens that a row"):
        sender.chunk([0, 1], (7, 12))
    sender.chunk([0, 1], (8, 12))


def test_options(site):
    for options, culprit in (
        ({"path": "fast"}, "path is 'fast'"),
        ({"progress": "magic"}, "progress is 'magic'"),
        ({"transport": "pigeon"}, "no transport 'pigeon'"),
        ({"staging_nbytes": 100, "n_buffers": 64}, "do not make 64 parts"),
        ({"staging_nbytes": -1}, "staging_nbytes is -1"),
        ({"n_buffers": 1}, "n_buffers is 1"),
        ({"staging_on": "gpu"}, "staging_on is 'gpu'"),
        *(({"max_sms": wrong}, "max_sms is") for wrong in (0, 2.5, "8")),
        ({"bind": "tcp://0.0.0.0:0"}, "can be reached from other machines"),
    ):
        with pytest.raises(UsageError, match=culprit):
            prefill_node(Rank(), site.address, **options)


def test_heads_of_another_rank_than_the_topology_says(site):
    """Ranks that share a prompt's computation hold more than their own, as vLLM's do: TP 2, of 2 each, as TP 4."""
    rank = Rank()
    k = np.zeros((4, 8, 2, 4), np.float32)
    rank.pool = Pool.of(build(paged_nhd([k], [k + 1], total_heads=4, tp=(2, 1))))
    words = r"has KV heads 2 to 3 of 4, and rank 0 of TP 1 has 0 to 3; say the same to both: tp=\(1, 0\)"
    with pytest.raises(UsageError, match=words):
        site.prefill(rank)
    rank.topology = Topology(tp_size=4, tp_rank=3)
    site.prefill(rank, publish=False)


def test_an_unreachable_bootstrap():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with decode_node(Rank(), config=IMPATIENT) as d:
            receiver = d.receive(1, address)
            drive([d], lambda: receiver.released)
            assert isinstance(receiver.error, DeadlineExceeded)
            assert address in str(receiver.error)


def test_an_advert_without_a_usable_endpoint(site):
    """It fails the room that asked; the node and its other rooms go on."""
    pair = site.pair()
    with BootstrapServer() as bad:
        advert = Advert(instance="p", topology=Topology(), endpoint="nowhere", incarnation=1, layout="")
        BootstrapClient(bad.address).publish(advert)
        receiver = pair.d.receive(1, bad.address)
        site.ends(receiver)
        with pytest.raises(UsageError, match="nowhere"):
            receiver.wait(0)
        pair.move(1)


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "over"),
    [
        ("auto", "auto", "local"), ("auto", "nixl", "nixl"), ("nixl", "auto", "nixl"), ("auto", "local", "local"),
        ("local", "nixl", ""),
    ],
)  # fmt: skip
def test_auto_talks_to_who_was_given_a_name(site, at_prefill, at_decode, over):
    pytest.importorskip("nixl")
    pair = site.pair(prefill={"transport": at_prefill}, decode={"transport": at_decode})
    if over:
        pair.move(1)
    else:
        receiver = pair.receive(1)
        site.ends(receiver)
        assert "transport 'local' at prefill, 'nixl' at decode" in str(receiver.error)
    counted = {name: n for name, n in pair.p.stats().items() if name.startswith("sessions_over")}
    assert counted == ({f"sessions_over_{over}": 1} if over else {})
