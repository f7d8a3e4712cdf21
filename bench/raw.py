"""One bulk write over a transport, without a node: the baseline of staged rooms."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from pdstage.layout import Region
from pdstage.tools.calibrate.pool import allocate
from pdstage.transport import Done, PostFailed, Spans, open_from_config

if TYPE_CHECKING:
    from collections.abc import Sequence

PAUSE_S = 5e-5


class Raw:
    """One end, with memory for `nbytes`; either end may write to the other.

    `host`: this host's address for peers elsewhere; empty: as the transport chooses. `device`: where the memory is.
    """

    def __init__(self, transport: str, nbytes: int, host: str = "", device: str = "cpu") -> None:
        kind, _, number = device.partition(":")
        self._transport = open_from_config(transport, device, host)
        self._memory, base = allocate(device, nbytes)
        self._region = Region(base, nbytes, kind, int(number or 0))
        self._transport.register([self._region])

    def describe(self) -> tuple[bytes, Region]:
        return self._transport.describe(), self._region

    def connect(self, description: bytes, region: Region) -> None:
        self._transport.connect("raw", description)
        self._transport.prepare("raw", [region])
        self._there = region

    def write(self, nbytes: int = 0, *, pauses: bool = False) -> float:
        """Seconds of one write of `nbytes` as one descriptor; 0: of the whole memory. `pauses`: between its polls."""
        here, there = self._region.base, self._there.base
        spans = Spans(*(np.array([one], np.int64) for one in (here, there, nbytes or self._region.nbytes)))
        start = time.perf_counter()
        self._transport.post("raw", spans, b"raw")
        self._await(1, PAUSE_S if pauses else 0.0)
        return time.perf_counter() - start

    def writes(self, sizes: Sequence[int]) -> float:
        """Seconds until all of `sizes` bytes are written, each as one descriptor of its own post, side by side."""
        ends = np.cumsum([0, *sizes])
        posts = [
            Spans(*(np.array([one], np.int64) for one in (self._region.base + at, self._there.base + at, nbytes)))
            for at, nbytes in zip(ends.tolist(), sizes, strict=False)
        ]
        start = time.perf_counter()
        for number, spans in enumerate(posts):
            self._transport.post("raw", spans, b"raw %d" % number)
        self._await(len(posts))
        return time.perf_counter() - start

    def _await(self, n_posts: int, pause_s: float = 0.0) -> None:
        while n_posts:
            for event in self._transport.poll():
                if isinstance(event, PostFailed):
                    raise event.error
                n_posts -= isinstance(event, Done)
            if pause_s and n_posts:
                time.sleep(pause_s)

    def idle(self) -> None:
        self._transport.poll()
        time.sleep(PAUSE_S)

    def close(self) -> None:
        self._transport.close()
