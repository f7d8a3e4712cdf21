"""A hybrid model's room between real nodes: pages, a window, slots, index keys and rings, at unequal TP."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import sglang
from test_states import KINDS

from pdstage import Pool, State, Topology
from pdstage.tensors import build
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
