"""The one door to the C++ extension `pdstage._native`, and the word on whether it is open.

Each caller keeps the same function in numpy behind it.

The extension is optional. PDSTAGE_NATIVE=no at run time closes the door, so that the numpy half can be tried on a
machine that has both; PDSTAGE_NATIVE=yes makes a missing extension an error at import instead of a slow run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pdstage import environment
from pdstage.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType


def _open() -> ModuleType | None:
    wanted = environment.NATIVE.read()
    if wanted == "no":
        return None
    try:
        return importlib.import_module("pdstage._native")
    except ImportError as error:
        if wanted == "yes":
            raise UsageError(
                f"the C++ extension cannot be imported ({error})",
                remedy="build it with `make native`, or unset PDSTAGE_NATIVE to go on with numpy",
            ) from error
        return None


ext: ModuleType | None = _open()


def active() -> str:
    """Which host code runs in this process: "c++" or "numpy"."""
    return "numpy" if ext is None else "c++"
