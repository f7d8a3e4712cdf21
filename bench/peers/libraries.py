"""The calls that engines make of NIXL and Mooncake themselves, for pages that are alike on both sides.

Each request is a list of pages. NIXL gets a transfer for each request: all are posted, then all awaited, as CollectiveX
does (SemiAnalysisAI/InferenceX#2510). Mooncake gets batches, as from SGLang. vLLM's own worker is in `vllm.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pdstage.layout import Layout

_BATCH = 512
"""Entries of one call: a peer's queue of Mooncake 0.3.13 takes about 2,000 and fails the rest."""


class Pages(NamedTuple):
    """One request's pages: where they are at the source and at the destination, and their bytes; and the numbers that
    the tokens' pages have at either, which are the same in every layer.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    src_ids: NDArray[np.int64]
    dst_ids: NDArray[np.int64]


class Library(Protocol):
    """One end of a library, with a pool's region registered."""

    pulls: ClassVar[bool] = False
    """Whether the destination makes the calls of a burst, which reads; else the source does, and writes."""

    def describe(self) -> object:
        """What the other end's `connect` wants."""

    def connect(self, described: Any) -> None: ...  # noqa: ANN401

    def burst(self, requests: Sequence[Pages]) -> float:
        """Seconds until all of `requests` are at the destination."""

    def offer(self, n: int) -> None:
        """At the source, before the destination reads a burst of `n` requests."""

    def idle(self) -> None:
        """Serves the peer's burst, where the library has no thread for it."""

    def close(self) -> None: ...


class Nixl(Library):
    """NIXL's agent with its UCX backend."""

    def __init__(self, layout: Layout) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415  (not everywhere)

        (region,) = layout.regions
        self._agent: Any = nixl_agent(f"bench-{time.monotonic_ns()}", nixl_agent_config(backends=["UCX"]))
        self._held = self._agent.register_memory([(region.base, region.nbytes, 0, "")], "DRAM")
        self._peer = ""

    def describe(self) -> bytes:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, described: bytes) -> None:
        peer = self._agent.add_remote_agent(described)
        self._peer = peer.decode() if isinstance(peer, bytes) else peer

    def burst(self, requests: Sequence[Pages]) -> float:
        start = time.perf_counter()
        handles = []
        for one in requests:
            src, dst = (self._list(at, one.nbytes) for at in (one.src, one.dst))
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

    def _list(self, at: NDArray[np.int64], nbytes: NDArray[np.int64]) -> Any:  # noqa: ANN401
        rows = np.zeros((len(at), 3), np.uint64)
        rows[:, 0], rows[:, 1] = at, nbytes
        return self._agent.get_xfer_descs(rows, "DRAM")

    def idle(self) -> None:
        self._agent.get_new_notifs()  # without a thread, UCX works inside of calls

    def close(self) -> None:
        self._agent.deregister_memory(self._held)
        self._agent = None


class Mooncake(Library):
    """Mooncake's Transfer Engine over tcp."""

    def __init__(self, layout: Layout) -> None:
        from mooncake.engine import TransferEngine  # noqa: PLC0415  (not everywhere)

        (region,) = layout.regions
        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        if self._engine.register_memory(region.base, region.nbytes):
            raise RuntimeError("Mooncake does not register the pool")
        self._base, self._peer = region.base, ""

    def describe(self) -> str:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def connect(self, described: str) -> None:
        self._peer = described

    def burst(self, requests: Sequence[Pages]) -> float:
        start = time.perf_counter()
        for one in requests:
            for at in range(0, len(one.nbytes), _BATCH):
                batch = [column[at : at + _BATCH].tolist() for column in one[:3]]
                if self._engine.batch_transfer_sync_write(self._peer, *batch):
                    raise RuntimeError("a batch of Mooncake failed")
        return time.perf_counter() - start

    def idle(self) -> None:
        time.sleep(5e-5)

    def close(self) -> None:
        self._engine.unregister_memory(self._base)
        self._engine = None
