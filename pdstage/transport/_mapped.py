"""The peers that `local` writes to: transports of this process, and other processes of this host.

Shared memory of another process is mapped here; its other memory is written by process id.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

import numpy as np

from pdstage import native, shared
from pdstage.errors import TransportError, UsageError
from pdstage.transport import _peer
from pdstage.transport.base import Mapped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from pdstage.layout import Region
    from pdstage.plan.spans import Spans
    from pdstage.shared import Backing
    from pdstage.transport._peer import Process

log = logging.getLogger(__name__)

_AT_ONCE_NBYTES = 1 << 30


class Here(_peer.Here):
    """A transport of this process: the counterpart of `There`."""

    def write(self, spans: Spans) -> tuple[int, TransportError | None]:
        error = self.why_not(spans)
        if error is not None:
            return 0, error
        copy(spans)
        return int(spans.nbytes.sum()), None

    def why_not(self, spans: Spans) -> TransportError | None:
        """Checks the spans: a stray write into another process fails safely, but here it would crash this process."""
        try:
            self.lives[self._life].own.find(spans.dst, spans.nbytes)
        except UsageError as error:
            return TransportError(str(error), remedy="the peer unregistered memory that was still being written")
        return None

    def why_not_written(self, address: int) -> TransportError | None:
        del address
        return None

    def unmap(self) -> None:
        pass

    def mapped(self, address: int, nbytes: int) -> Mapped | None:
        transport = self.lives.get(self._life)
        return Mapped(address, None) if transport is not None and transport.own.holds(address, nbytes) else None


class There:
    """Another process, and its shared memory that is mapped here."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._views: list[tuple[int, NDArray[np.uint8]]] = []
        self.gone, self.close, self.why_not_written = process.gone, process.close, process.why_not_written
        self.descriptor = process.descriptor

    def unmap(self) -> None:
        """Releases the mappings, except those that `mapped` has handed out."""
        self._views = []

    def map(self, backings: Iterable[tuple[int, Backing]], regions: Iterable[Region]) -> None:
        """Maps the shareable ones of `regions` instead of the previous ones; `backings`: base and backing file.

        All of their pages, up to `_AT_ONCE_NBYTES`: the other rooms of a node wait meanwhile.
        """
        self._views, left = [], _AT_ONCE_NBYTES
        for base, backing in backings:
            if not any(base <= region.base < base + backing.nbytes for region in regions):
                continue
            try:
                at_once = backing.nbytes <= left
                self._views.append((base, shared.attach(self._process.pid, backing, at_once=at_once)))
                left -= backing.nbytes if at_once else 0
            except OSError as error:  # it is then written as unshared memory
                log.info("memory of process %s is not mapped: %s", self._process.pid, error)

    def mapped(self, address: int, nbytes: int) -> Mapped | None:
        for base, view in self._views:
            if base <= address and address + nbytes <= base + view.nbytes:
                return Mapped(view.ctypes.data + address - base, view)
        return None

    def write(self, spans: Spans) -> tuple[int, TransportError | None]:
        if self._views and len(spans.nbytes) == 1:
            here = self.mapped(int(spans.dst[0]), int(spans.nbytes[0]))
            if here is not None:
                copy(spans._replace(dst=np.array([here.address], np.int64)))
                return int(spans.nbytes[0]), None
        return self._process.write(spans)


def copy(spans: Spans) -> None:
    """Copies spans within this process."""
    if native.ext is not None:
        native.ext.copy_spans(*spans)
        return
    for src, dst, nbytes in zip(spans.src.tolist(), spans.dst.tolist(), spans.nbytes.tolist(), strict=True):
        ctypes.memmove(dst, src, nbytes)
