"""Triton's kernels: in its interpreter against the reference, and as machine code for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("torch") and importlib.util.find_spec("triton")), reason="needs torch and triton"
)


def test_everything_in_the_interpreter():
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here / "interpreted_triton.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=here.parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
