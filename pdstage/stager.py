"""Staging memory and the kernels that fill and empty it.

Layer 4. Must not know rooms, messages or transports: it turns a selection, items and a token range into copied bytes.

Host copies are done when `gather` or `scatter` returns; copies on a device's stream are done when `poll` says so. The
manager treats both alike.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

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


class Copied(NamedTuple):
    """A gather or scatter that ended: its error or None, and the checksum of what moved, where one was asked for."""

    ticket: int
    error: PdstageError | None
    checksum: int = 0


class _What(NamedTuple):
    """What one copy is of."""

    owned: tuple[Share, ...]
    rects: tuple[Rect, ...]
    wire: str
    checksum: bool


class Stager:
    """Gathers out of and scatters into one pool, through plans made once per session and layer range.

    `submit`, if given, runs a function on another thread: copies of `_LARGE_NBYTES` or more go there, so that the
    caller can write one chunk while the next is gathered. A plan may be used from several threads at once.
    """

    def __init__(self, pool: Pool, submit: Callable[[Callable[[], None]], None] | None = None) -> None:
        self.pool = pool
        self._submit = submit
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._done: deque[Copied] = deque()

    def gather(
        self,
        ticket: int,
        owned: tuple[Share, ...],
        rects: tuple[Rect, ...],
        *,
        wire: str,
        items: Mapping[str, Index],
        dst: Region,
        checksum: bool = False,
    ) -> None:
        """Starts one gather into `dst`; `poll` gives `ticket` once its bytes are there."""

        def copy(plan: Plan, tokens: Tokens, sum_ptr: int) -> None:
            plan.gather(dst.base, dst.nbytes, items, tokens, sum_ptr=sum_ptr)

        self._start(ticket, _What(owned, rects, wire, checksum), dst.nbytes, copy)

    def scatter(
        self,
        ticket: int,
        owned: tuple[Share, ...],
        rects: tuple[Rect, ...],
        *,
        wire: str,
        items: Mapping[str, Index],
        src: Region,
        checksum: bool = False,
    ) -> None:
        """Starts one scatter out of `src`; `poll` gives `ticket` once its bytes are in place."""

        def copy(plan: Plan, tokens: Tokens, sum_ptr: int) -> None:
            plan.scatter(src.base, src.nbytes, items, tokens, sum_ptr=sum_ptr)

        self._start(ticket, _What(owned, rects, wire, checksum), src.nbytes, copy)

    def poll(self) -> list[Copied]:
        """What ended since the last call."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def _start(self, ticket: int, what: _What, nbytes: int, copy: Callable[[Plan, Tokens, int], None]) -> None:
        def run() -> None:
            total = np.zeros(1, np.uint64) if what.checksum else None
            try:
                copy(plan, tokens_of(what.rects), 0 if total is None else total.ctypes.data)
            except UsageError as error:
                self._done.append(Copied(ticket, error))
            else:
                self._done.append(Copied(ticket, None, 0 if total is None else int(total[0])))

        try:
            plan = self._plan(what)
        except UsageError as error:
            self._done.append(Copied(ticket, error))
            return
        if self._submit is not None and nbytes >= _LARGE_NBYTES:
            self._submit(run)
        else:
            run()

    def _plan(self, what: _What) -> Plan:
        layers = ((rect.component, rect.layer_start, rect.layer_stop) for rect in what.rects)
        key = (what.owned, what.wire, what.checksum, *layers)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            select = selects(self.pool.layout, what.owned, what.rects)
            plan = self._plans[key] = self.pool.plan(select, what.wire, checksum=what.checksum)
        return plan
