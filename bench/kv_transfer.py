"""Bursts of whole requests between two nodes, as CollectiveX measures transfer libraries, and further.

CollectiveX's kv-transfer suite (SemiAnalysisAI/InferenceX#2510) moves 1 to 64 requests at once between two equal ranks.
A request is a list of pages, layer by layer, at random places of both pools: page tables are drawn by seed and cut from
one permutation. The ceiling of each row is one contiguous write of the same bytes. Here too; every byte of every burst
is compared, and within a host the libraries' own calls run in turn with pdstage's. Further rows have other
tensor-parallel sizes, page sizes and orders of memory on the two sides.

One process a side has all ranks of its side. A library has two processes and two pools of its own. Processes that are
not measured stand still. Prefill has computed everything before the clock starts. The clock runs from the first `bind`
to the last Success, or from a library's first post to its last completion. A model keeps 1 of `scale` of its layers.
Rows whose pools do not fit the machine's memory are left out.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdstage import shared
from pdstage.control.bootstrap import BootstrapServer
from pdstage.kernels import Pool
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config
from pdstage.protocol.destinations import LEAST_PIECE_NBYTES
from pdstage.protocol.state import State
from pdstage.tools.calibrate import pool as pools

from . import shapes
from .bound import Costs, Pieces
from .harness import Measured, Row
from .peers.libraries import Library, Pages, installed
from .ranks import Actor, Rank, observers
from .shapes import SLOTS, Model
from .sides import PAUSE_S, Side, fabrics, median_ratio, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Self

    from numpy.typing import NDArray

    from pdstage.layout import Layout, View

    from .sides import Fabric

MODELS = (shapes.LLAMA_70B, shapes.QWEN3_235B, shapes.DEEPSEEK_V3, shapes.DEEPSEEK_V32, shapes.QWEN3_NEXT)
PATHS = ("staged", "direct")
BULK = "bulk"
LADDER = (1, 2, 4, 8, 16, 32, 64)
TARGETED = 8
"""The requests at once of which the rows beside their bound have a target."""
QUICK_SCALE = 40
_SLACK = 2
"""Pools have twice the pages of the largest burst, as CollectiveX's have."""
_CONFIG = Config(max_silence_s=300.0)


class Kept(NamedTuple):
    """How one side keeps a cache."""

    tp: int = 1
    page: int = 16
    heads_first: bool = False

    def __str__(self) -> str:
        return f"TP{self.tp}, pages of {self.page}{', HND' if self.heads_first else ''}"


