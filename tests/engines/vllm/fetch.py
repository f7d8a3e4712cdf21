"""Brings vLLM's own tests, which its wheel does not have: `python -m tests.engines.vllm.fetch`, in the engine's Python.

pip downloads the source archive of the very version that is installed. To name its version pip asks the archive's own
build script, which needs what `requirements-vllm.txt` has for it; nothing is built.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE = Path(sys.prefix) / "vllm-tests"
"""Their folder `tests`, without the conftest at its top, which wants all that vLLM's other tests need."""


def main() -> None:
    bring(importlib.metadata.version("vllm"), _is_wanted, PLACE)


def _is_wanted(inside: Path) -> bool:
    return inside.parts[:1] == ("tests",) and inside.suffix == ".py" and inside != Path("tests/conftest.py")


def bring(version: str, is_wanted: Callable[[Path], bool], place: Path) -> None:
    """Puts what `is_wanted` of the files of vLLM's source archive of that version into `place`, folders and all."""
    told = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    options = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", folder, f"vllm=={version}"]
        subprocess.run(command, check=True, env=os.environ | told)
        with tarfile.open(next(Path(folder).glob("vllm-*.tar.gz"))) as archive:
            for member in archive:
                inside = Path(*Path(member.name).parts[1:])
                if is_wanted(inside):
                    archive.extract(member.replace(name=str(inside)), place, filter="data")


if __name__ == "__main__":
    main()
