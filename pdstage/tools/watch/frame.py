"""One frame of `pdstage top`: the endpoints' answers, drawn with rich for any width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdstage.errors import UsageError

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise UsageError("pdstage top needs rich", remedy="pip install 'pdstage[top]'") from missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from pdstage.tools.watch.scrape import Answer, Node

WIDE = 110
N_SLOWEST = 8
_MAX_NODES = 16
_MAX_BARS = 12
_SPARKS = " ▁▂▃▄▅▆▇█"
_STATES = (("bootstrapping", "meet"), ("waiting_for_input", "wait"), ("transferring", "move"))
_STAGES = ("lease_wait", "gather", "write", "direct", "aux", "scatter")
_PROBLEMS = (  # metric, its label, the text shown
    ("pdstage_frames_dropped_total", "reason", "frames"),
    ("pdstage_tags_dropped_total", "reason", "tags"),
    ("pdstage_control_messages_dropped_total", "reason", "messages"),
    ("pdstage_stage_failures_total", "stage", "failed"),
)
_EVENTS = (
    ("pdstage_chunk_fallbacks_total", "fell back to direct"),
    ("pdstage_aux_fallbacks_total", "aux fell back to messages"),
    ("pdstage_chunks_altered_total", "altered on the way"),
    ("pdstage_sessions_refused_total", "sessions refused"),
    ("pdstage_peers_refused_total", "peers refused"),
    ("pdstage_peers_crowded_total", "peers crowded"),
)


class View(NamedTuple):
    """One node: its current values, and what was added over the last interval."""

    endpoint: str
    now: Node
    added: Node

    def rate(self, metric: str, **labels: str) -> float:
        return self.added.value(metric, **labels) / self.added.at if self.added.at > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        moved = self.rate("pdstage_written_bytes_total")
        return moved or self.rate("pdstage_stage_bytes_total", stage="scatter")


def draw(
    answers: Sequence[Answer],
    views: Sequence[View],
    *,
    width: int,
    clock: str,
    interval_s: float,
    history: Mapping[tuple[str, str], Sequence[float]],
) -> RenderableType:
    """The whole frame for `width` columns. `history` holds bytes a second by endpoint and node name, oldest first."""
    parts: list[RenderableType] = [_title(answers, views, clock, interval_s)]
    gone = [answer for answer in answers if answer.problem]
    if gone:
        parts.append(_gone(gone))
    if views:
        wide = width >= WIDE
        parts.append(_panel("nodes", _nodes(views, history, wide)))
        parts.append(_panel("staging memory", _memory(views, width - 4)))
        left = _panel("rooms open longest", _slowest(answers, views))
        right = _panel("stages of chunks, this interval", _stages(views))
        errors = _panel("errors, since the start", _errors(views))
        if wide:
            grid = Table.grid(expand=True)
            grid.add_column(ratio=1)
            grid.add_column(ratio=1)
            grid.add_row(Group(left), Group(right, errors))
            parts.append(grid)
        else:
            parts += [right, left, errors]
    return Group(*parts)


def _panel(title: str, body: RenderableType) -> Panel:
    return Panel(body, title=f"[bold]{title}[/]", title_align="left", border_style="bright_black", padding=(0, 1))


def _title(answers: Sequence[Answer], views: Sequence[View], clock: str, interval_s: float) -> Table:
    bar = Table.grid(expand=True)
    bar.add_column(overflow="ellipsis", no_wrap=True)
    bar.add_column(justify="right", no_wrap=True)
    nodes = f"{len(views)} node{'s' * (len(views) != 1)}"
    ends = f"{len(answers)} endpoint{'s' * (len(answers) != 1)}"
    done = sum(view.rate("pdstage_rooms_ended_total", outcome="success") for view in views if view.now.role == "decode")
    head = Text.assemble(("pdstage top", "bold cyan"), f"  {nodes} at {ends}  ", (f"{done:,.0f} rooms/s", "bold"))
    bar.add_row(head, f"[bright_black]{clock}, every {interval_s:g} s[/]")
    return bar


def _gone(answers: Sequence[Answer]) -> Text:
    return Text("\n").join(
        Text.assemble(("  no answer  ", "bold white on red"), f" {answer.endpoint}: {answer.problem}")
        for answer in answers
    )


def _nodes(views: Sequence[View], history: Mapping[tuple[str, str], Sequence[float]], wide: bool) -> Table:
    table = _table("node", *(("over", "path") if wide else ()))
    for _, short in _STATES:
        table.add_column(short, justify="right")
    for name in ("held", "done/s", "fail/s", "GB/s", *(("", "peers", "chunk p50", "p99") if wide else ())):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for view in views[:_MAX_NODES]:
        rooms = view.now.by("pdstage_rooms", "state")
        failed = view.rate("pdstage_rooms_ended_total", outcome="failed")
        cells: list[str | Text] = [_named(view)]
        if wide:
            cells += [_over(view), view.now.info.get("path", "")]
        cells += [_number(rooms.get(state, 0)) for state, _ in _STATES]
        cells.append(_number(rooms.get("success", 0) + rooms.get("failed", 0)))
        cells.append(f"{view.rate('pdstage_rooms_ended_total', outcome='success'):,.0f}")
        cells.append(Text(f"{failed:,.1f}", style="bold red") if failed else Text("0", style="bright_black"))
        cells.append(f"{view.bytes_per_s / 1e9:.2f}")
        if wide:
            cells.append(Text(sparkline(history.get((view.endpoint, view.now.name), ())), style="cyan"))
            cells.append(_number(view.now.value("pdstage_sessions")))
            metric = "pdstage_chunk_latency_seconds" if view.now.role == "prefill" else "pdstage_stage_seconds"
            cells += [_seconds(view.added.quantile(q, metric)) for q in (0.5, 0.99)]
        table.add_row(*cells)
    if len(views) > _MAX_NODES:
        table.add_row(Text(f"and {len(views) - _MAX_NODES} more", style="bright_black"))
    return table


def _named(view: View) -> Text:
    failed = view.now.value("pdstage_node_failed") > 0
    style = "bold white on red" if failed else "magenta" if view.now.role == "prefill" else "green"
    return Text(view.now.name, style=style)


def _over(view: View) -> str:
    used = view.now.by("pdstage_sessions_by_transport_total", "transport")
    return " ".join(sorted(used)) or view.now.info.get("transport", "")


def _memory(views: Sequence[View], width: int) -> RenderableType:
    """One bar per lane; a prefill node's bars are its send buffers. If there are many, the fullest."""
    rows: list[tuple[float, str, _Bar]] = []
    for view in views:
        capacity = view.now.by("pdstage_lane_capacity_bytes", "lane")
        for lane in sorted(capacity, key=int):
            rows.append((*_lane(view.now, lane, capacity[lane]),))
        buffers = view.now.by("pdstage_send_buffers", "state")
        if buffers:
            used, whole = buffers.get("used", 0.0), sum(buffers.values())
            text = f"{used:.0f} of {whole:.0f} x {_bytes(view.now.value('pdstage_send_buffer_bytes'))}"
            rows.append((used / whole, f"{view.now.name} buffers", _Bar(whole, {"cyan": used}, text)))
    if len(rows) > _MAX_BARS:
        rows = sorted(rows, key=lambda row: -row[0])[:_MAX_BARS]
    table = Table.grid(padding=(0, 1))
    for _ in range(3):
        table.add_column(no_wrap=True)
    n_cells = max(8, width - max((len(name) + len(row.text) for _, name, row in rows), default=0) - 6)
    for _, name, row in rows:
        table.add_row(name, bar(n_cells, row.whole, row.shares), row.text)
    legend = Text.assemble(
        ("█ landed  ", "cyan"), ("█ granted  ", "blue"), ("█ quarantined  ", "red"), ("░ free", "bright_black")
    )
    return Group(table, legend)


