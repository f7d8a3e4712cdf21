"""The pictures of docs/concepts.md and others: SVG, drawn from the code's own tables.

    python docs/pictures.py

The room's messages are those of the recorded session in tests/protocol/golden, its states are the table of
`pdstage.protocol.room`, lanes are run by `pdstage.protocol.lane.Lane`, shards are cut by
`pdstage.plan`, and layers are what tests/test_architecture.py holds every import to. `tests/docs/test_generated.py`
fails while a picture is stale.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdstage.layout.topology import shard_range  # noqa: E402
from pdstage.plan import shard_overlap  # noqa: E402
from pdstage.protocol.lane import ALIGNMENT, Lane  # noqa: E402
from pdstage.protocol.state import ROOM, State  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

FOLDER = ROOT / "docs" / "pictures"
SESSION = ROOT / "tests" / "protocol" / "golden" / "v2-session.json"
INK, PALE, LINE = "#263238", "#eceff1", "#90a4ae"
COLOURS = ("#80cbc4", "#ffcc80", "#9fa8da", "#c5e1a5", "#f48fb1", "#ffe082", "#b0bec5", "#ce93d8")
WORDS = {  # of a room's messages, beside their names
    "Hello": "my layout, transports and lanes",
    "Welcome": "mine: we can talk",
    "Heartbeat": "I am here",
    "Open": "this room goes to these pages",
    "Reserve": "a chunk needs this much staging memory",
    "Opened": "accepted",
    "Lease": "write it there, in this lane",
    "Tag": "one bulk write, and its tag with it",
    "CloseOk": "that was all, and nothing is in flight",
    "Closed": "then forget the room",
}


class Sheet:
    """Shapes of one picture, in order."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = PALE, *, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
            f'stroke="{LINE}"{dash}/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, anchor: str = "middle", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, *, wide: bool = False, arrow: bool = True) -> None:
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{INK if arrow else LINE}" '
            f'stroke-width="{3 if wide else 1.3}"{head}/>'
        )

    def band(self, points: list[tuple[float, float]], fill: str) -> None:
        where = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polygon points="{where}" fill="{fill}" fill-opacity="0.55"/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" role="img" font-family="system-ui, sans-serif" fill="{INK}">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def flow() -> Sheet:
    """The way of the bytes."""
    sheet = Sheet(760, 190, "From prefill's pool to decode's")
    for x, side in ((20, "prefill rank"), (410, "decode rank")):
        sheet.box(x, 20, 330, 120, "#fafafa", dashed=True)
        sheet.text(x + 165, 38, side, bold=True)
    boxes = ((35, "engine's pages", "#80cbc4"), (220, "send buffer", "#ffcc80"), (425, "staging lane", "#ffcc80"),
             (610, "engine's pages", "#80cbc4"))  # fmt: skip
    for x, words, fill in boxes:
        sheet.box(x, 60, 115, 50, fill)
        sheet.text(x + 57, 90, words)
    for x, to_x, words, wide in (
        (150, 218, "gather", False),
        (335, 423, "one write", True),
        (540, 608, "scatter", False),
    ):
        sheet.line(x, 85, to_x, 85, wide=wide)
        sheet.text((x + to_x) / 2, 76, words, size=12)
    sheet.parts.append(f'<path d="M92 110V165H667V112" fill="none" stroke="{LINE}" stroke-dasharray="5 4"/>')
    sheet.text(380, 182, "direct: piece by piece, where pieces are long", size=12)
    return sheet


def room() -> Sheet:
    """One room's messages, as they were recorded."""
    session = json.loads(SESSION.read_text())
    said = [(who, kind, name) for part in ("greeted", "bound late, staged") for who, kind, name, _ in session[part]]
    steps = [(*step, len(list(same))) for step, same in groupby(said)]
    sheet = Sheet(760, 110 + 44 * len(steps), "The life of a room on both sides")
    left, right = 150, 610
    for x, side, calls in (
        (left, "prefill", "send(), chunk(), finish()"),
        (right, "decode", "receive(), bind()"),
    ):
        sheet.text(x, 26, side, bold=True, size=15)
        sheet.text(x, 46, calls, size=12)
        sheet.line(x, 58, x, 72 + 44 * len(steps), arrow=False)
    for i, (who, kind, name, n) in enumerate(steps):
        y = 92 + 44 * i
        x, to_x = (left, right) if who == "prefill" else (right, left)
        sheet.line(x, y, to_x, y, wide=kind == "tag")
        often = f"{n} x {name}" if n > 1 else name
        sheet.text((left + right) / 2, y - 7, f"{often}: {WORDS[name]}")
        if name == "Tag":
            sheet.text(left - 12, y + 4, "after gather", size=12, anchor="end")
            sheet.text(right + 12, y + 4, "then scatter", size=12, anchor="start")
        elif name == "CloseOk":
            sheet.text(left - 12, y + 4, "Success", size=12, anchor="end", bold=True)
            sheet.text(right + 12, y + 4, "Success", size=12, anchor="start", bold=True)
        elif name == "Closed":
            sheet.text(left - 12, y + 4, "released", size=12, anchor="end", bold=True)
            sheet.text(right + 12, y + 4, "released", size=12, anchor="start", bold=True)
    return sheet


