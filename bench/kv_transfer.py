"""Bursts of whole requests between two nodes, as CollectiveX measures transfer libraries, and further.

CollectiveX's kv-transfer suite (SemiAnalysisAI/InferenceX#2510) moves 1 to 64 requests at once between two equal ranks.
A request is a list of pages, layer by layer, at random places of both pools: page tables are drawn by seed and cut from
one permutation. The ceiling of each row is one contiguous write of the same bytes. Here too; every byte of every burst
is compared, and the libraries' own calls run in turn with pdstage's. Further rows have other tensor-parallel sizes,
page sizes and orders of memory on the two sides.

One process a side has all ranks of its side. A library has two processes and two pools of its own: vLLM's worker has a
thread that polls, as NIXL's agents have by default, and beside it all else is slower. Processes that are not measured
stand still. Prefill has computed everything before the clock starts. The clock runs from the first `bind` to the last
Success, or from a library's first post to its last completion. A model keeps 1 of `scale` of its layers. Rows whose
pools do not fit the machine's memory are left out.

`--peer` has the decode side on another host, where `--serve` waits (two_hosts.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdstage import shared
from pdstage.errors import UsageError
from pdstage.kernels import Pool
from pdstage.layout.items import slot_items
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.config import Config
from pdstage.protocol.destinations import LEAST_PIECE_NBYTES
from pdstage.protocol.state import State
from pdstage.tools.calibrate import pool as pools

from . import shapes
from .bound import Costs, Pieces
from .harness import Measured, Row
from .peers import vllm
from .peers.libraries import Library, Pages, installed
from .ranks import Actor, Rank, expose, observers
from .shapes import SLOTS, Model
from .sides import Side, fabrics, median_ratio, rounds
from .two_hosts import FarRank, Place, Requests, Server, There, fabrics_between

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
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
HERE = Place()
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
    """Requests of `tokens` tokens; bursts of each of `sizes` requests."""

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
        return _SLACK * max(self.sizes) * (self.tokens // kept.page)

    def requests(self, side: str, burst: int, n: int) -> list[Request]:
        """Pages and slots of `n` requests at "src" or "dst", drawn by the burst's number."""
        kept, _ = self.ends(side)
        rng = np.random.default_rng([burst, side == "dst"])
        a_request = self.tokens // kept.page
        pages = rng.permutation(self._n_pages(kept))[: n * a_request].reshape(n, a_request)
        slots = rng.permutation(_SLACK * max(self.sizes))[:n].tolist()
        has_states = SLOTS in self.model.components()
        return [Request(table, slot, has_states) for table, slot in zip(pages, slots, strict=True)]

    def request(self) -> Requests:
        """The case as another host is asked for it."""
        model = self.model
        return Requests(model.name, model.n_layers, self.tokens, self.src, self.dst, list(self.sizes))

    @classmethod
    def asked(cls, one: Requests) -> Case:
        """The case that another host asks for. Raises `UsageError` for a model that this release does not know."""
        known = {model.name: model for model in MODELS}
        if one.model not in known:
            raise UsageError(f"no model {one.model!r}", remedy="run one release on both sides", field="model")
        model = shapes.of_layers(known[one.model], one.layers)
        return cls(model, one.tokens, Kept(*one.src), Kept(*one.dst), tuple(one.sizes))

    def pages(self, burst: int, n: int, layout: Layout, src_base: int, dst_base: int) -> list[Pages]:
        """A burst as a library takes it. The sides are alike; their pools begin at those addresses."""
        return [
            Pages(src_base + src, dst_base + dst, nbytes, one.pages, other.pages)
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
        return {SLOTS: slot_items(self.slot)} if self.has_states else {}


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
    """One side's ranks, "src" or "dst"."""

    def __init__(self, case: Case, side: str, fabric: Fabric, place: Place) -> None:
        super().__init__(max(case.sizes) * case.nbytes, fabric.transport, place.far_host, place.device)
        self.case, self._side = case, side
        kept, _ = case.ends(side)
        mappable = fabric.transport == "local" and place.device == "cpu"
        self.memories = [Memory(case, kept, rank, place.device, mappable=mappable) for rank in range(kept.tp)]
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

    def __init__(self, case: Case, directory: str, fabric: Fabric, place: Place) -> None:
        super().__init__(case, "src", fabric, place)
        for rank, memory in enumerate(self.memories):
            memory.paint()
            node = PrefillNode(
                memory.pool, Topology(tp_size=case.src.tp, tp_rank=rank), transport=fabric.transport,
                bootstrap=directory, config=_CONFIG, observers=observers(), **place.of_node(),
            )  # fmt: skip
            expose(node)
            self.nodes.append(node)

    def offer(self, path: str, burst: int, n: int) -> None:
        """Rooms of `n` requests, computed."""
        self.until(lambda: all(handle.released for handle in self.handles))
        self.handles = []
        for node in self.nodes:
            node.path = path
            for number, request in enumerate(self.case.requests("src", burst, n)):
                sender = node.send(f"{burst}-{number}")
                sender.chunk({"kv": request.pages}, {"kv": (0, self.case.tokens)})
                sender.finish(states=request.states or None)
                self.handles.append(sender)


class Sinks(_Nodes):
    """All decode ranks."""

    def __init__(self, case: Case, directory: str, fabric: Fabric, place: Place) -> None:
        super().__init__(case, "dst", fabric, place)
        self._directory = directory
        for rank, memory in enumerate(self.memories):
            node = DecodeNode(
                memory.pool, Topology(tp_size=case.dst.tp, tp_rank=rank), transport=fabric.transport,
                config=_CONFIG, observers=observers(), **place.of_node(),
            )  # fmt: skip
            expose(node)
            self.nodes.append(node)

    def clear(self) -> None:
        for memory in self.memories:
            memory.clear()

    def pull(self, burst: int, n: int) -> float:
        """Seconds from the first `bind` to the last Success."""
        requests = self.case.requests("dst", burst, n)
        receivers = [[node.receive(f"{burst}-{number}", self._directory) for number in range(n)] for node in self.nodes]
        self.handles = every = [one for of_node in receivers for one in of_node]
        self.until(lambda: all(one.state is not State.BOOTSTRAPPING for one in every))
        start = time.perf_counter()
        for of_node in receivers:
            for receiver, request in zip(of_node, requests, strict=True):
                receiver.bind({"kv": request.pages} | request.states, {"kv": (0, self.case.tokens)})
        self.until(lambda: all(one.state is State.SUCCESS for one in every))
        took = time.perf_counter() - start
        self.until(lambda: all(one.released for one in every))
        return took

    def check(self, burst: int, n: int) -> None:
        self.case.check(self.memories, burst, n)


class End(Actor):
    """One end of a library, with a pool of its own, at "src" or "dst"."""

    def __init__(self, case: Case, side: str, make: Callable[[Layout], Library], device: str) -> None:
        self.case, self._is_src = case, side == "src"
        self._memory = Memory(case, case.src, 0, device)
        if self._is_src:
            self._memory.paint()
        self._library = make(self._memory.layout)
        self._n_listed = 0

    def idle(self) -> None:
        self._library.idle()

    def meet(self) -> tuple[int, object]:
        """The pool's address, and what the library tells its peer."""
        return self._memory.region.base, self._library.describe()

    def met(self, base: int, described: object) -> None:
        self._their_base = base
        self._library.connect(described)

    def pulls(self) -> bool:
        return self._library.pulls

    def offer(self, n: int) -> None:
        self._library.offer(n)

    def clear(self) -> None:
        self._memory.clear()

    def burst(self, burst: int, n: int) -> float:
        """Seconds."""
        bases = self._memory.region.base, self._their_base
        pages = self.case.pages(burst, n, self._memory.layout, *(bases if self._is_src else reversed(bases)))
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


def libraries(case: Case, transport: str, place: Place) -> dict[str, Callable[[Layout], Library]]:
    """Those to measure beside rooms over `transport`, by name: that are here and take the case's pools."""
    if not case.is_equal:
        return {}
    found = installed(transport, place.host, place.device)
    if transport == "nixl" and found and place.device == "cpu" and vllm.takes(case.place(case.src, 0)):
        found[vllm.NAME] = partial(vllm.VllmWorker, host=place.host)
    return found


class _Pair(NamedTuple):
    """Two processes, which stand still but while they are measured."""

    src: Rank
    dst: Rank | FarRank

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
    """Both nodes' processes of one case, and both of each library; `there`: the decode side's are at that host.
    `among`: only those libraries; None: all. `place` is this side's. A context manager.
    """

    def __init__(
        self,
        case: Case,
        fabric: Fabric,
        place: Place = HERE,
        there: There | None = None,
        among: Collection[str] | None = None,
    ) -> None:
        self._case, self._fabric, self._there, self._among = case, fabric, there, among
        self._place = there.place if there is not None else place
        self._burst = 0
        self.libraries: dict[str, _Pair] = {}

    def __enter__(self) -> Self:
        case, fabric, there = self._case, self._fabric, self._there
        place = self._place
        with contextlib.ExitStack() as held:
            directory = place.directory().start()
            held.callback(directory.close)
            given = case, directory.address, fabric, place
            self._nodes = self._start(held, (Sources, *given), (Sinks, *given))
            known = libraries(case, fabric.transport, place)
            wanted = set(known if self._among is None else self._among)
            for name in known:
                if name not in wanted or (there is not None and name not in there.side.libraries):
                    continue
                src, dst = ((End, case, side, known[name], place.device) for side in ("src", "dst"))
                self.libraries[name] = self._start(held, src, dst, name)
            self._held = held.pop_all()
        return self

    def _start(
        self, held: contextlib.ExitStack, src: tuple[Any, ...], dst: tuple[Any, ...], library: str = ""
    ) -> _Pair:
        """One pair after the other: those that poll would hold up those that still start."""
        env, there = self._fabric.env, self._there
        pair = _Pair(
            Rank(*src, env=env),
            Rank(*dst, env=env)
            if there is None
            else there.rank(self._case.request(), "" if library else dst[2], self._fabric, library),
        )
        for rank in pair:
            held.callback(rank.close)
        for rank in pair:
            rank.ready()
        tell, hear = ("meet", "met") if library else ("describe", "connect")
        for one, other in (pair, reversed(pair)):
            one.call(hear, *other.call(tell))
        for rank in pair:
            rank.pause()
        return pair

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def seconds(self, way: str, n: int) -> float:
        """Seconds of a burst of `n` requests by a path, by a library, or as one contiguous write."""
        self._burst += 1
        with self.libraries.get(way, self._nodes).running() as pair:
            if way == BULK:
                return self._write(pair, n)
            pair.dst.call("clear")
            took = self._move(pair, n) if way in self.libraries else self._send(pair, way, n)
            pair.dst.call("check", self._burst, n)
            return took

    def _write(self, pair: _Pair, n: int) -> float:
        pair.each("use_raw", True)
        took: float = pair.src.call("write", n * self._case.nbytes)
        pair.each("use_raw", False)
        return took

    def _send(self, pair: _Pair, path: str, n: int) -> float:
        pair.src.call("offer", path, self._burst, n)
        took: float = pair.dst.call("pull", self._burst, n)
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
            pair.src.call("write_slowly", n * self._case.nbytes)
            send_s, receive_s = (rank.call("cost") for rank in pair)
            pair.each("use_raw", False)
        return Costs(gather_s, send_s, write_s, receive_s, scatter_s)

    def _move(self, pair: _Pair, n: int) -> float:
        pair.src.call("offer", n)
        driver = pair.dst if pair.dst.call("pulls") else pair.src
        took: float = driver.call("burst", self._burst, n)
        return took

    @property
    def n_cores(self) -> int:
        """That the two sides share; each other host's are its own."""
        return (os.cpu_count() or 1) * (1 if self._there is None else 2)

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


def _fitting(case: Case, n_libraries: int, limit: int) -> tuple[Case, Case]:
    """The case with those bursts that fit `limit` bytes of memory beside libraries, and with those of the rest that fit
    alone.
    """

    def within(sizes: tuple[int, ...], n: int) -> Case:
        while sizes and case._replace(sizes=sizes).memory_nbytes(n) > limit:
            sizes = sizes[:-1]
        return case._replace(sizes=sizes)

    beside = within(case.sizes, n_libraries)
    return beside, within(case.sizes[len(beside.sizes) :] if n_libraries else (), 0)


def _lacking(size: int, beside: Case, alone: Case) -> list[str]:
    """What a burst of `size` is not measured with."""
    if size in beside.sizes:
        return []
    return ["libraries beside"] if size in alone.sizes else ["it"]


def _memory() -> int:
    """Bytes that a run may use: two thirds of what is free."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024 * 2 // 3


def serve(bind: str, place: Place) -> Server:
    """The other host's side of `--peer`, to be entered."""
    anywhere = Case(MODELS[0], 16, Kept(), Kept())
    names = {name for transport in ("nixl", "mooncake") for name in libraries(anywhere, transport, place)}
    return Server(bind, place, _decode_side, _memory, sorted(names))


def _decode_side(asked: Requests, directory: str, fabric: Fabric, place: Place, library: str) -> Rank:
    case = Case.asked(asked)
    if case.memory_nbytes(0) > _memory():
        raise UsageError(f"not enough memory for {case}", remedy="a higher --scale keeps fewer layers")
    if not library:
        return Rank(Sinks, case, directory, fabric, place, env=fabric.env)
    known = libraries(case, fabric.transport, place)
    if library not in known:
        raise UsageError(f"no library {library!r} for {case}", remedy="run one release on both sides")
    return Rank(End, case, "dst", known[library], place.device, env=fabric.env)


def run(
    quick: bool,
    *,
    scale: int = 0,
    transport: str = "",
    peer: tuple[str, Place] | None = None,
    device: str = "cpu",
) -> Measured:
    """`scale`: 1 of so many layers of each model; 0: all, or few for a look. `transport`: only that one. `peer`: the
    other host's address and this one's place. `device`: where pools are, "cpu" or "cuda:N".
    """
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(There(*peer)) if peer is not None else None
        over, left_out = fabrics_between(there.side) if there is not None else (fabrics(), [])
        over = [fabric for fabric in over if transport in ("", fabric.transport)]
        if there is not None and not over:
            raise UsageError(
                f"no fabric between the two hosts: {'; '.join(left_out)}", remedy="choose another --transport"
            )
        here = there.place if there is not None else Place(device=device)
        limit = min(_memory(), there.side.memory) if there is not None else _memory()
        rows, more = _models(scale or (QUICK_SCALE if quick else 1), quick, over, here, there, limit=limit)
        machine = {"decode": there.side.machine} if there is not None else {}
        return Measured(rows, machine, left_out + more, [])


def _models(
    scale: int, quick: bool, over: list[Fabric], here: Place, there: There | None, *, limit: int
) -> tuple[list[Row], list[str]]:
    """Rows of every case that fits `limit` bytes of memory, and what was left out."""
    rows: list[Row] = []
    left_out = []
    repeats = 2 if quick else 3
    for whole in cases(scale, quick):
        for fabric in over:
            known = libraries(whole, fabric.transport, here)
            with_all, without = _fitting(whole, len(known), limit)
            for case, among in ((with_all, frozenset(known)), (without, frozenset[str]())):
                if case.sizes:
                    with Bed(case, fabric, here, there, among) as bed:
                        for size in case.sizes:
                            rows += _measured(bed, case, fabric, size, repeats)
            left_out += [
                f"{fabric.name}, {whole}, {size} at once: no memory for {what}; a higher --scale keeps fewer layers"
                for size in whole.sizes
                for what in _lacking(size, with_all, without)
            ]
    return rows, left_out


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
    bounds = [one.bound_s(bed.n_cores) for one in costs]
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
