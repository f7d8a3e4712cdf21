"""Raw memory: pools, and plans that copy one selection of a pool again and again.

Layer 3. Must not know tensors, rooms or transports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError
from ..layout import Layout
from ..plan import HEAD_MAJOR, TOKEN_MAJOR, Staging
from . import host_copy, reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..layout import Region, View
    from ..plan import Select, Tokens
    from ..tables import Index


class Compiled(Protocol):
    """A selection made ready by a backend. Checks everything before the first byte moves."""

    def gather(self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens) -> None: ...

    def scatter(self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens) -> None: ...


class Backend(Protocol):
    """What a backend's module offers to pools."""

    def missing(self) -> str:
        """Why it cannot be used here; empty if it can."""

    def compile_plan(self, layout: Layout, select: Iterable[Select], wire: str) -> Compiled: ...


# Modules are the backends; the annotation has mypy hold each of them to the protocol.
_BACKENDS: dict[str, Backend] = {"host": host_copy, "reference": reference}


def backends() -> dict[str, str]:
    """Every backend, and why it cannot be used here; empty for those that can."""
    return {name: backend.missing() for name, backend in _BACKENDS.items()}


def choose(backend: str, device: str) -> str:
    """The backend that a caller's `backend`, "auto" or a name, means for memory on `device`."""
    name = "host" if backend == "auto" else backend
    if name not in _BACKENDS:
        raise UsageError(f"no backend {backend!r}", remedy=f"use auto, {', '.join(_BACKENDS)}", backend=backend)
    if device != "cpu":
        raise UsageError(f"no backend copies memory on {device!r}", remedy="use a pool in host memory", device=device)
    problem = _BACKENDS[name].missing()
    if problem:
        raise UsageError(f"backend {name!r} cannot be used here", remedy=problem, backend=name)
    return name


class Pool:
    """A rank's registered memory on one device, from which plans are made.

    `keep` holds whatever owns the memory for as long as the pool or one of its plans lives.
    """

    def __init__(
        self,
        regions: Iterable[Region],
        views: Iterable[View],
        device: str = "cpu",
        *,
        slots: Iterable[str] = (),
        keep: object = None,
    ) -> None:
        self.layout = Layout.of(regions, views, slots=slots)
        self.device = device
        self.keep = keep
        self._check()

    @classmethod
    def of(cls, layout: Layout, device: str = "cpu", keep: object = None) -> Pool:
        """The pool over a layout that exists already."""
        pool = cls.__new__(cls)
        pool.layout, pool.device, pool.keep = layout, device, keep
        pool._check()
        return pool

    def _check(self) -> None:
        kind = self.device.partition(":")[0]
        for number, region in enumerate(self.layout.regions):
            if region.kind != kind:
                raise UsageError(
                    f"region {number} is {region.kind} memory in a pool on {self.device!r}",
                    remedy="make one pool for each device",
                    region=number,
                )

    def plan(self, select: Iterable[Select], wire: str = TOKEN_MAJOR, backend: str = "auto") -> Plan:
        """A plan for some shards of some views, staged in `wire` order. Cold: make it once for each peer and selection.

        Raises `UsageError` for shards that the pool does not hold, an unknown order or a backend that is not for here.
        """
        if wire not in (TOKEN_MAJOR, HEAD_MAJOR):
            raise UsageError(f"no staged order {wire!r}", remedy=f"use {TOKEN_MAJOR!r} or {HEAD_MAJOR!r}", wire=wire)
        name = choose(backend, self.device)
        chosen = tuple(select)
        return Plan(self, Staging(self.layout, chosen), name, _BACKENDS[name].compile_plan(self.layout, chosen, wire))


class Plan:
    """One selection of one pool, ready to be copied chunk after chunk; safe to use from several threads at once.

    `indexes` holds an `Index` for each component that has tokens, and `tokens` ranges `(start, stop)` in absolute
    positions of the sequence: item i of an index covers `[first_token + i*tokens_per_item, ...)`, and rows that a range
    only touches move whole. Both methods check everything first and raise `UsageError`, naming component, position and
    value, with nothing written.
    """

    def __init__(self, pool: Pool, staging: Staging, backend: str, compiled: Compiled) -> None:
        self._pool = pool
        self._staging = staging
        self._compiled = compiled
        self.backend = backend

    def nbytes(self, tokens: Tokens) -> int:
        """Staged bytes of `tokens`; a multiple of 128."""
        return self._staging.nbytes(tokens)

    def gather(
        self,
        dst_ptr: int,
        dst_nbytes: int,
        indexes: Mapping[str, Index],
        tokens: Tokens,
        *,
        stream: object = None,
        max_sms: int | None = None,
    ) -> None:
        """Pool to staging. Padding between views is not written. Host backends ignore `stream` and `max_sms`."""
        self._compiled.gather(dst_ptr, dst_nbytes, indexes, tokens)

    def scatter(
        self,
        src_ptr: int,
        src_nbytes: int,
        indexes: Mapping[str, Index],
        tokens: Tokens,
        *,
        stream: object = None,
        max_sms: int | None = None,
    ) -> None:
        """Staging to pool. An item may be named once only; rows and shards that are not named stay as they are."""
        self._compiled.scatter(src_ptr, src_nbytes, indexes, tokens)
