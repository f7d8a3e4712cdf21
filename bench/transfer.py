"""A room end to end over NIXL, through real nodes: staged beside direct, and beside one raw bulk write.

Prefill has computed everything before the clock starts. The clock, shared by all processes, runs from the first `bind`
to the last Success. Pages are in shuffled order on both sides. A room's bytes are the same on every path, and so are
the processes, one per rank: each holds a node for every path and one end of the raw write. Paths that are not being
measured sleep.

Six processes on few cores measure the scheduler as much as the transfer. So TP2 -> TP1 (three processes, the same
two-to-one layouts) and one rank to one are measured beside TP4 -> TP2. Over shared memory NIXL copies inside the call;
the rows over TCP, where it is asynchronous as on a network, show the overlap.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple, Self

import numpy as np

from pdstage.control.bootstrap import BootstrapServer
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config
from pdstage.protocol.state import State

from .harness import Row
from .peers.libraries import has_scatter_gather, scatter_gather
from .ranks import Actor, Rank, Shape, expose, observers
from .raw import Raw
from .sides import PAIRS, RUNS, TCP, Sides, fabrics, median_ratio
from .sides import Shape as Rooms

HEAD_DIM = 128
HEAD_NBYTES = 2 * HEAD_DIM
LAYERS = 8
SEND_NBYTES, N_BUFFERS = 16 << 20, 4
MAX_LANES_NBYTES = 64 << 20
QUICK_NBYTES, NBYTES = 16 << 20, 128 << 20
WAIT_S = 120.0
LISTS = "scatter-gather"
"""Beside the paths: the direct one with NIXL's scatter-gather put, which takes a whole list of descriptors."""
AGAIN = "direct again"
"""The direct path by one more node: how far two nodes differ that do the same."""
_CONFIG = Config(max_silence_s=300.0)  # the nodes of the paths that are not measured are not polled


