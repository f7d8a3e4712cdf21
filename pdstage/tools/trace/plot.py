"""A trace as a picture: a band for each rank, a row for each lane, and every chunk's path across them.

matplotlib draws; its figures are made without pyplot, so that nothing stays open.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.errors import UsageError
from pdstage.tools.trace.chrome import Track, tracks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdstage.tools.trace.model import Node, RoomLife, Stage, Trace

COLOURS = {
    "lease_wait": "#c3c7d1", "gather": "#3b76c4", "write": "#f0a030", "scatter": "#2f9e63", "direct": "#9558b2",
    "aux": "#7a6a5c",
}  # fmt: skip
NAMES = {"lease_wait": "lease wait", "direct": "direct write", "aux": "aux row"}
INK, FAINT, BAND = "#20242c", "#8a909c", "#f5f6f9"
ROOM_COLOURS = ("#dfe8f7", "#e2f2e8", "#fbeeda", "#eee2f4", "#f9e3e3", "#e0f1f3")
MAX_ROWS = 80
WIDTH_IN, ROW_IN, LEAST_PX, DPI = 13.0, 0.36, 2.0, 150


class Window(NamedTuple):
    """Seconds of the trace's clock."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        return self.stop - self.start

    def shows(self, stage: Stage) -> bool:
        return stage.began_at < self.stop and stage.ended_at > self.start


@dataclass(slots=True)
class _Row:
    """One line of the picture; `stages` is None for a rank's rooms."""

    node: Node
    label: str
    stages: list[Stage] | None
    track: Track | None = None
    y: float = 0.0


def window_of(trace: Trace, room: str | None, from_ms: float | None, to_ms: float | None) -> Window:
    """What is drawn: the trace, or one room's stages, or from and to that many milliseconds after its beginning."""
    lives = [life for life in trace.rooms if room in (None, life.room)]
    stages = [stage for stage in trace.stages if room in (None, stage.room)]
    if room is not None and not lives:
        known = ", ".join(list(dict.fromkeys(life.room for life in trace.rooms))[:8])
        raise UsageError(f"no room {room!r} in this trace", remedy=f"it has {known or 'none'}", field="room")
    if not stages:
        raise UsageError("a trace without one chunk", remedy="trace a run that moves something", field="trace")
    start, stop = min(stage.began_at for stage in stages), max(stage.ended_at for stage in stages)
    margin = 0.01 * (stop - start) or 1e-4
    first = start - margin if from_ms is None else start + from_ms / 1e3
    last = stop + margin if to_ms is None else start + to_ms / 1e3
    if not first < last:
        raise UsageError(f"nothing lies between {from_ms} and {to_ms} ms", remedy="give --to after --from", field="to")
    return Window(first, last)