class _Bar(NamedTuple):
    whole: float
    shares: dict[str, float]
    """By colour."""
    text: str


def _lane(node: Node, lane: str, capacity: float) -> tuple[float, str, _Bar]:
    landed, granted, ahead = (
        node.value("pdstage_lane_leased_bytes", lane=lane, state=state) for state in ("landed", "granted", "ahead")
    )
    carved = node.value("pdstage_lane_quarantined_bytes", lane=lane)
    lag = node.value("pdstage_lane_watermark_lag_bytes", lane=lane)
    text = f"{(landed + granted + carved) / capacity:4.0%} of {_bytes(capacity)}, watermark lag {_bytes(lag)}"
    if ahead:
        text += f", {_bytes(ahead)} ahead"
    if carved:
        text += f", {_bytes(carved)} quarantined"
    shares = {"cyan": landed, "blue": granted, "red": carved}
    return (landed + granted + ahead + carved) / capacity, f"{node.name} lane {lane}", _Bar(capacity, shares, text)


def bar(n_cells: int, whole: float, shares: Mapping[str, float]) -> Text:
    """`n_cells` cells, divided among the shares by colour as parts of `whole`; a nonzero share gets at least one."""
    made, left = Text(), n_cells
    for colour, share in shares.items():
        n = min(left, max(round(n_cells * share / whole), 1)) if share > 0 and whole > 0 else 0
        made.append("█" * n, style=colour)
        left -= n
    made.append("░" * left, style="bright_black")
    return made


