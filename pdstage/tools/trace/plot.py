"""A trace as a picture: a band for each rank, a row for each lane, and every chunk's path across them.

matplotlib draws; its figures are made without pyplot, so that nothing stays open.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.errors import UsageError
from pdstage.tools.trace.chrome import tracks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdstage.tools.trace.model import Node, Stage, Trace

COLOURS = {
    "lease_wait": "#c3c7d1", "gather": "#3b76c4", "write": "#f0a030", "scatter": "#2f9e63", "direct": "#9558b2",
    "aux": "#7a6a5c",
}  # fmt: skip
NAMES = {"lease_wait": "lease wait", "direct": "direct write", "aux": "aux row"}
ROOM_COLOURS = ("#dfe8f7", "#e2f2e8", "#fbeeda", "#eee2f4", "#f9e3e3", "#e0f1f3")
INK, FAINT = "#20242c", "#8a909c"
MAX_ROWS = 80
WIDTH_IN, ROW_IN, DPI = 13.0, 0.36, 150


class Window(NamedTuple):
    """Seconds of the trace's clock."""

    start: float
    stop: float

    def bar(self, start: float, stop: float) -> tuple[float, float]:
        """Begin and length in milliseconds of what is to be seen of a span, two pixels at least; shorter than 0: none
        of it.
        """
        begin, end = max(start, self.start), min(stop, self.stop)
        least_ms = 2e3 * (self.stop - self.start) / (WIDTH_IN * DPI)
        return (begin - self.start) * 1e3, max((end - begin) * 1e3, least_ms) if end >= begin else -1.0


class _Row(NamedTuple):
    """One line of the picture, of a rank's rooms or of a track's `stages`."""

    node: Node
    label: str
    stages: Sequence[Stage]


def window_of(trace: Trace, room: str | None, from_ms: float | None, to_ms: float | None) -> Window:
    """What is drawn: the trace, or one room's stages, or from and to that many milliseconds after its beginning."""
    known = list(dict.fromkeys(life.room for life in trace.rooms))
    if room is not None and room not in known:
        raise UsageError(
            f"no room {room!r} in this trace", remedy=f"it has {', '.join(known[:8]) or 'none'}", field="room"
        )
    stages = [stage for stage in trace.stages if room in (None, stage.room)]
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
        remedy = "pip install 'pdstage[trace]'"
        raise UsageError(f"plots need {missing.name}", remedy=remedy, field="matplotlib") from missing
    window = window_of(trace, room, from_ms, to_ms)
    lines: list[_Row] = []
    for node in trace.ordered_nodes:
        shown = {
            track: [stage for stage in stages if window.start < stage.ended_at and stage.began_at < window.stop]
            for track, stages in tracks(trace, node).items()
        }
        held = [_Row(node, track.name(node.role), stages) for track, stages in shown.items() if stages]
        lines += [_Row(node, "rooms", ()), *held] if held else []
    if len(lines) > MAX_ROWS:
        remedy = "draw one --room, or less time"
        raise UsageError(f"{len(lines)} rows are more than can be read", remedy=remedy, field="room")
    figure = Figure(figsize=(WIDTH_IN, len(lines) * ROW_IN + 1.8), dpi=DPI, layout="constrained")
    _paint(figure.add_subplot(), trace, window, lines, room)
    try:
        figure.savefig(path, facecolor="white", metadata={"Software": None} if path.suffix == ".png" else None)
    except (OSError, ValueError) as error:  # a folder that is not there, an ending it does not know
        raise UsageError(f"cannot write {path} ({error})", remedy="name another file", field="out") from error


def _paint(axes: Any, trace: Trace, window: Window, lines: list[_Row], room: str | None) -> None:  # noqa: ANN401
    ways: dict[tuple[int, ...], list[tuple[Stage, int]]] = defaultdict(list)
    for y, (node, _, stages) in enumerate(lines):
        if stages:
            _stages(axes, window, y, stages, room)
        else:
            _rooms(axes, trace, window, y, node)
        for stage in stages:
            ways[stage.claim].append((stage, y))
    for way in ways.values():  # from each chunk's gather to its write to its scatter
        for (before, from_y), (after, to_y) in pairwise(sorted(way, key=lambda one: one[0].began_at)):
            if from_y != to_y:
                xs = [(at - window.start) * 1e3 for at in (before.ended_at, after.began_at)]
                axes.plot(xs, [from_y, to_y], color=FAINT, linewidth=0.7, alpha=0.75, zorder=6, clip_on=True)
    axes.set_xlim(0, (window.stop - window.start) * 1e3)
    axes.set_ylim(len(lines) - 0.3, -0.7)
    labels = [f"{line.node.name}  {line.label}" if not line.stages else line.label for line in lines]
    axes.set_yticks(range(len(lines)), labels, fontsize=8, color=INK)
    axes.set_xlabel("milliseconds", color=INK)
    axes.grid(axis="x", color="#e3e6ec", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(axes, trace, window, room)


def _rooms(axes: Any, trace: Trace, window: Window, y: int, node: Node) -> None:  # noqa: ANN401
    """Each from its earliest possible start to its end; where they overlap, later ones are on top."""
    names = list(dict.fromkeys(life.room for life in trace.rooms))
    for life in sorted(trace.rooms, key=lambda life: life.opened_at):
        left, width = window.bar(life.moved_at or life.bound_at or life.opened_at, life.ended_at or window.stop)
        if life.incarnation == node.incarnation and width > 0:
            colour = ROOM_COLOURS[names.index(life.room) % len(ROOM_COLOURS)]
            axes.barh(y, width, left=left, height=0.62, color=colour, edgecolor="white")
            if width / ((window.stop - window.start) * 1e3) > len(life.room) / 150:
                ink = INK if life.state != "failed" else "#b03030"
                axes.text(left + width / 2, y, life.room, ha="center", va="center", fontsize=7.5, color=ink)


def _stages(axes: Any, window: Window, y: int, stages: Sequence[Stage], room: str | None) -> None:  # noqa: ANN401
    """A write begins under its gather's end, so that it is drawn lower and below it."""
    for stage in stages:
        left, width = window.bar(stage.began_at, stage.ended_at)
        is_write = stage.kind == "write"
        axes.barh(
            y, width, left=left, height=0.5 if is_write else 0.66, color=COLOURS[stage.kind],
            zorder=4 if is_write else 5, alpha=1.0 if room in (None, stage.room) else 0.25,
            edgecolor="#b03030" if stage.error else "none", linewidth=0.4,
        )  # fmt: skip


def _legend(axes: Any, trace: Trace, window: Window, room: str | None) -> None:  # noqa: ANN401
    """Number and median of each kind of stage, lease waits included."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    shown = [
        s for s in trace.stages if room in (None, s.room) and window.start < s.ended_at and s.began_at < window.stop
    ]
    keys = []
    for kind, colour in COLOURS.items():
        took = [(stage.ended_at - stage.began_at) * 1e3 for stage in shown if stage.kind == kind]
        if took:
            label = f"{NAMES.get(kind, kind)}: {len(took)}, {statistics.median(took):.3g} ms"
            keys.append(Patch(color=colour, label=label))
    moved = sum(stage.nbytes for stage in shown if stage.kind in ("gather", "direct", "aux"))
    what = room or f"{len({stage.room for stage in shown})} rooms"
    length_ms = (window.stop - window.start) * 1e3
    title = f"{what}, {len({s.claim for s in shown})} chunks: {moved / 1e6:,.1f} MB in {length_ms:,.4g} ms"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=26)
    axes.legend(
        handles=keys, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=max(1, len(keys)), frameon=False, fontsize=8
    )  # fmt: skip
