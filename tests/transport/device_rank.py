"""Nodes whose pools lie on the double's GPU: kernels run in streams, when one asks for their events."""

from __future__ import annotations

from dataclasses import replace

from pdstage import Layout, Pool
from tests import cuda_double
from tests.manager.engine import QUICK, Rank, decode_node, serve_all

DEVICE = "cuda:0"
STAGING_NBYTES = 1 << 16


class DeviceRank(Rank):
    """A rank whose pages lie in the double's device memory; `types`: in expandable segments with such handles.

    `k_on_host`: K stays in host memory.
    """

    def __init__(self, types=None, *, k_on_host=False, **shape):
        super().__init__(**shape)
        tensors = self.v if k_on_host else self.tensors
        nbytes, gpu = sum(one.nbytes for one in tensors), cuda_double.double()
        held = gpu.allocate(nbytes) if types is None else gpu.expandable([4096] * -(-nbytes // 4096), types)
        at, moved = 0, []
        for one in tensors:
            moved.append(held.view[at : at + one.nbytes].reshape(one.shape))
            at += one.nbytes
        self.k, self.v = self.k if k_on_host else moved[: self.layers], moved[-self.layers :]
        layout = self.layout_of()
        inside = [held.address <= region.base < held.address + nbytes for region in layout.regions]
        assert inside.count(True) == 1 and inside.count(False) == (self.layers if k_on_host else 0)
        regions = [replace(one, kind="cuda") if at else one for one, at in zip(layout.regions, inside, strict=True)]
        self.pool = Pool.of(Layout(tuple(regions), layout.components), DEVICE, keep=held)


def serve_decode(pipe, address, path="staged", types=None, k_on_host=False, config=QUICK, **where):
    """Receives rooms and says for each how it ended, whether it holds what it must, and what its transport copied.

    `where` says where its staging memory lies; on the device if nothing is said. `types` and `k_on_host`
    are its pool's.
    """
    with cuda_double.use():
        rank = DeviceRank(types, page=8, hnd=True, k_on_host=k_on_host)
        options = {"transport": "local", "path": path, "config": config, "staging_nbytes": STAGING_NBYTES}
        with decode_node(rank, **options | where) as node:
            serve_all(pipe, node, rank, address)
