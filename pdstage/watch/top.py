"""`pdstage top`: reads endpoints repeatedly and shows each frame; or shows one frame."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pdstage.errors import UsageError
from pdstage.watch.scrape import Answer, Node, read, url_of
from pdstage.watch.terminal import table

_MAX_ROWS = 16
_STATES = {"meet": "bootstrapping", "wait": "waiting_for_input", "move": "transferring"}
# Totals of what should not happen: the metric, the label that tells its kinds apart, and what is shown.
_PROBLEMS = (
    ("pdstage_room_failures_total", "error", "rooms failed"),
    ("pdstage_frames_dropped_total", "reason", "frames"),
    ("pdstage_tags_dropped_total", "reason", "tags"),
    ("pdstage_control_messages_dropped_total", "reason", "messages"),
    ("pdstage_stage_failures_total", "stage", "failed"),
    ("pdstage_chunk_fallbacks_total", "", "fell back to direct"),
    ("pdstage_aux_fallbacks_total", "", "aux fell back to messages"),
    ("pdstage_chunks_altered_total", "", "altered on the way"),
    ("pdstage_sessions_refused_total", "", "sessions refused"),
    ("pdstage_peers_refused_total", "", "peers refused"),
    ("pdstage_peers_crowded_total", "", "peers crowded"),
    ("pdstage_sessions_unfenced", "", "sessions not fenced, now"),
    ("pdstage_sessions_closed_total", "reason", "sessions"),
)
_IN_ORDER = "sessions ended"
_NODES = (
    "node", "over", "path", *_STATES, "held", "done/s", "fail/s", "GB/s", "peers", "staging", "held up",
)  # fmt: skip


class View(NamedTuple):
    """One node: its current values, and what was added over the last interval."""

    now: Node
    added: Node


class Top:
    """What was read of some endpoints so far: enough for the next frame."""

    def __init__(self, endpoints: Sequence[str], interval_s: float) -> None:
        for endpoint in endpoints:
            url_of(endpoint)
        self._endpoints, self._interval_s = endpoints, interval_s
        self._before: dict[tuple[str, str], Node] = {}
        self.answers: list[Answer] = []
        self._views: list[View] = []

    def read(self) -> None:
        """Reads every endpoint, in parallel, so that one that hangs delays the others by its timeout at most. A node
        that was gone, or restarted, has no rates until its second reading.
        """
        with ThreadPoolExecutor(min(32, len(self._endpoints))) as pool:
            self.answers = list(pool.map(read, self._endpoints))
        now = {(answer.endpoint, node.name): node for answer in self.answers for node in answer.nodes}
        self._views = [View(node, node.since(self._before.get(key))) for key, node in now.items()]
        self._views.sort(key=lambda view: (view.now.role != "prefill", _in_order(view.now.name)))
        self._before = now

    def frame(self, width: int) -> str:
        """Lines of at most `width` characters."""
        views = self._views
        done = sum(
            v.added.rate("pdstage_rooms_ended_total", outcome="success") for v in views if v.now.role == "decode"
        )
        counts = f"{_counted(len(views), 'node')} at {_counted(len(self.answers), 'endpoint')}"
        clock = f"{time.strftime('%H:%M:%S')}, every {self._interval_s:g} s"
        lines = [f"pdstage top  {counts}  {done:,.0f} rooms/s  {clock}"]
        lines += [f"no answer  {answer.endpoint}: {answer.problem}" for answer in self.answers if answer.problem]
        if views:
            hidden = any(not answer.problem and not answer.rooms_told for answer in self.answers)
            lines += _table("nodes", _NODES, [_node(view) for view in views], "")
            told = "not served by this endpoint" if hidden else "none open"
            lines += _table("rooms open longest", ("room", "node", "state", "age"), self._oldest(), told)
            lines += _table("errors, since the start", ("node", "what", "total", "per s"), _errors(views), "none")
        return "\n".join(line[:width] for line in lines)

    def _oldest(self) -> list[tuple[str, ...]]:
        rooms = [(room, view.now.name) for view in self._views for room in view.now.rooms]
        rooms.sort(key=lambda one: -float(one[0]["age_s"]))
        return [
            (str(room["room"]), node, str(room["state"]).replace("_", " "), _seconds(float(room["age_s"])))
            for room, node in rooms
        ]


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split()]


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]], without: str) -> list[str]:
    """`without` is shown where there is no row."""
    if not rows:
        return ["", f"{title}: {without}"]
    more = [f"and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []
    return ["", f"{title}:", *table(head, rows[:_MAX_ROWS]), *more]


def _node(view: View) -> tuple[str, ...]:
    now, added = view
    over = [own["transport"] for own, _ in now.series("pdstage_sessions_by_transport_total")]
    info = next((own for own, _ in now.series("pdstage_node_info")), {})
    rooms = {own["state"]: n for own, n in now.series("pdstage_rooms")}
    moved = added.rate("pdstage_written_bytes_total") or added.rate("pdstage_stage_bytes_total", stage="scatter")
    return (
        f"{now.name}{' FAILED' if now.value('pdstage_node_failed') else ''}",
        " ".join(sorted(over)) or info.get("transport", ""),
        info.get("path", ""),
        *(f"{rooms.get(state, 0):,.0f}" for state in _STATES.values()),
        f"{rooms.get('success', 0) + rooms.get('failed', 0):,.0f}",
        f"{added.rate('pdstage_rooms_ended_total', outcome='success'):,.0f}",
        f"{added.rate('pdstage_rooms_ended_total', outcome='failed'):,.1f}",
        f"{moved / 1e9:.2f}",
        f"{now.value('pdstage_sessions'):,.0f}",
        *_memory(now),
    )


def _memory(node: Node) -> tuple[str, str]:
    """How much of the lanes is leased or quarantined, or how many send buffers are used; and the bytes that wait for a
    watermark or for a lost writer.
    """
    if buffers := node.value("pdstage_send_buffers"):
        return f"{node.value('pdstage_send_buffers', state='used'):.0f} of {buffers:.0f}", ""
    leased, ahead = node.value("pdstage_lane_leased_bytes"), node.value("pdstage_lane_leased_bytes", state="ahead")
    lost, capacity = node.value("pdstage_lane_quarantined_bytes"), node.value("pdstage_lane_capacity_bytes")
    return f"{(leased - ahead + lost) / capacity:.0%} of {_bytes(capacity)}" if capacity else "", _bytes(ahead + lost)


def _errors(views: Sequence[View]) -> list[tuple[str, ...]]:
    """Node, what, total and rate, of all that should not happen and did."""
    rows = []
    for now, added in views:
        for metric, label, what in _PROBLEMS:
            for own, n in now.series(metric):
                kind = own.get(label, "")
                said = f"{what} {kind}".strip()
                if n and said != _IN_ORDER:
                    rows.append((added.rate(metric, **({label: kind} if label else {})), n, now.name, said))
    rows.sort(key=lambda row: (-row[0], -row[1]))
    return [(name, what, f"{n:,.0f}", f"{rate:,.1f}" if rate else "") for rate, n, name, what in rows]


def _seconds(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if value >= s), (1e-6, "us"))
    return f"{value / scale:.3g} {unit}"


def _bytes(nbytes: float) -> str:
    power, unit = next(((p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if nbytes >= 1 << p), (0, "B"))
    return f"{nbytes / (1 << power):.3g} {unit}"


def run(
    endpoints: Sequence[str], *, interval_s: float = 1.0, once: bool = False, stop: threading.Event | None = None
) -> int:
    """Shows `endpoints` until interrupted, or `stop` is set; with `once` one frame.

    Returns 0 if every endpoint answered the last time, else 1. Raises `UsageError`.
    """
    if not 0.1 <= interval_s <= 3600:
        raise UsageError(f"an interval of {interval_s} s", remedy="give 0.1 to 3600")
    stop, top = stop or threading.Event(), Top(endpoints, interval_s)
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and not once else ""
    top.read()
    try:
        while not stop.wait(interval_s):
            top.read()
            sys.stdout.write(f"{clear}{top.frame(shutil.get_terminal_size((132, 24)).columns)}\n")
            sys.stdout.flush()
            if once:
                break
    except KeyboardInterrupt:
        pass
    return int(any(answer.problem for answer in top.answers))
