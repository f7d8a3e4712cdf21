"""Raw memory: pools, and plans that copy one selection of a pool repeatedly."""

from __future__ import annotations

import logging
import weakref
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..layout import Layout
from ..plan import HEAD_MAJOR, TOKEN_MAJOR, Staging
from ..plan.convert import codings
from . import convert_reference, cuda_convert, cuda_copy, host_copy, reference, triton_convert, triton_copy
from .backend import Launch, Recipe
from .device import check_aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..layout import Region, View
    from ..plan import Select, Tokens
    from ..plan.tables import Index
    from .backend import Backend, Compiled, Converting
    from .index_ring import Runtime

log = logging.getLogger(__name__)

# Backends are modules; by the annotation mypy checks each of them against the protocol.
_BACKENDS: dict[str, Backend] = {
    "host": host_copy,
    "cuda": cuda_copy,
    "triton": triton_copy,
    "reference": reference,
}
# The modules that make plans of recipes with codings. Host memory has no faster one than the reference.
_CONVERTING: dict[str, Converting] = {
    "host": convert_reference,
    "cuda": cuda_convert,
    "triton": triton_convert,
    "reference": convert_reference,
}
# In order of preference.
_BY_KIND = {"cpu": ("host", "reference"), "cuda": ("cuda", "triton")}


def backends() -> dict[str, str]:
    """Every backend, and why it cannot be used here; empty for those that can."""
    return {name: backend.missing() for name, backend in _BACKENDS.items()}


def choose(backend: str, device: str) -> str:
    """The backend for memory on `device` that `backend` selects: "auto" or a name."""
    if backend != "auto" and backend not in _BACKENDS:
        raise UsageError(f"no backend {backend!r}", remedy=f"use auto, {', '.join(_BACKENDS)}", backend=backend)
    fitting = _BY_KIND.get(device.partition(":")[0], ())
    if not fitting:
        raise UsageError(f"no backend copies memory on {device!r}", remedy="use cpu or cuda memory", device=device)
    if backend not in ("auto", *fitting):
        raise UsageError(
            f"backend {backend!r} does not copy memory on {device!r}", remedy=f"use {' or '.join(fitting)}",
            backend=backend, device=device,
        )  # fmt: skip
    problems = {}
    for name in fitting if backend == "auto" else (backend,):
        problems[name] = _BACKENDS[name].missing()
        if not problems[name]:
            if backend == "auto" and name == "reference":
                _warn_slow("copied by the reference", f"the host code {problems['host']}")
            return name
    raise UsageError(
        f"backend {' or '.join(problems)} cannot be used here", remedy="; ".join(problems.values()), backend=backend
    )


@cache
def _warn_slow(what: str, why: str) -> None:
    log.warning("memory is %s, correctly and very slowly: %s", what, why)


def converting(name: str) -> Converting:
    """The module whose plans convert, for backend `name`. Raises `UsageError` if it cannot be used here."""
    module = _CONVERTING[name]
    if problem := module.missing():
        raise UsageError(
            f"backend {name!r} cannot convert formats here",
            remedy=f"{problem}, or use one format on both sides",
            backend=name,
        )
    if module is convert_reference:
        _warn_slow("converted by the reference", "a GPU's kernels are fast")
    if name == "triton" and not cuda_convert.missing():  # an H200: 0.13 to 0.5 of a plain copy, CUDA's 0.7 and more
        _warn_slow("converted by Triton", "CUDA's kernels are here, which backend='auto' takes")
    return module


class Pool:
    """A rank's registered memory on one device, from which plans are made.

    A GPU's pool may have regions in host memory (`on_host`), such as pages that an engine keeps there. The GPU's
    kernels read and write them in place once they are page-locked, which a node does. `keep` holds the memory's owner
    for as long as the pool or one of its plans lives.
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
        """The pool over an existing layout."""
        pool = cls.__new__(cls)
        pool.layout, pool.device, pool.keep = layout, device, keep
        pool._check()
        return pool

    def _check(self) -> None:
        kind, _, ordinal = self.device.partition(":")
        self.device = kind if kind == "cpu" else f"{kind}:{ordinal or 0}"  # of one name, so of one runtime
        for number, region in enumerate(self.layout.regions):
            where = region.kind if region.kind == "cpu" else f"{region.kind}:{region.device}"
            if where not in (self.device, "cpu"):
                raise UsageError(
                    f"region {number} is {where} memory in a pool on {self.device!r}",
                    remedy="make one pool for each device",
                    region=number,
                )

    @property
    def on_host(self) -> tuple[Region, ...]:
        """A GPU's regions in host memory; none if the pool is the host's."""
        return () if self.device == "cpu" else tuple(held for held in self.layout.regions if held.kind == "cpu")

    def runtime(self, backend: str = "auto") -> Runtime | None:
        """Streams and events of the pool's device, for callers that enqueue copies; None for host memory."""
        return _BACKENDS[choose(backend, self.device)].runtime_of(self.device)

    def check_converts(self) -> None:
        """Raises `UsageError` if plans of this pool cannot convert."""
        converting(choose("auto", self.device))

    def plan(
        self,
        select: Iterable[Select],
        order: str = TOKEN_MAJOR,
        backend: str = "auto",
        *,
        checksum: bool = False,
        staged: Layout | None = None,
        only: str = "",
    ) -> Plan:
        """A plan for some shards of some views, staged in `order`. Slow: make it once for each peer and selection.

        `staged` is this pool's side of a `convert.pair`, and `select` then selects from it. bf16 views of the pool are
        encoded when gathered and decoded when scattered, in token-major order.

        With `checksum`, calls may pass a `sum_ptr`. `only`, "gather", "scatter" or "copy_to", is the one call that
        will be made: no kernel of another is loaded. Raises `UsageError` for shards that the pool does not have, an
        unknown order or call, or a backend that cannot be used here.
        """
        if order not in (TOKEN_MAJOR, HEAD_MAJOR):
            raise UsageError(f"no staged order {order!r}", remedy=f"use {TOKEN_MAJOR!r} or {HEAD_MAJOR!r}", order=order)
        if only not in ("", "gather", "scatter", "copy_to"):
            raise UsageError(f"no call {only!r}", remedy='use "gather", "scatter" or "copy_to"', only=only)
        name = choose(backend, self.device)
        staging = Staging(staged or self.layout, select)
        made = codings(self.layout, staged, staging.select) if staged is not None else []
        recipe = Recipe(self.layout, staging.select, order, self.device, checksum, staged, tuple(made), only)
        if all(coding.encoding is None for coding in made):
            return Plan(self, staging, name, recipe._replace(codings=()), _BACKENDS[name].compile_plan(recipe))
        if order != TOKEN_MAJOR:
            raise UsageError(f"converting in {order!r} order", remedy=f"use {TOKEN_MAJOR!r}", order=order)
        return Plan(self, staging, name, recipe, converting(name).compile_plan(recipe))


