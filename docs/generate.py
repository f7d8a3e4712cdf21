"""Writes the generated parts of docs: the deadlines and the tests of each invariant in reliability.md, the table of
traits in transports.md, that of `tuning` in tune.md, the variables in environment.md, every metric in metrics.md. It
also runs `performance`, `pictures` and `reference` beside it.

    python docs/generate.py

Deadlines come from `pdstage.protocol.config`, citations from the tests: a file cites an invariant by its number (I7) in
a docstring or comment. Traits are read from the transports' source,
since a transport imports only where its library is. Tests fail while a page is stale.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import performance  # noqa: E402
import pictures  # noqa: E402
import reference  # noqa: E402
import tuning  # noqa: E402

from pdstage import DecodeNode, PrefillNode, environment  # noqa: E402
from pdstage.integrations import options  # noqa: E402
from pdstage.manager.options import NodeOptions  # noqa: E402
from pdstage.protocol import config, state  # noqa: E402
from pdstage.watch import catalogue  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PAGE = ROOT / "docs" / "reliability.md"
API_PAGE = ROOT / "docs" / "api.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
ENVIRONMENT_PAGE = ROOT / "docs" / "environment.md"
TRANSPORTS_PAGE = ROOT / "docs" / "transports.md"
N_INVARIANTS = 16
CITED = re.compile(r"\bI(\d{1,2})\b")
DEADLINES = {  # field: whose, what it bounds, what happens at its end
    "retry_s": ("both", "an unanswered question", "it is asked again"),
    "hello_s": ("both", "a handshake: its answer, or the first frame after it", "its rooms fail, or it is forgotten"),
    "open_s": ("decode", "from Open to every writer's Opened", "the room fails"),
    "wait_s": ("decode", "from Open to the first chunk", "the room fails"),
    "transfer_s": ("decode", "between two chunks that bring something new", "the room fails"),
    "recall_after_s": ("decode", "a lease that may be written, is not, and is in another's way", "it is recalled"),
    "stuck_after_s": (
        "decode",
        "a lane that does not move, while another could serve",
        "leases behind it are recalled",
    ),
    "drain_s": (
        "decode",
        "a writer's answer to Abort, or its Close after Success",
        "the session is lost: all its rooms fail",
    ),
    "open_wait_s": (
        "prefill",
        "`send()` to the last destination's Open; begins anew while a decode rank waits with the room",
        "the room fails",
    ),
    "send_wait_s": ("prefill", "an Open to its room's `send()`", "the room fails at decode"),
    "write_s": ("prefill", "one write", "the session is lost: all its rooms fail"),
    "fall_back_after_s": (
        "prefill",
        "a chunk without staging memory, where pages may be written in place",
        "it goes direct",
    ),
    "max_silence_s": (
        "both",
        "the longest silence this node promises its peers",
        "they lose the session: all its rooms fail",
    ),
    "max_deadline_s": (
        "prefill",
        "a room that decode's heartbeats hold; and one that it has opened, however long it wants to wait",
        "the room fails",
    ),
    "idle_s": (
        "both",
        "a session that no room of either side needs; the shorter of the two sides'",
        "it ends in order, with its connection; the next room starts a new session",
    ),
}


def deadlines() -> str:
    """Every `_s` of Config."""
    rows = ["| `Config` | default | side | bounds | then |", "|---|---:|---|---|---|"]
    for field in fields(config.Config):
        if field.name.endswith("_s"):
            default = f"{field.default:g} s"
            if field.name not in DEADLINES:
                raise SystemExit(f"Config.{field.name} needs a line in docs/generate.py")
            rows.append(f"| `{field.name}` | {default} | {' | '.join(DEADLINES[field.name])} |")
    return "\n".join(rows)


def _cited(text: str) -> set[int]:
    return {int(number) for number in CITED.findall(text) if 1 <= int(number) <= N_INVARIANTS}


def citations(folder: Path = ROOT / "tests") -> dict[int, list[str]]:
    """By invariant: the files of tests that cite it."""
    cited = {
        path.relative_to(folder).as_posix(): _cited(path.read_text()) for path in sorted(folder.rglob("test_*.py"))
    }
    return {number: [name for name, held in cited.items() if number in held] for number in range(1, N_INVARIANTS + 1)}


def table() -> str:
    rows = ["| | held by tests in |", "|---|---|"]
    for number, files in citations().items():
        names = [f"[{name.removesuffix('.py')}](../tests/{name})" for name in files]
        rows.append(f"| I{number} | {', '.join(names)} |")
    return "\n".join(rows)


def traits() -> str:
    """What each transport of the package declares, in the order in which "auto" prefers them."""
    found = []
    for path in sorted((ROOT / "pdstage" / "transport").glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            said = _values(node, _values(tree, {})) if isinstance(node, ast.ClassDef) else {}
            if said.get("traits"):
                found.append((-int(said.get("preference", 0)), trait_row(said["traits"])))
    head = "| | memory | tag | descriptors a post | blocks | fences | stops reads | post | descriptor | bytes |"
    return "\n".join([head, "|---|---|---|---:|---|---|---|---:|---:|---:|", *(row for _, row in sorted(found))])


def _values(body: ast.Module | ast.ClassDef, known: Mapping[str, Any]) -> dict[str, Any]:
    """Names that are given numbers, strings, sets of those or Traits, which are taken as dicts; of others none."""
    found: dict[str, Any] = {"Traits": dict, "__builtins__": {"frozenset": frozenset}, **known}
    for node in body.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                with suppress(NameError, TypeError):  # it takes more than that
                    found[name] = eval(ast.unparse(value), found) if value else None
    return found


def trait_row(declared: dict[str, Any]) -> str:
    """One transport's row, from the fields of its `Traits`."""

    def yes(name: str) -> str:
        return "yes" if declared[name] else "no"

    cells = [
        f"`{declared['name']}`",
        ", ".join(sorted(declared["kinds"])),
        "with the write" if declared["notifies"] else "by its caller",
        f"{declared['max_descriptors']:,}",
        *map(yes, ("post_blocks", "fences", "stops_reads")),
        f"{declared['post_s'] * 1e6:g} us",
        f"{declared['descriptor_s'] * 1e6:g} us",
        f"{declared['bytes_per_s'] / 1e9:g} GB/s",
    ]
    return f"| {' | '.join(cells)} |"


