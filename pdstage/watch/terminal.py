"""What commands show people: tables, and the progress of slow work, on standard error and only if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


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


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of columns; those whose first cell begins with a digit are on the right."""
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [">" if cell[:1].isdigit() else "<" for cell in cells[min(1, len(cells) - 1)]]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*line).rstrip() for line in cells]
