"""The nodes' fixture, of the manager's tests."""

from __future__ import annotations

from tests.manager.conftest import site

__all__ = ["site"]
