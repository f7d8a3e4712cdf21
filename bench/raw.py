"""One bulk write over a transport, without a node: the baseline of staged rooms."""

from __future__ import annotations

import time

import numpy as np

from pdstage.layout import Region
from pdstage.transport import Done, Spans, open_transport


class Raw:
    """One end, with memory for `nbytes`; either end may write to the other."""

    def __init__(self, transport: str, nbytes: int) -> None:
        self._transport = open_transport(transport)
        self._memory = np.ones(nbytes, np.uint8)
        self._region = Region(self._memory.ctypes.data, nbytes)
        self._transport.register([self._region])

    def describe(self) -> tuple[bytes, Region]:
        return self._transport.describe(), self._region

    def connect(self, description: bytes, region: Region) -> None:
        self._transport.connect("raw", description)
        self._transport.prepare("raw", [region])
        self._there = region

    def write(self, nbytes: int = 0) -> float:
        """Seconds of one write of `nbytes` as one descriptor; 0: of the whole memory."""
        here, there = self._region.base, self._there.base
        spans = Spans(*(np.array([one], np.int64) for one in (here, there, nbytes or self._region.nbytes)))
        start = time.perf_counter()
        self._transport.post("raw", spans, b"raw")
        while not any(isinstance(event, Done) for event in self._transport.poll()):
            pass
        return time.perf_counter() - start

    def idle(self) -> None:
        self._transport.poll()
        time.sleep(5e-5)

    def close(self) -> None:
        self._transport.close()