class Case(NamedTuple):
    """`nbytes` of KV state from `src_tp` ranks to `dst_tp`, which share runs of `run` bytes."""

    src_tp: int
    dst_tp: int
    run: int
    nbytes: int
    page: int = 16

    @property
    def kv_heads(self) -> int:
        return self.run // HEAD_NBYTES * self.src_tp

    @property
    def lanes_nbytes(self) -> int:
        """Decode's staging memory: at most a room's bytes, so that the first rooms have been all through it."""
        return max(4 << 20, min(MAX_LANES_NBYTES, self.nbytes))

    @property
    def tokens(self) -> int:
        return self.nbytes // (2 * LAYERS * HEAD_NBYTES * self.kv_heads)

    def shape(self, tp: int, rank: int) -> Shape:
        """Pools hold a quarter more pages than a room has."""
        n_pages = self.tokens // self.page
        return Shape(self.kv_heads, HEAD_DIM, LAYERS, self.page, n_pages + n_pages // 4 + 1, tp, rank)

    def pages(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(self.shape(1, 0).n_pages)[: self.tokens // self.page]

    def __str__(self) -> str:
        run = f"{self.run} B" if self.run < 1024 else f"{self.run // 1024} KiB"
        return f"TP{self.src_tp} -> TP{self.dst_tp}, {run} runs, {self.nbytes >> 20} MiB"


class _End(Actor):
    """What both sides share: a node a path, and one end of the raw write."""

    def __init__(self, transport: str, nbytes: int) -> None:
        self.nodes: dict[str, PrefillNode] | dict[str, DecodeNode] = {}
        self.active = ""
        self.raw = Raw(transport, nbytes)
        self.describe, self.connect, self.write = self.raw.describe, self.raw.connect, self.raw.write

    def expose(self) -> None:
        for path, node in self.nodes.items():
            expose(node, {"engine": path})

    def use(self, path: str) -> None:
        """From now on `idle` polls the node of `path`, or the raw write's end if that is empty."""
        self.active = path

    def idle(self) -> None:
        if self.active:
            self.nodes[self.active].turn(1e-3)
        else:
            self.raw.idle()

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()
        self.raw.close()


def _path(way: str) -> str:
    return "direct" if way in (LISTS, AGAIN) else way


class Source(_End):
    """A prefill rank; every cell of its pool holds its rank's mark."""

    def __init__(self, case: Case, rank: int, boots: dict[str, str], transport: str) -> None:
        super().__init__(transport, case.nbytes)
        self.case = case
        pool = case.shape(case.src_tp, rank).pool(fill=rank + 1)
        topology = Topology(tp_size=case.src_tp, tp_rank=rank)
        self.nodes: dict[str, PrefillNode] = {}
        for path, bootstrap in boots.items():
            with scatter_gather("y" if path == LISTS else "n"):
                self.nodes[path] = PrefillNode(
                    pool, topology, transport=transport, bootstrap=bootstrap, path=_path(path),
                    staging_nbytes=SEND_NBYTES, n_buffers=N_BUFFERS, config=_CONFIG, observers=observers(),
                )  # fmt: skip
        self.expose()

    def offer(self, path: str, room: int) -> None:
        self.use(path)
        sender = self.nodes[path].send(room)
        sender.chunk(self.case.pages(room), self.case.tokens)
        sender.finish()

    def n_descriptors(self, path: str) -> int:
        return self.nodes[path].stats()["descriptors"]

    def n_rooms(self, path: str) -> int:
        return self.nodes[path].stats()["rooms_succeeded"]


class Sink(_End):
    """A decode rank."""

    def __init__(self, case: Case, rank: int, boots: dict[str, str], transport: str) -> None:
        super().__init__(transport, case.nbytes)
        self.case, self.boots = case, boots
        self.pool = case.shape(case.dst_tp, rank).pool()
        topology = Topology(tp_size=case.dst_tp, tp_rank=rank)
        self.first_mark = rank * case.src_tp // case.dst_tp + 1
        self.nodes: dict[str, DecodeNode] = {
            path: DecodeNode(
                self.pool, topology, transport=transport, path=_path(path), staging_nbytes=case.lanes_nbytes,
                config=_CONFIG, observers=observers(),
            )
            for path in boots
        }  # fmt: skip
        self.expose()

    def pull(self, path: str, room: int) -> tuple[float, float]:
        """When `bind` was called and when the state was Success, on the clock all processes share."""
        self.use(path)
        memory, pages = self.pool.keep, self.case.pages(-1 - room & 0xFFFF)
        assert isinstance(memory, np.ndarray)
        memory[:] = 0
        receiver = self.nodes[path].receive(room, self.boots[path])
        while receiver.state is State.BOOTSTRAPPING:
            self.nodes[path].turn(1e-3)
        start = time.monotonic()
        receiver.bind(pages, self.case.tokens)
        receiver.wait(WAIT_S)
        end = time.monotonic()
        receiver.wait_released(WAIT_S)
        self._check(memory[:, :, pages])
        return start, end

    def _check(self, got: np.ndarray) -> None:
        """Every head holds the mark of the rank it came from."""
        heads = got.shape[-2]
        per_rank = max(1, heads * self.case.dst_tp // self.case.src_tp)
        marks = self.first_mark + np.arange(heads) // per_rank
        if not (got == marks[:, None]).all():
            raise AssertionError("a room arrived with other bytes than were sent")


class Bed:
    """The processes of one case. A context manager."""

    def __init__(
        self, case: Case, paths: tuple[str, ...], *, transport: str = "nixl", env: dict[str, str] | None = None
    ) -> None:
        self.case = case
        self._bootstraps = {path: BootstrapServer().start() for path in paths}
        boots = {path: server.address for path, server in self._bootstraps.items()}
        self.src = [Rank(Source, case, rank, boots, transport, env=env) for rank in range(case.src_tp)]
        self.dst = [Rank(Sink, case, rank, boots, transport, env=env) for rank in range(case.dst_tp)]
        self._next = 0

    def __enter__(self) -> Self:
        for rank in (*self.src, *self.dst):
            rank.ready()
        theirs, ours = self.dst[0].call("describe"), self.src[0].call("describe")
        self.src[0].call("connect", *theirs)
        self.dst[0].call("connect", *ours)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in (*self.dst, *self.src):
            rank.close()
        for server in self._bootstraps.values():
            server.close()

    def room(self, path: str) -> float:
        """Seconds of one room by `path`."""
        self._next += 1
        self._all(self.src, "offer", path, self._next)
        spans = self._all(self.dst, "pull", path, self._next)
        took: float = max(end for _, end in spans) - min(start for start, _ in spans)
        return took

    def raw(self) -> float:
        """Seconds of one write of a room's bytes, from the first source to the first sink."""
        self._all((*self.src, *self.dst), "use", "")
        return float(self.src[0].call("write"))

    def n_descriptors(self, path: str) -> int:
        return sum(self._all(self.src, "n_descriptors", path))

    def n_rooms(self, path: str) -> int:
        return int(self.src[0].call("n_rooms", path))

    def medians(self, ways: tuple[str, ...], repeats: int) -> dict[str, float]:
        """Median seconds of each way (a path, or "raw"), in turn, once the lanes have been filled and all is warm."""
        took: dict[str, list[float]] = {way: [] for way in ways}
        n_warm = 3
        for _ in range(n_warm + repeats):
            for way in ways:
                took[way].append(self.raw() if way == "raw" else self.room(way))
        return {way: statistics.median(times[n_warm:]) for way, times in took.items()}

    def _all(self, ranks: Any, method: str, *given: object) -> list[Any]:  # noqa: ANN401
        for rank in ranks:
            rank.begin(method, *given)
        return [rank.result() for rank in ranks]


def run(quick: bool, transport: str = "nixl") -> list[Row]:
    """`quick`: three processes, small rooms, few cells. `transport` is the targets' rows'; nixl where it is there."""
    nbytes = QUICK_NBYTES if quick else NBYTES
    repeats = 3 if quick else 7
    rows = []
    for env, what in ((None, "shared memory"), (TCP, "TCP")):
        for src_tp, dst_tp in ((2, 1),) if quick else ((2, 1), (4, 2)):
            for run_nbytes, target in ((1024, 6.0), (256, 20.0)):
                case = Case(src_tp, dst_tp, run_nbytes, nbytes)
                rows.append(_against_direct(case, what, target, env, repeats=repeats, transport=transport))
    for env, what in ((None, "shared memory"), (TCP, "TCP")):
        for src_tp in (1,) if quick else (1, 2):
            page = 1 if src_tp == 1 else 16  # so that runs of 1 KiB are all that one rank and another share
            rows.append(_against_raw(Case(src_tp, 1, 1024, nbytes, page), what, env, repeats, transport))
    return [*rows, *_scatter_gather(quick, transport), *_sweep(quick)]


def _against_direct(
    case: Case, what: str, target: float, env: dict[str, str] | None, *, repeats: int, transport: str
) -> Row:
    with Bed(case, ("staged", "direct"), transport=transport, env=env) as bed:
        took = bed.medians(("staged", "direct", "raw"), repeats)
        n = {path: bed.n_descriptors(path) // bed.n_rooms(path) for path in ("staged", "direct")}
    gb = case.nbytes / 1e9
    return Row(
        name=f"staged beside direct, {what}, {case}",
        value=gb / took["staged"],
        baseline=gb / took["direct"],
        unit="GB/s",
        target=target if transport == "nixl" else None,
        detail=f"{n['staged']} and {n['direct']} descriptors; raw write {gb / took['raw']:.2f} GB/s",
    )


def _against_raw(case: Case, what: str, env: dict[str, str] | None, repeats: int, transport: str) -> Row:
    with Bed(case, ("staged",), transport=transport, env=env) as bed:
        took = bed.medians(("staged", "raw"), repeats)
    gb = case.nbytes / 1e9
    return Row(
        name=f"staged beside one raw write, {what}, {case}",
        value=gb / took["staged"],
        baseline=gb / took["raw"],
        unit="GB/s",
        target=0.7 if transport == "nixl" else None,
        detail="from bind to Success; raw: one descriptor of the same bytes",
    )


def _scatter_gather(quick: bool, transport: str) -> list[Row]:
    """Direct with a put for a whole list beside direct with one for each descriptor, and staged; none without it."""
    rows: list[Row] = []
    if transport != "nixl" or not has_scatter_gather():
        return rows
    for env, what in ((None, "shared memory"), (TCP, "TCP")):
        for run_nbytes in (1024,) if quick else (256, 1024, 4096, 16384):
            case = Case(2, 1, run_nbytes, QUICK_NBYTES)
            with Bed(case, ("staged", "direct", AGAIN, LISTS), env=env) as bed:
                took = bed.medians(("staged", "direct", AGAIN, LISTS), 3 if quick else 21)
                n = bed.n_descriptors(LISTS) // bed.n_rooms(LISTS)
            gb, again = case.nbytes / 1e9, took["direct"] / took[AGAIN]
            rows.append(
                Row(
                    name=f"direct by NIXL's scatter-gather put beside direct, {what}, {case}",
                    value=gb / took[LISTS],
                    baseline=gb / took["direct"],
                    unit="GB/s",
                    detail=f"{n} descriptors; staged {gb / took['staged']:.2f} GB/s; direct again {again:.2f} x",
                )
            )
    return rows


def _sweep(quick: bool) -> list[Row]:
    """Staged, direct and one bulk write of the same bytes, over fragment sizes and TP pairs; one process a side."""
    shapes = [Rooms(2, 1, QUICK_NBYTES // 4)] if quick else [Rooms(*pair) for pair in PAIRS]
    rows = []
    for fabric in fabrics():
        for shape in shapes:
            with Sides(shape, fabric) as sides:
                for run_nbytes in (1024, 65536) if quick else RUNS:
                    took = sides.times(("staged", "direct", "raw"), run_nbytes, 2 if quick else 5)
                    rows.append(_cell(fabric.name, shape, run_nbytes, took))
    return rows


def _cell(fabric: str, shape: Rooms, run_nbytes: int, took: dict[str, list[float]]) -> Row:
    speeds = {way: shape.nbytes / 1e9 / statistics.median(times) for way, times in took.items()}
    size = f"{run_nbytes} B" if run_nbytes < 1024 else f"{run_nbytes // 1024} KiB"
    return Row(
        name=f"staged beside direct, {fabric}, TP{shape.src_tp} -> TP{shape.dst_tp}, {size} runs, one process a side",
        value=speeds["direct"] / median_ratio(took["staged"], took["direct"]),
        baseline=speeds["direct"],
        unit="GB/s",
        detail=f"raw write {speeds['raw']:.2f} GB/s, staged {median_ratio(took['raw'], took['staged']):.2f} of it",
        point={
            "table": "paths", "transport": fabric, "src_tp": shape.src_tp, "dst_tp": shape.dst_tp,
            "run_nbytes": run_nbytes, **speeds,
        },
    )  # fmt: skip
