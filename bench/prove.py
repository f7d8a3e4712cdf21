"""One command that tests the kernels on the present GPU: its tests and the whole GPU benchmark, in under ten minutes.

It runs unattended: a part that fails or hangs does not stop the rest. The most important parts come first, and parts
without time left are named. It writes one JSON and one log, in $OUT if that is set. The JSON is complete at any moment,
so a killed run leaves what it had measured. It works from a checkout with only torch and the backends' own packages
installed; `pdstage.bench.kit` prepares a folder with everything else it needs.

    python3 -m pdstage.bench.prove                              tests and benchmark
    python3 -m pdstage.bench.prove --require cuda,triton,ipc    what is left out or skipped of these is a failure
    python3 -m pdstage.bench.prove --rehearse                   the same on the CPU, tiny: everything but the numbers
    python3 -m pdstage.bench.prove --sanitize                   each kernel test again under compute-sanitizer

The exit code is 0 if all was run and succeeded, 1 if not, 2 without a device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdstage import environment
from pdstage.errors import UsageError

try:
    from . import curves, gpu, harness, kit
    from .runner import DROPPED, ROOT, Command, Record, Runner, Section, call
except ModuleNotFoundError as lacking:
    if __name__ != "__main__":
        raise
    why = f"nothing was run: {lacking}; install numpy and torch for {sys.executable}"
    folder = Path(os.environ.get("OUT") or Path(__file__).resolve().parents[1] / "build/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps({"finished": True, "failed": [why]}))
    sys.exit(f"gpu: {why}")

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

RESULTS = ROOT / "bench/results"
SCRATCH = ROOT / "build/gpu"
"""The folder for the log if $OUT is not set, and for rehearsals."""
TESTS = ("tests/gpu", "tests/engines/vllm")
BUDGET_S = 540.0
_SMOKE = "tests/gpu/test_space.py"
_ALONE = "tests/gpu/test_streams.py"  # it sees what any process allocates on the device
# Words that occur in the name of a test, a row or a section to which the requirement applies.
REQUIREMENTS = {
    "cuda": ("cuda plain", "cuda bulk", "cuda-plain", "cuda-bulk"),
    "triton": ("triton",),
    "ipc": ("test_local_", "test_contract.py: ", "[local", "rooms:", "rooms, local"),
    "nixl": ("test_contract.py: ", "[nixl", "test_contract.py::test_rooms", "rooms, nixl"),
}
_MULTI_GPU = "CUDA devices, this machine has 1"
_SLOWER = 20
_SANITIZED_S = 280.0
_PROBE_S = 120.0
# A tool and the variants it runs on: only the bulk kernel has barriers and shared memory.
TOOLS = (("memcheck", ""), ("racecheck", "bulk"), ("synccheck", "bulk"))
_FEW = {environment.GPU_TESTS.name: "few"}
# Each tensor in separate memory: inside a cached block nothing is out of bounds.
_SANITIZED = {**_FEW, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def sections(device: str = "cuda:0") -> list[Section]:
    """In the order of their worth. The tests have time of their own."""
    rest, vllm = (tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / at).glob("test_*.py"))) for at in TESTS)
    measured = list(gpu.ORDER)
    n_first = [one.name for one in measured].index("fused")
    return [
        measured[0],
        Section("smoke", 45.0, tests=(_SMOKE,), env=_FEW),
        *measured[1:n_first],
        Section("tests", 150.0, tests=tuple(path for path in rest if path != _ALONE), keeps_s=110.0),
        Section("streams", 60.0, tests=(_ALONE,), keeps_s=60.0),
        Section("vllm", 100.0, tests=vllm, keeps_s=60.0, env={"ENGINES_DEVICE": device}),
        *measured[n_first:],
    ]


def prove(
    device: str, name: str, *, quick: bool, require: Sequence[str], stop_at: float, chosen: Sequence[Section]
) -> dict[str, Any]:
    """Runs `chosen` and returns the report, which is on disk as well. `name` is that of the files."""
    begun = time.monotonic()
    out, kept = _out(), RESULTS if device != "cpu" else SCRATCH
    record = Record(
        [folder / f"{name}.json" for folder in {kept, out}], name="gpu", quick=quick, device=device,
        command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), machine=harness.machine(), commit=harness.commit(),
        kit=kit.told(), budget_s=round(stop_at - begun, 1), require=list(require),
    )  # fmt: skip
    with (out / f"{name}.log").open("w") as log, _ended_by_signals():
        runner = Runner(record, log, stop_at=stop_at, device=device, quick=quick)
        runner.run(chosen)
    record.report["failed"] += [f"required: {said}" for said in missed(require, record)]
    record.report |= {"finished": True, "seconds": round(time.monotonic() - begun, 1)}
    record.write()
    print(f"written: {', '.join(map(str, [*record.paths, out / f'{name}.log']))}")
    return record.report


def missed(require: Sequence[str], record: Record) -> list[str]:
    """What was skipped, left out or dropped of what is required; tests of one file for one reason together. What one
    GPU is too few for is no skip.
    """
    said = [tuple(one.split(": ", 1)) for one in record.left_out()]
    said += [(test, why) for test, why in record.skipped if _MULTI_GPU not in why]
    n_of = Counter(
        f"{name}: {what.partition('::')[0]}: {why}"
        for name in require
        for what, why in said
        if any(word in f"{what}: {why}".lower() for word in REQUIREMENTS[name])
    )
    return [f"{one} ({n} times)" if n > 1 else one for one, n in n_of.items()]


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM ends this process as an exception does, and with it what it has started."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _out() -> Path:
    """$OUT, or a folder of this checkout that git ignores."""
    folder = Path(os.environ.get("OUT") or SCRATCH)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sanitize(log: IO[str], budget_s: float = _SANITIZED_S) -> list[str]:
    """The kernel tests under compute-sanitizer; skipped, saying why, where the tool or the driver does not allow it."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        print("sanitize: skipped: compute-sanitizer is not on the PATH nor in /usr/local/cuda/bin")
        return []
    problem = _refused(tool, log)
    if problem:
        print(f"sanitize: skipped: compute-sanitizer cannot watch this device: {problem}")
        return []
    stop_at, failed = time.monotonic() + budget_s, []
    for check, chosen in TOOLS:
        left_s = stop_at - time.monotonic()
        problem = _sanitized(tool, check, chosen, left_s, log) if left_s > 1 else "no time was left"
        print(f"sanitize: {check}: {problem or 'good'}")
        if problem:
            failed.append(f"{check}: {problem}")
    return failed


