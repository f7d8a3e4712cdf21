"""Staging memory and the kernels that fill and empty it.

It turns a selection, items and a token range into copied bytes. Host copies are done when `gather` or `scatter`
returns. Copies on a device's stream are done when `poll` reports them. The manager treats both alike.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import time
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from pdstage import shared
from pdstage.arguments import shown
from pdstage.errors import PdstageError, UsageError
from pdstage.kernels import Index, Plan, Pool
from pdstage.layout import Layout, Region, View
from pdstage.plan import VIEW_ALIGNMENT, Rects, Select, Shares, Tokens, layers_of, selects
from pdstage.plan.token_slices import Cut, by_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from pdstage.kernels.index_ring import Runtime
    from pdstage.plan.tables import Indexes

    _Plans: TypeAlias = tuple[tuple[int, Plan], ...]

T = TypeVar("T")

log = logging.getLogger(__name__)

ALIGNMENT = 256
DEFAULT_MAX_SMS = 8
"""275 GB/s on an H200, of which they are 6 %."""
_MAX_PLANS = 1024
_RATED_NBYTES, _RATED_VIEWS = (1 << 20, 32 << 20), 64
_RATED_S = 1e-3
_RATE_WAIT_S = 1.0
_STAGED = 4  # of a plan's key
_AT_ONCE = 32
_NO_SUM = np.zeros(1, np.uint64)


_released: WeakKeyDictionary[Runtime, dict[int, list[int]]] = WeakKeyDictionary()
"""Unused staging memory on a device, by size. Another process may still have it open, so it cannot be freed
(cudaIpcCloseMemHandle): the next node reuses it.
"""
_locked: WeakKeyDictionary[Runtime, Counter[int]] = WeakKeyDictionary()
"""How many hold each address that was page-locked here."""


class PageLock:
    """Host memory that a device's kernels read and write in place, until `release`.

    What was page-locked already, such as a pinned tensor, stays so. Several may hold the same memory, as the nodes of
    both roles of an engine do: the last one unlocks it. Raises `UsageError` if the memory cannot be page-locked.
    """

    def __init__(self, what: str, regions: Iterable[Region], runtime: Runtime | None) -> None:
        """`what` names the memory in errors."""
        self._what = what
        self._held: list[tuple[Runtime, int]] = []
        if runtime is None:
            return
        try:
            for region in regions:
                self._lock(runtime, region)
        except UsageError:
            self.release()
            raise

    def _lock(self, runtime: Runtime, region: Region) -> None:
        holders = _locked.setdefault(runtime, Counter())
        if not holders[region.base]:
            try:
                if not runtime.page_lock(region.base, region.nbytes):
                    return
            except (OSError, MemoryError, RuntimeError) as error:
                raise UsageError(
                    f"{region.nbytes} bytes of {self._what} cannot be page-locked ({error})",
                    remedy="give less, or free memory of this host",
                ) from error
        holders[region.base] += 1
        self._held.append((runtime, region.base))

    def release(self) -> None:
        """Nothing on the device uses it any more."""
        while self._held:
            runtime, base = self._held.pop()
            holders = _locked[runtime]
            holders[base] -= 1
            if not holders[base]:
                del holders[base]
                runtime.page_unlock(base)


class Memory:
    """Staging memory of this process, aligned to pages.

    It is on the pool's `device`, or in host memory, which is then page-locked so that the pool's kernels reach it;
    `runtime` is that device's. `mappable` allocates host memory that peers on this host can map, if the system has such
    memory. Raises `UsageError` if there is not as much.
    """

    def __init__(
        self,
        nbytes: int,
        device: str = "cpu",
        *,
        mappable: bool = False,
        runtime: Runtime | None = None,
        staging_on: str = "pool",
    ) -> None:
        where = "cpu" if staging_on == "host" else device
        self._runtime, self._kept = runtime, 0
        self._held: NDArray[np.uint8] | None = None
        base, nbytes = self._allocate(nbytes, where, mappable)
        kind, _, number = where.partition(":")
        self.region = Region(base, nbytes, kind, int(number or 0))
        self._lock = PageLock("staging memory", () if where == device else (self.region,), runtime)

    def _allocate(self, nbytes: int, where: str, mappable: bool) -> tuple[int, int]:
        """Address and bytes."""
        if where != "cpu":
            runtime = self._runtime
            assert runtime is not None  # of a pool on a device
            spare = _released.setdefault(runtime, {}).get(nbytes)
            base = spare.pop() if spare else _granted(nbytes, f"on {where}", lambda: runtime.allocate(nbytes))
            self._kept = base
            return base, nbytes
        here = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        if nbytes > here:  # touching more than that ends the process
            raise UsageError(
                f"staging_nbytes is {nbytes}, and this machine has {here} bytes of memory", remedy="give less"
            )
        array = _granted(nbytes, "on cpu", lambda: _host_memory(nbytes, mappable))
        self._held = array
        return array.ctypes.data, array.nbytes

    def release(self) -> None:
        """Nothing uses it any more: memory allocated here goes back to the system, or to the next node."""
        runtime, region = self._runtime, self.region
        self._lock.release()
        if runtime is not None and self._kept:
            _released[runtime].setdefault(region.nbytes, []).append(self._kept)
            self._kept = 0
        self._held = None

    def parts(self, n: int) -> list[Region]:
        """`n` equal parts, each 256-byte aligned and a multiple of 256 bytes long."""
        base, nbytes = self.region.base, self.region.nbytes // n // ALIGNMENT * ALIGNMENT
        if n < 1 or nbytes < ALIGNMENT:
            raise UsageError(
                f"{self.region.nbytes} bytes of staging memory do not make {n} parts",
                remedy=f"raise staging_nbytes to at least {n * ALIGNMENT}",
            )
        return [Region(base + part * nbytes, nbytes, self.region.kind, self.region.device) for part in range(n)]


def _granted(nbytes: int, where: str, ask: Callable[[], T]) -> T:
    """The result of `ask`. Raises `UsageError` if the system has not enough memory."""
    try:
        return ask()
    except (OSError, MemoryError, RuntimeError) as error:
        raise UsageError(
            f"{nbytes} bytes of staging memory {where} cannot be had ({error})",
            remedy="lower staging_nbytes, or free memory there",
        ) from error


def _host_memory(nbytes: int, mappable: bool) -> NDArray[np.uint8]:
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if mappable:
        with contextlib.suppress(OSError):
            return shared.allocate(nbytes)
    return shared.touched(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Copied(NamedTuple):
    """A gather or scatter that ended: its error or None, and the checksum of its bytes if requested.

    Times are of `time.monotonic()`, 0 for a copy that never began. On a device it begins at its launch, and ends when
    its end is seen.
    """

    ticket: int
    error: PdstageError | None
    checksum: int = 0
    began_at: float = 0.0
    ended_at: float = 0.0


class Move(NamedTuple):
    """What one gather or scatter moves. `items` are whole pages or slots.

    `cut` says how they are cut for a peer that holds other tokens: `tokens` are numbers of those it has in common;
    without one they are the rectangles' own. `staged` is the pool's side of the session's `StagedPair`, and `cut`
    belongs to the views it is made of; None if bytes are staged as the pool has them.
    """

    owned: Shares
    rects: Rects
    tokens: Tokens
    order: str
    items: Indexes
    checksum: bool = False
    cut: Cut | None = None
    staged: Layout | None = None


class Passes:
    """Copies from pages of one pool directly to pages of another pool that is mapped here: both plans, by class of cut.

    `pools` are the two, `cuts` how their pages are cut for each other, `selects` what moves. Raises `UsageError` if one
    pass cannot turn the stored form of one into that of the other.
    """

    def __init__(
        self,
        pools: tuple[Pool, Pool],
        cuts: tuple[Cut, Cut],
        selects: Sequence[Sequence[Select]],
    ) -> None:
        self.cuts = cuts
        self.plans: list[tuple[int, int, Plan, Plan]] = []
        for (i, j), parts in by_classes(cuts[0], selects[0], cuts[1], selects[1]).items():
            ours, theirs = (
                Pool.of(Layout(pool.layout.regions, cut.layouts[number].components), pool.device, pool).plan(
                    part, only="copy_to"
                )
                for pool, cut, number, part in zip(pools, cuts, (i, j), parts, strict=True)
            )
            ours.check_peer(theirs)
            self.plans.append((i, j, ours, theirs))


class Stager:
    """Gathers from and scatters into one pool, through plans made once per session and layer range.

    `runtime` is the device's, for pools on one: all copies go to one separate stream, each on at most `max_sms`
    multiprocessors. `only`: "gather" or "scatter", of which one alone is called.
    """

    def __init__(
        self,
        pool: Pool,
        runtime: Runtime | None = None,
        *,
        max_sms: int | None = None,
        only: str = "",
    ) -> None:
        self.pool = pool
        self._only = only
        self._max_sms = max_sms
        self._stream = _Stream.of(runtime) if runtime is not None else None
        self._plans: dict[tuple[object, ...], _Plans] = {}
        self._done: list[Copied] = []

    def gather(self, ticket: int, move: Move, dst: Region) -> None:
        """Starts one gather into `dst`; `poll` returns `ticket` once its bytes are there."""
        self._start(ticket, move, "gather", dst)

    def scatter(self, ticket: int, move: Move, src: Region) -> None:
        """Starts one scatter from `src`; `poll` returns `ticket` once its bytes are in place."""
        self._start(ticket, move, "scatter", src)

    def copy_to(
        self,
        ticket: int,
        passes: Passes,
        tokens: Tokens,
        items: Indexes,
        peer_items: Indexes,
    ) -> Copied | None:
        """Copies from the pool's pages to a peer's. None: it has begun, and `poll` returns `ticket`."""

        return self._begin(ticket, partial(_copy_passes, passes, tokens, (items, peer_items), self._max_sms), False)

    def poll(self) -> list[Copied]:
        """The copies that ended since the last call. Never waits."""
        done, self._done = self._done, []
        return done if self._stream is None else done + self._stream.ended()

    def warm(self, *, checksum: bool) -> None:
        """Compiles and loads what a device needs for the pool's largest component, so that no room waits for it."""
        if self._stream is not None:
            self._typical(checksum)

    def _typical(self, checksum: bool) -> tuple[Plan, Sequence[View]]:
        """A plan of the pool's largest component, and its views."""
        views = max([one.views for one in self.pool.layout.components], key=_item_nbytes)[:_RATED_VIEWS]
        select = [Select(view.key, 0, view.shards) for view in views]
        return self.pool.plan(select, checksum=checksum, only=self._only), views

    def rate(self, into: Region, *, checksum: bool) -> float | None:
        """Bytes a second of a gather of the pool's largest component into `into`, within `max_sms`, once its kernel is
        there: a few hundred microseconds. None in host memory, and where not one item fits.
        """
        if self._stream is None:
            return None
        found, (plan, views) = None, self._typical(checksum)
        name, nbytes = views[0].key.component, _item_nbytes(views)
        per_item, n_items = views[0].tokens_per_item, min(view.n_items for view in views)
        for most_nbytes in _RATED_NBYTES:
            room = min(into.nbytes, most_nbytes) - VIEW_ALIGNMENT * len(views)
            if (n := min(n_items, room // nbytes)) < 1:
                continue
            items, tokens = {name: Index.of(np.arange(n))}, {name: (0, n * per_item)}
            gather = partial(plan.gather, into.base, into.nbytes, items, tokens, max_sms=self._max_sms)
            took_s = self._stream.seconds(gather)
            if took_s == math.inf:
                break
            found = n * nbytes / took_s
            if took_s > _RATED_S:
                break
        return found

    def give_back(self) -> None:
        """Once no copy runs; none begins any more."""
        if self._stream is not None:
            self._stream.give_back()
            self._stream = None

    @property
    def launched(self) -> bool:
        """Whether copies are in flight on a device: nothing announces their end, so `poll` must be called."""
        return self._stream is not None and bool(self._stream.running)

    @property
    def over(self) -> bool:
        """Whether a copy on a device ended that `poll` has not told of."""
        return self._stream is not None and self._stream.over

    def reserve(self) -> None:
        """A session begins, whose plans are made as its chunks come: allocates what they need."""
        if self._stream is not None:
            self._stream.runtime.reserve()

    def check(self) -> None:
        """Raises the driver's error on a device that has failed, which nothing mends in this process."""
        if self._stream is not None:
            self._stream.check()

    def forget(self, *staged: Layout) -> None:
        """Drops the plans of layouts other than the pool's, whose session is over."""
        gone = {id(layout) for layout in staged} - {id(self.pool.layout)}
        self._plans = {key: plans for key, plans in self._plans.items() if key[_STAGED] not in gone}

    def _start(self, ticket: int, move: Move, verb: str, staged: Region) -> None:
        try:
            plans = self._plan(move)
        except Exception as error:  # noqa: BLE001  (nothing began: only this copy fails)
            self._done.append(Copied(ticket, failed(error)))
            return
        over = self._begin(ticket, partial(_copy_all, plans, move, verb, staged, self._max_sms), move.checksum)
        if over is not None:
            self._done.append(over)

    def _begin(self, ticket: int, copy: Callable[..., None], checksum: bool) -> Copied | None:
        """Calls `copy(stream=, sum_ptr=)`. Returns its end, or None if `poll` reports it."""
        if self._stream is not None:
            refused = self._stream.start(ticket, copy, checksum)
            return Copied(ticket, refused) if refused is not None else None
        total, began_at = np.zeros(1, np.uint64) if checksum else _NO_SUM, time.monotonic()
        try:
            copy(stream=None, sum_ptr=total.ctypes.data if checksum else 0)
        except Exception as error:  # noqa: BLE001  (it is over, and only this copy fails)
            return Copied(ticket, failed(error))
        return Copied(ticket, None, int(total[0]), began_at, time.monotonic())

    def _plan(self, move: Move) -> _Plans:
        # A layout is keyed by its id, which stays unique while a plan holds it: hashing a layout is slow.
        cut, staged = move.cut.key if move.cut is not None else (), id(move.staged)
        key = (move.owned, move.order, move.checksum, cut, staged, *map(layers_of, move.rects))
        plans = self._plans.get(key)
        if plans is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plans = self._plans[key] = self._new_plans(move)
        return plans

    def _new_plans(self, move: Move) -> _Plans:
        staged, cut = move.staged, move.cut
        staged = None if staged is self.pool.layout else staged
        select = selects(staged or self.pool.layout, move.owned, move.rects)

        pools, runs = [self.pool], [(0, list(select))]
        if cut is not None and cut.key:
            pools, runs = [Pool.of(layout, self.pool.device, self.pool) for layout in cut.layouts], cut.runs(select)
        how: dict[str, Any] = {"checksum": move.checksum, "staged": staged, "only": self._only}
        return tuple((number, pools[number].plan(run, move.order, **how)) for number, run in runs)


def _item_nbytes(views: Sequence[View]) -> int:
    return sum(view.shards * view.shard_nbytes * view.rows_per_item for view in views)


def failed(error: Exception) -> PdstageError:
    """What one copy ends with, whatever its plan or its launch raised."""
    if isinstance(error, PdstageError):
        return error
    log.error("a copy failed", exc_info=error)
    return PdstageError(f"a copy failed: {shown(error)}", remedy="see the log; the other rooms go on")


def _copy_all(
    plans: _Plans, move: Move, verb: str, staged: Region, max_sms: int | None, *, stream: int | None, sum_ptr: int
) -> None:
    """Runs each plan's part of the staged bytes in turn; all add to one checksum."""
    indexes = move.cut.indexes(move.items, move.tokens) if move.cut is not None and move.cut.key else None
    base, end = staged.base, staged.base + staged.nbytes
    for number, plan in plans:
        items = move.items if indexes is None else indexes.of(number)
        copy = plan.gather if verb == "gather" else plan.scatter
        copy(base, end - base, items, move.tokens, stream=stream, max_sms=max_sms, sum_ptr=sum_ptr)
        if indexes is not None:
            base += plan.nbytes(move.tokens)


def _copy_passes(
    passes: Passes,
    tokens: Tokens,
    items: tuple[Indexes, Indexes],
    max_sms: int | None,
    *,
    stream: int | None,
    sum_ptr: int,
) -> None:
    """`items` are the pool's and the peer's."""
    del sum_ptr
    ours, theirs = (cut.indexes(of_side, tokens) for cut, of_side in zip(passes.cuts, items, strict=True))
    for i, j, plan, peer in passes.plans:
        plan.copy_to(peer, ours.of(i), theirs.of(j), tokens, stream=stream, max_sms=max_sms)


class _Running(NamedTuple):
    """A copy in the stream. `event` follows it; `total`, page-locked memory at `sum_ptr`, receives its checksum."""

    ticket: int | None
    """None: nobody asks for its end."""
    event: object
    total: NDArray[np.uint64]
    sum_ptr: int
    began_at: float = 0.0
    error: PdstageError | None = None


class _Stream:
    """Copies in one stream of a device, each followed by an event that is queried and never waited for."""

    _idle: ClassVar[dict[Runtime, list[_Stream]]] = {}

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._stream = runtime.new_stream()
        self.running: deque[_Running] = deque()
        self._spare = self._more()

    @classmethod
    def of(cls, runtime: Runtime) -> _Stream:
        """One that another stager has given back, or a new one: a runtime's streams, events and page-locked memory live
        as long as it does.
        """
        idle = cls._idle.setdefault(runtime, [])
        return idle.pop() if idle else cls(runtime)

    def seconds(self, copy: Callable[..., None]) -> float:
        """Of the second of two calls, from its launch to its end as the host sees it; infinite if it does not end in
        `_RATE_WAIT_S`, since what runs on the device before it may not: then it is one of those that run.
        """
        spare, took_s = self._spare.pop(), math.inf
        for _ in range(2):
            began_at = time.perf_counter()
            copy(stream=self._stream)
            self.runtime.record(spare.event, self._stream)
            while not self.runtime.done(spare.event):
                if time.perf_counter() - began_at > _RATE_WAIT_S:
                    self.running.append(spare._replace(ticket=None))  # else its last copy's, perhaps of another node
                    return math.inf
                time.sleep(0)
            took_s = time.perf_counter() - began_at
        self._spare.append(spare)
        return took_s

    def give_back(self) -> None:
        """Nothing runs in it."""
        self._idle[self.runtime].append(self)

    @property
    def over(self) -> bool:
        """Whether `ended` has something to say."""
        return bool(self.running) and self.runtime.done(self.running[0].event)

    def start(self, ticket: int, copy: Callable[..., None], checksum: bool) -> PdstageError | None:
        """Launches `copy(stream=, sum_ptr=)`. What it raises is reported once the stream is past what it launched: a
        copy of several parts may be refused, or find no memory, at a later one. Returns why nothing was launched. On a
        device that has failed, this call raises.
        """
        if not self._spare:
            try:
                self._spare = self._more()
            except Exception as error:  # noqa: BLE001  (only this copy fails)
                self.check()
                return failed(error)
        spare = self._spare.pop()
        spare.total[0], began_at, refused = 0, time.monotonic(), None
        try:
            copy(stream=self._stream, sum_ptr=spare.sum_ptr if checksum else 0)
        except Exception as error:  # noqa: BLE001  (only this copy fails)
            refused = failed(error)
        self.runtime.record(spare.event, self._stream)
        self.running.append(spare._replace(ticket=ticket, began_at=began_at, error=refused))
        return None

    def check(self) -> None:
        spare = self._spare[-1] if self._spare else self.running[-1]
        self.runtime.done(spare.event)

    def _more(self) -> list[_Running]:
        """Grows the pool for more concurrent copies than before."""
        words = self.runtime.pinned(8 * _AT_ONCE).view(np.uint64)
        totals = [words[n : n + 1] for n in range(_AT_ONCE)]
        return [_Running(0, self.runtime.event(), total, total.ctypes.data) for total in totals]

    def ended(self) -> list[Copied]:
        ended = []
        while self.running and self.runtime.done(self.running[0].event):
            one = self.running.popleft()
            self._spare.append(one)
            if one.ticket is not None:
                ended.append(Copied(one.ticket, one.error, int(one.total[0]), one.began_at, time.monotonic()))
        return ended
