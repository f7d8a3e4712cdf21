"""What pdstage logs is in SGLang's log, as each of its processes configures it: by the root logger, for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = """
import logging, sys
from types import SimpleNamespace
from tests.engines import stubs
stubs.install()
from sglang.srt.utils import configure_logger
import pdstage.manager

configure_logger(SimpleNamespace(log_level=sys.argv[1]), prefix=" TP0")
log = logging.getLogger("pdstage.manager.sessions")
log.info("session with %s", "decode rank tp 0 of 1")
log.warning("peer %s: %s", "10.0.0.1:5000", "was silent")
"""


@pytest.mark.parametrize(("level", "shown"), [("info", ["session", "peer"]), ("warning", ["peer"])])
def test_sglang_s_level_is_pdstage_s(level: str, shown: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, level], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "session with" in line or "was silent" in line]
    assert [line.partition("] ")[2].split()[0] for line in lines] == shown
    assert all(line.partition("]")[0].endswith("TP0") for line in lines)
