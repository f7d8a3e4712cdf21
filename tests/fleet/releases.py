"""Pythons that have an earlier release: its wheel, built from the commit of its tag, in an environment of its own.

All other packages are those of the environment that this runs in. `build/releases` keeps what was made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pdstage
from tests.engines import lend

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("releases.toml")


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter and the release that it has."""

    version: str
    path: Path


def here() -> Python:
    return Python(f"{pdstage.__version__} (this)", Path(sys.executable))


def released() -> dict[str, str]:
    """Releases that this one promises to work with, oldest first: version and commit."""
    return dict(tomllib.loads(RECORD.read_text())["releases"])


class NoHistory(RuntimeError):
    """The checkout has no commit of that release: it is shallow, or no checkout at all."""


def python_of(version: str, within: str = "") -> Python:
    """Builds what is missing, in a minute or so; `within` names the environment if it is not the usual one. Raises
    `NoHistory`.
    """
    folder = ROOT / "build" / "releases" / (f"{version}-{within}" if within else version)
    python = folder / "venv" / "bin" / "python"
    commit = released()[version]
    made = folder / commit
    if not made.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install(_wheel(commit, folder), folder / "venv", python)
        made.touch()
    return Python(version, python)


def _wheel(commit: str, folder: Path) -> Path:
    """With the extension, as users have it."""
    source = folder / "source"
    source.mkdir(parents=True)
    with (folder / "source.tar").open("wb") as file:
        command = ["git", "-C", str(ROOT), "archive", commit]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise NoHistory(f"no commit {commit[:9]} here ({done.stderr.decode().strip()}); git fetch --unshallow --tags")
    with tarfile.open(folder / "source.tar") as archive:
        archive.extractall(source, filter="data")
    _run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source),
        env={"PDSTAGE_NATIVE": "yes"},
    )  # fmt: skip
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install(wheel: Path, venv: Path, python: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel))
    lend.main(str(python))


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
