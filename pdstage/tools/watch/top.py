"""`pdstage top`: reads endpoints repeatedly and shows each frame; or shows one frame, as text or a picture."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.tools.watch.frame import View, draw
from pdstage.tools.watch.scrape import Endpoints

from rich.console import Console  # isort: skip  (after the check that says how to install it)
from rich.live import Live  # isort: skip
from rich.terminal_theme import TerminalTheme  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from pdstage.tools.watch.scrape import Answer, Node

N_HISTORY = 16
_THEME = TerminalTheme(
    (16, 20, 28), (214, 219, 229),
    [(60, 66, 80), (240, 92, 92), (96, 200, 120), (222, 184, 88), (88, 148, 240), (196, 128, 230), (72, 196, 206),
     (200, 206, 216)],
    [(118, 126, 142), (255, 120, 120), (130, 224, 150), (240, 206, 120), (122, 174, 255), (216, 156, 246),
     (108, 220, 228), (244, 246, 250)],
)  # fmt: skip


class Top:
    """What was read of some endpoints so far: enough for the next frame."""

    def __init__(self, endpoints: Endpoints, interval_s: float) -> None:
        self._endpoints = endpoints
        self._interval_s = interval_s
        self._before: dict[tuple[str, str], Node] = {}
        self._history: dict[tuple[str, str], deque[float]] = {}
        self._answers: list[Answer] = []
        self._views: list[View] = []

    def read(self) -> None:
        """Reads every endpoint. A node that was gone, or restarted, has no rates until its second reading."""
        self._answers = self._endpoints.read()
        self._views, before = [], self._before
        self._before = {}
        for answer in self._answers:
            for node in answer.nodes:
                key = (answer.endpoint, node.name)
                view = View(answer.endpoint, node, node.since(before.get(key)))
                self._views.append(view)
                self._before[key] = node
                if key in before:
                    self._history.setdefault(key, deque(maxlen=N_HISTORY)).append(view.bytes_per_s)
        self._views.sort(key=_place)
        for key in set(self._history) - set(self._before):
            self._history[key].append(0.0)

    def frame(self, width: int) -> RenderableType:
        return draw(
            self._answers, self._views, width=width, clock=time.strftime("%H:%M:%S"), interval_s=self._interval_s,
            history=self._history,
        )  # fmt: skip


def _place(view: View) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Prefill first, then by rank in numeric order."""
    parts = view.now.name.split()
    return view.now.role != "prefill", [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]


def run(
    endpoints: Sequence[str],
    *,
    interval_s: float = 1.0,
    once: bool = False,
    svg: Path | None = None,
    width: int | None = None,
    frames: int = 1,
    console: Console | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Shows `endpoints` until interrupted, or `stop` is set; with `once` one frame, and with `svg` one into that file.

    A frame covers `frames` intervals; its rates are those of the last. Returns 0 if every endpoint answered the last
    time, else 1. Raises `UsageError`.
    """
    if not 0.1 <= interval_s <= 3600 or frames < 1:
        raise UsageError(f"an interval of {interval_s} s", remedy="give 0.1 to 3600", field="interval")
    console = console or Console(width=width)
    stop = stop or threading.Event()
    with Endpoints(endpoints) as asked:
        top = Top(asked, interval_s)
        top.read()
        if once or svg is not None:
            for _ in range(frames):
                stop.wait(interval_s)
                top.read()
            if svg is not None:
                _export(top, svg, width or 132)
            if once:
                console.print(top.frame(console.width))
        else:
            _live(top, console, interval_s, stop)
        return int(any(answer.problem for answer in top._answers))


def _live(top: Top, console: Console, interval_s: float, stop: threading.Event) -> None:
    with Live(top.frame(console.width), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while not stop.wait(interval_s):
                top.read()
                live.update(top.frame(console.width), refresh=True)
        except KeyboardInterrupt:
            return


def _export(top: Top, file: Path, width: int) -> None:
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=width, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(top.frame(width))
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="pdstage top", theme=_THEME), flags=re.DOTALL)
    try:
        file.write_text(drawn)  # without remote fonts: any monospace font will do
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}", remedy="give a file's path", field="svg") from error
