"""A trace as a picture: a band for each rank, a row for each lane, and every chunk's path across them.

matplotlib draws; its figures are made without pyplot, so that nothing stays open. Perfetto shows parts of long traces.
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
FAINT, FAILED = "#8a909c", "#b03030"
ROOM, ROOM_FAILED = "#dfe8f7", "#f9e3e3"
MAX_ROWS = 80
WIDTH_IN, ROW_IN, DPI = 13.0, 0.36, 150


class _Row(NamedTuple):
    """One line of the picture: a rank's rooms, or the stages of one of its tracks."""

    node: Node
    label: str
    stages: Sequence[Stage]


def draw(trace: Trace, path: Path, room: str | None = None) -> None:
    """Writes the picture, of the time of one `room` or of all, a PNG or what else `path`'s ending says.

    Raises `UsageError` without matplotlib, for a room that is not in the trace, and for more rows than can be read.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        remedy = "pip install 'pdstage[trace]'"
        raise UsageError(f"plots need {missing.name}", remedy=remedy, field="matplotlib") from missing
    shown = [stage for stage in trace.stages if room in (None, stage.room)]
    if not shown:
        known = ", ".join(list(dict.fromkeys(life.room for life in trace.rooms))[:8])
        what = "a trace without one chunk" if room is None else f"no chunk of room {room!r} in this trace"
        raise UsageError(what, remedy=f"it has rooms {known}" if known else "trace a run that moves something")
    start, stop = min(stage.began_at for stage in shown), max(stage.ended_at for stage in shown)
    lines: list[_Row] = []
    for node in trace.ordered_nodes:
        within = [
            _Row(node, track.name(node.role), held)
            for track, stages in tracks(trace, node).items()
            if (held := [stage for stage in stages if start < stage.ended_at and stage.began_at < stop])
        ]
        lines += [_Row(node, f"{node.name}  rooms", ()), *within] if within else []
    if len(lines) > MAX_ROWS:
        remedy = "draw one --room, or look at it in Perfetto"
        raise UsageError(f"{len(lines)} rows are more than can be read", remedy=remedy, field="room")
    figure = Figure(figsize=(WIDTH_IN, len(lines) * ROW_IN + 1.8), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for y, line in enumerate(lines):
        if line.stages:
            _stages(axes, start, y, line.stages, room)
        else:
            _rooms(axes, trace, (start, stop), y, line.node)
    _paths(axes, start, lines)
    axes.set_xlim(0, (stop - start) * 1e3)
    axes.set_ylim(len(lines) - 0.3, -0.7)
    axes.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=8)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _legend(axes, shown)
    try:
        figure.savefig(path, facecolor="white")
    except (OSError, ValueError) as error:  # a folder that is not there, an ending it does not know
        raise UsageError(f"cannot write {path} ({error})", remedy="name another file", field="out") from error


def _paths(axes: Any, start: float, lines: list[_Row]) -> None:  # noqa: ANN401
    """From each chunk's gather to its write to its scatter."""
    paths: dict[tuple[int, ...], list[tuple[Stage, int]]] = defaultdict(list)
    for y, line in enumerate(lines):
        for stage in line.stages:
            paths[stage.claim].append((stage, y))
    for path in paths.values():
        for (before, from_y), (after, to_y) in pairwise(sorted(path, key=lambda one: one[0].began_at)):
            xs = [(at - start) * 1e3 for at in (before.ended_at, after.began_at)]
            axes.plot(xs, [from_y, to_y], color=FAINT, linewidth=0.7, zorder=6)


def _rooms(axes: Any, trace: Trace, shown: tuple[float, float], y: int, node: Node) -> None:  # noqa: ANN401
    """Each from its earliest possible start to its end; where they overlap, later ones are on top."""
    start, stop = shown
    for life in sorted(trace.rooms, key=lambda life: life.opened_at):
        begin = max(start, life.moved_at or life.bound_at or life.opened_at)
        end = min(stop, life.ended_at or stop)
        if life.incarnation == node.incarnation and begin < end:
            left, width = (begin - start) * 1e3, (end - begin) * 1e3
            colour = ROOM_FAILED if life.state == "failed" else ROOM
            axes.barh(y, width, left=left, height=0.62, color=colour, edgecolor="white")
            if end - begin > len(life.room) / 150 * (stop - start):
                axes.text(left + width / 2, y, life.room, ha="center", va="center", fontsize=7.5)


def _stages(axes: Any, start: float, y: int, stages: Sequence[Stage], room: str | None) -> None:  # noqa: ANN401
    """A write begins under its gather's end, so that it is drawn lower and below it."""
    for stage in stages:
        is_write = stage.kind == "write"
        colour = COLOURS[stage.kind]
        axes.barh(
            y, (stage.ended_at - stage.began_at) * 1e3, left=(stage.began_at - start) * 1e3,
            height=0.5 if is_write else 0.66, color=colour, zorder=4 if is_write else 5,
            alpha=1.0 if room in (None, stage.room) else 0.25, edgecolor=FAILED if stage.error else colour,
        )  # fmt: skip


def _legend(axes: Any, shown: Sequence[Stage]) -> None:  # noqa: ANN401
    """Number and median of each kind of stage, lease waits included."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    took: dict[str, list[float]] = defaultdict(list)
    for stage in shown:
        took[stage.kind].append((stage.ended_at - stage.began_at) * 1e3)
    keys = [
        Patch(
            color=colour, label=f"{kind.replace('_', ' ')}: {len(took[kind])}, {statistics.median(took[kind]):.3g} ms"
        )
        for kind, colour in COLOURS.items()
        if kind in took
    ]
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(keys), frameon=False, fontsize=8)
