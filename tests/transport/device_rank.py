"""Nodes whose pools lie on the double's GPU: kernels run on the CPU, in streams, when one asks for their events."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from transport import cuda_double

from pdstage import Pool
from pdstage.kernels import host_copy, pool
from pdstage.layout import Layout
from tests.manager.engine import QUICK, Rank, decode_node, drive

DEVICE = "cuda:0"
STAGING_NBYTES = 1 << 16
TOKENS, N_ROOMS = 50, 6


class Streams:
    """`index_ring.Runtime` as far as a stager needs it. `held`: no kernel runs."""

    flushes = False

    def __init__(self):
        self.held = False
        self.n_run = 0
        self.locked = {}
        self._work = deque()
        self._over = set()
        self._numbers = itertools.count(1)

    def current(self):
        return cuda_double.CUDA.on(0)

    def allocate(self, nbytes):
        return cuda_double.RUNTIME.allocate(nbytes).address

    def page_lock(self, ptr, nbytes):
        self.locked[ptr] = nbytes
        return True

    def page_unlock(self, ptr):
        del self.locked[ptr]

    def reserve(self):
        """Host plans need nothing on a device."""

    def new_stream(self):
        return next(self._numbers)

    event = new_stream

    def pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def launch(self, kernel):
        self._work.append(kernel)

    def record(self, event, stream):
        self._over.discard(event)
        self._work.append(event)

    def done(self, event):
        was = event in self._over
        while self._work and not self.held and not was:
            work = self._work.popleft()
            if isinstance(work, int):
                self._over.add(work)
                break
            work()
            self.n_run += 1
        return was


STREAMS = Streams()


class LaunchedPlan:
    """A host plan whose copies are put in a stream."""

    fans_out = False

    def __init__(self, plan):
        self._plan = plan

    def gather(self, *args):
        self._launch(self._plan.gather, args)

    def scatter(self, *args):
        self._launch(self._plan.scatter, args)

    def copy_to(self, peer, *args):
        self._launch(lambda *rest: self._plan.copy_to(peer._plan, *rest), args)

    def _launch(self, copy, args):
        *what, launch = args
        assert isinstance(launch.stream, int)
        STREAMS.launch(lambda: copy(*what, launch._replace(stream=None)))


def use_double(patch=pool._BACKENDS.__setitem__):
    """The kernels' backend `cuda` is the double from now on in this process."""

    def compile_plan(recipe):
        return LaunchedPlan(host_copy.compile_plan(recipe._replace(device="cpu")))

    patch("cuda", SimpleNamespace(missing=str, compile_plan=compile_plan, runtime_of=lambda _: STREAMS))


class DeviceRank(Rank):
    """A rank whose pages lie in the double's device memory; `types`: in expandable segments with such handles.

    `k_on_host`: K stays in host memory.
    """

    def __init__(self, types=None, *, k_on_host=False, **shape):
        super().__init__(**shape)
        tensors = self.v if k_on_host else [*self.k, *self.v]
        nbytes, runtime = sum(one.nbytes for one in tensors), cuda_double.RUNTIME
        sizes = [4096] * -(-nbytes // 4096)
        held = runtime.allocate(nbytes) if types is None else runtime.expandable(sizes, types)
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


def staging():
    memory = cuda_double.RUNTIME.allocate(STAGING_NBYTES)
    return SimpleNamespace(data_ptr=lambda: memory.address, nbytes=memory.nbytes, device=DEVICE, held=memory)


def serve_decode(pipe, address, journal=None, path="staged", types=None, k_on_host=False, config=QUICK, **where):
    """Receives rooms and says for each how it ended, whether it holds what it must, and what its transport copied.

    `where` says where its staging memory lies; the double's device memory if nothing is said. `types` and `k_on_host`
    are its pool's.
    """
    use_double()
    rank = DeviceRank(types, page=8, hnd=True, k_on_host=k_on_host)
    where = where or {"staging": staging()}
    options = {"transport": cuda_double.LocalDouble(), "path": path, "journal": journal, "config": config}
    with decode_node(rank, **options, **where) as node:
        pages = [rank.allocate(TOKENS) for _ in range(N_ROOMS)]
        receivers = [node.receive(room, address) for room in range(N_ROOMS)]
        for receiver, into in zip(receivers, pages, strict=True):
            receiver.bind(into, TOKENS)
        drive([node], lambda: all(receiver.released for receiver in receivers))
        pipe.send([(int(one.state), rank.holds(n, TOKENS, pages[n])) for n, one in enumerate(receivers)])
        drive([node], pipe.poll)
