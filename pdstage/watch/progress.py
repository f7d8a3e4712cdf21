"""Progress of slow commands: one line on standard error, and only if that is a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Advance(Protocol):
    def __call__(self, text: str = "", by: int = 1) -> None:
        """`by` more steps are done; `text`, if any, is shown from now on."""


@contextmanager
def progress(text: str, total: int | None = None) -> Iterator[Advance]:
    """Shows `text` and how many of `total` steps are done; None: the total is unknown."""
    shown, n_done, of = text, 0, "" if total is None else f"/{total}"

    def advance(text: str = "", by: int = 1) -> None:
        nonlocal shown, n_done
        shown, n_done = text or shown, n_done + by
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{shown} {n_done}{of}")
            sys.stderr.flush()

    advance(by=0)
    yield advance
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
