"""Prepares a folder of packages that a GPU machine may lack, where there is a package registry; `prove` finds it.

    python -m pdstage.bench.kit            into .gpu-kit of this checkout, which git ignores; at most 64 MiB

It has, for Python 3.11 and 3.12 on x86-64: msgspec, pyzmq and psutil, NIXL without the parts that one GPU does not
need, pytest, hypothesis, rich, the compiled extension, and vLLM without its compiled operators, as the adapter's tests
need it. Only missing packages are used from it.
`kit.json` lists its content, and why the rest is absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pdstage
from pdstage.errors import PdstageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(pdstage.__file__).resolve().parent.parent
FOLDER = ROOT / ".gpu-kit"
UNPACKED = ROOT / "build/gpu-kit"
"""Where its archives are unpacked."""
PYTHONS = ("3.11", "3.12")
MOST_NBYTES = 64 << 20
_ABOUT, _EXTENSION = "kit.json", "extension"
_PINS = ("constraints.txt", "tests/engines/requirements-vllm.txt")
# pip takes a wheel for exactly the platforms it is told of: those of a C library that any image with Python 3.11 has.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)] + ["manylinux2014_x86_64"]
_NOT_HERE = {
    "cupy": "its wheel has 66 MiB for one Python: without it the CUDA kernels and CUDA IPC are left out, Triton is not",
}


class Package(NamedTuple):
    """Distributions that come together, `module` being what needs them; `keep` says which of their files are wanted."""

    module: str
    distributions: tuple[str, ...]
    keep: Callable[[Path], Iterable[Path]]


def everything(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def of_nixl(folder: Path) -> Iterable[Path]:
    """Python's part, the plugin for UCX, UCX's modules for CUDA and within a host, and what these load by name.

    Left out: other plugins, NIXL's own device library (nixl_ep, three quarters of the wheel), RDMA, tools.
    """
    libraries = folder / "nixl_cu13.libs"
    wanted = [path for name in ("nixl", "nixl_cu13") for path in everything(folder / name)]
    wanted += [folder / "nixl_meta_utils.py", *folder.glob("*.dist-info/METADATA")]
    wanted += folder.glob(".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so")
    wanted += [libraries / "nixl/libplugin_UCX.so"]
    wanted += [path for name in ("uct_cuda", "ucm_cuda", "uct_cma") for path in libraries.glob(f"ucx/lib{name}.so*")]
    by_name = {path.name: path for path in everything(folder) if ".so" in path.name and path.parent.name != "plugins"}
    found: dict[Path, None] = {}
    while wanted:
        path = wanted.pop()
        if path not in found:
            found[path] = None
            wanted += [by_name[name] for name in _needed(path) if name in by_name] if ".so" in path.name else []
    return found


def of_vllm(folder: Path) -> Iterable[Path]:
    """Python's part of vLLM, and all of what it imports."""
    return (path for path in everything(folder) if path.relative_to(folder).parts[0] != "vllm" or path.suffix == ".py")


_VLLM = (
    "vllm", "annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "compressed-tensors", "fastapi", "httpcore2",
    "httpx2", "jiter", "llguidance", "loguru", "openai", "openai-harmony", "opentelemetry-api", "opentelemetry-sdk",
    "opentelemetry-semantic-conventions", "partial-json-parser", "pybase64", "pydantic", "pydantic-core", "sniffio",
    "starlette", "truststore", "typing-inspection", "uvicorn", "xgrammar",
)  # fmt: skip
PACKAGES = (
    Package("msgspec", ("msgspec",), everything),
    Package("zmq", ("pyzmq",), everything),
    Package("psutil", ("psutil",), everything),
    Package("pytest", ("pytest", "iniconfig", "pluggy", "packaging"), everything),
    Package("hypothesis", ("hypothesis", "sortedcontainers"), everything),
    Package("nixl", ("nixl", "nixl-cu13"), of_nixl),
    Package("rich", ("rich", "markdown-it-py", "mdurl"), everything),
    Package("pygments", ("pygments",), everything),
    Package("vllm", _VLLM, of_vllm),
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything is in the folder that belongs there, 1 if a part is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="default %(default)s")
    given = parser.parse_args(argv)
    try:
        about = prepare(given.folder)
    except PdstageError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    for name, nbytes in about["nbytes"].items():
        print(f"{nbytes / 2**20:6.1f} MiB  {name}")
    print(f"{sum(about['nbytes'].values()) / 2**20:6.1f} MiB in {given.folder}")
    for name, why in about["left_out"].items():
        print(f"left out: {name}: {why}")
    return 1 if about["left_out"].keys() - _NOT_HERE.keys() else 0


