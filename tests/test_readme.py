"""The code of the README, and of pages that say so here, runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdstage

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "asyncio.md"]
BLOCKS = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("code", BLOCKS)
def test_code(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout + done.stderr, "a transfer that goes well says nothing"


def test_there_is_code():
    assert len(BLOCKS) >= len(PAGES)


def test_the_reading_list_names_every_module():
    listed = pdstage.__doc__ or ""
    for name in (
        "topology",
        "layout",
        "tensors",
        "plan",
        "kernels",
        "ring",
        "protocol",
        "transport",
        "stager",
        "manager",
    ):
        assert name in listed
