"""A server's ranks as they compute: the Llama split over them, or a whole model of which each keeps its share.

Layer 6 (demo). Must not know requests, HTTP or transfers. The ranks of a server live in one process, each with pools
of its own; an engine gives each a process, and a device.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from pdstage.demo import cache as caches
from pdstage.demo.engine import COMPONENT
from pdstage.demo.families import FAMILIES, PAGES
from pdstage.demo.holding import Holding, put_together
from pdstage.demo.llama import Segment, ShardedLlama, head_share, slice_weights
from pdstage.demo.pools import PagedPool, PagedShape, Room, pages_for
from pdstage.demo.reference import build_model
from pdstage.demo.serve.blocks import Kind
from pdstage.errors import PdstageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdstage.demo.holding import Spans
    from pdstage.demo.pools import Pool
    from pdstage.demo.serve.options import ServerOptions
    from pdstage.topology import Topology


@dataclass(slots=True, eq=False)
class Context:
    """One request's state: where it lies in the pools, and its tokens, of which the first `held` are computed.

    At decode the prompt's tokens are unknown, and none of them is read: zeros stand for them.
    """

    room: Room
    tokens: list[int]
    n_prompt: int
    held: int = 0
    cache: Any = field(default=None)


class Part(NamedTuple):
    """Tokens `[start, stop)` of a prompt, to be computed next."""

    context: Context
    start: int
    stop: int


class Computed(NamedTuple):
    """What comes after a part, and what is in the pools since."""

    token: int
    spans: Spans


class Ranks(Protocol):
    """All ranks of one server, in step."""

    @property
    def pools(self) -> Sequence[Mapping[str, Pool]]:
        """Of each rank, by component."""

    @property
    def kinds(self) -> Mapping[str, Kind]: ...

    def prefill(self, parts: Sequence[Part]) -> list[Computed]:
        """Computes the next part of each prompt."""

    def adopt(self, context: Context) -> None:
        """All of a prompt has come into the pools."""

    def decode(self, contexts: Sequence[Context]) -> list[int]:
        """The token after each context's last one, whose state is stored on the way."""


def make_ranks(options: ServerOptions) -> Ranks:
    """Raises `UsageError` where this transformers does not have the model."""
    torch.set_num_threads(1)  # servers share a machine that may have two cores
    return LlamaRanks(options) if options.model == "llama" else WholeRanks(options)


class Adder:
    """Adds up what the threads of one group give: each calls `sum` of its own `of(rank)`, and all get the same."""

    def __init__(self, n: int) -> None:
        self._barrier = threading.Barrier(n)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * n

    def of(self, rank: int) -> Share:
        return Share(self, rank)

    def add(self, rank: int, partial: torch.Tensor) -> None:
        self._parts[rank] = partial
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()  # everybody has read all parts
        partial.copy_(total)

    def give_up(self) -> None:
        """One of them will not come: the others' calls raise."""
        self._barrier.abort()


class Share(NamedTuple):
    """One rank's door to the adder: `llama.Sums`."""

    adder: Adder
    rank: int

    def sum(self, partial: torch.Tensor) -> None:
        self.adder.add(self.rank, partial)

    def hand_on(self, hidden: torch.Tensor, stage: int) -> None:
        """There is one stage only."""


