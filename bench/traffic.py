"""Traffic matrices of NIXL's kvbench, moved as rooms: what each rank sends to each rank, all at once.

Each rank that sends is a prefill node, each that receives a decode node, all at TP 1 and independent: each prefill node
has a directory of its own. Cell [i, j] is one request, which prefill rank i sends and decode rank j receives. A rank
that does both is one node of each kind with a pool of each: also a cell between two ranks that both send, and a cell of
a rank to itself, is a request from the prefill node of the one to the decode node of the other. A rank with no cell has
no node.

A cell's bytes are pages of a plain cache: K and V of 8 layers, pages of 16 tokens, one head of 128 in bf16, so that a
page is 4 KiB in each of 16 places, as at a rank of Llama-70B at TP 8, and a token is 4 KiB altogether. A cell is
rounded up to whole tokens. Pages lie at random places of both pools, which have twice as many. The ceiling is what
kvbench itself measures: one contiguous write of the same bytes for each cell, all posted and then awaited.

One process a side has all ranks of its side. The clock runs at decode, from the first `bind` to the last Success; the
ceiling's at prefill. Every byte of every burst is compared: no two places of a pool, and no two senders, hold the same
eight bytes.
"""

from __future__ import annotations

import statistics
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.errors import UsageError
from pdstage.kernels import Pool
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config
from pdstage.protocol.state import State

from . import shapes
from .harness import Row
from .ranks import Rank, expose, observers
from .shapes import Array, Block, Model
from .sides import Side, median_ratio, rounds
from .two_hosts import Cells, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from numpy.typing import NDArray

    from .matrix import Pattern
    from .sides import Fabric
    from .two_hosts import There

PAGE = 16
_WIDTH = 128 * 2
CACHE = Model("plain", tuple(Block("kv", range(8), (Array(role, "kv_head", 1, _WIDTH),)) for role in "kv"), PAGE)
_N_VIEWS = 2 * CACHE.n_layers
TOKEN_NBYTES = _N_VIEWS * _WIDTH
WAYS = ("staged", "direct")
CEILING = "bulk"
_SLACK = 2
_STAGING = 32 << 20, 256 << 20
"""Staging memory of a node: what its cells take, but at least and at most so much."""
_CONFIG = Config(max_silence_s=300.0)


