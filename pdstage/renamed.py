"""Packages under their old names, for one release: the same modules, and a warning."""

from __future__ import annotations

import contextlib
import pkgutil
import sys
import warnings
from importlib import import_module


def renamed(old: str, new: str) -> None:
    """Makes `old`, whose body calls this, and every module in it the modules of `new`."""
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=3)
    package = sys.modules[old] = import_module(new)
    for part in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):  # it wants a package that is not installed
            sys.modules[f"{old}.{part.name}"] = import_module(f"{new}.{part.name}")
