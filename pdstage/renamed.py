"""Old names of modules and of names in them, for one release: the same objects, with a warning."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

_MODULES = {
    "topology": "layout.topology",
    "states": "layout.states",
    "items": "layout.items",
    "addressed": "layout.addresses",
    "ownership": "plan.ownership",
    "token_slices": "plan.token_slices",
    "spans": "plan.spans",
    "tables": "plan.tables",
    "cost": "plan.cost",
    "convert": "plan.convert",
    "ring": "protocol.lane",
    "trace": "tools.trace",
    "watch": "tools.watch",
}
"""Inside `pdstage`: what modules were called, and are called now."""


class OldModules:
    """Finds modules by their old names, for `sys.meta_path`."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        old, _, rest = inner.partition(".")
        if package != "pdstage" or old not in _MODULES:
            return None
        now = ".".join(filter(None, (package, _MODULES[old], rest)))
        return ModuleSpec(name, _Alias(now), is_package=True)


class _Alias(Loader):
    def __init__(self, now: str) -> None:
        self._now = now
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is {self._now} now", DeprecationWarning, stacklevel=2)
        module = import_module(self._now)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has put that of the old name there


def find_old_modules() -> None:
    """Lets `import pdstage.OLD` find what it is called now. Once a process; before others, which would load a second
    copy of what is in an old package.
    """
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldModules())


def old_names(module: str, names: Mapping[str, Any]) -> Callable[[str], object]:
    """A `__getattr__` for `module`: `names` maps the old names to the current objects."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = names[name]
        warnings.warn(f"{module}.{name} is {now.__name__} now", DeprecationWarning, stacklevel=2)
        return now

    return find
