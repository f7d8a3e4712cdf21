"""The doctor as a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import msgspec

from pdstage.tools.doctor.report import Report
from tests import processes

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
    return Run(processes.python("-c", code, "doctor", "--json", *args, env=env, timeout=DEADLINE_S, cwd="/"))
