"""A device to measure on: its memory, its streams, and a clock that hides the host's time.

The CPU is supported too, so that everything but the numbers can be tested there.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from pdstage.plan.tables import Index

from . import variants
from .harness import Spread, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Work = Callable[[], object]

_TRIED_NBYTES = 1 << 20
_FLUSH_NBYTES = 256 << 20  # several times any L2
_HEAD_START_CYCLES = 500_000  # about 0.3 ms: the host has enqueued everything before the clock starts
_WARM_UPS = 2


class Bed:
    """`device` is "cpu" or "cuda:0". `left_out` lists what could not be measured, and why."""

    def __init__(self, device: str, only: tuple[str, ...] = ()) -> None:
        self.device = device
        self.left_out: list[str] = []
        self.kind = device.partition(":")[0]
        self.variants = []
        for variant in (variants.HOST,) if self.kind == "cpu" else variants.ON_GPU:
            if only and variant not in only:
                continue
            problem = variants.missing(variant)
            if problem:
                self.left_out.append(f"{variant}: {problem}")
            else:
                self.variants.append(variant)
        self._flush = None if self.kind == "cpu" else torch.zeros(_FLUSH_NBYTES // 4, device=device)

    def transports_missing(self) -> dict[str, str]:
        """Every transport, and why it cannot move this device's memory; empty if it can. Needs msgspec."""
        from pdstage.transport import available  # noqa: PLC0415

        missing = dict(available())
        if self.kind == "cuda" and importlib.util.find_spec("cupy") is None:
            missing["local"] = "cupy is not installed"
        return missing

    @property
    def n_sms(self) -> int:
        if self.kind == "cpu":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def sized(self, nbytes: int) -> int:
        """`nbytes`; fewer on the CPU, where only the code is tested."""
        return min(nbytes, _TRIED_NBYTES) if self.kind == "cpu" else nbytes

    def memory(self, nbytes: int, *, poison: int | None = None) -> torch.Tensor:
        """Random bytes, or all of one value: zeros would hide unwritten bytes, and copy faster than data."""
        if poison is not None:
            return torch.full((nbytes,), poison, dtype=torch.uint8, device=self.device)
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device)

    def index(self, items: NDArray[Any], *, on_device: bool = True) -> Index:
        """The list where a call reads it: on the device, or on the host."""
        if self.kind == "cpu" or not on_device:
            return Index.of(items)
        held = torch.from_numpy(items).to(self.device)
        return Index(held.data_ptr(), items.itemsize * 8, items.size, 0, held, self.device)

    def stream(self) -> object:
        """The stream that the clock times."""
        return None if self.kind == "cpu" else torch.cuda.current_stream()

    def wait(self) -> None:
        if self.kind != "cpu":
            torch.cuda.synchronize()

    def spreads(self, works: Mapping[str, Work], repeats: int) -> dict[str, Spread]:
        """The seconds that the device spends on each of `works`, taken in turn, from cold caches.

        Before each, the L2 is filled with other bytes, and a sleeping kernel lets the host run ahead. Between the two
        events there is then only the device's work.
        """
        if self.kind == "cpu":
            for work in works.values():
                work()
            rounds = [[seconds(work) for work in works.values()] for _ in range(repeats)]
            return {name: Spread.of(list(times)) for name, times in zip(works, zip(*rounds, strict=True), strict=True)}
        for work in works.values():
            for _ in range(_WARM_UPS):
                work()
        self.wait()
        taken: dict[str, list[Any]] = {name: [] for name in works}
        for _ in range(repeats):
            for name, work in works.items():
                taken[name].append(self.timed(work))
            self.wait()
        return {name: Spread.of([took() for took in times]) for name, times in taken.items()}

    def timed(self, work: Work) -> Callable[[], float]:
        """Enqueues `work` between two events. The result, called once the device is done, returns its seconds."""
        start, stop = event(), event()
        if self._flush is not None:
            self._flush.sum()  # reading leaves no dirty lines for the next kernel to write back
        head_start()
        start.record()
        work()
        stop.record()
        return lambda: float(start.elapsed_time(stop)) / 1e3


def event() -> Any:  # noqa: ANN401  (torch's own is not annotated)
    """A CUDA event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def side_stream() -> Any:  # noqa: ANN401
    """A stream of high priority, as for staging kernels."""
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def head_start() -> None:
    """Keeps the current stream busy without touching memory."""
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