class Case:
    """A matrix in tokens. `pages(i, j, burst)` at either side: where its pools keep a cell, drawn by the burst."""

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        self.tokens = {(i, j): n for i, row in enumerate(tokens) for j, n in enumerate(row) if n}
        self.senders = sorted({i for i, _ in self.tokens})
        self.receivers = sorted({j for _, j in self.tokens})

    @classmethod
    def of(cls, pattern: Pattern) -> Case:
        return cls([[-(-nbytes // TOKEN_NBYTES) for nbytes in row] for row in pattern.cells])

    def cells(self, n_ranks: int) -> Cells:
        """The case as another host is asked for it."""
        return Cells([[self.tokens.get((i, j), 0) for j in range(n_ranks)] for i in range(n_ranks)])

    def of_rank(self, rank: int, *, sends: bool) -> list[tuple[int, int]]:
        """The cells that a rank sends or receives."""
        return [cell for cell in self.tokens if cell[not sends] == rank]

    def n_used(self, rank: int, *, sends: bool) -> int:
        """Pages of all its cells."""
        return sum(-(-self.tokens[cell] // PAGE) for cell in self.of_rank(rank, sends=sends))

    def pages(self, rank: int, burst: int, *, sends: bool) -> dict[tuple[int, int], NDArray[np.int64]]:
        """Where a rank's pool keeps each of its cells."""
        n = self.n_used(rank, sends=sends)
        drawn = np.random.default_rng([burst, rank, sends]).permutation(_SLACK * n)
        cells = self.of_rank(rank, sends=sends)
        ends = np.cumsum([-(-self.tokens[cell] // PAGE) for cell in cells])
        return dict(zip(cells, np.split(drawn[:n], ends[:-1]), strict=True))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each cell."""
        return [n * TOKEN_NBYTES for n in self.tokens.values()]

    @property
    def memory_nbytes(self) -> int:
        """Of both sides' pools and staging memory, and of the two ends of the contiguous writes."""
        total = 2 * sum(self.sizes)
        for ranks, sends in ((self.senders, True), (self.receivers, False)):
            for used in (self.n_used(rank, sends=sends) * PAGE * TOKEN_NBYTES for rank in ranks):
                total += _SLACK * used + _staging(used)
        return total


def _staging(nbytes: int) -> int:
    return min(max(_STAGING[0], nbytes), _STAGING[1])


class Memory:
    """A rank's pool of `n_pages`. `words` is `[view, page, word of eight bytes]`."""

    def __init__(self, n_pages: int) -> None:
        layout = shapes.place(CACHE, 1, 0, {"kv": n_pages})
        held = np.zeros(layout.regions[0].nbytes // 8, np.uint64)
        self.pool = Pool.of(shapes.place(CACHE, 1, 0, {"kv": n_pages}, base=held.ctypes.data), keep=held)
        self.words = held.reshape(_N_VIEWS, n_pages, -1)

    def paint(self, sender: int) -> None:
        """What prefill rank `sender` holds."""
        self.words[:] = marks(sender, self.words.shape[1], np.arange(self.words.shape[1]))


def marks(sender: int, n_pages: int, pages: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The words of these of `n_pages` pages at a sender, `[view, page, word]`: its number, and where a word lies."""
    views, words = np.arange(_N_VIEWS), np.arange(PAGE * _WIDTH // 8)
    at = (views[:, None, None] * n_pages + pages[:, None]) * len(words) + words
    return at.astype(np.uint64) + np.uint64(1 + sender << 44)


class _End(Side):
    """One side's nodes by rank, and one end of the contiguous writes."""

    def __init__(self, case: Case, fabric: Fabric, place: Place) -> None:
        super().__init__(sum(case.sizes), fabric.transport, place.far_host)
        self.case = case

    def _options(self, n_pages: int, fabric: Fabric, place: Place) -> dict[str, Any]:
        staging_nbytes = _staging(n_pages * PAGE * TOKEN_NBYTES)
        given = {"transport": fabric.transport, "config": _CONFIG, "observers": observers()}
        return given | {"staging_nbytes": staging_nbytes} | place.of_node()


class Senders(_End):
    """All ranks that send."""

    def __init__(self, case: Case, fabric: Fabric, place: Place) -> None:
        super().__init__(case, fabric, place)
        for rank in case.senders:
            n_pages = case.n_used(rank, sends=True)
            memory = Memory(_SLACK * n_pages)
            memory.paint(rank)
            node = PrefillNode(memory.pool, Topology(), **self._options(n_pages, fabric, place))
            expose(node, {"rank": str(rank)})
            self.nodes.append(node)

    def meet(self) -> tuple[int, dict[str, object]]:
        """The directory of each rank, by its number."""
        found = zip(self.case.senders, self.nodes, strict=True)
        return 0, {str(rank): node.bootstrap_address for rank, node in found}

    def offer(self, path: str, burst: int) -> None:
        """All cells, computed."""
        self.until(lambda: all(handle.released for handle in self.handles))
        self.handles = []
        for rank, node in zip(self.case.senders, self.nodes, strict=True):
            node.path = path
            for (i, j), pages in self.case.pages(rank, burst, sends=True).items():
                sender = node.send(f"{burst}: {i}-{j}")
                sender.chunk({"kv": pages}, {"kv": (0, self.case.tokens[i, j])})
                sender.finish()
                self.handles.append(sender)

    def writes(self) -> float:
        """Seconds of the contiguous writes, one a cell."""
        return self._raw.writes(self.case.sizes)

    def n_descriptors(self) -> int:
        """So far, by all ways but the ceiling."""
        n: int = sum(node.stats()["descriptors"] for node in self.nodes)
        return n


class Receivers(_End):
    """All ranks that receive."""

    def __init__(self, case: Case, fabric: Fabric, place: Place) -> None:
        super().__init__(case, fabric, place)
        self._memories = []
        self._directories: dict[str, Any] = {}
        for rank in case.receivers:
            n_pages = case.n_used(rank, sends=False)
            memory = Memory(_SLACK * n_pages)
            node = DecodeNode(memory.pool, Topology(), **self._options(n_pages, fabric, place))
            expose(node, {"rank": str(rank)})
            self._memories.append(memory)
            self.nodes.append(node)

    def met(self, base: int, directories: dict[str, object]) -> None:
        """Each sender's directory, by its rank."""
        del base
        self._directories = directories

    def clear(self) -> None:
        for memory in self._memories:
            memory.words[:] = 0

    def pull(self, burst: int, n: int) -> float:
        """Seconds from the first `bind` to the last Success of a burst of all `n` cells."""
        waiting = []
        for rank, node in zip(self.case.receivers, self.nodes, strict=True):
            for (i, j), pages in self.case.pages(rank, burst, sends=False).items():
                receiver = node.receive(f"{burst}: {i}-{j}", self._directories[str(i)])
                waiting.append((receiver, pages, self.case.tokens[i, j]))
        if len(waiting) != n:
            raise AssertionError(f"{len(waiting)} cells here, and {n} at prefill")
        self.handles = every = [receiver for receiver, _, _ in waiting]
        self.until(lambda: all(one.state is not State.BOOTSTRAPPING for one in every))
        start = time.perf_counter()
        for receiver, pages, tokens in waiting:
            receiver.bind({"kv": pages}, {"kv": (0, tokens)})
        self.until(lambda: all(one.state is State.SUCCESS for one in every))
        took = time.perf_counter() - start
        self.until(lambda: all(one.released for one in every))
        return took

    def check(self, burst: int, n: int) -> None:
        """Compares every byte of a burst of all `n` cells."""
        del n
        theirs = {rank: self.case.pages(rank, burst, sends=True) for rank in self.case.senders}
        for rank, memory in zip(self.case.receivers, self._memories, strict=True):
            for (i, j), pages in self.case.pages(rank, burst, sends=False).items():
                n_pages = _SLACK * self.case.n_used(i, sends=True)
                rows = _N_VIEWS, -1, _WIDTH // 8  # view, token, word
                expected = marks(i, n_pages, theirs[i][i, j]).reshape(rows)[:, : self.case.tokens[i, j]]
                got = memory.words[:, pages].reshape(rows)[:, : self.case.tokens[i, j]]
                if not np.array_equal(got, expected):
                    raise AssertionError(f"rank {j} received other bytes than rank {i} sent")


def decode_side(asked: Cells, fabric: Fabric, place: Place, limit: int) -> Rank:
    """The process of all receivers for a caller at another host. Raises `UsageError` above `limit` bytes of memory."""
    case = Case(asked.tokens)
    if not case.tokens or case.memory_nbytes > limit:
        raise UsageError("a matrix with no cell, or more than memory holds", remedy="give a smaller matrix")
    return Rank(Receivers, case, fabric, place, env=fabric.env)


class Bed:
    """Both processes of one case; `there`: the receivers' is at that host. A context manager."""

    def __init__(self, case: Case, fabric: Fabric, there: There | None) -> None:
        place = there.place if there is not None else Place()
        self._case, self._burst = case, 0
        self._src = Rank(Senders, case, fabric, place, env=fabric.env)
        n_ranks = 1 + max(case.senders[-1], case.receivers[-1])
        self._dst = (
            there.rank(case.cells(n_ranks), "", fabric)
            if there is not None
            else Rank(Receivers, case, fabric, place, env=fabric.env)
        )

    def __enter__(self) -> Self:
        for rank in (self._src, self._dst):
            rank.ready()
        for one, other in ((self._src, self._dst), (self._dst, self._src)):
            one.call("connect", *other.call("describe"))
        self._dst.call("met", *self._src.call("meet"))
        return self

    def __exit__(self, *_: object) -> None:
        for rank in (self._dst, self._src):
            rank.close()

    def seconds(self, way: str) -> float:
        """Seconds of all cells at once, by a path or as contiguous writes."""
        if way == CEILING:
            for rank in (self._src, self._dst):
                rank.call("use_raw", True)
            took: float = self._src.call("writes")
            for rank in (self._src, self._dst):
                rank.call("use_raw", False)
            return took
        self._burst += 1
        self._dst.call("clear")
        self._src.call("offer", way, self._burst)
        took = self._dst.call("pull", self._burst, len(self._case.tokens))
        self._dst.call("check", self._burst, len(self._case.tokens))
        return took

    def n_descriptors(self) -> int:
        n: int = self._src.call("n_descriptors")
        return n


def measure(
    patterns: Sequence[Pattern], over: Sequence[Fabric], repeats: int, limit: int, there: There | None
) -> tuple[list[Row], list[str]]:
    """Rows of every pattern over every fabric that fits `limit` bytes of memory, and what was left out."""
    rows: list[Row] = []
    left_out = []
    for number, pattern in enumerate(patterns):
        case, name = Case.of(pattern), f"pattern {number}, {pattern.name}"
        if case.memory_nbytes > limit:
            left_out.append(f"{name}: not enough memory; give a smaller matrix")
            continue
        for fabric in over:
            with Bed(case, fabric, there) as bed:
                rows += _rows(bed, case, fabric, pattern._replace(name=name), repeats)
    return rows, left_out


def _rows(bed: Bed, case: Case, fabric: Fabric, pattern: Pattern, repeats: int) -> Iterator[Row]:
    """A row for each path, beside the contiguous writes. Ways take turns, each time in another order."""
    ways = [*WAYS, CEILING]
    n_descriptors = {}
    for way in ways:
        before = bed.n_descriptors()
        bed.seconds(way)
        n_descriptors[way] = bed.n_descriptors() - before
    took: dict[str, list[float]] = {way: [] for way in ways}
    for way in chain.from_iterable(rounds(ways, repeats)):
        took[way].append(bed.seconds(way))
    moved = sum(case.sizes)
    ceiling = moved / 1e9 / statistics.median(took[CEILING])
    for way in WAYS:
        yield Row(
            name=f"{way}, {fabric.name}: {pattern.name}, {len(case.senders)} ranks to {len(case.receivers)}",
            value=ceiling * median_ratio(took[CEILING], took[way]),
            baseline=ceiling,
            unit="GB/s",
            detail=f"{moved / (1 << 20):.1f} MiB, {len(case.tokens)} cells, {n_descriptors[way]} descriptors; "
            "baseline: one contiguous write a cell",
            point={
                "table": "kv-transfer matrix", "transport": fabric.name, "way": way, "pattern": pattern.name,
                "senders": case.senders, "receivers": case.receivers, "cells": len(case.tokens),
                "nbytes_asked": pattern.nbytes, "nbytes": moved, "seconds": sorted(took[way]),
            },
        )  # fmt: skip
