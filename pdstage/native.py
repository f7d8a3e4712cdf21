"""The only access to the C++ extension `pdstage._native`, and whether it is active.

Each caller does without it too, in numpy; memory is then copied by the reference.

The extension is optional. PDSTAGE_NATIVE=no at run time disables it, so that the numpy functions can be tried on a
machine that has both. PDSTAGE_NATIVE=yes makes a missing extension an error at import instead of a slow run.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from pdstage import environment
from pdstage.errors import UsageError


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
                remedy="build it with `make native`, or unset PDSTAGE_NATIVE to use numpy",
            ) from error
        return None


ext: ModuleType | None = _open()


def active() -> str:
    """The host code of this process: "c++" or "numpy"."""
    return "numpy" if ext is None else "c++"