class Case(NamedTuple):
    """Requests of `tokens` tokens; bursts of each of `sizes` requests, in random pages."""

    model: Model
    tokens: int
    src: Kept
    dst: Kept
    sizes: tuple[int, ...] = (1,)

    @property
    def is_equal(self) -> bool:
        """Whether the two sides' pages are alike, so that a library can move them."""
        return self.src == self.dst and self.src.tp == 1

    def ends(self, side: str) -> tuple[Kept, Kept]:
        """How that side, "src" or "dst", keeps its cache, and how the other does."""
        return (self.src, self.dst) if side == "src" else (self.dst, self.src)

    def place(self, kept: Kept, rank: int, base: int = 0, kind: str = "cpu", device: int = 0) -> Layout:
        n_items = {"kv": self._n_pages(kept), SLOTS: _SLACK * max(self.sizes)}
        model = replace(self.model, page=kept.page)
        return shapes.place(
            model, kept.tp, rank, n_items, base=base, kind=kind, device=device, heads_first=kept.heads_first
        )

    def _n_pages(self, kept: Kept) -> int:
        return _SLACK * max(self.sizes) * -(-self.tokens // kept.page)

    def requests(self, side: str, burst: int, n: int) -> list[Request]:
        """Pages and slots of `n` requests at "src" or "dst", drawn by the burst's number."""
        kept, _ = self.ends(side)
        rng = np.random.default_rng([burst, side == "dst"])
        a_request = -(-self.tokens // kept.page)
        pages = rng.permutation(self._n_pages(kept))[: n * a_request].reshape(n, a_request)
        slots = rng.permutation(_SLACK * max(self.sizes))[:n].tolist()
        has_states = SLOTS in self.model.components()
        return [Request(table, slot, has_states) for table, slot in zip(pages, slots, strict=True)]

    def pages(self, burst: int, n: int, layout: Layout, src_base: int, dst_base: int) -> list[Pages]:
        """A burst as a library takes it. The sides are alike; their pools begin at those addresses."""
        return [
            Pages(src_base + src, dst_base + dst, nbytes)
            for one, other in zip(*(self.requests(side, burst, n) for side in ("src", "dst")), strict=True)
            for (src, nbytes), (dst, _) in [(item_spans(layout, one), item_spans(layout, other))]
        ]

    def check(self, memories: Iterable[Memory], burst: int, n: int) -> None:
        """Compares every byte of a burst in the destination's memories."""
        theirs, own = (self.requests(side, burst, n) for side in ("src", "dst"))
        for memory in memories:
            memory.fetch()
            for one, other in zip(theirs, own, strict=True):
                memory.check(self.tokens, one, other, self.src.page)

    @property
    def nbytes(self) -> int:
        """Of one request, all ranks of prefill together; a latent counts once."""
        whole = shapes.place(replace(self.model, page=1), 1, 0, dict.fromkeys(("kv", SLOTS), 1))
        return sum(
            view.shards * view.width * (1 if view.key.component == SLOTS else self.tokens) for view in whole.views()
        )

    def memory_nbytes(self, n_libraries: int) -> int:
        """Of both sides' pools, for nodes and for each library, and the two ends of the contiguous write."""
        pools = sum(
            self.place(kept, rank).regions[0].nbytes for kept in (self.src, self.dst) for rank in range(kept.tp)
        )
        return (1 + n_libraries) * pools + 2 * max(self.sizes) * self.nbytes

    def __str__(self) -> str:
        how = str(self.src) if self.src == self.dst else f"{self.src} -> {self.dst}"
        return f"{self.model.name}, {self.model.n_layers} layers, {self.tokens // 1024}k tokens, {how}"


class Request(NamedTuple):
    """Where one side keeps a request."""

    pages: NDArray[np.int64]
    slot: int
    has_states: bool

    @property
    def states(self) -> dict[str, Any]:
        return {SLOTS: [self.slot]} if self.has_states else {}


class Memory:
    """One rank's pool, with cells whose content says whose they are: `_marks` of view, item, row, shard and word.

    `mappable`: in memory that peers on this host map. A pool on a GPU has a copy in host memory too, which is painted,
    and compared.
    """

    def __init__(self, case: Case, kept: Kept, rank: int, device: str = "cpu", *, mappable: bool = False) -> None:
        kind, _, number = device.partition(":")
        nbytes = case.place(kept, rank).regions[0].nbytes
        whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._words: NDArray[np.uint16] = (
            shared.allocate(whole).view(np.uint16) if mappable else np.zeros(whole // 2, np.uint16)
        )
        self._there: Any = None
        base = self._words.ctypes.data
        if kind != "cpu":
            self._there, base = pools.allocate(device, nbytes)
        self.layout = case.place(kept, rank, base, kind, int(number or 0))
        self.pool = Pool.of(self.layout, device, keep=(self._words, self._there))
        self.region = self.layout.regions[0]
        self._numbers = {key: number for number, key in enumerate(sorted(self.layout.by_key()))}

    def _cells(self, view: View) -> NDArray[np.uint16]:
        """`[item, row, shard, word]`."""
        sizes = view.n_items, view.tokens_per_item, view.shards, view.width // 2
        strides = view.item_stride, view.rows[0].stride, view.shard_stride, 2
        cells: NDArray[np.uint16] = np.lib.stride_tricks.as_strided(self._words[view.offset // 2 :], sizes, strides)
        return cells

    def _marks(
        self, view: View, items: NDArray[Any], rows: NDArray[Any], out: NDArray[np.uint16] | None = None
    ) -> NDArray[np.uint16]:
        """What the cells of prefill's `items` and `rows` hold, which broadcast."""
        cell = (items * 40503 + rows * 9973 + self._numbers[view.key] * 257).astype(np.uint16)
        shards = ((view.axis.first + np.arange(view.shards)) * 2749).astype(np.uint16)
        words = (np.arange(view.width // 2) * 31).astype(np.uint16)
        marks: NDArray[np.uint16] = np.add(cell[..., None, None], shards[:, None] + words, out=out)
        return marks

    def paint(self) -> None:
        for view in self.layout.views():
            items, rows = np.arange(view.n_items)[:, None], np.arange(view.tokens_per_item)
            self._marks(view, items, rows, out=self._cells(view))
        self._put()

    def clear(self) -> None:
        self._words[:] = 0
        self._put()

    def _put(self) -> None:
        if self._there is not None:
            import torch  # noqa: PLC0415  (with a GPU)

            self._there.copy_(torch.from_numpy(self._words.view(np.uint8)[: len(self._there)]))
            torch.cuda.synchronize(self._there.device)  # nodes' streams do not wait for torch's

    def fetch(self) -> None:
        """Before `check`: what is in the pool now."""
        if self._there is not None:
            self._words.view(np.uint8)[: len(self._there)] = self._there.cpu().numpy()

    def check(self, tokens: int, theirs: Request, own: Request, page: int) -> None:
        """Every byte of a request: at `theirs` in prefill's pages of `page` tokens, and at `own` here."""
        at = np.arange(tokens)
        for view in self.layout.views():
            if view.key.component == SLOTS:
                expected = self._marks(view, np.array([theirs.slot]), np.array([0]))
                got = self._cells(view)[[own.slot], 0]
            else:
                expected = self._marks(view, theirs.pages[at // page], at % page)
                got = self._cells(view)[own.pages[at // view.tokens_per_item], at % view.tokens_per_item]
            if not np.array_equal(got, expected):
                raise AssertionError(f"a request arrived with other bytes than were sent, in {view.key}")


class _Nodes(Side):
    """One side's ranks, "src" or "dst". `options` are more of their nodes."""

    def __init__(self, case: Case, side: str, fabric: Fabric, device: str, options: Mapping[str, Any]) -> None:
        super().__init__(max(case.sizes) * case.nbytes, fabric.transport, device)
        self._options = {"transport": fabric.transport, "config": _CONFIG, **options}
        self.case, self._side = case, side
        kept, _ = case.ends(side)
        mappable = fabric.transport == "local" and device == "cpu"
        self.memories = [Memory(case, kept, rank, device, mappable=mappable) for rank in range(kept.tp)]
        self._pieces: list[Pieces] = []

    def copies(self, burst: int, n: int) -> float:
        """Seconds of this side's copies of a burst, alone."""
        if not self._pieces:
            self._pieces = self._new_pieces()
        requests = [(one.pages, one.slot) for one in self.case.requests(self._side, burst, n)]
        return sum(of_rank.seconds(requests) for of_rank in self._pieces)

    def _new_pieces(self) -> list[Pieces]:
        own, theirs = (
            {rank: self.case.place(kept, rank) for rank in range(kept.tp)} for kept in self.case.ends(self._side)
        )
        return [
            Pieces(
                memory.pool, own, theirs, rank=rank, gathers=self._side == "src", tokens=self.case.tokens,
                nbytes=LEAST_PIECE_NBYTES,
            )
            for rank, memory in enumerate(self.memories)
        ]  # fmt: skip

    def n_descriptors(self) -> int:
        """Written so far, by both paths."""
        return sum(node.stats().get("descriptors", 0) for node in self.nodes)


class Sources(_Nodes):
    """All prefill ranks. Their pools hold their marks."""

    def __init__(self, case: Case, directory: str, fabric: Fabric, device: str, options: Mapping[str, Any]) -> None:
        super().__init__(case, "src", fabric, device, options)
        for rank, memory in enumerate(self.memories):
            memory.paint()
            topology = Topology(tp_size=case.src.tp, tp_rank=rank)
            node = PrefillNode(memory.pool, topology, directory=directory, observers=observers(), **self._options)
            self.nodes.append(node)

    def offer(self, path: str, burst: int, n: int, tokens: int = 0) -> None:
        """Rooms of `n` requests, computed; of their first `tokens` alone, unless these are 0."""
        self.until(lambda: all(handle.released for handle in self.handles))
        self.handles, tokens = [], tokens or self.case.tokens
        for node in self.nodes:
            node.path = path
            for number, request in enumerate(self.case.requests("src", burst, n)):
                sender = node.send(f"{burst}-{number}")
                sender.chunk({"kv": request.pages[: -(-tokens // self.case.src.page)]}, {"kv": (0, tokens)})
                sender.finish(states=request.states or None)
                self.handles.append(sender)

    def n_chunks(self) -> tuple[int, int]:
        """Staged and direct, so far."""
        stats = [node.stats() for node in self.nodes]
        return sum(one["chunks_staged"] for one in stats), sum(one["chunks_direct"] for one in stats)


class Sinks(_Nodes):
    """All decode ranks."""

    def __init__(self, case: Case, directory: str, fabric: Fabric, device: str, options: Mapping[str, Any]) -> None:
        super().__init__(case, "dst", fabric, device, options)
        self._directory = directory
        for rank, memory in enumerate(self.memories):
            topology = Topology(tp_size=case.dst.tp, tp_rank=rank)
            node = DecodeNode(memory.pool, topology, observers=observers(), **self._options)
            self.nodes.append(node)

    def clear(self) -> None:
        for memory in self.memories:
            memory.clear()

    def pull(self, burst: int, n: int, tokens: int = 0, asked: bool = False) -> float:
        """Seconds from the first `bind` to the last Success; `asked`: from the first `receive`."""
        requests, tokens = self.case.requests("dst", burst, n), tokens or self.case.tokens
        start = time.perf_counter()
        receivers = [[node.receive(f"{burst}-{number}", self._directory) for number in range(n)] for node in self.nodes]
        self.handles = every = [one for of_node in receivers for one in of_node]
        self.until(lambda: all(one.state is not State.BOOTSTRAPPING for one in every))
        start = start if asked else time.perf_counter()
        for of_node in receivers:
            for receiver, request in zip(of_node, requests, strict=True):
                pages = {"kv": request.pages[: -(-tokens // self.case.dst.page)]}
                receiver.bind(pages | request.states, {"kv": (0, tokens)})
        self.until(lambda: all(one.state is State.SUCCESS for one in every))
        took = time.perf_counter() - start
        self.until(lambda: all(one.released for one in every))
        return took

    def check(self, burst: int, n: int) -> None:
        self.case.check(self.memories, burst, n)


class End(Actor):
    """One end of a library, with a pool of its own, at "src" or "dst"."""

    def __init__(self, case: Case, side: str, make: Callable[[Layout], Library], device: str) -> None:
        self.case, self._memory = case, Memory(case, case.src, 0, device)
        if side == "src":
            self._memory.paint()
        self._library = make(self._memory.layout)
        self._n_listed = 0

    def idle(self) -> None:
        self._library.idle()

    def describe(self) -> tuple[int, object]:
        """The pool's address, and what the library tells its peer."""
        return self._memory.region.base, self._library.describe()

    def connect(self, base: int, described: Any) -> None:  # noqa: ANN401  (the library's own)
        self._their_base = base
        self._library.connect(described)

    def clear(self) -> None:
        self._memory.clear()

    def burst(self, burst: int, n: int) -> float:
        """Seconds, of the source's calls."""
        pages = self.case.pages(burst, n, self._memory.layout, self._memory.region.base, self._their_base)
        self._n_listed += sum(len(one.nbytes) for one in pages)
        return self._library.burst(pages)

    def n_descriptors(self) -> int:
        """So far, of the bursts that this end drove."""
        return self._n_listed

    def check(self, burst: int, n: int) -> None:
        self.case.check([self._memory], burst, n)

    def close(self) -> None:
        self._library.close()


def item_spans(layout: Layout, request: Request) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a request's pages and slots lie in a pool, and their bytes, layer by layer: each one contiguous."""
    offsets, nbytes, end = [], [], -1
    for view in sorted(layout.views(), key=lambda view: view.offset):
        if view.offset < end:  # beside another array in the same items
            continue
        items = np.array([request.slot]) if view.key.component == SLOTS else request.pages
        offsets.append(view.offset + items * view.item_stride)
        nbytes.append(np.full(len(items), view.item_stride))
        end = view.offset + view.item_stride
    return np.concatenate(offsets), np.concatenate(nbytes)


def libraries(case: Case, transport: str, device: str) -> dict[str, Callable[[Layout], Library]]:
    """Those to measure beside rooms over `transport`, by name: that are here and take the case's pools."""
    return installed(transport, device) if case.is_equal else {}


class _Pair(NamedTuple):
    """Two processes, which stand still but while they are measured."""

    src: Rank
    dst: Rank

    def each(self, method: str, *given: object) -> None:
        for rank in self:
            rank.call(method, *given)

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        for rank in self:
            rank.resume()
        yield self
        for rank in self:
            rank.pause()


class Bed:
    """Both nodes' processes of one case, and both of each library. `device` is where pools are, and `far` where the
    decode side's are, if elsewhere; `options` are more of nodes. A context manager.
    """

    def __init__(
        self,
        case: Case,
        fabric: Fabric,
        device: str = "cpu",
        *,
        far: str = "",
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._case, self._fabric = case, fabric
        self._devices, self._options = (device, far or device), dict(options)
        self._burst = 0
        self.libraries: dict[str, _Pair] = {}

    def __enter__(self) -> Self:
        case, fabric = self._case, self._fabric
        known = libraries(case, fabric.transport, self._devices[0])
        with contextlib.ExitStack() as held:
            address = held.enter_context(BootstrapServer()).address
            ends = [
                Rank(side, case, address, fabric, device, self._options, env=fabric.env)
                for side, device in zip((Sources, Sinks), self._devices, strict=True)
            ]
            self._nodes = self._start(held, _Pair(*ends))
            for name in known:
                ends = [
                    Rank(End, case, side, known[name], device, env=fabric.env)
                    for side, device in zip(("src", "dst"), self._devices, strict=True)
                ]
                self.libraries[name] = self._start(held, _Pair(*ends))
            self._held = held.pop_all()
        return self

    def _start(self, held: contextlib.ExitStack, pair: _Pair) -> _Pair:
        """One pair after the other: those that poll would hold up those that still start."""
        for rank in pair:
            held.callback(rank.close)
        for rank in pair:
            rank.ready()
        for one, other in (pair, reversed(pair)):
            one.call("connect", *other.call("describe"))
        for rank in pair:
            rank.pause()
        return pair

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def seconds(self, way: str, n: int, tokens: int = 0, *, check: bool = True, asked: bool = False) -> float:
        """Seconds of a burst of `n` requests by a path, by a library, or as one contiguous write; `check` compares
        every byte. `tokens`, `asked`: see `Sinks.pull`.
        """
        self._burst += 1
        with self.libraries.get(way, self._nodes).running() as pair:
            if way == BULK:
                return self._write(pair, n)
            if check:
                pair.dst.call("clear")
            if way in self.libraries:
                took: float = pair.src.call("burst", self._burst, n)
            else:
                pair.src.call("offer", way, self._burst, n, tokens)
                took = pair.dst.call("pull", self._burst, n, tokens, asked)
            if check:
                pair.dst.call("check", self._burst, n)
            return took

    def chosen(self) -> str:
        """The path that "auto" takes, after a burst that is not timed."""
        with self._nodes.running() as pair:
            before = pair.src.call("n_chunks")
        self.seconds("auto", 1)
        with self._nodes.running() as pair:
            staged, direct = (after - n for after, n in zip(pair.src.call("n_chunks"), before, strict=True))
        return "both" if staged and direct else "staged" if staged else "direct"

    def _write(self, pair: _Pair, n: int) -> float:
        pair.each("use_raw", True)
        took: float = pair.src.call("write", n * self._case.nbytes)
        pair.each("use_raw", False)
        return took

    def costs(self, n: int) -> Costs:
        """Of the steps of a burst of `n` requests."""
        self._burst += 1
        with self._nodes.running() as pair:
            for rank in pair:
                rank.begin("copies", self._burst, n)
            gather_s, scatter_s = (rank.result() for rank in pair)
            if self._fabric.transport == "local":  # which maps the peer's memory
                return Costs(gather_s, 0.0, 0.0, 0.0, scatter_s)
            write_s = self._write(pair, n)
            pair.each("use_raw", True)
            pair.each("begin_cost")
            pair.src.call("write", n * self._case.nbytes, PAUSE_S)
            send_s, receive_s = (rank.call("cost") for rank in pair)
            pair.each("use_raw", False)
        return Costs(gather_s, send_s, write_s, receive_s, scatter_s)

    def n_descriptors(self, way: str) -> int:
        """So far, by that library or by both paths."""
        with self.libraries.get(way, self._nodes).running() as pair:
            return sum(rank.call("n_descriptors") for rank in pair)


def cases(scale: int, quick: bool) -> Iterator[Case]:
    """CollectiveX's rows first, then those of our own."""
    llama, *others = (_scaled(model, scale) for model in MODELS)
    own = (
        (Kept(2), Kept(1)), (Kept(1), Kept(2)), (Kept(1, 16), Kept(1, 64)), (Kept(1), Kept(1, heads_first=True)),
        (Kept(4, 16), Kept(2, 64, heads_first=True)),
    )  # fmt: skip
    if quick:
        yield Case(llama, 8192, Kept(), Kept(), (1, 4))
        yield Case(llama, 8192, *own[0])
        return
    for page in (16, 64):
        yield Case(llama, 8192, Kept(1, page), Kept(1, page), LADDER)
        for tokens in (32_768, 131_072, 524_288):
            yield Case(llama, tokens, Kept(1, page), Kept(1, page))
        for model in others:
            yield Case(model, 8192, Kept(1, page), Kept(1, page), (1, 8))
    for src, dst in own:
        yield Case(llama, 8192, src, dst, (1, 8))
    for src, dst in own[:3]:
        yield Case(others[-1], 8192, src, dst, (1, 8))


def _scaled(model: Model, scale: int) -> Model:
    """With 1 of `scale` of its layers; of a hybrid at least one of each kind."""
    return shapes.of_layers(model, max(4 if SLOTS in model.components() else 1, -(-model.n_layers // scale)))


def _fitting(case: Case, n_libraries: int, limit: int) -> Case:
    """The case with those bursts that fit `limit` bytes of memory."""
    sizes = case.sizes
    while sizes and case._replace(sizes=sizes).memory_nbytes(n_libraries) > limit:
        sizes = sizes[:-1]
    return case._replace(sizes=sizes)


def _memory(device: str) -> int:
    """Bytes that a run may use: two thirds of what is free there."""
    if device != "cpu":
        import torch  # noqa: PLC0415  (of a device alone)

        return int(torch.cuda.mem_get_info(device)[0]) * 2 // 3
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024 * 2 // 3


def run(quick: bool, *, scale: int = 0, transport: str = "", device: str = "cpu") -> Measured:
    """`scale`: 1 of so many layers of each model; 0: all, or few for a look. `transport`: only that one. `device`:
    where pools are, "cpu" or "cuda:N".
    """
    over = [fabric for fabric in fabrics() if transport in ("", fabric.transport)]
    limit, rows, left_out = _memory(device), list[Row](), list[str]()
    for whole in cases(scale or (QUICK_SCALE if quick else 1), quick):
        for fabric in over:
            known = libraries(whole, fabric.transport, device)
            case = _fitting(whole, len(known), limit)
            if case.sizes:
                with Bed(case, fabric, device) as bed:
                    for size in case.sizes:
                        rows += _measured(bed, case, fabric, size, 2 if quick else 3)
            left_out += [
                f"{fabric.name}, {whole}, {size} at once: no memory for it; a higher --scale keeps fewer layers"
                for size in whole.sizes[len(case.sizes) :]
            ]
    return Measured(rows, {}, left_out, [])


def _measured(bed: Bed, case: Case, fabric: Fabric, n: int, repeats: int) -> Iterator[Row]:
    """A row for each way, beside the contiguous write. Ways take turns, each time in another order."""
    ways = [*PATHS, *bed.libraries, BULK]
    n_descriptors = {}
    for way in ways:
        before = bed.n_descriptors(way)
        bed.seconds(way, n)
        n_descriptors[way] = bed.n_descriptors(way) - before
    took: dict[str, list[float]] = {way: [] for way in ways}
    costs: list[Costs] = []
    for turns in rounds(ways, repeats):
        for way in turns:
            took[way].append(bed.seconds(way, n))
        costs.append(bed.costs(n))
    gb = n * case.nbytes / 1e9
    ceiling = gb / statistics.median(took[BULK])
    point = {
        "transport": fabric.name, "model": case.model.name, "layers": case.model.n_layers, "tokens": case.tokens,
        "requests": n, "nbytes": n * case.nbytes, "src": case.src._asdict(), "dst": case.dst._asdict(),
    }  # fmt: skip
    steps = Costs(*map(statistics.median, zip(*costs, strict=True)))
    bounds = [one.bound_s(os.cpu_count() or 1) for one in costs]
    bound = gb / statistics.median(bounds)
    yield Row(
        name=f"staged beside its bound, {fabric.name}: {case}, {n} at once",
        value=bound * median_ratio(bounds, took["staged"]),
        baseline=bound,
        unit="GB/s",
        target=0.9 if n == TARGETED else None,
        detail=f"{n * case.nbytes >> 20} MiB; baseline: the busiest core or link; {steps}",
        point={"table": "kv-bound", "steps_s": steps._asdict(), "seconds": sorted(took["staged"]), **point},
    )
    for way in ways[:-1]:
        yield Row(
            name=f"{way}, {fabric.name}: {case}, {n} at once",
            value=ceiling * median_ratio(took[BULK], took[way]),
            baseline=ceiling,
            unit="GB/s",
            detail=f"{n * case.nbytes >> 20} MiB, {n_descriptors[way]} descriptors; baseline: one contiguous write",
            point={"table": "kv-transfer", "way": way, "seconds": sorted(took[way]), **point},
        )
