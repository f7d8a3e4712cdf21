"""What the wheel and the sdist hold, and what PDSTAGE_NATIVE does to them.

Every build runs on a copy of the checkout, so that nothing is left in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import pdstage
from tests.processes import python
from tests.test_architecture import FOLDERS, ROOT

LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")


def wheel_of(source: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    return python(*command, cwd=out, env={**os.environ, **env})


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked tree, symlinks kept."""
    copy = tmp_path_factory.mktemp("checkout") / "pdstage"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    python("-c", code, check=True, cwd=checkout)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out, filter="data")
    return next(path for path in out.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built of the sdist without the extension."""
    out = tmp_path_factory.mktemp("wheel")
    done = wheel_of(sdist, out, PDSTAGE_NATIVE="no")
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def expected_modules(root: Path) -> set[str]:
    """Installed names of all Python files, from the folders they live in."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(root / folder)}"
        for folder, package in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }


def test_wheel_holds_every_module_once_under_pdstage(checkout: Path, wheel: zipfile.ZipFile) -> None:
    assert wheel.filename.endswith("-py3-none-any.whl"), wheel.filename
    names = wheel.namelist()
    assert len(names) == len(set(names)), "a name twice"
    assert {name.split("/")[0] for name in names} == {"pdstage", f"pdstage-{pdstage.__version__}.dist-info"}
    assert {name for name in names if name.endswith(".py")} == expected_modules(checkout)
    assert "pdstage/py.typed" in names
    for path in [*checkout.glob("csrc/cuda/*.cu*"), checkout / "bench/limits.c"]:  # what is compiled at run time
        assert wheel.read(f"pdstage/{path.relative_to(checkout)}") == path.read_bytes()


def test_sdist_holds_sources_once(checkout: Path, sdist: Path) -> None:
    held = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    sources = {
        str(path.relative_to(checkout))
        for folder in ("csrc", "kernels", "bench", "pdstage", "tests")
        for path in (checkout / folder).rglob("*")
        if path.is_file() and path.suffix in {".py", ".c", ".cpp", ".hpp", ".cu", ".cuh"}
        if not any(parent.is_symlink() for parent in path.parents)
    }
    assert sources <= held, sorted(sources - held)
    assert {"LICENSE", "setup.py", "pyproject.toml", "constraints.txt", "Makefile"} <= held
    assert not [name for name in held if name.startswith(("pdstage/kernels", "pdstage/csrc", "pdstage/bench"))]


@pytest.mark.parametrize(
    ("native", "words"),
    [("maybe", "PDSTAGE_NATIVE='maybe' is neither yes nor no"), ("yes", "false"), ("", None)],
    ids=["no such choice", "yes", "unset"],
)
def test_a_build_without_a_compiler(native: str, words: str | None, checkout: Path, tmp_path: Path) -> None:
    """Said loudly where the extension was asked for; else the wheel goes without."""
    done = wheel_of(checkout, tmp_path, PDSTAGE_NATIVE=native, CC="false", CXX="false")
    said, wheels = done.stdout + done.stderr, list(tmp_path.glob("*.whl"))
    assert (done.returncode == 0) is bool(wheels) is (words is None), said
    assert words is None or words in said
    assert not [name for one in wheels for name in zipfile.ZipFile(one).namelist() if name.endswith(".so")]


def test_pins_satisfy_ranges() -> None:
    """Every requirement of what `make setup` installs has a pin, and the pin lies in its range."""
    from packaging.requirements import Requirement  # noqa: PLC0415
    from packaging.utils import canonicalize_name  # noqa: PLC0415
    from packaging.version import Version  # noqa: PLC0415

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines[1:])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    sets = ("torch", "nixl", "mooncake", "demo", "metrics", "top", "docs", "dev")
    for text in [*project["dependencies"], *(one for name in sets for one in extras[name])]:
        wanted = Requirement(text)
        assert Version(pins[canonicalize_name(wanted.name)]) in wanted.specifier, text