def states() -> Sheet:
    """The room table."""
    places = {
        State.BOOTSTRAPPING: (110, 50), State.WAITING_FOR_INPUT: (360, 50), State.TRANSFERRING: (610, 50),
        State.FAILED: (235, 190), State.SUCCESS: (485, 190),
    }  # fmt: skip
    sheet = Sheet(720, 240, "A room's states")
    moves = [(src, event, dst) for src, row in ROOM.rows.items() for event, dst in row.items() if dst is not None]
    for src, event, dst in moves:
        (x, y), (to_x, to_y) = places[src], places[dst]
        if y == to_y:
            sheet.line(x + 85, y, to_x - 87, y)
            sheet.text((x + to_x) / 2, y - 6, event.name.lower(), size=11)
        else:
            lean = (to_x - x) / (to_y - y)
            sheet.line(x + 20 * lean, y + 20, to_x - 22 * lean, to_y - 22)
            sheet.text(x + (to_x - x) * 0.3 + 8, y + (to_y - y) * 0.3 + 4, event.name.lower(), size=11, anchor="start")
    left = {src for src, _, _ in moves}
    for state, (x, y) in places.items():
        fill = PALE if state in left else {State.FAILED: "#f48fb1"}.get(state, "#c5e1a5")
        sheet.box(x - 85, y - 20, 170, 40, fill)
        sheet.text(x, y + 5, f"{state.name} ({int(state)})", size=12)
    return sheet


def lanes() -> Sheet:
    """A lane's leases, granted and released by the ring itself."""
    lane, unit = Lane(16 * ALIGNMENT), ALIGNMENT
    at: dict[str, int] = {}
    shots: list[tuple[str, int, list[tuple[str, int, int, str]]]] = []

    def shot(words: str) -> None:
        names = {cursor: name for name, cursor in at.items()}
        held = [(names[cursor], cursor, nbytes, state) for cursor, nbytes, state in lane.leases()]
        shots.append((words, lane.watermark, held))

    def grant(name: str, units: int) -> None:
        cursor = lane.grant(units * unit)
        if cursor is None:
            raise AssertionError(f"lease {name} has to wait")
        at[name] = cursor

    for name, units in (("A", 6), ("B", 5), ("C", 4)):
        grant(name, units)
    shot("A, B and C are granted to three chunks, and may be written")
    grant("D", 5)
    shot("D would straddle the end: it begins a lap on, closed, since A is on its bytes")
    lane.land(at["B"])
    lane.release(at["B"])
    shot("B is scattered and released first: the watermark still stands at A")
    lane.land(at["A"])
    lane.release(at["A"])
    shot("A is released: the watermark passes A and B, and D may be written")
    lane.quarantine(at["C"])
    shot("C's writer is not heard of: its bytes are carved out, and the watermark passes them")
    sheet = Sheet(760, 40 + 82 * len(shots), "A staging lane and its watermark")
    for i, (words, watermark, held) in enumerate(shots):
        _lane(sheet, lane.capacity, 30 + 82 * i, (words, watermark, held))
    return sheet


def _lane(sheet: Sheet, capacity: int, y: int, shot: tuple[str, int, list[tuple[str, int, int, str]]]) -> None:
    """Two laps of a lane, the watermark, and the window: one lap from there on."""
    words, watermark, held = shot
    scale = 340 / capacity
    sheet.text(40, y, words, anchor="start", size=12)
    for lap in range(2):
        sheet.box(40 + 340 * lap, y + 10, 340, 30, "#ffffff")
    for name, cursor, nbytes, state in held:
        closed = state == "granted" and cursor + nbytes > watermark + capacity
        fill = {"quarantined": "#f48fb1"}.get(state, COLOURS[ord(name) - ord("A")])
        sheet.box(40 + cursor * scale, y + 10, nbytes * scale, 30, "#ffffff" if closed else fill, dashed=closed)
        sheet.text(40 + (cursor + nbytes / 2) * scale, y + 30, f"{name}, closed" if closed else name)
    x = 40 + watermark * scale
    sheet.line(x, y + 58, x, y + 42)
    sheet.text(x + 6, y + 57, "watermark", size=11, anchor="start")


