"""What a process of a test's engine imports before anything else: see `tests.engines.stubs`."""

from __future__ import annotations

from tests.engines import stubs

stubs.install()
