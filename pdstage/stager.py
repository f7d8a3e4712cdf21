"""Staging memory and the kernels that fill and empty it.

Layer 4. Must not know rooms, messages or transports: it turns a selection, items and a token range into copied bytes.

Host copies are done when `gather` or `scatter` returns; copies on a device's stream are done when `poll` says so. The
manager treats both alike.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import Region
from pdstage.plan import selects, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.errors import PdstageError
    from pdstage.kernels import Index, Plan, Pool
    from pdstage.plan import Rect, Share, Tokens

ALIGNMENT = 256
_MOST_PLANS = 1024
_LARGE_NBYTES = 512 << 10


class Memory:
    """Staging memory of this process: page-aligned, or a caller's tensor or array of bytes."""

    def __init__(self, nbytes: int, tensor: object = None) -> None:
        if tensor is None:
            nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            # Private, so that it may be of huge pages; touched now, so that no first write pays for its pages.
            held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                held.madvise(mmap.MADV_HUGEPAGE)
            self._held: object = held
            np.frombuffer(held, np.uint8)[:: mmap.PAGESIZE] = 0
            base = np.frombuffer(self._held, np.uint8).ctypes.data
        else:
            base, nbytes, self._held = *_address_of(tensor), tensor
        self.region = Region(base, nbytes)

    def parts(self, n: int) -> list[Region]:
        """`n` equal parts, each 256-byte aligned and a multiple of 256 bytes long."""
        base = -(-self.region.base // ALIGNMENT) * ALIGNMENT
        nbytes = (self.region.base + self.region.nbytes - base) // n // ALIGNMENT * ALIGNMENT
        if n < 1 or nbytes < ALIGNMENT:
            raise UsageError(
                f"{self.region.nbytes} bytes of staging memory do not make {n} parts",
                remedy=f"raise staging_nbytes to at least {(n + 1) * ALIGNMENT}",
            )
        return [Region(base + part * nbytes, nbytes, self.region.kind, self.region.device) for part in range(n)]


def _address_of(tensor: object) -> tuple[int, int]:
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.nbytes
    pointer, nbytes = getattr(tensor, "data_ptr", None), getattr(tensor, "nbytes", None)
    if pointer is None or nbytes is None:
        raise UsageError(f"staging memory of type {type(tensor).__name__}", remedy="give a tensor or a numpy array")
    return int(pointer()), int(nbytes)


class Stager:
    """Gathers out of and scatters into one pool, through plans made once per session and layer range.

    `submit`, if given, runs a function on another thread: copies of `_LARGE_NBYTES` or more go there, so that the
    caller can write one chunk while the next is gathered. A plan may be used from several threads at once.
    """

    def __init__(self, pool: Pool, submit: Callable[[Callable[[], None]], None] | None = None) -> None:
        self.pool = pool
        self._submit = submit
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._done: deque[tuple[int, PdstageError | None]] = deque()

    def gather(
        self,
        ticket: int,
        owned: tuple[Share, ...],
        rects: tuple[Rect, ...],
        *,
        wire: str,
        items: Mapping[str, Index],
        dst: Region,
    ) -> None:
        """Starts one gather into `dst`; `poll` gives `ticket` once its bytes are there."""
        self._start(ticket, owned, rects, wire, dst.nbytes, lambda plan, t: plan.gather(dst.base, dst.nbytes, items, t))

    def scatter(
        self,
        ticket: int,
        owned: tuple[Share, ...],
        rects: tuple[Rect, ...],
        *,
        wire: str,
        items: Mapping[str, Index],
        src: Region,
    ) -> None:
        """Starts one scatter out of `src`; `poll` gives `ticket` once its bytes are in place."""
        self._start(
            ticket, owned, rects, wire, src.nbytes, lambda plan, t: plan.scatter(src.base, src.nbytes, items, t)
        )

    def poll(self) -> list[tuple[int, PdstageError | None]]:
        """The tickets that ended since the last call, each with its error or None."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def _start(  # noqa: PLR0917
        self,
        ticket: int,
        owned: tuple[Share, ...],
        rects: tuple[Rect, ...],
        wire: str,
        nbytes: int,
        copy: Callable[[Plan, Tokens], None],
    ) -> None:
        def run() -> None:
            try:
                copy(plan, tokens_of(rects))
            except UsageError as error:
                self._done.append((ticket, error))
            else:
                self._done.append((ticket, None))

        try:
            plan = self._plan(owned, rects, wire)
        except UsageError as error:
            self._done.append((ticket, error))
            return
        if self._submit is not None and nbytes >= _LARGE_NBYTES:
            self._submit(run)
        else:
            run()

    def _plan(self, owned: tuple[Share, ...], rects: tuple[Rect, ...], wire: str) -> Plan:
        key = (owned, wire, *((rect.component, rect.layer_start, rect.layer_stop) for rect in rects))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self.pool.plan(selects(self.pool.layout, owned, rects), wire)
        return plan
