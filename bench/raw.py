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
        target, own = (np.array([one.base], np.int64) for one in (region, self._region))
        self._spans = Spans(own, target, np.array([region.nbytes], np.int64))

    def write(self) -> float:
        """Seconds of one write of the whole memory as one descriptor."""
        start = time.perf_counter()
        self._transport.post("raw", self._spans, b"raw")
        while not any(isinstance(event, Done) for event in self._transport.poll()):
            pass
        return time.perf_counter() - start

    def idle(self) -> None:
        self._transport.poll()
        time.sleep(5e-5)

    def close(self) -> None:
        self._transport.close()
