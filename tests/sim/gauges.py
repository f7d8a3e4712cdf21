"""What grows, counted: objects and bytes reachable from a core, lines of Python it runs, and how even shares are.

Counts are the same on every machine, so tests may hold them to bounds; times are not, and are only printed.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import pdstage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PACKAGE = pdstage.__path__[0]
_NOT_HELD = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


class Size(NamedTuple):
    n_objects: int
    nbytes: int


def size_of(root: object, apart: Iterable[object] = ()) -> Size:
    """All objects reachable from `root` but not through `apart`, and their bytes."""
    seen = {id(root), *map(id, apart)}
    todo, n, nbytes = deque([root]), 0, 0
    while todo:
        held = todo.popleft()
        n += 1
        nbytes += sys.getsizeof(held)
        for inner in (*gc.get_referents(held), *_untracked(held)):
            if id(inner) not in seen and not isinstance(inner, _NOT_HELD):
                seen.add(id(inner))
                todo.append(inner)
    return Size(n, nbytes)


def _untracked(held: object) -> tuple[object, ...]:
    """What a msgspec struct without garbage collection holds: the collector does not know."""
    fields = getattr(type(held), "__struct_fields__", ())
    return tuple(getattr(held, name) for name in fields)


class Lines:
    """Counts the lines of the package that run inside `with`: work, without a clock. A loop counts each time round."""

    def __init__(self) -> None:
        self.n = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: types.FrameType, event: str, arg: object) -> object:
        return self._line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _line(self, frame: types.FrameType, event: str, arg: object) -> object:
        self.n += event == "line"
        return self._line


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all are equal, 1/n when one has everything (Jain, Chiu, Hawe 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0