class Plan:
    """One selection of one pool, ready for chunk after chunk. Several threads may use it at once.

    `indexes` holds an `Index` for each component that has tokens; `tokens` are ranges `(start, stop)` in absolute
    positions of the sequence. Item i of an index covers `[first_token + i*tokens_per_item, ...)`. Rows that a range
    touches are copied whole. Every method checks everything first. It raises `UsageError`, naming component, position
    and value, and then writes nothing. An index that is on the device cannot be checked without waiting for it: the
    kernel skips items outside the pool.

    On a device, copies are done in the order of `stream` (a cupy or torch stream, a `cudaStream_t` as integer, None for
    the current one); `max_sms` limits the multiprocessors they use. A graph that recorded a call may be launched after
    the plan is gone. Host backends ignore both. `sum_ptr`, for a plan made with `checksum`, is the address of a uint64
    to which the checksum of the gathered or scattered cells is added.
    """

    def __init__(self, pool: Pool, staging: Staging, backend: str, recipe: Recipe, compiled: Compiled) -> None:
        self._pool = pool
        self._staging = staging
        self._recipe = recipe
        self._decodable = all(coding.decodable for coding in recipe.codings)
        self._compiled = compiled
        self._peers: weakref.WeakSet[Plan] = weakref.WeakSet()
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
        sum_ptr: int = 0,
    ) -> None:
        """Pool to staging. Padding between views is not written."""
        self._compiled.gather(dst_ptr, dst_nbytes, indexes, tokens, self._launch(stream, max_sms, sum_ptr))

    def scatter(
        self,
        src_ptr: int,
        src_nbytes: int,
        indexes: Mapping[str, Index],
        tokens: Tokens,
        *,
        stream: object = None,
        max_sms: int | None = None,
        sum_ptr: int = 0,
    ) -> None:
        """Staging to pool. An item may be listed only once; other rows and shards do not change."""
        if not self._decodable:
            raise UsageError("data is selected without its scales", remedy="select both to scatter them")
        self._compiled.scatter(src_ptr, src_nbytes, indexes, tokens, self._launch(stream, max_sms, sum_ptr))

    def copy_to(
        self,
        peer: Plan,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        *,
        stream: object = None,
        max_sms: int | None = None,
    ) -> None:
        """Pool to pool in one pass, without staging: the same as `gather` here and `scatter` at `peer`.

        `peer` is a plan over memory that this plan's device can write, at addresses of this process (such as a peer
        GPU's pool mapped by CUDA IPC). It selects equally many shards of the same views; its page size and strides may
        differ. Raises `UsageError` if the two do not match.
        """
        self.check_peer(peer)
        launch = self._launch(stream, max_sms, 0)
        self._compiled.copy_to(peer._compiled, indexes, peer_indexes, tokens, launch)

    def _launch(self, stream: object, max_sms: int | None, sum_ptr: int) -> Launch:
        if sum_ptr:
            if not self._recipe.checksum:
                raise UsageError("this plan computes no checksums", remedy="make it with checksum=True")
            check_aligned(sum_ptr, 8, "the checksum's word")
        if max_sms is not None and max_sms < 1:
            raise UsageError(f"max_sms is {max_sms}", remedy="give at least 1, or None", max_sms=max_sms)
        return Launch(stream, max_sms, sum_ptr)

    def check_peer(self, peer: Plan) -> None:
        """Raises `UsageError` if `copy_to` this peer is impossible."""
        if peer in self._peers:
            return
        ours, theirs = (f"{plan.backend} ({type(plan._compiled).__name__})" for plan in (self, peer))
        if ours != theirs:
            raise UsageError(f"a plan of {ours} cannot copy to one of {theirs}", remedy="make both with one backend")
        if self._recipe.codings or peer._recipe.codings:
            raise UsageError("a plan that converts copies to no pool", remedy="gather and scatter, through staging")
        for mine, other in zip_longest(self._recipe.cells(), peer._recipe.cells()):
            if mine != other:
                raise UsageError(f"copying {mine} to {other}", remedy="select the same views and shards on both sides")
        self._peers.add(peer)
