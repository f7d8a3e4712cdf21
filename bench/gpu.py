"""The GPU benchmark: gather and scatter at the roofline, with few multiprocessors, beside the model and beside others.

Needs torch and a CUDA device, and no compiled extension, msgspec or zmq. Each section runs in a process of its own: a
kernel that faults takes its process's whole CUDA context along, and must not take the other sections' numbers.

    python -m pdstage.cli bench gpu --json FILE         from a checkout, with nothing installed
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pdstage
from pdstage.errors import UsageError

from . import variants
from .harness import Measured, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .bed import Bed

# In the order in which they would be missed most, should the time run out.
SECTIONS = {
    "runs": "gpu_kernels:runs",
    "models": "gpu_kernels:models",
    "sms": "gpu_kernels:sms",
    "launch": "gpu_kernels:launch",
    "sglang": "peers.sglang:rows",
    "gemm": "gpu_beside:gemm",
    "decode": "gpu_beside:decode",
    "fused": "gpu_kernels:fused",
    "ipc": "gpu_ipc:rows",
}
BUDGET_S = 330.0
_SECTION_S = 150.0
_LEAST_S = 5.0
_TAIL = 600
_TIMED_OUT = "not done"


def run(quick: bool) -> Measured:
    """All sections; raises `UsageError` where there is no CUDA device."""
    if not has_device():
        raise UsageError("there is no CUDA device here", remedy="run it on a machine with one", field="device")
    runner = Runner(quick, BUDGET_S)
    for section in SECTIONS:
        runner.run(section)
    if not runner.whole.rows and not runner.whole.failed:
        runner.whole.failed.append(f"nothing could be measured: {'; '.join(runner.whole.left_out)}")
    return runner.whole


def has_device() -> bool:
    """Whether torch sees a CUDA device; asked in a process of its own, so that this one holds no context."""
    if not importlib.util.find_spec("torch"):
        return False
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


class Runner:
    """Runs sections in children until `budget_s` is used up, and gathers in `whole` what they measured."""

    def __init__(self, quick: bool, budget_s: float, device: str = "cuda:0") -> None:
        self.whole = Measured([], {}, [], [])
        self._quick, self._device = quick, device
        self._stop_at = time.monotonic() + budget_s

    def run(self, section: str) -> None:
        """One section. If its child dies, a kernel at a time, so that only the culprit's numbers are lost."""
        problem = self._child(section, ())
        if problem and self._device != "cpu" and _TIMED_OUT not in problem:
            alone = [self._child(section, (variant,)) for variant in variants.ON_GPU]
            problem = "; ".join(filter(None, alone)) or f"{problem} (but not with each kernel by itself)"
        if problem:
            self.whole.failed.append(problem)

    def _child(self, section: str, only: tuple[str, ...]) -> str:
        """Adds what the section measures to `whole`; in words what went wrong, empty if nothing."""
        named = " with ".join((section, *only))
        left_s = min(_SECTION_S, self._stop_at - time.monotonic())
        if left_s < _LEAST_S:
            return f"{named}: {_TIMED_OUT}: no time was left"
        print(f"{named} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            problem = self._call([*self._command(section, out), *_variants(only)], left_s)
            self._add(out)
        return f"{named}: {problem}" if problem else ""

    def _call(self, command: list[str], left_s: float) -> str:
        code, printed = call(command, left_s)
        if code is None:
            return f"{_TIMED_OUT} after {left_s:.0f} s"
        return f"exit code {code}: {printed.strip()[-_TAIL:]}" if code else ""

    def _add(self, out: Path) -> None:
        """What the child wrote before its end, whatever that was; of a row measured twice the later."""
        lines = out.read_text().splitlines(keepends=True) if out.exists() else []
        for line in lines:
            if not line.endswith("\n"):
                break
            told = json.loads(line)
            if "row" in told:
                row = Row(**told["row"])
                self.whole.rows[:] = [*(held for held in self.whole.rows if held.name != row.name), row]
            self.whole.machine.update(told.get("machine", {}))
            self.whole.left_out.extend(said for said in told.get("left_out", ()) if said not in self.whole.left_out)

    def _command(self, section: str, out: Path) -> list[str]:
        command = [sys.executable, "-m", "pdstage.bench.gpu", section, str(out), "--device", self._device]
        return [*command, "--quick"] if self._quick else command


def call(command: Sequence[str], most_s: float, cwd: Path | None = None, **env: str) -> tuple[int | None, str]:
    """Runs a command and every process it starts; its exit code, None if it was ended after `most_s`, and output."""
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env={**environment(), **env}, start_new_session=True
        )
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                code = child.wait(most_s)
            finally:
                if child.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        out.seek(0)
        return code, out.read()


def _variants(only: tuple[str, ...]) -> list[str]:
    return [part for variant in only for part in ("--variant", variant)]


def environment() -> dict[str, str]:
    """This process's, with the package found where it is now: a checkout need not be installed."""
    root = str(Path(pdstage.__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))}


def measure(section: str, quick: bool, device: str, only: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A section's rows, measured in this process, and what a parent needs beside them."""
    from .bed import Bed  # noqa: PLC0415

    bed = Bed(device, only)
    yield {"machine": {} if bed.kind == "cpu" else {"gpu": gpu()}}
    module, _, function = SECTIONS[section].partition(":")
    work: Callable[[Bed, bool], Iterable[Row]] = getattr(importlib.import_module(f"pdstage.bench.{module}"), function)
    fields = Row.__dataclass_fields__
    for row in work(bed, quick) if bed.variants else ():
        yield {"row": {name: getattr(row, name) for name in fields}}
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
    """A child: one section's numbers into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--variant", action="append", default=[])
    given = parser.parse_args(argv)
    with given.out.open("w") as out:
        for told in measure(given.section, given.quick, given.device, tuple(given.variant)):
            print(json.dumps(told), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
