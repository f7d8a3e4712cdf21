"""Host half of csrc/host/copy.hpp: copies pools in host memory. It needs the extension; `reference` is far slower."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import native
from ..plan import HEAD_MAJOR
from ..plan.tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..plan import Tokens
    from ..plan.tables import Index
    from .backend import Compiled, Launch, Recipe


DESTINATION = " of the destination"  # follows the component's name in errors about a peer's side


def missing() -> str:
    """Why host code cannot copy here; empty if it can."""
    return "" if native.ext is not None else "needs the extension: build it with a C++ compiler"


def compile_plan(recipe: Recipe) -> NativePlan:
    """The selection's tables, built once."""
    assert native.ext is not None
    table = Table.of(recipe.layout, recipe.select)
    plan = native.ext.CopyPlan(*table.arrays(), recipe.order == HEAD_MAJOR, recipe.checksum)
    return NativePlan(table, plan)


def runtime_of(device: str) -> None:
    """Host copies are done when the call returns."""


class NativePlan:
    """A plan held by the extension. A call passes one tuple per component and releases the GIL."""

    def __init__(self, table: Table, plan: Any) -> None:  # noqa: ANN401  (the extension's, which has no types)
        self._table = table
        self._as_peer = replace(table, side=DESTINATION)
        self._plan = plan

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        parts = self._table.parts(indexes, tokens)
        fault, *where = self._plan.gather(dst_ptr, dst_nbytes, parts, launch.sum_ptr)
        if fault:
            self._table.refuse(fault, *where)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        parts = self._table.parts(indexes, tokens)
        fault, *where = self._plan.scatter(src_ptr, src_nbytes, parts, launch.sum_ptr)
        if fault:
            self._table.refuse(fault, *where)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, NativePlan)
        parts, peer_parts = self._table.parts(indexes, tokens), peer._as_peer.parts(peer_indexes, tokens)
        fault, component, *where = self._plan.copy_to(peer._plan, parts, peer_parts)
        if fault:
            n = len(self._table.names)
            (self._table if component < n else peer._as_peer).refuse(fault, component % n, *where)
