"""Keys: what encrypting the control plane costs.

The same rooms between two ranks with keys and two without, in turn; what a room is says `rooms`.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from pdstage.control.keys import Keys

from . import beside
from .rooms import PROGRESS, Pair

if TYPE_CHECKING:
    from .harness import Row


def run(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        Keys.make(f"{folder}/key")
        return [row for progress in PROGRESS for row in _rows(progress, f"{folder}/key", quick)]


def _rows(progress: str, key_file: str, quick: bool) -> list[Row]:
    n, repeats = (256, 3) if quick else (2000, 7)
    with Pair("local", progress, key_file) as keyed, Pair("local", progress) as plain:
        return beside.rows(keyed, plain, n, repeats, of=progress, detail="baseline: the same without keys")
