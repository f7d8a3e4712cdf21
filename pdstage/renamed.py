"""Old names of packages and of names in modules, for one release: the same objects, with a warning."""

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
    """Makes `old`, whose body calls this, and every module in it aliases of `new`'s."""
    warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=3)
    package = sys.modules[old] = import_module(new)
    for part in pkgutil.iter_modules(package.__path__):
        with contextlib.suppress(ImportError):  # it needs a package that is not installed
            sys.modules[f"{old}.{part.name}"] = import_module(f"{new}.{part.name}")


def old_names(module: str, names: Mapping[str, Any]) -> Callable[[str], object]:
    """A `__getattr__` for `module`: `names` maps the old names to the current objects."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = names[name]
        warnings.warn(f"{module}.{name} is {now.__name__} now", DeprecationWarning, stacklevel=2)
        return now

    return find
