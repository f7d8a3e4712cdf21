"""Builds the C++ code with a sanitizer into build/ and runs what exercises it; then bugs that the sanitizer must see.

    python -m tests.native.sanitize asan | tsan

asan (with undefined behaviour): the driver, then the extension under the Python tests of host kernels, spans, the
control socket and the local transport. tsan: the driver alone, which is all that shares memory between threads; the
extension's own threads hold the interpreter's lock, and an interpreter not built for TSan would drown what it says.
Only g++ or clang++ and its own runtime libraries are needed (`CXX` names the compiler).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CXX = os.environ.get("CXX", "g++")
BASE = ["-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-pthread", "-Icsrc"]
FLAGS = {
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-fsanitize=thread"],
}
BUGS = {  # what each must say of the bugs that it is there for
    "asan": {"overflow": "heap-buffer-overflow", "undefined": "signed integer overflow"},
    "tsan": {"race": "data race"},
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "LSAN_OPTIONS": f"suppressions={HERE / 'lsan.supp'}:print_suppressions=0",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
TESTS = [
    "tests/test_spans.py", "tests/control/test_zmq.py", "tests/transport/test_local.py",
    "tests/kernels/test_checksum.py", "tests/kernels/test_pool.py",
]  # fmt: skip
# The numpy half and the reference have no C++ in them; copies of more than 4 MiB are the driver's.
LEFT_OUT = "not numpy and not reference and not more_threads and not big_copies"
IN_PYTHON = """
import sys, pytest, pdstage.native
assert "build/asan" in pdstage.native.ext.__file__, pdstage.native.ext.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""
BUG_IN_PYTHON = """
import numpy as np, pdstage.native
short = np.zeros(64, np.int64)
view = [[0, short.ctypes.data, 1024, 1, 1, 0, 0, 1, 0, 1, 0, 1024, 1, 0, 0]]
plan = pdstage.native.ext.CopyPlan(np.array(view), np.array([[1, 1]]), False, False)
items = np.zeros(1, np.int64)
out = np.zeros(1024, np.uint8)
plan.gather(out.ctypes.data, 1024, [(items.ctypes.data, 64, 1, 0, 0, 1)], 0)
"""


def ran(name: str, command: list[str], **env: str) -> None:
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **OPTIONS, **env}, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: failed with {done.returncode}: {' '.join(command)}")
    print(f"{name}: good, {time.monotonic() - start:.0f} s", flush=True)


def seen(bug: str, word: str, command: list[str], **env: str) -> None:
    """The sanitizer must end the command, and say what it saw."""
    env = {**os.environ, **OPTIONS, **env}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
    if not done.returncode or word not in done.stderr:
        raise SystemExit(f"nobody saw the planted bug {bug!r}: {done.stderr[-2000:]}")
    print(f"planted {bug}: seen ({word})", flush=True)


def driver(kind: str, folder: Path) -> None:
    target = folder / "driver"
    ran(
        "build of the driver",
        [CXX, *BASE, *FLAGS[kind], "-Wall", "-Wextra", "-Werror", "tests/native/driver.cpp", "-o", str(target)],
    )
    ran("driver", [str(target)])
    for bug, word in BUGS[kind].items():
        seen(bug, word, [str(target), bug])


def extension(folder: Path) -> None:
    import pybind11  # noqa: PLC0415  (only this half needs it)

    package = folder / "pdstage"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    for path in (ROOT / "pdstage").iterdir():  # the checkout's package, but for the extension
        if not path.name.startswith(("_native", "__pycache__")):
            (package / path.name).symlink_to(path)
    target = package / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = sorted(str(path) for path in (ROOT / "csrc").glob("*.cpp"))
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    shared = ["-fPIC", "-shared", "-fvisibility=hidden", *includes, *sources, "-ldl", "-o", str(target)]
    ran("build of the extension", [CXX, *BASE, *FLAGS["asan"], *shared])
    runtimes = [_answer(f"-print-file-name={name}") for name in ("libasan.so", "libubsan.so")]
    env = {
        "LD_PRELOAD": " ".join(path for path in runtimes if Path(path).is_absolute()),
        "ASAN_OPTIONS": OPTIONS["ASAN_OPTIONS"] + ":detect_leaks=0",  # the interpreter leaves what it made at its end
        "PYTHONPATH": f"{folder}:{ROOT}",
        "PYTHONSAFEPATH": "1",
        "PDSTAGE_NATIVE": "yes",
    }
    seen("overread through Python", "heap-buffer-overflow", [sys.executable, "-c", BUG_IN_PYTHON], **env)
    options = ["-q", "-p", "no:cacheprovider", "-o", "pythonpath=tests", "-k", LEFT_OUT]
    ran("extension", [sys.executable, "-c", IN_PYTHON, *options, *TESTS], **env)


def _answer(question: str) -> str:
    return subprocess.run([CXX, question], check=True, capture_output=True, text=True).stdout.strip()


def main(kind: str) -> None:
    if shutil.which(CXX) is None:
        raise SystemExit(f"there is no compiler {CXX}; name one: CXX=clang++")
    folder = ROOT / "build" / kind
    folder.mkdir(parents=True, exist_ok=True)
    driver(kind, folder)
    if kind == "asan":
        extension(folder)


if __name__ == "__main__":
    if sys.argv[1:] not in (["asan"], ["tsan"]):
        raise SystemExit("python -m tests.native.sanitize asan | tsan")
    main(sys.argv[1])