def recut() -> Sheet:
    """Who sends which KV heads to whom: two pairs of sizes."""
    sheet = Sheet(760, 330, "KV heads re-cut between tensor-parallel sizes")
    for x, (total, src_tp, dst_tp) in ((20, (8, 4, 2)), (400, (8, 3, 2))):
        _recut(sheet, x, total, src_tp, dst_tp)
    return sheet


def _recut(sheet: Sheet, x: int, total: int, src_tp: int, dst_tp: int) -> None:
    step = 220 / total
    sheet.text(x + 170, 24, f"TP {src_tp} to TP {dst_tp}, {total} KV heads", bold=True)

    def edge(tp: int, rank: int, shard: int) -> float:
        return 50 + shard * step + rank * 24 / max(1, tp - 1)

    for tp, left, side in ((src_tp, x + 70, "prefill"), (dst_tp, x + 230, "decode")):
        for rank in range(tp):
            start, end = shard_range(total, tp, rank)
            sheet.box(left, edge(tp, rank, start), 50, (end - start) * step)
            label = f"{side} {rank}"
            at = left - 8 if side == "prefill" else left + 58
            sheet.text(at, edge(tp, rank, start) + (end - start) * step / 2 + 4, label, size=12,
                       anchor="end" if side == "prefill" else "start")  # fmt: skip
            for shard in range(start, end):
                sheet.text(left + 25, edge(tp, rank, shard) + step / 2 + 4, f"{shard}", size=11)
    for src in range(src_tp):
        for dst in range(dst_tp):
            part = shard_overlap(total, src_tp, src, dst_tp, dst)
            if part is not None:
                a = edge(src_tp, src, shard_range(total, src_tp, src)[0] + part.src_start)
                b = edge(dst_tp, dst, shard_range(total, dst_tp, dst)[0] + part.dst_start)
                height = part.count * step
                sheet.band([(x + 121, a), (x + 229, b), (x + 229, b + height), (x + 121, a + height)],
                           COLOURS[src % len(COLOURS)])  # fmt: skip


def layers() -> Sheet:
    """The layers, what is in each, and which lower ones it really imports."""
    held = _architecture()
    imported: dict[int, set[int]] = {layer: set() for layer in held.LAYERS}
    for name, path in held.sources():
        own = held.layer_of(name)
        if own is not None:
            found = (held.layer_of(one.target) for one in held.imports_of(name, path) if _counts(one))
            imported[own] |= {target for target in found if target is not None and target < own}
    present = {name.split(".")[1] for name, _ in held.sources() if name.count(".")}
    sheet = Sheet(760, 30 + 56 * len(held.LAYERS), "Layers: imports point down only")
    for i, layer in enumerate(sorted(held.LAYERS, reverse=True)):
        y = 15 + 56 * i
        sheet.box(20, y, 720, 46, COLOURS[layer % len(COLOURS)])
        sheet.text(36, y + 29, f"L{layer}", anchor="start", bold=True, size=15)
        names = textwrap.wrap("  ".join(name for name in held.LAYERS[layer] if name in present), 105)
        for line, words in enumerate(names):
            sheet.text(80, y + (21 if len(names) == 1 else 15 + 13 * line), words, anchor="start", size=12)
        low = ", ".join(f"L{one}" for one in sorted(imported[layer], reverse=True))
        sheet.text(
            80,
            y + (38 if len(names) == 1 else 42),
            f"imports {low}" if low else "imports nothing of pdstage below it",
            anchor="start",
            size=11,
        )
    return sheet


def _counts(found: Any) -> bool:
    return found.target.startswith("pdstage.") and not found.guarded


def _architecture() -> ModuleType:
    """tests/test_architecture.py, which has the table and reads the imports."""
    path = ROOT / "tests" / "test_architecture.py"
    spec = importlib.util.spec_from_file_location("test_architecture", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes look themselves up
    spec.loader.exec_module(module)
    return module


PICTURES: dict[str, Callable[[], Sheet]] = {
    "flow": flow, "room": room, "states": states, "lanes": lanes, "recut": recut, "layers": layers,
}  # fmt: skip


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    write()
