"""How SGLang's models are saved."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session")
def saving() -> list[str]:
    return [sys.executable, "-m", "tests.e2e.sglang.save"]
