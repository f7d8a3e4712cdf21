"""A progress bar for slow commands: on standard error, and only if that is a terminal and rich is installed."""

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
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress  # noqa: PLC0415
    except ModuleNotFoundError:
        yield lambda text="", by=1: None
        return
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(text, total=total)
        yield lambda text="", by=1: shown.update(task, advance=by, description=text or None)
