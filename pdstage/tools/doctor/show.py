"""The report for people: plain lines, or colours if rich is installed and the output is a terminal."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdstage.tools.doctor.found import Found, Level, PeerReport, Report

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_WORDS = {"ok": "all is well", "warn": "works, with something to look at", "fail": "something asked for cannot work"}


class Show(Protocol):
    def line(self, found: Found) -> None:
        """One check's result, as soon as it is known."""

    def end(self, report: Report) -> None:
        """The verdict on each transport, the peer's steps, and the overall verdict."""


def show(write: Callable[[str], None]) -> Show:
    """The form that suits the output; `write` prints a plain line."""
    return Coloured() if sys.stdout.isatty() and find_spec("rich") is not None else Plain(write)


class Plain:
    """Lines for grep: level, area, name, sentence; and below them the remedy."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def line(self, found: Found) -> None:
        self._write(f"{found.level:5} {found.area}/{found.name}: {found.says}")
        if found.remedy and found.level != "ok":
            self._write(f"      -> {found.remedy}")

    def end(self, report: Report) -> None:
        for level, text in summary(report):
            self._write(f"{level:5} {text}" if level else text)


class Coloured:
    """The same with colours, wrapped to the terminal's width."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415

        self._console = Console(highlight=False)
        self._area = ""

    def line(self, found: Found) -> None:
        if found.area != self._area:
            self._area = found.area
            self._console.print(f"\n{found.area}", style="bold", markup=False)
        self._row(found.level, found.name, found.says)
        if found.remedy and found.level != "ok":
            self._row("", "", f"-> {found.remedy}", "dim")

    def end(self, report: Report) -> None:
        self._console.print()
        for level, text in summary(report):
            name, _, says = text.partition(": ") if level else ("", "", text)
            self._row(level, name, says)

    def _row(self, level: Level | str, name: str, says: str, style: str = "") -> None:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        row = Table.grid(padding=(0, 1))
        row.add_column(width=5)
        row.add_column(width=16)
        row.add_column(ratio=1, overflow="fold")
        row.add_row(Text(level, _COLOURS.get(level, "")), Text(name), Text(says, style))
        self._console.print(row)


def summary(report: Report) -> Iterator[tuple[Level | str, str]]:
    """The last lines, each with its level, or none."""
    for name, verdict in report.transports.items():
        level = next(line.level for line in report.checks if (line.area, line.name) == ("transports", name))
        yield level, f"transport {name}: {verdict.says}"
    if report.peer is not None:
        yield from _peer(report.peer)
    bad = sum(line.level == "fail" for line in report.checks)
    odd = sum(line.level == "warn" for line in report.checks)
    yield report.verdict, f"verdict: {_WORDS[report.verdict]} ({bad} failed, {odd} to look at, of {len(report.checks)})"


def _peer(peer: PeerReport) -> Iterator[tuple[Level | str, str]]:
    for side, where in ((peer.here, "here"), (peer.there, "there")):
        if side is not None:
            transports = ", ".join(f"{name} {version}".strip() for name, version in side.transports.items())
            says = f"{side.host}, pdstage {side.pdstage}, wire {side.wire}, Python {side.python}, {side.host_code}"
            yield "", f"{where}: {says}; {transports}; offers {', '.join(side.features)}"
    for stage in peer.stages:
        yield stage.level, f"peer {stage.name}: {stage.seconds * 1e3:.0f} ms, {stage.says}"
    if peer.failed_at:
        yield "", f"-> {peer.remedy}"
