"""A progress bar for slow commands: on standard error, and only if that is a terminal.

A command's output is the same with and without it.
"""

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
    """Shows `text` and how many of `total` steps are done; None: the total is unknown.

    Without a terminal, or without rich, nothing is shown.
    """
    if not sys.stderr.isatty():
        yield _silent
        return
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    except ModuleNotFoundError:
        yield _silent
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=True) as shown:
        task = shown.add_task(text, total=total)

        def advance(text: str = "", by: int = 1) -> None:
            shown.update(task, advance=by, description=text or None)

        yield advance


def _silent(text: str = "", by: int = 1) -> None:
    pass
