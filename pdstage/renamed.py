"""Packages, and names in modules, as they were called before, for one release: the same things, and a warning."""

from __future__ import annotations

import contextlib
import pkgutil
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def renamed(old: str, new: str) -> None:
    """Makes `old`, whose body calls this, and every module in it the modules of `new`."""
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=3)
    package = sys.modules[old] = import_module(new)
    for part in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):  # it wants a package that is not installed
            sys.modules[f"{old}.{part.name}"] = import_module(f"{new}.{part.name}")


def old_names(module: str, names: Mapping[str, Any]) -> Callable[[str], object]:
    """A `__getattr__` for `module`: `names` are the old names, and what each is now."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = names[name]
        warnings.warn(f"{module}.{name} is {now.__name__} now", DeprecationWarning, stacklevel=2)
        return now

    return find
