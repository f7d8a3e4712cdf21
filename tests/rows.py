"""Rows of tests: the transports that work here, and which of them only FULL=1 runs; and how many drawn cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache

import pytest

both_paths = pytest.mark.parametrize("path", ["staged", "direct"])
either_side = pytest.mark.parametrize("side", ["prefill", "decode"])
inline_or_thread = pytest.mark.parametrize("progress", ["inline", "thread"])
everything = False
"""Whether FULL=1 asked for all rows and all drawn cases; conftest.py sets it before test modules are imported."""


def drawn(n: int, *, full: int) -> int:
    """How many cases to draw: `n` in `make test`."""
    return full if everything else n


@cache
def _reasons() -> Mapping[str, str]:
    from pdstage.transport import available  # noqa: PLC0415  (conftest.py imports this where only tests of GPUs can run)

    return available()


def usable(*names: str) -> list[str]:
    """Those of `names` that start on this machine."""
    reasons = _reasons()
    return [name for name in names if not reasons.get(name, "unknown")]


def rows(names: Iterable[object], *, full: Collection[object]) -> list[object]:
    """A parameter for each of `names`; those in `full` cost more time than `make test` has."""
    return [pytest.param(name, marks=pytest.mark.full if name in full else ()) for name in names]