def _sanitized(tool: str, check: str, chosen: str, left_s: float, log: IO[str]) -> str:
    """What went wrong, empty if nothing."""
    watched = [tool, "--tool", check, "--target-processes", "all", "--error-exitcode", "97"]
    tests = [sys.executable, "-m", "pytest", _SMOKE, "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    (ended,) = call([Command(check, [*watched, *tests, *(["-k", chosen] if chosen else [])], _SANITIZED)], left_s, log)
    if ended.code is None:
        return f"not done after {left_s:.0f} s"
    return "" if ended.code in (0, 5) else f"exit code {ended.code}"


def _refused(tool: str, log: IO[str]) -> str:
    """Why the tool does not run a plain CUDA program here; empty if it does."""
    program = "import torch; print(int(torch.arange(4, device='cuda').sum()))"
    command = Command("probe", [tool, "--error-exitcode", "97", sys.executable, "-c", program])
    (ended,) = call([command], _PROBE_S, log)
    if ended.code == 0 and "6" in ended.printed.split():
        return ""
    return ended.printed.strip()[-300:] or f"exit code {ended.code}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitize", action="store_true", help="the kernel tests under compute-sanitizer instead")
    parser.add_argument("--quick", action="store_true", help="a look, not a measurement")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, tiny; the numbers mean nothing")
    parser.add_argument("--require", default="", metavar="LIST", help=f"of {', '.join(REQUIREMENTS)}")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help="default %(default).0f")
    parser.add_argument("--only", default="", metavar="LIST", help="these sections")
    given = parser.parse_args(argv)
    stop_at = time.monotonic() + given.budget_s
    kit.install()
    try:
        require = _named(given.require, REQUIREMENTS, "require")
        runs_on = "cpu" if given.rehearse else "cuda:0"
        known = {section.name: section for section in sections(runs_on)}
        chosen = [known[name] for name in _named(given.only, known, "only") or known]
        if given.rehearse:  # a slow or busy machine is not a fault of what is rehearsed
            chosen = [section._replace(most_s=_SLOWER * section.most_s) for section in chosen]
    except UsageError as error:
        parser.error(str(error))
    device = "rehearsal" if given.rehearse else gpu.device_name()
    if not device:
        said = UsageError("no CUDA device that torch can use", remedy="run it on a machine with a GPU", field="device")
        print(f"{'sanitize: skipped' if given.sanitize else 'gpu'}: {said}", file=sys.stderr)
        return 0 if given.sanitize else 2
    if given.sanitize:
        with (_out() / "sanitize.log").open("w") as log:
            return _verdict(sanitize(log))
    report = prove(
        runs_on,
        f"{curves.slug(device)}{'-quick' if given.quick else ''}",
        quick=given.quick or given.rehearse,
        require=require,
        stop_at=stop_at,
        chosen=chosen,
    )
    incomplete = show(report)
    return _verdict(report["failed"], incomplete)


def _named(text: str, known: dict[str, Any], field: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"--{field} names {name!r}", remedy=f"choose of {', '.join(known)}", field=field)
    return names


def show(report: dict[str, Any]) -> list[str]:
    """What was dropped comes first. Returns what of the chosen was not run, in words."""
    tests = report["tests"]
    incomplete = [f"{one['name']}: {one['why']}" for one in report["sections"] if one["state"] == DROPPED]
    incomplete += [f"{tests['not_run']} tests"] if tests["not_run"] else []
    for line in incomplete:
        print(f"NOT RUN {line}")
    print(harness.table(report))
    print(f"tests: {', '.join(f'{tests[what]} {what}' for what in ('passed', 'failed', 'skipped', 'not_run'))}")
    for skip in tests["skips"]:
        print(f"skipped: {skip['n']} of {skip['file']}: {skip['why']}")
    for line in report["left_out"]:
        print(f"left out: {line}")
    return incomplete


def _verdict(failed: Sequence[str], incomplete: Sequence[str] = ()) -> int:
    for line in failed:
        print(f"FAILED {line}")
    print(f"{len(failed)} failed" if failed else f"not run: {'; '.join(incomplete)}" if incomplete else "all good")
    return 1 if failed or incomplete else 0


if __name__ == "__main__":
    sys.exit(main())
