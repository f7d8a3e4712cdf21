"""The interface between pools and backends: the input of a plan, the parameters of a call, a backend's module."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..layout import Key, Layout
    from ..plan import Select, Tokens
    from ..plan.convert import Coding
    from ..plan.tables import Index
    from .index_ring import Runtime


class Launch(NamedTuple):
    """The parameters of one call: its stream, its number of multiprocessors, and where its checksum is added (0:
    nowhere).

    `sum_ptr` is the address of a uint64 that the plan's device can write; only plans made with `checksum` take one.
    """

    stream: object = None
    max_sms: int | None = None
    sum_ptr: int = 0


class Cells(NamedTuple):
    """One selected view as the other side of a transfer sees it: its shards, and their pieces."""

    key: Key
    first_shard: int
    n_shards: int
    segs: int
    width: int
    tokens_per_row: int


class Recipe(NamedTuple):
    """The input from which a backend makes a plan. `select` is in key order.

    `codings`, one for each selected view of layout `staged`, are given only if one of them converts. `only`, "gather",
    "scatter" or "copy_to", is what the plan is made for: the kernels of other calls are compiled when first needed.
    """

    layout: Layout
    select: tuple[Select, ...]
    order: str
    device: str
    checksum: bool
    staged: Layout | None = None
    codings: tuple[Coding, ...] = ()
    only: str = ""

    def cells(self) -> list[Cells]:
        """What must be equal in two plans for the bytes of one to become bytes of the other."""
        views = self.layout.by_key()
        return [
            Cells(
                key, start + views[key].axis.first, count, views[key].segs, views[key].width, views[key].tokens_per_row
            )
            for key, start, count in self.select
        ]


class Compiled(Protocol):
    """A selection prepared by a backend. It checks everything before the first byte moves."""

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None: ...

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None: ...

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        """`peer` is a plan of the same class whose `cells` are equal."""


class Backend(Protocol):
    """The interface of a backend's module."""

    def missing(self) -> str:
        """Why it cannot be used here; empty if it can."""

    def compile_plan(self, recipe: Recipe) -> Compiled: ...

    def runtime_of(self, device: str) -> Runtime | None:
        """The device's streams and events, which tell when a copy is done; None if copies are done when the call
        returns.
        """


class Converting(Protocol):
    """The interface of a module that converts, in addition to a backend's own plans."""

    def missing(self) -> str: ...

    def compile_plan(self, recipe: Recipe) -> Compiled: ...
