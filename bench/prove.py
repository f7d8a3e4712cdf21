"""One command that proves the kernels on the GPU at hand: every GPU test, then the whole GPU benchmark.

Runs unattended: neither a failed nor a hanging test keeps the benchmark from running, and the exit code is 0 only if
both were good. Works from a checkout with nothing installed but torch, pytest and the backends' own packages.

    python -m pdstage.bench.prove             tests and benchmark, in under 9 minutes
    python -m pdstage.bench.prove --sanitize  each kernel test again under compute-sanitizer
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pdstage
from pdstage import environment
from pdstage.errors import UsageError

from . import curves, gpu, harness

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(pdstage.__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
TESTS = "tests/gpu"
TESTS_S = 165.0  # with the benchmark's budget under 9 minutes
_SANITIZED_S = 280.0
_PROBE_S = 120.0
_ALONE = {"test_streams.py"}  # it sees what any process allocates on the device
# A tool, the tests it runs and the variants: barriers and shared memory are the bulk kernel's alone.
TOOLS = (
    ("memcheck", ""),
    ("racecheck", "bulk"),
    ("synccheck", "bulk"),
)
# Few cases, and each tensor in memory of its own: inside a cached block nothing is out of bounds.
_SANITIZED = {environment.GPU_TESTS.name: "few", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_GOOD_EXITS = (0, 5)  # pytest: all good, and nothing chosen


def tests(budget_s: float = TESTS_S) -> list[str]:
    """Runs each file of GPU tests in a process of its own, since a faulting kernel spoils its process's context.

    Side by side, but for those that watch the device's memory. In words what failed; empty if all is well.
    """
    stop_at = time.monotonic() + budget_s

    def one(path: Path) -> str:
        left_s = stop_at - time.monotonic()
        problem = _pytest([], path, [], left_s) if left_s > 1 else "no time was left"
        return f"{TESTS}/{path.name}: {problem}" if problem else ""

    files = sorted((ROOT / TESTS).glob("test_*.py"))
    with ThreadPoolExecutor(len(files)) as pool:
        said = [*pool.map(one, [path for path in files if path.name not in _ALONE])]
    said += [one(path) for path in files if path.name in _ALONE]
    return [line for line in said if line]


def sanitize(budget_s: float = _SANITIZED_S) -> list[str]:
    """The kernel tests under compute-sanitizer; skipped, saying why, where the tool or the driver does not allow it."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        print("sanitize: skipped: compute-sanitizer is not on the PATH nor in /usr/local/cuda/bin")
        return []
    problem = _refused(tool)
    if problem:
        print(f"sanitize: skipped: compute-sanitizer cannot watch this device: {problem}")
        return []
    stop_at, failed = time.monotonic() + budget_s, []
    for check, chosen in TOOLS:
        command = [tool, "--tool", check, "--target-processes", "all", "--error-exitcode", "97"]
        left_s = stop_at - time.monotonic()
        selected = ["-k", chosen] if chosen else []
        path = ROOT / TESTS / "test_space.py"
        problem = _pytest(command, path, selected, left_s, **_SANITIZED) if left_s > 1 else "no time was left"
        print(f"sanitize: {check}: {problem or 'good'}")
        if problem:
            failed.append(f"{check}: {problem}")
    return failed


def _refused(tool: str) -> str:
    """Why the tool does not run a plain CUDA program here; empty if it does."""
    program = "import torch; print(int(torch.arange(4, device='cuda').sum()))"
    code, printed = gpu.call([tool, "--error-exitcode", "97", sys.executable, "-c", program], _PROBE_S)
    if code == 0 and "6" in printed.split():
        return ""
    return printed.strip()[-300:] or f"exit code {code}"


def _pytest(before: list[str], path: Path, more: list[str], left_s: float, **env: str) -> str:
    """Runs pytest on `path` and shows what it printed, in $OUT as well; what went wrong, empty if nothing."""
    command = [*before, sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider"]
    code, printed = gpu.call([*command, "-m", "gpu or multigpu", *more], left_s, ROOT, **env)
    problem = f"not done after {left_s:.0f} s" if code is None else f"exit code {code}"
    print(f"== {' '.join([*before, path.name, *more])}\n{printed}", flush=True)
    out = _out()
    if out:
        (out / f"{path.stem}{'-' + before[2] if before else ''}.txt").write_text(printed)
    return "" if code in _GOOD_EXITS else problem


def _out() -> Path | None:
    """The folder in $OUT, made if need be."""
    named = os.environ.get("OUT")
    if named:
        Path(named).mkdir(parents=True, exist_ok=True)
    return Path(named) if named else None


def bench(quick: bool) -> list[str]:
    """Runs the benchmark and writes bench/results/<gpu>.json, to $OUT as well; what failed."""
    report = harness.run_named("gpu", quick)
    name = curves.slug(report["machine"].get("gpu", {}).get("name", "")) or "gpu"
    text = json.dumps(report, indent=1) + "\n"
    path = RESULTS / f"{name}{'-quick' if quick else ''}.json"
    path.write_text(text)
    print(f"written: {path}")
    out = _out()
    if out:
        (out / path.name).write_text(text)
    return [f"bench: {line}" for line in report["failed"]]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything was good, 1 if not, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="the kernel tests under compute-sanitizer instead")
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    given = parser.parse_args(argv)
    if not gpu.has_device():
        said = UsageError("no CUDA device that torch can use", remedy="run it on a machine with a GPU", field="device")
        print(f"{'sanitize: skipped' if given.sanitize else 'gpu'}: {said}", file=sys.stderr)
        return 0 if given.sanitize else 2
    failed = sanitize() if given.sanitize else [*tests(), *bench(given.quick)]
    for line in failed:
        print(f"FAILED {line}")
    print("all good" if not failed else f"{len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
