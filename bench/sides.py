"""Two processes, one per side, each with all ranks of its side: rooms by every path between any two TP sizes.

There is one process per side, since on few cores a process per rank would measure the scheduler (bench/transfer.py has
those too). Ranks of a side take turns on its core.

Prefill nodes choose by cost unless a path is given. A rank's pool is one allocation, viewed as runs of every measured
length.
"""

from __future__ import annotations

import statistics
import time
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from pdstage import environment
from pdstage.control.bootstrap import BootstrapServer
from pdstage.kernels import Pool
from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis, Topology, shard_range
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config
from pdstage.protocol.state import State
from pdstage.transport import available

from .ranks import Actor, Rank, expose, observers
from .raw import Raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pdstage.manager.handle import Handle

RUNS = tuple(256 << n for n in range(9))  # 256 B to 64 KiB
PAIRS = ((4, 2), (2, 4), (4, 4), (3, 2), (8, 4))
LAYERS, PAGE = 8, 16
N_VIEWS = 2 * LAYERS
ROOM_NBYTES = 32 << 20
N_BUFFERS = 4
WAIT_S = 120.0
_IDLE_S = 0.02
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_WAYS_OVER: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "nixl": (("nixl, shared memory", {}), ("nixl, TCP", TCP))
}
_CONFIG = Config(max_silence_s=300.0)


class Fabric(NamedTuple):
    """A transport with the environment that says what it runs over."""

    name: str
    transport: str
    env: dict[str, str]


def fabrics() -> list[Fabric]:
    """Every transport that can be used here; those of which one name is several fabrics as each of them."""
    usable = [name for name, problem in available().items() if not problem]
    return [Fabric(what, name, env) for name in usable for what, env in _WAYS_OVER.get(name, ((name, {}),))]


