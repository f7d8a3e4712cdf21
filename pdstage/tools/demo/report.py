"""The demo's output: a progress bar while it works, one table, one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from pdstage.tools.demo.options import Options


@dataclass(slots=True)
class RoomReport:
    """One room's transfer. `rows`: digests of its aux row on all ranks; there is one if they agree.

    Times are seconds on the machine's monotonic clock, which all processes share.

    `began_at`: its first chunk was handed over; `handed_at`: its last one; `came_at`: the last decode rank had all.
    """

    n_prompt_tokens: int
    nbytes: int = 0
    descriptors: int = 0
    paths: set[str] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)
    began_at: float = float("inf")
    handed_at: float = 0.0
    came_at: float = 0.0
    identical: bool = False

    @property
    def seconds(self) -> float:
        return self.came_at - self.began_at

    @property
    def wait_s(self) -> float:
        """How long decode still waited after prefill was done."""
        return max(0.0, self.came_at - self.handed_at)


@dataclass(frozen=True, slots=True)
class Move:
    """All rooms once more, on one path; `seconds` from the first rank's sending until every decode rank had all."""

    path: str
    descriptors: int
    bytes_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """The run's JSON, key by key. `new_tokens` counts those of all rooms; `seconds`: first chunk to last room.

    `rows_identical`: for each room every decode rank has the aux row that prefill gave. The transport wrote `aux_rows`
    of them; `aux_fallbacks` should have gone that way, and came by message. `moves`: the same rooms afterwards, on each
    path in turn.
    """

    transport: str
    path: str
    model: str
    prefill_tp: int
    decode_tp: int
    prefill_pp: int
    decode_pp: int
    requests: int
    new_tokens: int
    tokens_identical: bool
    negative_control_caught: bool
    bytes_moved: int
    descriptors: int
    seconds: float
    rows_identical: bool
    aux_rows: int
    aux_fallbacks: int
    moves: tuple[Move, ...] = ()
    device: str = "cpu"

    @property
    def good(self) -> bool:
        return self.tokens_identical and self.rows_identical and self.negative_control_caught

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


class Bars:
    """The progress display: processes started, prompts computed, rooms arrived at each decode rank, tokens decoded."""

    def __init__(self, console: Console, options: Options, n_prompt_tokens: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<30}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        totals = {
            "started": ("start, processes", len(options.prefill.places()) + len(options.decode.places())),
            "prefilled": ("prefill, prompt tokens", n_prompt_tokens),
            "arrived": ("transfer, rooms x decode ranks", options.requests * len(options.decode.places())),
            "decoded": ("decode, new tokens", options.requests * options.new_tokens),
        }
        if options.moves:
            totals["moved"] = ("direct beside staged, moves", len(options.moves))
        self._tasks = {what: self._progress.add_task(text, total=total) for what, (text, total) in totals.items()}

    def advance(self, what: str, by: int) -> None:
        self._progress.advance(self._tasks[what], by)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def show(console: Console, options: Options, report: Report, rooms: Sequence[RoomReport], margin: float) -> None:
    """Prints the table and, below it, what was checked. `margin`: the smallest gap between two best logits."""
    title = f"{options.model}: prefill {options.prefill} -> decode {options.decode} over {report.transport}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("room", "prompt", "bytes", "path", "descriptors", "ms", "wait", "GB/s", "tokens"):
        table.add_column(name, justify="left" if name in {"room", "path", "tokens"} else "right", no_wrap=True)
    for number, room in enumerate(rooms):
        moved = (f"{room.nbytes:,}", path_of(room.paths), f"{room.descriptors:,}", f"{room.seconds * 1e3:.1f}")
        rate, wait = _rate(room.nbytes, room.seconds), f"{room.wait_s * 1e3:.1f}"
        table.add_row(str(number), str(room.n_prompt_tokens), *moved, wait, rate, _verdict(room.identical))
    table.add_section()
    moved = (f"{report.bytes_moved:,}", report.path, f"{report.descriptors:,}", f"{report.seconds * 1e3:.1f}")
    rate = _rate(report.bytes_moved, report.seconds)
    n_prompt_tokens = str(sum(room.n_prompt_tokens for room in rooms))
    table.add_row("all", n_prompt_tokens, *moved, "", rate, _verdict(report.tokens_identical))
    console.print(table)
    for line in _legend(options, report, margin):
        console.print(line, soft_wrap=True, highlight=False)
    if report.moves:
        _show_moves(console, report)


def _show_moves(console: Console, report: Report) -> None:
    """The two paths side by side, each by its median transfer."""
    console.print()
    console.print("the same caches once more, whole, with nothing else going on:", highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("path", "bytes", "descriptors", "ms", "GB/s"):
        table.add_column(name, justify="left" if name == "path" else "right", no_wrap=True)
    took = {}
    for path in dict.fromkeys(move.path for move in report.moves):
        of_path = sorted((move for move in report.moves if move.path == path), key=lambda move: move.seconds)
        middle = of_path[len(of_path) // 2]
        took[path] = middle.seconds
        moved = (f"{middle.bytes_moved:,}", f"{middle.descriptors:,}", f"{middle.seconds * 1e3:.1f}")
        table.add_row(path, *moved, _rate(middle.bytes_moved, middle.seconds))
    console.print(table)
    ratio = took["direct"] / took["staged"]
    n = len(report.moves) // len(took)
    console.print(
        f"staged moved them {ratio:.1f} times as fast as direct (medians of {n} moves, in turn)", highlight=False
    )


def _legend(options: Options, report: Report, margin: float) -> list[str]:
    same = "[green]identical to[/]" if report.tokens_identical else "[red]NOT the same as[/]"
    rows = "[green]identical[/]" if report.rows_identical else "[red]NOT the same[/]"
    caught = "[green]caught[/]" if report.negative_control_caught else "[red]NOT caught[/]"
    return [
        "[dim]ms: from the first chunk until every decode rank has the room; later chunks are computed meanwhile",
        "[dim]wait: the milliseconds of it after the last chunk was computed; GB/s: bytes by ms",
        f"model: {report.model}",
        *_pools(options),
        f"tokens: {report.new_tokens} new ones, {same} those of one process (closest two logits: {margin:.1g} apart)",
        f"aux rows: {rows} on both sides; {report.aux_rows} written by the transport, {report.aux_fallbacks} to be "
        "but sent by message",
        f"negative control: in each component ({', '.join(options.components)}) one received page or slot overwritten "
        f"with noise on one decode rank, {caught} by the same check",
    ]


def _pools(options: Options) -> list[str]:
    """Where each component is kept, and what is computed where."""
    prefill, decode = options.prefill, options.decode
    kept = "pages of {0.page} tokens in {1}" if options.components != ("mamba",) else "slots in {1}"
    lines = [
        f"pools: {kept.format(prefill, prefill.layout.upper())} at prefill, "
        f"{kept.format(decode, decode.layout.upper())} at decode; all shuffled"
        + (f", on {options.device}" if options.device != "cpu" else ""),
    ]
    lines.append("ranks: each prefill rank computes the whole model; it stores and moves only its share")
    if options.family.ties:
        lines.append("one process: prompt in the same chunks, then on from a copy of its cache, as top-k leaves ties")
    return lines


def path_of(paths: set[str]) -> str:
    return "+".join(sorted(paths)) or "-"


def _verdict(identical: bool) -> str:
    return "[green]identical[/]" if identical else "[red]different[/]"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.3f}" if 0 < seconds < float("inf") else "-"
