"""The plainest pool there is, `[view, item, byte]`, where plain torch indexing says what must come out."""

from __future__ import annotations

import torch

from pdstage.bench.shapes import runs_layout
from pdstage.bench.variants import plan_of
from pdstage.kernels import Index, Pool
from pdstage.layout import Layout, Region
from pdstage.plan import TOKEN_MAJOR, Select

ITEMS = [9, 3, 60, 1, 33]
SLEEP_CYCLES = 1_000_000_000  # more than half a second on any clock: work behind it has not run yet


class Plain:
    """`n_views` views of `n_items` items of `width` bytes; one item is one token. Over given memory, or its own.

    Given memory may be on the host.
    """

    def __init__(self, variant, *, n_views=4, n_items=64, width=256, device="cuda:0", memory=None, checksum=False):
        self.device, self.width = device, width
        self._lists = []  # those on the device live as long as the pool: a call only enqueues what reads them
        if memory is None:
            memory = torch.randint(0, 256, (n_views * n_items * width,), dtype=torch.uint8, device=device)
        self.memory = memory
        self.cells = memory.view(n_views, n_items, width)
        layout = runs_layout(width, n_items, n_views, base=memory.data_ptr(), kind="cuda")
        where = memory.device.type, memory.device.index or 0
        regions = [Region(region.base, region.nbytes, *where) for region in layout.regions]
        self.pool = Pool.of(Layout(tuple(regions), layout.components), device, keep=memory)
        self.select = [Select(view.key, 0, 1) for view in layout.views()]
        self._how = variant, checksum
        self.plan = self.again()

    def again(self):
        """Another plan of the same."""
        variant, checksum = self._how
        return plan_of(self.pool, self.select, TOKEN_MAJOR, variant, checksum=checksum)

    def list(self, items, *, on_device):
        """An index over `items`, on the device or the host."""
        held = torch.as_tensor(items, dtype=torch.int64)
        if not on_device:
            return {"kv": Index.of(held.numpy())}
        held = held.to(self.device)
        self._lists.append(held)
        return {"kv": Index(held.data_ptr(), 64, held.numel(), 0, held, self.device)}

    def tokens(self, n):
        return {"kv": (0, n)}

    def staging(self, n, device=None):
        return torch.full((self.plan.nbytes(self.tokens(n)),), 0xA5, dtype=torch.uint8, device=device or self.device)

    def at(self, staging, index):
        """What a call is given: staging, and all of a list."""
        return staging.data_ptr(), staging.numel(), index, self.tokens(index["kv"].n)

    def gather(self, out, items, *, on_device=True, **options):
        self.plan.gather(*self.at(out, self.list(items, on_device=on_device)), **options)

    def scatter(self, src, items, *, on_device=True, **options):
        self.plan.scatter(*self.at(src, self.list(items, on_device=on_device)), **options)

    def expected(self, items):
        """What a gather stages; widths are multiples of 128, so nothing is padded."""
        return self.cells[:, torch.as_tensor(items, device=self.memory.device)].reshape(-1)


def block(stream):
    """Keeps `stream` busy; the event after it, not done for as long."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        return stream.record_event()
