"""Checks and converts callers' arguments, where they enter and before anything is changed.

An integer is whatever `operator.index` accepts, numpy's too. Every function raises a `UsageError` that names the
argument and quotes its value, whatever the value's own methods raise.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from pdstage.errors import UsageError

T = TypeVar("T")
GivenPath: TypeAlias = str | os.PathLike[str]

MAX_INTEGER = (1 << 63) - 1
_MAX_SHOWN = 80


def integer(what: str, value: object, low: int = 0, high: int = MAX_INTEGER) -> int:
    """An integer of `low..high`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except Exception as error:
        raise _wrong(what, value, f"give an integer of {low}..{high}") from error
    if not low <= number <= high:
        raise _wrong(what, value, f"give an integer of {low}..{high}")
    return number


def quotient(what: str, value: int, by: int) -> int:
    """`value / by`, which must be whole."""
    if by < 1 or value % by:
        raise _wrong(what, value, f"give a multiple of {by}")
    return value // by


def number(what: str, value: object, *, above: float = -math.inf) -> float:
    """A finite number greater than `above`."""
    wanted = "give a finite number" + (f" above {above:g}" if above > -math.inf else "")
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError("text")  # noqa: TRY301  (which float() would read)
        found = float(value)  # type: ignore[arg-type]
    except Exception as error:
        raise _wrong(what, value, wanted) from error
    if not above < found < math.inf:
        raise _wrong(what, value, wanted)
    return found


def timeout(what: str, value: object) -> float | None:
    """Seconds; a negative number means an expired timeout, None and infinity mean no limit."""
    if value is None or (isinstance(value, float) and value == math.inf):
        return None
    return number(what, value)


def flag(what: str, value: object) -> bool:
    """True or False, numpy's too."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise _wrong(what, value, "give True or False")


def choice(what: str, value: object, names: Sequence[str]) -> str:
    """One of `names`."""
    if not isinstance(value, str) or value not in names:
        raise _wrong(what, value, f"choose one of {', '.join(names)}")
    return value


def path(what: str, value: object) -> str:
    """A file's path: a string, or a value that `os.fspath` converts to one."""
    try:
        found = os.fspath(value)  # type: ignore[call-overload]
    except Exception as error:
        raise _wrong(what, value, "give a file's path") from error
    if not isinstance(found, str) or "\0" in found or not found:
        raise _wrong(what, value, "give a file's path")
    return found


def instance(what: str, value: object, kind: type[T]) -> T:
    """An object of `kind`."""
    if not isinstance(value, kind):
        raise _wrong(what, value, f"give a {kind.__name__}")
    return value


def text(what: str, value: object) -> str:
    """A string that UTF-8 can encode."""
    if not isinstance(value, str) or not _is_encodable(value):
        raise _wrong(what, value, "give a string without surrogates")
    return value


def octets(what: str, value: object) -> bytes:
    """A copy of bytes, a bytearray or a memoryview."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _wrong(what, value, "give bytes")
    return bytes(value)


def pair(what: str, value: object, low: int = 0, high: int = MAX_INTEGER) -> tuple[int, int]:
    """Two integers of `low..high`, `(start, stop)`, the second not below the first."""
    try:
        given: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
        first, last = given
    except Exception as error:
        raise _wrong(what, value, "give two integers, (start, stop)") from error
    start, stop = integer(f"the start of {what}", first, low, high), integer(f"the stop of {what}", last, low, high)
    if stop < start:
        raise _wrong(what, value, "give (start, stop), the stop not below the start")
    return start, stop


def sayable(words: object) -> str:
    """Any words as text that UTF-8 can encode: a reason may quote a file's name, which is arbitrary bytes."""
    try:
        said = str(words)
    except Exception as error:  # noqa: BLE001  (raised by its own method)
        said = f"{type(words).__name__} whose text raised {type(error).__name__}"
    return said if _is_encodable(said) else said.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    """A value as errors quote it."""
    try:
        said = repr(value)
    except Exception as error:  # noqa: BLE001  (raised by its own method)
        said = f"a {type(value).__name__} whose repr raised {type(error).__name__}"
    return said if len(said) <= _MAX_SHOWN else f"{said[:_MAX_SHOWN]}..."


def _is_encodable(words: str) -> bool:
    if words.isascii():
        return True
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(what: str, value: object, remedy: str) -> UsageError:
    return UsageError(f"{what} is {shown(value)}", remedy=remedy)
