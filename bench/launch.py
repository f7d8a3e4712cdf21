"""Host time of a launch: what a gather or scatter of 61 layers costs the thread that starts it. Needs no GPU.

The driver is a double whose calls return at once, so only this package's code is measured; `pdstage bench gpu` measures
the same with the driver's part. Item lists are in host memory, like the manager's, and are passed in the kernel's
parameters. The baseline is the path of longer lists: a slot of page-locked memory, an upload, and an event.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.kernels.arena import Arena
from pdstage.kernels.backend import Launch, Recipe
from pdstage.kernels.cuda_copy import CudaPlan
from pdstage.kernels.cuda_runtime import CudaRuntime
from pdstage.kernels.cuda_tables import LISTED, LISTED_LARGE
from pdstage.kernels.driver import Kernel
from pdstage.kernels.index_ring import IndexRing
from pdstage.plan import TOKEN_MAJOR, Staging
from pdstage.plan.tables import Index

from . import shapes
from .harness import Row, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

TARGET_US = 15
PAGES = (4, 64, 512, 4096)
_STREAM = 1 << 40
_BASE = 1 << 30


class Machine(CudaRuntime):
    """A runtime over a driver that does nothing; lists of up to `listed` items go into parameters."""

    def __init__(self, *listed: int) -> None:
        def nothing(*_: object) -> int:
            return 0

        names = "capture_mode", "context", "bind", "upload", "record", "wait", "capturing", "launch"
        calls = dict.fromkeys(names, nothing)
        self._library: Any = SimpleNamespace(**calls, done=lambda _: True, new_stream=lambda: _STREAM)
        self.device, self.n_sms, self.capability, self.widest, self.listed = 0, 132, 90, 16, listed
        self._context, self._own = 0, set()
        self.tables = Arena(self)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)

    def allocate(self, nbytes: int) -> int:
        return _BASE + nbytes

    def event(self) -> int:
        return _BASE

    def kernel(self, name: str, macros: Mapping[str, int], threads: int, shared_nbytes: int = 0) -> Kernel:
        return Kernel(_BASE, threads, shared_nbytes)


def run(quick: bool) -> list[Row]:
    """One row for gathers and one for scatters of each number of pages."""
    layout = shapes.place(shapes.DEEPSEEK_V3, 1, 0, {"kv": 2 * PAGES[-1]}, base=_BASE, kind="cuda")
    select = Staging(layout, shapes.sends(shapes.Pair(shapes.DEEPSEEK_V3, 1, 1), 1)[0].src_select).select
    recipe = Recipe(layout, select, TOKEN_MAJOR, "cuda:0", checksum=False)
    plans = [CudaPlan(recipe, machine, IndexRing(machine)) for machine in (Machine(LISTED, LISTED_LARGE), Machine())]
    rows = []
    for n_pages in PAGES:
        pages = np.random.default_rng(0).permutation(2 * PAGES[-1])[:n_pages].astype(np.int32)
        tokens = {"kv": (0, n_pages * shapes.DEEPSEEK_V3.page)}
        given = (_BASE, Staging(layout, select).nbytes(tokens), {"kv": Index.of(pages)}, tokens, Launch(_STREAM))
        for way in ("gather", "scatter"):
            calls: list[Callable[[], object]] = [partial(getattr(plan, way), *given) for plan in plans]
            ours, uploaded = interleaved(calls, repeats=15 if quick else 101, inner=50)
            rows.append(
                Row(
                    name=f"host time of a {way} of 61 layers, {n_pages} pages",
                    value=ours * 1e6,
                    baseline=uploaded * 1e6,
                    unit="us",
                    target=TARGET_US,
                    on="value",
                    better="lower",
                    detail="baseline: the list is uploaded; the driver's own time is in neither",
                    point={"table": "launch", "way": way, "pages": n_pages},
                )
            )
    return rows
