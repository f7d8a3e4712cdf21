"""The GPU benchmark: gather and scatter at the roofline, with few multiprocessors, and beside a model.

Needs torch and a CUDA device, and no compiled extension. Rooms between two processes also need msgspec and zmq.

    python -m pdstage.cli bench gpu --output FILE       from a checkout, with nothing installed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdstage import native
from pdstage.errors import UsageError

from .harness import Measured, Row
from .runner import ROW_FIELDS, Record, Runner, Section, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .bed import Bed

# The most important first, in case the time runs out, and how long each takes at most.
ORDER = (
    Section("compile", 75.0, "gpu_compile:rows"),
    Section("runs", 100.0, "gpu_kernels:runs"),
    Section("launch", 30.0, "gpu_kernels:launch"),
    Section("rooms", 120.0, "gpu_rooms:rows", by_kernel=False),
    Section("sms", 70.0, "gpu_kernels:sms"),
    Section("narrow", 30.0, "gpu_kernels:narrow"),
    Section("models", 90.0, "gpu_kernels:models"),
    Section("fused", 40.0, "gpu_kernels:fused"),
    Section("convert", 40.0, "convert:rows", by_kernel=False),
    Section("decode", 60.0, "gpu_beside:decode"),
)
SECTIONS = {section.name: section for section in ORDER}
BUDGET_S = 420.0


def run(quick: bool) -> Measured:
    """All of `ORDER`. Raises `UsageError` without a CUDA device."""
    if not device_name():
        raise UsageError("there is no CUDA device here", remedy="run it on a machine with one", field="device")
    record = Record([], machine={})
    Runner(record, sys.stderr, stop_at=time.monotonic() + BUDGET_S, device="cuda:0", quick=quick).run(ORDER)
    found = record.report
    if not record.rows and not found["failed"]:
        found["failed"].append(f"nothing could be measured: {'; '.join(record.left_out())}")
    return Measured(list(record.rows.values()), found["machine"], record.left_out(), found["failed"])


def device_name() -> str:
    """The first CUDA device's name; "" without one. Another process asks, so that this one has no context."""
    if not importlib.util.find_spec("torch"):
        return ""
    code = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    asked = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment())
    return asked.stdout.strip() if asked.returncode == 0 else ""


def measure(section: str, quick: bool, device: str, only: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A section's rows, measured in this process, and the parent's data about them."""
    from .bed import Bed  # noqa: PLC0415

    bed = Bed(device, only)
    yield {"machine": {"host_code": native.active()} | ({} if bed.kind == "cpu" else {"gpu": gpu()})}
    module, _, function = SECTIONS[section].work.partition(":")
    work: Callable[[Bed, bool], Iterable[Row]] = getattr(importlib.import_module(f"pdstage.bench.{module}"), function)
    for row in work(bed, quick) if bed.variants else ():
        yield {"row": {name: getattr(row, name) for name in ROW_FIELDS}}
    yield {"left_out": bed.left_out}


def gpu() -> dict[str, Any]:
    """The device and the software that a number depends on."""
    import torch  # noqa: PLC0415

    held = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": held.multi_processor_count,
        "memory_nbytes": held.total_memory,
        "l2_nbytes": getattr(held, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
    for name in ("triton", "cupy"):
        if importlib.util.find_spec(name):
            found[name] = importlib.import_module(name).__version__
    if "cupy" in found:
        found["driver"] = importlib.import_module("cupy").cuda.runtime.driverGetVersion()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """A child: writes one section's numbers to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--variant", action="append", default=[])
    given = parser.parse_args(argv)
    with given.out.open("w") as out:
        for line in measure(given.section, given.quick, given.device, tuple(given.variant)):
            print(json.dumps(line), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
