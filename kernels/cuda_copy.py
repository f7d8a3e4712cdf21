"""CUDA kernels, compiled at run time by NVRTC and launched through CuPy.

Layer 3. Must not know rooms or transports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .pool import Compiled, Recipe


def missing() -> str:
    """Why it cannot be used here; empty if it can."""
    return "not here yet"


def compile_plan(recipe: Recipe) -> Compiled:
    raise UsageError("not here yet", remedy="use another backend")