class Shape(NamedTuple):
    """Rooms of about `nbytes` from `src_tp` ranks to `dst_tp`.

    Pages have 16 tokens; between equal sizes, which share whole pages, one, so that no two runs join.
    """

    src_tp: int
    dst_tp: int
    nbytes: int = ROOM_NBYTES

    @property
    def heads(self) -> int:
        """One a rank of the larger side; where that does not deal them out evenly to the smaller, enough that do."""
        larger, smaller = max(self[:2]), min(self[:2])
        return larger if larger % smaller == 0 else larger * smaller

    @property
    def page(self) -> int:
        return 1 if self.src_tp == self.dst_tp else PAGE

    def tokens(self, run: int) -> int:
        return max(1, self.nbytes // (N_VIEWS * run * self.heads))

    def n_pages(self, run: int) -> int:
        """Of the pool: four times what a room takes."""
        return 4 * self._n_used(run)

    def _n_used(self, run: int) -> int:
        return -(-self.tokens(run) // self.page)

    def pages(self, run: int, seed: int) -> NDArray[Any]:
        return np.random.default_rng(seed).permutation(self.n_pages(run))[: self._n_used(run)]

    def array(self, run: int, tp: int, rank: int) -> tuple[int, ...]:
        """`[view, page, token, head, byte]` of one rank."""
        start, stop = shard_range(self.heads, tp, rank)
        return N_VIEWS, self.n_pages(run), self.page, stop - start, run

    def pool(self, tp: int, rank: int, fill: int) -> tuple[Pool, NDArray[np.uint8]]:
        memory = np.full(max(int(np.prod(self.array(run, tp, rank))) for run in RUNS), fill, np.uint8)
        views = [view for run in RUNS for view in self._views(run, tp, rank)]
        return Pool.of(Layout.of([Region(memory.ctypes.data, memory.nbytes)], views), keep=memory), memory

    def _views(self, run: int, tp: int, rank: int) -> list[View]:
        _, n_pages, page, heads, _ = self.array(run, tp, rank)
        row, axis = heads * run, Axis("kv_head", self.heads, shard_range(self.heads, tp, rank)[0], heads)
        return [
            View(
                key=Key(component(run), "kv"[number % 2], number // 2), region=0, offset=number * n_pages * page * row,
                n_items=n_pages, item_stride=page * row, tokens_per_item=page, rows=(RowLevel(1, row),), shards=heads,
                shard_stride=run, width=run, axis=axis, format="bytes",
            )
            for number in range(N_VIEWS)
        ]  # fmt: skip


def component(run: int) -> str:
    return f"runs of {run}"


class Side(Actor):
    """All ranks of one side, and one end of the raw write of up to `nbytes`. `host`, `device`: see `Raw`."""

    def __init__(self, nbytes: int, transport: str, host: str = "", device: str = "cpu") -> None:
        self.nodes: list[Any] = []
        self.handles: list[Handle] = []
        self._raw = Raw(transport, nbytes, host, device)
        self._is_raw = False
        self._cost = ((0.0, 0.0), 0.0)

    def idle(self) -> None:
        if self._is_raw:
            self._raw.idle()
        else:
            self.turn()

    def turn(self) -> None:
        for node in self.nodes:
            node.turn(5e-4 if len(self.nodes) == 1 else 0.0)

    def until(self, done: Callable[[], bool]) -> None:
        deadline_at = time.monotonic() + WAIT_S
        while not done():
            self.turn()
            failed = [handle for handle in self.handles if handle.state is State.FAILED]
            if failed or time.monotonic() > deadline_at:
                raise AssertionError(f"a room failed or did not end: {[handle.error for handle in failed]}")

    def describe(self) -> tuple[bytes, Region]:
        return self._raw.describe()

    def connect(self, description: bytes, region: Region) -> None:
        self._raw.connect(description, region)

    def use_raw(self, is_raw: bool) -> None:
        """From now on `idle` serves the raw write, or the nodes."""
        self._is_raw = is_raw

    def write(self, nbytes: int = 0) -> float:
        return self._raw.write(nbytes)

    def begin_cost(self) -> None:
        """From now on the raw write's cost is counted, less that of polling while there is none."""
        until = time.perf_counter() + _IDLE_S
        began = time.perf_counter(), time.process_time()
        while time.perf_counter() < until:
            self._raw.idle()
        now = time.perf_counter(), time.process_time()
        self._cost = now, (now[1] - began[1]) / (now[0] - began[0])

    def write_slowly(self, nbytes: int) -> None:
        """A write with pauses between its polls."""
        self._raw.write(nbytes, pauses=True)

    def cost(self) -> float:
        """Seconds of processor time since `begin_cost`."""
        (at, busy_s), idle = self._cost
        return max(0.0, time.process_time() - busy_s - idle * (time.perf_counter() - at))

    def close(self) -> None:
        for node in self.nodes:
            node.close(1.0)
        self._raw.close()


class Sources(Side):
    """All prefill ranks; every byte of a rank's pool is its mark."""

    def __init__(self, shape: Shape, directory: str, transport: str) -> None:
        super().__init__(shape.nbytes, transport)
        self.shape = shape
        tp = shape.src_tp
        for rank in range(tp):
            self.nodes.append(
                PrefillNode(
                    shape.pool(tp, rank, rank + 1)[0], Topology(tp_size=tp, tp_rank=rank), transport=transport,
                    bootstrap=directory, path="auto", staging_nbytes=N_BUFFERS * shape.nbytes // tp,
                    n_buffers=N_BUFFERS, config=_CONFIG, observers=observers(),
                )
            )  # fmt: skip
            expose(self.nodes[-1])

    def offer(self, path: str, run: int, room: int) -> None:
        self.until(lambda: all(handle.released for handle in self.handles))
        self.handles = []
        name, tokens = component(run), self.shape.tokens(run)
        for node in self.nodes:
            node.path = path
            sender = node.send(room)
            sender.chunk({name: self.shape.pages(run, room)}, {name: (0, tokens)})
            sender.finish()
            self.handles.append(sender)

    def n_chunks(self) -> tuple[int, int]:
        """Staged and direct, so far."""
        stats = [node.stats() for node in self.nodes]
        return sum(one["chunks_staged"] for one in stats), sum(one["chunks_direct"] for one in stats)


class Sinks(Side):
    """All decode ranks."""

    def __init__(self, shape: Shape, directory: str, transport: str) -> None:
        super().__init__(shape.nbytes, transport)
        self.shape = shape
        self._directory, self._memories, tp = directory, [], shape.dst_tp
        for rank in range(tp):
            pool, memory = shape.pool(tp, rank, 0)
            self._memories.append(memory)
            node = DecodeNode(
                pool, Topology(tp_size=tp, tp_rank=rank), transport=transport, path="auto",
                staging_nbytes=max(8 << 20, 4 * shape.nbytes // tp), config=_CONFIG, observers=observers(),
            )  # fmt: skip
            self.nodes.append(node)
            expose(node)

    def pull(self, run: int, room: int, check: bool) -> float:
        """Seconds from the first rank's `bind` to the last one's Success."""
        name, pages = component(run), self.shape.pages(run, -1 - room & 0xFFFFFF)
        for memory in self._memories if check else ():
            memory[:] = 0
        receivers = [node.receive(room, self._directory) for node in self.nodes]
        self.handles = list(receivers)
        self.until(lambda: all(one.state is not State.BOOTSTRAPPING for one in receivers))
        start = time.perf_counter()
        for receiver in receivers:
            receiver.bind({name: pages}, {name: (0, self.shape.tokens(run))})
        self.until(lambda: all(one.state is State.SUCCESS for one in receivers))
        took = time.perf_counter() - start
        self.until(lambda: all(one.released for one in receivers))
        if check:
            self._check(run, pages)
        return took

    def _check(self, run: int, pages: NDArray[Any]) -> None:
        """Every head holds the mark of the rank it came from."""
        shape = self.shape
        owner = np.empty(shape.heads, np.uint8)
        for rank in range(shape.src_tp):
            owner[slice(*shard_range(shape.heads, shape.src_tp, rank))] = rank + 1
        for rank, memory in enumerate(self._memories):
            sizes = shape.array(run, shape.dst_tp, rank)
            got = memory[: int(np.prod(sizes))].reshape(sizes)[:, pages]
            got = got.reshape(N_VIEWS, -1, *sizes[3:])[:, : shape.tokens(run)]
            if not (got == owner[slice(*shard_range(shape.heads, shape.dst_tp, rank)), None]).all():
                raise AssertionError("a room arrived with other bytes than were sent")


class Sides:
    """Both processes. A context manager; `calibration` is a file for the prefill nodes."""

    def __init__(self, shape: Shape, fabric: Fabric, calibration: str = "") -> None:
        self.shape = shape
        env = {**fabric.env, environment.CALIBRATION.name: calibration}
        self._directory = BootstrapServer().start()
        self._src, self._dst = (
            Rank(side, shape, self._directory.address, fabric.transport, env=env) for side in (Sources, Sinks)
        )
        self._next = 0

    def __enter__(self) -> Self:
        for rank in (self._src, self._dst):
            rank.ready()
        theirs, ours = self._dst.call("describe"), self._src.call("describe")
        self._src.call("connect", *theirs)
        self._dst.call("connect", *ours)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in (self._dst, self._src):
            rank.close()
        self._directory.close()

    def room(self, path: str, run: int, *, check: bool = False) -> float:
        """Seconds of one room by `path`; `check` compares every byte that arrived."""
        self._next += 1
        self._src.call("offer", path, run, self._next)
        return float(self._dst.call("pull", run, self._next, check))

    def raw(self) -> float:
        """Seconds of one write of a room's bytes."""
        for rank in (self._src, self._dst):
            rank.call("use_raw", True)
        took = float(self._src.call("write"))
        for rank in (self._src, self._dst):
            rank.call("use_raw", False)
        return took

    def chosen(self, run: int) -> str:
        """The path that "auto" takes, after a room that is not timed."""
        before = self._src.call("n_chunks")
        self.room("auto", run, check=True)
        staged, direct = (after - n for after, n in zip(self._src.call("n_chunks"), before, strict=True))
        return "both" if staged and direct else "staged" if staged else "direct"

    def times(self, ways: Sequence[str], run: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of each way (a path, or "raw"), in turn and in another order each time, once each is warm."""
        for way in ways:
            if way != "raw":
                self.room(way, run, check=True)
        took: dict[str, list[float]] = {way: [] for way in ways}
        for way in chain.from_iterable(rounds(ways, repeats)):
            took[way].append(self.raw() if way == "raw" else self.room(way, run))
        return took


def rounds(ways: Sequence[str], repeats: int) -> Iterator[Sequence[str]]:
    """All ways, `repeats` times, each time in another order: a slow spell of the machine does not hit one alone."""
    for number in range(repeats):
        first = number % len(ways)
        yield (*ways[first:], *ways[:first])


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Of times taken in turn: the median of their ratios, which a slow spell that hits both does not move."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))
