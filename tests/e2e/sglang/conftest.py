"""How SGLang's models are saved."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def saving() -> tuple[str, ...]:
    from tests.e2e.sglang.engines import SAVING  # noqa: PLC0415  (what it imports is in SGLang's environment only)

    return SAVING
