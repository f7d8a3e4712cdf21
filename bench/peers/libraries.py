"""The calls that engines make of NIXL and Mooncake themselves, for pages that are alike on both sides.

Each request is a list of pages. NIXL gets a transfer for each request: all are posted, then all awaited, as CollectiveX
does (SemiAnalysisAI/InferenceX#2510). Mooncake gets batches, as from SGLang. NIXL is measured twice where it can put
whole lists (ai-dynamo/nixl#1835): a put for each descriptor, its default, and one for the list.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from pdstage.transport import available

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pdstage.layout import Layout

_HOST = "127.0.0.1"
_BATCH = 512
"""Entries of one call: a peer's queue of Mooncake 0.3.13 takes about 2,000 and fails the rest."""

_WHEELS, _PLUGIN = ("nixl-cu12", "nixl-cu13", "nixl"), "libplugin_UCX.so"
_SCATTER_GATHER = "NIXL_UCX_SGL_ENABLE"
"""Whether an agent of NIXL puts whole lists. It reads this once, when it is created (src/plugins/ucx/ucx_backend.cpp).
"""


def has_scatter_gather() -> bool:
    """Whether NIXL's UCX plugin here can put whole lists.

    Only a build that can has these words for its log. One that cannot warns and puts each descriptor, and a NIXL before
    1.5.1 does not read the switch.
    """
    folder = os.environ.get("NIXL_PLUGIN_DIR")
    plugins = [Path(folder) / _PLUGIN] if folder else [one for name in _WHEELS for one in _plugins_of(name)]
    return any(plugin.is_file() and b"UCX SGL offload" in plugin.read_bytes() for plugin in plugins)


def _plugins_of(wheel: str) -> list[Path]:
    with suppress(PackageNotFoundError):
        return [Path(str(one.locate())) for one in files(wheel) or () if one.name == _PLUGIN]
    return []


@contextmanager
def scatter_gather(value: str) -> Iterator[None]:
    """Agents that are created inside put whole lists ("y") or each descriptor ("n")."""
    before = os.environ.get(_SCATTER_GATHER)
    os.environ[_SCATTER_GATHER] = value
    try:
        yield
    finally:
        del os.environ[_SCATTER_GATHER]
        if before is not None:
            os.environ[_SCATTER_GATHER] = before


class Pages(NamedTuple):
    """One request's pages: where they are at the source and at the destination, and their bytes."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class Nixl:
    """One end of NIXL with its UCX backend, which puts each descriptor. Without NIXL's own thread, which spins."""

    puts_lists: ClassVar[str] = "n"

    def __init__(self, layout: Layout) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415  (not everywhere)

        (region,) = layout.regions
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        with scatter_gather(self.puts_lists):
            self._agent: Any = nixl_agent(f"bench-{time.monotonic_ns()}", config)
        self._own = self._theirs = "DRAM" if region.kind == "cpu" else "VRAM", region.device
        self._held = self._agent.register_memory([(region.base, region.nbytes, region.device, "")], self._own[0])
        self._peer = ""

    def describe(self) -> tuple[bytes, tuple[str, int]]:
        """What the other end's `connect` wants."""
        return self._agent.get_agent_metadata(), self._own

    def connect(self, described: Sequence[Any]) -> None:
        metadata, (kind, device) = described
        peer = self._agent.add_remote_agent(metadata)
        self._peer, self._theirs = peer.decode() if isinstance(peer, bytes) else peer, (kind, device)

    def burst(self, requests: Sequence[Pages]) -> float:
        """Seconds until all of `requests` are at the destination."""
        start = time.perf_counter()
        handles = []
        for one in requests:
            src, dst = self._list(one.src, one.nbytes, *self._own), self._list(one.dst, one.nbytes, *self._theirs)
            handle = self._agent.initialize_xfer("WRITE", src, dst, self._peer)
            self._agent.transfer(handle)
            handles.append(handle)
        for handle in handles:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                pass
            if state != "DONE":
                raise RuntimeError(f"a transfer of NIXL ended as {state}")
        took = time.perf_counter() - start
        for handle in handles:
            self._agent.release_xfer_handle(handle)
        return took

    def _list(self, at: NDArray[np.int64], nbytes: NDArray[np.int64], kind: str, device: int) -> Any:  # noqa: ANN401
        rows = np.zeros((len(at), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = at, nbytes, device
        return self._agent.get_xfer_descs(rows, kind)

    def idle(self) -> None:
        """Serves the peer's burst."""
        self._agent.get_new_notifs()  # without a thread, UCX works inside of calls

    def close(self) -> None:
        self._agent.deregister_memory(self._held)
        self._agent = None


class NixlLists(Nixl):
    """The same, which puts whole lists."""

    puts_lists = "y"


class Mooncake:
    """One end of Mooncake's Transfer Engine over tcp, with a pool's region registered."""

    def __init__(self, layout: Layout) -> None:
        from mooncake.engine import TransferEngine  # noqa: PLC0415  (not everywhere)

        (region,) = layout.regions
        self._engine: Any = TransferEngine()
        if self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        if self._engine.register_memory(region.base, region.nbytes):
            raise RuntimeError("Mooncake does not register the pool")
        self._base, self._peer = region.base, ""

    def describe(self) -> str:
        return f"{_HOST}:{self._engine.get_rpc_port()}"

    def connect(self, described: str) -> None:
        self._peer = described

    def burst(self, requests: Sequence[Pages]) -> float:
        start = time.perf_counter()
        for one in requests:
            for at in range(0, len(one.nbytes), _BATCH):
                batch = [column[at : at + _BATCH].tolist() for column in one]
                if self._engine.batch_transfer_sync_write(self._peer, *batch):
                    raise RuntimeError("a batch of Mooncake failed")
        return time.perf_counter() - start

    def idle(self) -> None:
        time.sleep(5e-5)

    def close(self) -> None:
        self._engine.unregister_memory(self._base)
        self._engine = None


Library = Nixl | Mooncake


def installed(transport: str, device: str) -> dict[str, Callable[[Layout], Library]]:
    """The libraries to measure beside rooms over `transport`, by name, with pools on `device`."""
    if available().get(transport):
        return {}
    if transport == "mooncake" and device == "cpu":
        return {"Mooncake's batches": Mooncake}
    lists = {"NIXL's own lists by scatter-gather": NixlLists} if has_scatter_gather() else {}
    return {"NIXL's own lists": Nixl, **lists} if transport == "nixl" else {}
