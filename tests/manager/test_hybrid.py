"""A hybrid model's room between real nodes: pages, a window, slots, index keys and rings, at unequal TP."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from emulator import sglang
from test_states import KINDS

from pdstage import Pool, State, Topology
from pdstage.layout.items import prefix_items, window_items
from pdstage.tensors import build, sglang_mha
from tests.manager.engine import drive

TOKENS = 300
# By kind: its settings at prefill and at decode.
MODEL = {
    "minimax_dense_kv": ({"page_size": 4, "hnd": False}, {"page_size": 8, "hnd": True}),
    "swa": ({"page_size": 8}, {"page_size": 4}),
    "mamba": ({"kimi": False}, {"kimi": True, "extra": 3}),
    "dsa": ({"page_size": 64}, {"page_size": 128}),
    "dsa_tail": ({"rows": 4}, {"rows": 7}),
    "c128_state": ({"ring": 256}, {"ring": 384}),
}


class Rank:
    """One rank of the model: an emulated pool of every kind, and one layout over all of them."""

    def __init__(self, side: int, tp: int, rank: int) -> None:
        self.engines = {}
        for name, settings in MODEL.items():
            pool = KINDS[name].pool
            tokens = {} if pool is sglang.Mamba else {"n_tokens": TOKENS}
            self.engines[name] = pool(tp=tp, rank=rank, seed=100 * side + rank, **tokens, **settings[side])
        parts = [part for name, e in self.engines.items() for part in KINDS[name].parts(e)]
        self.topology = Topology(tp_size=tp, tp_rank=rank)
        self.pool = Pool.of(build(*parts), keep=self.engines)
        layout = self.pool.layout
        given = {c: items for name, e in self.engines.items() for c, items in KINDS[name].items(e).items()}
        self.items = {layout.component(name).name: items for name, items in given.items()}
        # Where the sequence ends is known to neither pages nor windows; slots are whole.
        self.tokens = {
            name: (given.first_token, TOKENS)
            for name, given in self.items.items()
            if layout.component(name).positional
        }  # fmt: skip

    def store(self, starts: dict[str, int]) -> None:
        for name, e in self.engines.items():
            e.store(*([starts[name], TOKENS] if name in starts else []))


@pytest.mark.parametrize("path", ["staged", "direct", "auto"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 4), (4, 2), (1, 1)])
def test_a_hybrid_room_arrives(site, src_tp, dst_tp, path):
    src = [Rank(0, src_tp, rank) for rank in range(src_tp)]
    dst, twins = ([Rank(1, dst_tp, rank) for rank in range(dst_tp)] for _ in "ab")
    starts = {name: span[0] for name, span in dst[0].tokens.items()}
    for rank in src:
        rank.store(dict.fromkeys(starts, 0) | {"dsa_tail": starts["dsa_tail"]})
    for twin in twins:
        twin.store(starts)
    senders = [site.prefill(rank, path=path).send("room") for rank in src]
    receivers = [site.decode(rank, path=path).receive("room", site.address) for rank in dst]
    for receiver, rank in zip(receivers, dst, strict=True):
        receiver.bind(rank.items, rank.tokens)
    for sender, rank in zip(senders, src, strict=True):
        sender.chunk(rank.items, rank.tokens)
        sender.finish()
    drive(site.nodes, lambda: all(h.released for h in (*receivers, *senders)))
    for receiver, rank, twin in zip(receivers, dst, twins, strict=True):
        assert receiver.wait(0) is State.SUCCESS, receiver.error
        for name, e in rank.engines.items():
            for ours, theirs in zip(e.memory, twin.engines[name].memory, strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("component", ["kv", "swa"])
@pytest.mark.parametrize(("src_page", "dst_page"), [(16, 64), (64, 16)])
def test_a_room_ends_and_a_window_starts_where_tokens_say(site, src_page, dst_page, component):
    """As docs/states.md has it: pages are not enough where prefill's are smaller than decode's."""
    window = 20
    slots, starts = np.arange(64, 64 + TOKENS), {"kv": 0, "swa": TOKENS - window}

    def rank(page, fill):
        pool = np.full((2, 1024, 2, 8), fill, np.float32)
        views = sglang_mha(pool[:1], pool[1:], page_size=page, total_heads=2, tp=(1, 0), component=component)
        whole, end = prefix_items(slots, page_size=page), window_items(slots, page_size=page, window=window)
        items = {component: whole if component == "kv" else end}
        return SimpleNamespace(pool=Pool.of(build(views), keep=pool), topology=Topology(), held=pool, items=items)

    src, dst = rank(src_page, 1), rank(dst_page, 0)
    sender, receiver = site.prefill(src).send("room"), site.decode(dst).receive("room", site.address)
    receiver.bind(dst.items, {component: (starts[component], TOKENS)})
    sender.chunk(src.items)
    sender.finish()
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.wait(0) is State.SUCCESS, receiver.error
    first, last = slots[[starts[component], -1]]
    assert dst.held[:, first : last + 1].all()
    assert not dst.held[:, :first].any()
    assert not dst.held[:, last + 1 :].any()
