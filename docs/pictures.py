"""The pictures of docs that follow the code: SVG, drawn from its own tables. Others in docs/pictures were drawn once.

    python docs/pictures.py

The room's messages are those of two cores in a `World` of tests/pair.py, its states are the table of
`pdstage.protocol.state`. `tests/docs/test_generated.py` fails while a picture is stale.
"""

from __future__ import annotations

import re
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdstage.protocol.state import ROOM, State  # noqa: E402
from tests.pair import World  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = ROOT / "docs" / "pictures"
INK, PALE, LINE = "#263238", "#eceff1", "#90a4ae"
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

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="{LINE}"/>'
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


def room() -> Sheet:
    """The messages of a handshake and of one room of two chunks."""
    world = World()
    receiver = world.announce(1)
    world.run()
    world.send(1, step=4)
    world.bind(receiver, 8, world.pages(1))
    world.run()
    items = [re.match(r"(frame|tag) ([DP])0>[DP]0 (\w*)", line) for line in world.log]
    said = [(item[1], item[2], item[3] or "Tag") for item in items if item]
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
    for i, (kind, who, name, n) in enumerate(steps):
        y = 92 + 44 * i
        x, to_x = (left, right) if who == "P" else (right, left)
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


PICTURES: dict[str, Callable[[], Sheet]] = {"room": room, "states": states}


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    write()