def metrics() -> str:
    """Every metric that `pdstage.watch` exports, by section."""
    lines: list[str] = []
    for title, held in catalogue.SECTIONS.items():
        lines += ["", f"### {title}", "", "| metric | type | unit | labels | |", "|---|---|---|---|---|"]
        for one in held:
            own = ", ".join(f"`{label}`" for label in one.labels)
            whose = f" {one.role[0].upper()}" if one.role else ""
            lines.append(f"| `{one.name}`{whose} | {one.kind} | {one.unit} | {own} | {one.text} |")
    return "\n".join(lines[1:])


def variables() -> str:
    """Every environment variable that is read, by whom, and what it may be; those of who works on pdstage apart."""
    rows = [
        [f"| `{v.name}` | {v.values} | {v.unset} | {v.meaning} | {v.read_by} |" for v in held]
        for held in (environment.USERS, environment.DEVELOPERS)
    ]
    head = ["| variable | may be | unset | what for | read by |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows[0], "", "For who works on pdstage:", "", *head, *rows[1]])


def node_options() -> str:
    """What PDSTAGE_NODE and vLLM's extra config take: from the nodes' signatures and `Config`."""
    hints: dict[str, Any] = {"trust_layout": "bool", "metrics_port": "int", "metrics_host": "str"}
    hints |= inspect.get_annotations(NodeOptions) | PrefillNode.__init__.__annotations__
    hints |= DecodeNode.__init__.__annotations__
    rows = ["| option | JSON | unless given | unit |", "|---|---|---|---|"]
    for name, default in options.defaults().items():
        hint = getattr(hints[name], "__forward_arg__", str(hints[name]))
        kinds = [_JSON[kind] for one in hint.split(" | ") if (kind := one.partition("[")[0]) in _JSON]
        shown = "" if default is None else f"`{json.dumps(default)}`"
        rows.append(f"| `{name}` | {' or '.join(kinds)} | {shown} | {'bytes' if name.endswith('_nbytes') else ''} |")
    return "\n".join(rows)


_JSON = {
    "bool": "true or false", "int": "number", "str": "text", "arguments.GivenPath": "text", "GivenKeys": "text",
    "Mapping": "object", "Config": "object",
}  # fmt: skip


def config_fields() -> str:
    """Each field of Config."""
    units = {"s": "seconds", "nbytes": "bytes"}
    rows = ["| `config` | unless given | unit |", "|---|---:|---|"]
    for field in fields(config.Config):
        unit = units.get(field.name.rpartition("_")[2], "")
        rows.append(f"| `{field.name}` | `{json.dumps(field.default)}` | {unit} |")
    return "\n".join(rows)


def machines() -> str:
    """The state tables: a row a state, a column an event."""
    lines = []
    for machine in (state.DESTINATION, state.CHUNK, state.WRITER, state.LEASE):
        events = list(dict.fromkeys(event for row in machine.rows.values() for event in row))
        words = [event.name.lower().replace("_", " ") for event in events]
        lines += ["", f"| {machine.name} | {' | '.join(words)} |", "|---|" + "---|" * len(events)]
        for phase in type(next(iter(machine.rows))):
            row = machine.rows.get(phase, {})
            cells = [("" if event not in row else row[event].name.lower() if row[event] else "-") for event in events]
            lines.append(f"| *{phase.name.lower()}* | {' | '.join(cells)} |")
    return "\n".join(lines[1:])


PARTS = {"deadlines": deadlines, "invariants": table, "states": machines}
PAGES = {
    PAGE: PARTS,
    TRANSPORTS_PAGE: {"traits": traits},
    ROOT / "docs" / "tune.md": {"tuning": tuning.table},
    ENVIRONMENT_PAGE: {"variables": variables, "node": node_options, "config": config_fields},
    METRICS_PAGE: {"metrics": metrics},
}


def written(page: str, parts: Mapping[str, Callable[[], str]] = PARTS) -> str:
    """The page with its generated parts made anew."""
    for name, make in parts.items():
        begin, end = f"<!-- {name}: made by `make docs`, do not edit -->", f"<!-- /{name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"the page has no place for {name}: put {begin} and {end} into it")
        page = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    performance.write()
    pictures.write()
    for page, parts in PAGES.items():
        page.write_text(written(page.read_text(), parts))
    API_PAGE.write_text(reference.written(API_PAGE.read_text()))