class LlamaRanks:
    """The sharded Llama, a thread a rank, over paged pools; a step computes many requests together."""

    def __init__(self, options: ServerOptions) -> None:
        shape, places = options.demo.shape, options.places
        full = build_model(options.demo).network.state_dict()
        self._adder = Adder(options.tp)
        self._models = [
            ShardedLlama(shape, slice_weights(full, shape, place), place, self._adder.of(place.tp_rank))
            for place in places
        ]
        self._kv = [PagedPool(self._shape(options, place), seed=0) for place in places]
        self._threads = ThreadPoolExecutor(options.tp, thread_name_prefix="rank")
        paged = self._kv[0].shape
        self.kinds = {COMPONENT: Kind(PAGES, paged.page_size, paged.n_pages)}

    @staticmethod
    def _shape(options: ServerOptions, place: Topology) -> PagedShape:
        shape = options.demo.shape
        share = head_share(shape, place.tp_size, place.tp_rank)
        return PagedShape(
            order=options.layout,
            n_pages=pages_for(options.pool_tokens, options.page),
            page_size=options.page,
            layers=range(shape.layers),
            heads=share.kv_stop - share.kv_start,
            total_heads=shape.kv_heads,
            widths={"k": shape.head_dim, "v": shape.head_dim},
        )

    @property
    def pools(self) -> Sequence[Mapping[str, Pool]]:
        return [{COMPONENT: kv} for kv in self._kv]

    def prefill(self, parts: Sequence[Part]) -> list[Computed]:
        tokens = [token for part in parts for token in part.context.tokens[part.start : part.stop]]
        segments = [Segment(p.context.room[COMPONENT], p.start, p.stop - p.start) for p in parts]
        chosen = self._forward(tokens, segments)
        return [Computed(t, {COMPONENT: (p.start, p.stop)}) for t, p in zip(chosen, parts, strict=True)]

    def adopt(self, context: Context) -> None:
        """The pools are where it is computed from."""

    def decode(self, contexts: Sequence[Context]) -> list[int]:
        segments = [Segment(c.room[COMPONENT], len(c.tokens) - 1, 1) for c in contexts]
        return self._forward([c.tokens[-1] for c in contexts], segments)

    def _forward(self, tokens: list[int], segments: list[Segment]) -> list[int]:
        def one(rank: int) -> torch.Tensor:
            try:
                return self._models[rank].forward(tokens, segments, self._kv[rank])
            except BaseException:
                self._adder.give_up()
                raise

        futures = [self._threads.submit(one, rank) for rank in range(len(self._models))]
        logits = [future.result() for future in futures]
        chosen: list[int] = logits[0].argmax(-1).tolist()
        return chosen


class WholeRanks:
    """transformers' own model, computed once for all ranks; each stores and moves only its share of the state."""

    def __init__(self, options: ServerOptions) -> None:
        self._family = FAMILIES[options.model]
        self._kv_heads = options.demo.heads
        self._model = build_model(options.demo)
        per_room = options.pool_tokens // options.max_running
        self._held = [
            Holding(
                self._family, self._kv_heads, place, order=options.layout, page_size=options.page,
                lengths=[per_room] * options.max_running, seed=0,
            )
            for place in options.places
        ]  # fmt: skip
        self.kinds = {name: self._kind(name, options) for name in self._held[0].pools}

    def _kind(self, name: str, options: ServerOptions) -> Kind:
        kept, pool = self._family.components(self._kv_heads)[name][0].kept, self._held[0].pools[name]
        if isinstance(pool, PagedPool):
            return Kind(kept, pool.shape.page_size, pool.shape.n_pages, self._family.window)
        return Kind(kept, 1, options.max_running + 1)

    @property
    def pools(self) -> Sequence[Mapping[str, Pool]]:
        return [held.pools for held in self._held]

    def prefill(self, parts: Sequence[Part]) -> list[Computed]:
        return [self._prefill_one(*part) for part in parts]

    def _prefill_one(self, context: Context, start: int, stop: int) -> Computed:
        if context.cache is None:
            context.cache = self._model.new_cache()
        logits = self._model.forward(context.tokens[start:stop], context.cache)
        spans = self._held[0].fresh(start, stop, context.n_prompt)
        states = caches.read(context.cache, self._family, self._kv_heads, spans)
        for held in self._held:
            held.keep(context.room, states, spans)
        return Computed(int(logits.argmax()), spans)

    def adopt(self, context: Context) -> None:
        """Puts the ranks' shares together into a fresh cache.

        Raises `PdstageError` if two ranks' copies of the same part differ.
        """
        parts = [held.parts(context.room) for held in self._held]
        places = [held.place for held in self._held]
        states, differing = put_together(self._family, self._kv_heads, places, parts)
        if differing:
            raise PdstageError(f"ranks hold different copies of {min(differing)}", remedy="report this as a bug")
        context.cache = self._model.new_cache()
        caches.write(context.cache, states, context.n_prompt)

    def decode(self, contexts: Sequence[Context]) -> list[int]:
        return [int(self._model.forward(c.tokens[-1:], c.cache).argmax()) for c in contexts]
