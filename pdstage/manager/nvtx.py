"""NVTX ranges around what a node asks of its device, for Nsight Systems.

With PDSTAGE_NVTX=1, and only where the pool is on a device. A range is of the host's call, a launch or a post; the
profiler shows what the device did of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, assert_never

from pdstage import environment
from pdstage.manager.role import Gathers
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.kernels.index_ring import Runtime
    from pdstage.protocol.prefill_chunks import ChunkEffect

_NAMES = {Gather: "gather", Write: "write", WriteDirect: "direct write", WriteRow: "aux row", Scatter: "scatter"}


class Ranges:
    """The ranges of one device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @contextmanager
    def of(self, effect: ChunkEffect | Gathers | Scatter) -> Iterator[None]:
        self._runtime.push_range(name(effect))
        try:
            yield
        finally:
            self._runtime.pop_range()


def name(effect: ChunkEffect | Gathers | Scatter) -> str:
    """As a profiler shows it: what is done, of which room and chunk, and for how many others beside its destination."""
    match effect:
        case Gathers(members):
            return f"{name(members[0])} +{len(members) - 1}"
        case Gather() | Write() | WriteDirect() | WriteRow():
            key, chunk = effect.chunk.destination.open.room, effect.chunk.number
        case Scatter():
            key, chunk = effect.landing.writer.room.key, effect.landing.lease.request.chunk
        case _:
            assert_never(effect)
    return f"pdstage {_NAMES[type(effect)]} {key[1:].decode(errors='replace')} #{chunk}"


def ranges_of(runtime: Runtime | None) -> Ranges | None:
    """The ranges of a pool's device, if they are asked for and there is one. Raises `UsageError` for another value."""
    return Ranges(runtime) if environment.NVTX.read() == "1" and runtime is not None else None