def prepare(folder: Path) -> dict[str, Any]:
    """Makes the folder anew, and says what is in it. Raises `UsageError` for a folder that is something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / _ABOUT).exists():
        raise UsageError(f"{folder} is a folder with something else in it", remedy="name a new one", folder=str(folder))
    for old in (folder, UNPACKED):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    about: dict[str, Any] = {"pythons": PYTHONS, "nbytes": {}, "left_out": dict(_NOT_HERE)}
    parts: dict[str, Callable[[], None]] = {
        package.module: lambda package=package: _bring(package, folder / package.module)  # type: ignore[misc]
        for package in PACKAGES
    }
    parts |= {f"extension for {v}": lambda v=v: _build(v, folder / _EXTENSION) for v in PYTHONS}  # type: ignore[misc]
    before = 0
    for name, bring in parts.items():
        try:
            bring()
        except (PdstageError, OSError) as error:
            about["left_out"][name] = str(error)
        about["nbytes"][name] = _nbytes(folder) - before
        before = _nbytes(folder)
    if before > MOST_NBYTES:
        raise UsageError(f"{folder} has {before} bytes", remedy=f"leave out enough for {MOST_NBYTES}")
    (folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return about


def _bring(package: Package, into: Path) -> None:
    """An archive of wheels for every Python over each other: what differs between them has the Python in its name."""
    with tempfile.TemporaryDirectory() as held:
        unpacked, kept = Path(held) / "unpacked", Path(held) / "kept"
        for version in PYTHONS:
            for wheel in _download(package.distributions, version, Path(held) / version):
                zipfile.ZipFile(wheel).extractall(unpacked)
        for path in package.keep(unpacked):
            target = kept / path.relative_to(unpacked)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            if ".so" in path.name:
                _call(["strip", "--strip-unneeded", str(target)])
        shutil.make_archive(str(into), "zip", kept)


def _download(names: Sequence[str], version: str, into: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(into)]
    command += ["--python-version", version, "--implementation", "cp"]
    command += [part for pins in _PINS for part in ("-c", str(ROOT / pins))]
    _call([*command, *(part for name in _PLATFORMS for part in ("--platform", name)), *names])
    return sorted(into.glob("*.whl"))


def _build(version: str, into: Path) -> None:
    """The extension for a Python that is here with its headers. It brings the C++ library along."""
    import pybind11  # noqa: PLC0415  (of those who prepare a kit)

    code = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'))"
    headers, suffix = _call([_python(version), "-c", code]).split()
    if not Path(headers, "Python.h").is_file():
        raise UsageError(f"Python {version} is here without its headers", remedy=f"install python{version}-dev")
    into.mkdir(exist_ok=True)
    flags = ["-std=c++20", "-O3", "-fvisibility=hidden", "-pthread", "-shared", "-fPIC", "-s"]
    flags += [
        "-static-libstdc++",
        "-static-libgcc",
        f"-I{ROOT / 'csrc'}",
        f"-I{pybind11.get_include()}",
        f"-I{headers}",
    ]
    sources, target = sorted((ROOT / "csrc").glob("*.cpp")), into / f"_native{suffix}"
    _call([os.environ.get("CXX", "c++"), *flags, *map(str, sources), "-ldl", "-o", str(target)])


def _python(version: str) -> str:
    """An interpreter of that version. Raises `UsageError` where there is none."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    said = "it is not on the PATH"
    for found in filter(None, (shutil.which(f"python{version}", path=one) for one in os.get_exec_path())):
        try:
            _call([found, "-c", ""])
        except UsageError as error:
            said = str(error)
        else:
            return found
    raise UsageError(f"no Python {version}: {said}", remedy=f"put a python{version} on the PATH")


def _needed(library: Path) -> list[str]:
    """The libraries that it loads by name."""
    told = _call(["readelf", "-d", str(library)]).splitlines()
    return [line.partition("[")[2].partition("]")[0] for line in told if "(NEEDED)" in line]


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"{command[0]} does not run: {error}", remedy="install it") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UsageError(f"{Path(command[0]).name}: {said[-1] if said else done.returncode}", remedy="see above")
    return done.stdout


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in everything(folder))


# What prove asks of it.


@lru_cache(maxsize=1)
def used() -> dict[str, Path]:
    """By module: the folders of those packages that this Python lacks and the kit has for it, unpacked."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not (FOLDER / _ABOUT).exists() or version not in PYTHONS:
        return {}
    lacking = [package.module for package in PACKAGES if importlib.util.find_spec(package.module) is None]
    archives = {name: FOLDER / f"{name}.zip" for name in lacking}
    found = {name: UNPACKED / name for name, archive in archives.items() if archive.exists()}
    for name, folder in found.items():
        if not folder.is_dir():
            shutil.unpack_archive(archives[name], folder)
    return found


def paths() -> list[str]:
    """For PYTHONPATH."""
    return [str(path) for path in used().values()]


def install() -> None:
    """Puts the extension where Python looks for it, if it is not there."""
    name = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    made, target = FOLDER / _EXTENSION / name, ROOT / "pdstage" / name
    if made.exists() and not target.exists():
        shutil.copy(made, target)


def told() -> dict[str, Any]:
    """What of the kit is used, for a report."""
    return {"here": (FOLDER / _ABOUT).exists(), "used": sorted(used())}


if __name__ == "__main__":
    sys.exit(main())