def draw(
    trace: Trace, path: Path, *, room: str | None = None, from_ms: float | None = None, to_ms: float | None = None
) -> None:
    """Writes the picture, a PNG or what else `path`'s ending says that matplotlib draws.

    Raises `UsageError` without matplotlib, for a room that is not in the trace, and for more rows than can be read.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"plots need {missing.name}", remedy="pip install 'pdstage[trace]'", field="matplotlib"
        ) from missing
    window = window_of(trace, room, from_ms, to_ms)
    lines, height = _placed(_rows(trace, window))
    if len(lines) > MAX_ROWS:
        raise UsageError(
            f"{len(lines)} rows are more than can be read", remedy="draw one --room, or less time", field="room"
        )
    figure = Figure(figsize=(WIDTH_IN, height * ROW_IN + 1.5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    _Picture(axes, trace, window, lines, height).paint(room)
    try:
        figure.savefig(path, facecolor="white", metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:  # a folder that is not there, an ending it does not know
        raise UsageError(f"cannot write {path} ({error})", remedy="name another file", field="out") from error


def _rows(trace: Trace, window: Window) -> Iterator[_Row]:
    for node in trace.ordered_nodes:
        held = []
        for track, stages in tracks(trace, node).items():
            shown = [stage for stage in stages if window.shows(stage)]
            if shown:
                held.append(_Row(node, track.name(node.role), shown, track))
        if held:
            yield _Row(node, "rooms", None)
            yield from held


def _placed(lines: Iterator[_Row]) -> tuple[list[_Row], float]:
    """The rows with their places from above, with a gap between ranks, and the height of all."""
    placed, y, before = [], 0.0, None
    for line in lines:
        y += 0.7 if before is not None and line.node != before else 0.0
        line.y, before = y, line.node
        y += 1.0
        placed.append(line)
    return placed, y


class _Picture:
    def __init__(self, axes: Any, trace: Trace, window: Window, lines: list[_Row], height: float) -> None:  # noqa: ANN401
        self.axes, self.trace, self.window, self.lines, self.height = axes, trace, window, lines, height
        self.per_px_ms = window.length * 1e3 / ((WIDTH_IN - 2.2) * DPI)
        self.places: dict[tuple[int, ...], list[tuple[Stage, float]]] = {}

    def ms(self, at: float) -> float:
        return (at - self.window.start) * 1e3

    def paint(self, room: str | None) -> None:
        axes = self.axes
        for line in self.lines:
            if line.stages is None:
                self._band(line.node)
                self._rooms(line)
            else:
                self._stages(line, room)
                self._waits(line, room)
        self._ways()
        axes.set_xlim(0, self.window.length * 1e3)
        axes.set_ylim(self.height - 0.3, -0.7)
        axes.set_yticks([line.y for line in self.lines], [line.label for line in self.lines], fontsize=8, color=INK)
        axes.set_xlabel("milliseconds", color=INK)
        axes.tick_params(axis="y", length=0, pad=4)
        axes.tick_params(axis="x", colors=INK, labelsize=8)
        axes.grid(axis="x", color="#e3e6ec", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        self._legend(room)

    def _band(self, node: Node) -> None:
        ys = [line.y for line in self.lines if line.node == node]
        self.axes.axhspan(min(ys) - 0.55, max(ys) + 0.5, color=BAND, zorder=0, linewidth=0)
        words = f"{node.name}  ({node.place})" if node.place else node.name
        self.axes.annotate(
            words, (1, min(ys)), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            rotation=0, ha="left", va="center", fontsize=9, fontweight="bold", color=INK, annotation_clip=False,
        )  # fmt: skip

    def _rooms(self, line: _Row) -> None:
        """Each from its earliest possible start to its end; where they overlap, later ones are on top."""
        last = self.window.stop
        mine = [life for life in self.trace.rooms if life.incarnation == line.node.incarnation]
        for life in sorted(mine, key=lambda life: life.opened_at):
            start, stop = self._clipped(life.moved_at or life.bound_at or life.opened_at, life.ended_at or last)
            if start >= stop:
                continue
            self._bar(line.y, start, stop, 0.62, self._colour_of(life), edgecolor="white", zorder=2)
            if (stop - start) * 1e3 / self.per_px_ms > 12 * len(life.room):
                self.axes.text(
                    (self.ms(start) + self.ms(stop)) / 2, line.y, life.room, ha="center", va="center", fontsize=7.5,
                    color=INK if life.state != "failed" else "#b03030", zorder=8, clip_on=True,
                )  # fmt: skip

    def _colour_of(self, life: RoomLife) -> str:
        names = dict.fromkeys(other.room for other in self.trace.rooms)
        return ROOM_COLOURS[list(names).index(life.room) % len(ROOM_COLOURS)]

    def _stages(self, line: _Row, room: str | None) -> None:
        for stage in line.stages or ():
            faded = room is not None and stage.room != room
            self.places.setdefault(stage.claim, []).append((stage, line.y))
            height = 0.66 if stage.kind != "write" else 0.5
            self._bar(
                line.y, *self._clipped(stage.began_at, stage.ended_at), height, COLOURS[stage.kind],
                alpha=0.25 if faded else 1.0, zorder=4 if stage.kind == "write" else 5,
                edgecolor="#b03030" if stage.error else "white",
            )  # fmt: skip

    def _waits(self, line: _Row, room: str | None) -> None:
        """Below the chunks of a lane, those that wait for memory in it."""
        track = line.track
        if track is None or track.row or line.node.role == "decode":
            return
        for stage in self.trace.stages:
            here = (stage.incarnation, stage.peer, stage.lane) == (line.node.incarnation, track.peer, track.lane)
            if here and stage.kind == "lease_wait" and room in (None, stage.room):
                start, stop = self._clipped(stage.began_at, stage.ended_at)
                if start < stop:
                    self._bar(line.y + 0.42, start, stop, 0.12, COLOURS["lease_wait"], alpha=0.8, zorder=3)

    def _ways(self) -> None:
        """From each chunk's gather to its write to its scatter."""
        from matplotlib.patches import FancyArrowPatch  # noqa: PLC0415

        for held in self.places.values():
            stages = sorted(held, key=lambda one: one[0].began_at)
            for (before, from_y), (after, to_y) in pairwise(stages):
                if from_y != to_y and self.window.start < before.ended_at and after.began_at < self.window.stop:
                    down = 0.28 if to_y > from_y else -0.28
                    self.axes.add_patch(
                        FancyArrowPatch(
                            (self.ms(before.ended_at), from_y + down), (self.ms(after.began_at), to_y - 1.2 * down),
                            arrowstyle="-|>", mutation_scale=6, linewidth=0.7, color=FAINT, alpha=0.75, zorder=6,
                            connectionstyle="arc3,rad=0.0", shrinkA=0, shrinkB=0,
                        )
                    )  # fmt: skip

    def _clipped(self, start: float, stop: float) -> tuple[float, float]:
        return max(start, self.window.start), min(stop, self.window.stop)

    def _bar(self, y: float, start: float, stop: float, height: float, colour: str, **how: Any) -> None:  # noqa: ANN401
        width = max((stop - start) * 1e3, LEAST_PX * self.per_px_ms)
        how = {"linewidth": 0.4 if width > 8 * self.per_px_ms else 0.0} | how
        self.axes.barh(y, width, left=self.ms(start), height=height, color=colour, **how)

    def _legend(self, room: str | None) -> None:
        from matplotlib.patches import Patch  # noqa: PLC0415

        shown = [s for s in self.trace.stages if room in (None, s.room) and self.window.shows(s)]
        keys = []
        for kind, colour in COLOURS.items():
            took = [(stage.ended_at - stage.began_at) * 1e3 for stage in shown if stage.kind == kind]
            if took:
                words = f"{NAMES.get(kind, kind)}: {len(took)}, {statistics.median(took):.3g} ms"
                keys.append(Patch(color=colour, label=words))
        moved = sum(stage.nbytes for stage in shown if stage.kind in ("gather", "direct", "aux"))
        n_chunks = len({stage.claim for stage in shown})
        what = room or f"{len({stage.room for stage in shown})} rooms"
        title = f"{what}, {n_chunks} chunks: {moved / 1e6:,.1f} MB in {self.window.length * 1e3:,.4g} ms"
        self.axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=26)
        self.axes.legend(
            handles=keys, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(keys), frameon=False, fontsize=8,
            handlelength=1.2, columnspacing=1.8, borderaxespad=0.3,
        )  # fmt: skip
        self.axes.annotate(
            "number, median", (1, 1), xycoords="axes fraction", xytext=(6, 8), textcoords="offset points", fontsize=7.5,
            color=FAINT, annotation_clip=False,
        )  # fmt: skip
