"""The doctor as a command of its own, and broken installs of NIXL to put in front of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from pdstage.tools.doctor.found import Report

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 240


class Run:
    """One run of `pdstage doctor --json`: its exit code and its report."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.stderr = done.returncode, done.stderr
        assert done.stdout.startswith("{"), done.stderr
        self.raw = json.loads(done.stdout)
        self.report = msgspec.json.decode(done.stdout, type=Report)

    def line(self, name: str):
        return next(line for line in self.report.checks if line.name == name)


def doctor(*args: str, before: str = "", path: Path | None = None, **environment: str) -> Run:
    """`before`: code that its process runs first. `path`: a folder of packages before all others."""
    paths = [str(path)] if path is not None else []
    code = f"{textwrap.dedent(before)}\nimport sys\nfrom pdstage import cli\nsys.exit(cli.main(sys.argv[1:]))"
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)])}
    command = [sys.executable, "-c", code, "doctor", "--json", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S, check=False, cwd="/")
    return Run(done)


BLOCKED = """\
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13") else find(name, path, target)

PathFinder.find_spec = find_others
"""
# As much of NIXL's Python API as it takes to get to the fault; a package before the real one on the path.
WORKING = """\
import enum, os, signal, time
class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 1
def nixl_agent_config(**options):
    return options
class nixl_agent:
    backends = {"UCX": 1}
    def __init__(self, name, config):
        if config["backends"]:
            self.create_backend("UCX")
    def get_plugin_list(self):
        return ["GDS", "UCX", "POSIX"]
    def create_backend(self, name):
        %s
"""
BINDINGS = "class nixlBackendError(Exception): pass\n"


def fake_nixl(folder: Path, *, api: str, init: str = "") -> Path:
    package = folder / "nixl"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "_api.py").write_text(api)
    (package / "_bindings.py").write_text(BINDINGS)
    return folder


@pytest.fixture
def blocked(tmp_path):
    """A folder whose sitecustomize makes NIXL a package that is not there."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    return tmp_path