def _stages(views: Sequence[View]) -> RenderableType:
    table = _table("stage")
    for name in ("chunks/s", "p50", "p99", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in _STAGES:
        n = sum(view.rate("pdstage_stage_seconds_count", stage=stage) for view in views)
        if not n:
            continue
        merged = _merged([view.added for view in views])
        nbytes = sum(view.rate("pdstage_stage_bytes_total", stage=stage) for view in views)
        p50, p99 = (_seconds(merged.quantile(q, "pdstage_stage_seconds", stage=stage)) for q in (0.5, 0.99))
        table.add_row(stage.replace("_", " "), f"{n:,.0f}", p50, p99, f"{nbytes / 1e9:.2f}" if nbytes else "")
    staged, direct = (
        sum(v.rate("pdstage_chunks_written_total", path=path) for v in views) for path in ("staged", "direct")
    )
    waiting = sum(view.now.value("pdstage_lease_requests_waiting") for view in views)
    text = Text.assemble(
        "path: ", (f"{staged:,.0f}", "bold"), " staged/s, ", (f"{direct:,.0f}", "bold"), " direct/s; ",
        (f"{waiting:,.0f}", "bold yellow" if waiting else "bold"), " wait for a lease",
    )  # fmt: skip
    return Group(table, text) if table.row_count else text


def _merged(nodes: Sequence[Node]) -> Node:
    made = type(nodes[0])("", "", 0.0)
    for node in nodes:
        for labels, value in node.samples.get("pdstage_stage_seconds_bucket", {}).items():
            held = made.samples["pdstage_stage_seconds_bucket"]
            held[labels] = held.get(labels, 0.0) + value
    return made


def _errors(views: Sequence[View]) -> RenderableType:
    rows: list[tuple[str, str, float, float]] = []
    for view in views:
        by_error = view.now.by("pdstage_room_failures_total", "error")
        failed = by_error or {"": view.now.value("pdstage_rooms_ended_total", outcome="failed")}
        metric = "pdstage_room_failures_total" if by_error else "pdstage_rooms_ended_total"
        for error, n in failed.items():
            own = {"error": error} if by_error else {"outcome": "failed"}
            rows.append((view.now.name, f"rooms failed {error}".strip(), n, view.rate(metric, **own)))
        for metric, label, what in _PROBLEMS:
            for reason, n in view.now.by(metric, label).items():
                rows.append((view.now.name, f"{what} {reason}", n, view.rate(metric, **{label: reason})))
        for metric, what in _EVENTS:
            rows.append((view.now.name, what, view.now.value(metric), view.rate(metric)))
        lost = {"reason": "lost"}
        rows.append((
            view.now.name, "sessions lost", view.now.value("pdstage_sessions_closed_total", **lost),
            view.rate("pdstage_sessions_closed_total", **lost),
        ))  # fmt: skip
        unfenced = view.now.value("pdstage_sessions_unfenced")
        rows.append((view.now.name, "sessions not fenced, now", unfenced, 0.0))
    rows = sorted((row for row in rows if row[2]), key=lambda row: (-row[3], -row[2]))
    if not rows:
        return Text("none", style="green")
    table = _table("node", "what")
    table.add_column("total", justify="right")
    table.add_column("per s", justify="right")
    for name, what, n, rate in rows[:12]:
        table.add_row(name, what, f"{n:,.0f}", Text(f"{rate:,.1f}", style="bold red") if rate else "")
    return table


def _slowest(answers: Sequence[Answer], views: Sequence[View]) -> RenderableType:
    rooms = sorted(((room, view) for view in views for room in view.now.rooms), key=lambda pair: -pair[0].age_s)
    if not rooms:
        hidden = any(not answer.problem and not answer.rooms_told for answer in answers)
        return Text("not served by this endpoint" if hidden else "none open", style="bright_black")
    table = _table("room", "node", "state")
    table.columns[0].overflow = "ellipsis"
    table.columns[0].no_wrap = True
    table.add_column("age", justify="right", no_wrap=True)
    for room, view in rooms[:N_SLOWEST]:
        table.add_row(room.room, _named(view), room.state.replace("_", " "), _seconds(room.age_s))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bright_black", padding=(0, 1))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def sparkline(values: Sequence[float]) -> str:
    """One character per value, relative to the highest."""
    most = max(values, default=0.0)
    steps = len(_SPARKS) - 1
    return "".join(_SPARKS[round(steps * value / most)] if most > 0 else " " for value in values)


def _number(n: float) -> Text:
    return Text(f"{n:,.0f}", style="" if n else "bright_black")


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _bytes(nbytes: float) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.3g} {unit}"
    return f"{nbytes:.0f} B"
