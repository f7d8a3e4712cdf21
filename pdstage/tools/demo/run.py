"""The whole demo: starts the processes, moves the caches, compares the tokens, and reports."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pdstage.bench.ranks import Rank, traced
from pdstage.control.bootstrap import BootstrapServer
from pdstage.errors import UsageError
from pdstage.tools.demo.engine import Model, cut, put_together, spoilt
from pdstage.tools.demo.ranks import DecodeRank, PrefillRank
from pdstage.tools.trace import check, merge_files
from pdstage.transport import available, load
from pdstage.watch.terminal import progress, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.tools.demo.options import Options

Report: TypeAlias = dict[str, Any]
"""The run's JSON. `new_tokens` counts those of all rooms; `seconds`: first chunk to last room.

`rows_identical`: for each room every decode rank has the aux row that prefill gave. The transport wrote `aux_rows` of
them; `aux_fallbacks` should have gone that way, and came by message. `moves`: the same rooms afterwards, on each path
in turn; their `seconds` are from the first rank's sending until every decode rank had all.
"""
_OVER = "sessions_over_"
_COLOURS = {"direct": "#c65d3b", "staged": "#2f7f8f"}
_SAME = ("prefill_tp", "decode_tp", "prefill_pp", "decode_pp", "requests", "device")


@dataclass(slots=True)
class Room:
    """One room's transfer: what prefill's ranks counted, and times of the machine's monotonic clock.

    `began_at`: its first chunk was handed over; `handed_at`: its last one; `came_at`: the last decode rank had all.
    """

    prompt: list[int]
    truth: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)
    rows: set[int] = field(default_factory=set)
    began_at: float = 0.0
    handed_at: float = 0.0
    came_at: float = 0.0


def _path(moved: Counter[str]) -> str:
    return "+".join(path for path in ("direct", "staged") if moved[f"chunks_{path}"])


def run(options: Options) -> Report:
    """Runs the demo and prints its tables. Raises `UsageError` for a transport or a device that is not here."""
    if options.transport is None:
        options = replace(options, transport="auto" if available()["nixl"] else "nixl")
    if options.transport != "auto":
        load(str(options.transport))
    n_devices = torch.cuda.device_count()
    if options.device != "cpu" and (torch.device(options.device).index or 0) >= n_devices:
        what = f"--device {options.device}: torch finds {n_devices} CUDA devices here"
        raise UsageError(what, remedy="leave it out: the demo runs on the CPU too")
    check(options.trace)
    with tempfile.TemporaryDirectory(prefix="pdstage-demo-") as folder:
        with ExitStack() as stack:
            if options.trace is not None:
                stack.enter_context(traced(Path(folder)))
            rooms, caught, moves = _conducted(options, stack)
        if options.trace is not None:
            merge_files(Path(folder).iterdir(), options.trace)
    moved: Counter[str] = Counter()
    for room in rooms:
        moved.update(room.moved)
    report = {
        "transport": "+".join(sorted(name.removeprefix(_OVER) for name in moved if name.startswith(_OVER))),
        "path": _path(moved),
        "model": f"{options.model}, random weights: {len(options.family.layers)} layers of "
        f"{', '.join(options.family.components)}, float64",
        **{name: getattr(options, name) for name in _SAME},
        "new_tokens": sum(len(room.tokens) for room in rooms),
        "tokens_identical": all(room.tokens == room.truth for room in rooms),
        "negative_control_caught": caught,
        "bytes_moved": moved["bytes_written"],
        "descriptors": moved["descriptors"],
        "seconds": max(room.came_at for room in rooms) - min(room.began_at for room in rooms),
        "rows_identical": all(len(room.rows) == 1 for room in rooms),
        "aux_rows": moved["aux_rows"],
        "aux_fallbacks": moved["aux_fallbacks"],
        "moves": moves,
    }
    show(options, report, rooms)
    if options.picture is not None and moves:
        options.picture.write_text(picture(moves))
    return report


def is_good(report: Report) -> bool:
    return bool(report["tokens_identical"] and report["rows_identical"] and report["negative_control_caught"])


def _each(ranks: Sequence[Rank], method: str, *args: object) -> list[Any]:
    for rank in ranks:
        rank.begin(method, *args)
    return [rank.result() for rank in ranks]


def _conducted(options: Options, stack: ExitStack) -> tuple[list[Room], bool, list[Report]]:
    """The rooms, whether the negative control was caught, and the moves."""
    rooms, family = [Room(prompt) for prompt in options.prompts()], options.family
    lengths = [len(room.prompt) for room in rooms]
    directory = stack.enter_context(BootstrapServer()).address
    prefill = [Rank(PrefillRank, options, place, lengths, directory) for place in options.prefill.places()]
    decode = [Rank(DecodeRank, options, place, lengths, directory) for place in options.decode.places()]
    for rank in (*prefill, *decode):
        stack.callback(rank.close)
    torch.set_num_threads(1)  # the ranks use the other cores, and two threads here would wait for them
    model = Model(options)
    advance = stack.enter_context(progress("rooms and moves", len(rooms) + len(options.moves)))
    for rank in (*prefill, *decode):
        rank.ready()
    _each(decode, "expect")
    truths = []
    for number, room in enumerate(rooms):
        truths.append(_move(options, model, number, room, (prefill, decode)))
        advance()
    for number, (room, truth) in enumerate(zip(rooms, truths, strict=True)):
        room.truth = truth()
        states = put_together(family, options.decode.places(), _each(decode, "load", number))
        if not number:  # room 0 decoded from the same states passes the check, and fails it with any component spoilt
            controls = [spoilt(states, family, name, options) for name in family.components]
        room.tokens = model.go_on_from(states, len(room.prompt), room.tokens[0], options.new_tokens)
    first = rooms[0]
    wrong = [model.go_on_from(one, len(first.prompt), first.tokens[0], options.new_tokens) for one in controls]
    moves = []
    for number, path in enumerate(options.moves):
        moves.append(_move_again(path, number, prefill, decode))
        advance()
    return rooms, first.tokens == first.truth and first.truth not in wrong, moves


def _move(
    options: Options, model: Model, number: int, room: Room, sides: tuple[list[Rank], list[Rank]]
) -> Callable[[], list[int]]:
    """Prefills one room and moves it, chunk by chunk; its `tokens` are then the first one, as decode has it.

    Returns a function that computes all of them from the cache that was not moved.
    """
    prefill, decode = sides
    _each(prefill, "open", number)
    for rank in decode:
        rank.begin("arrived", number)
    cache, token = model.new_cache(), 0
    for states, spans, token in model.prefill(room.prompt, cache, options.chunk_tokens):  # noqa: B007
        room.handed_at = time.monotonic()
        room.began_at = room.began_at or room.handed_at
        for rank, place in zip(prefill, options.prefill.places(), strict=True):
            rank.begin("chunk", cut(states, options.family, place), spans)
        for rank in prefill:
            rank.result()
    for moved, row in _each(prefill, "finish", token):
        room.moved.update(moved)
        room.rows.add(row)
    for rank in decode:
        at, first, row = rank.result()
        room.came_at, room.tokens = max(room.came_at, at), [first]
        room.rows.add(row)
    return lambda: model.go_on(cache, token, options.new_tokens)


def _move_again(path: str, move: int, prefill: list[Rank], decode: list[Rank]) -> Report:
    """All rooms once more, whole and at once, on the idle machine, into the pages that hold them already."""
    _each(decode, "expect", move)
    for rank in decode:
        rank.begin("all_arrived")
    began_at, descriptors, nbytes = zip(*_each(prefill, "again", path, move), strict=True)
    seconds = max(rank.result() for rank in decode) - min(began_at)
    return {"path": path, "descriptors": sum(descriptors), "bytes_moved": sum(nbytes), "seconds": seconds}


def _medians(moves: Sequence[Report]) -> dict[str, Report]:
    """By path, the move that took the median time."""
    found = {}
    for path in ("direct", "staged"):
        of_path = sorted((move for move in moves if move["path"] == path), key=lambda move: float(move["seconds"]))
        found[path] = of_path[len(of_path) // 2]
    return found


def show(options: Options, report: Report, rooms: Sequence[Room]) -> None:
    """Prints what was checked, what the transfer alone took by either path, and the rooms."""
    said = {name: "yes" if good else "NO" for name, good in report.items() if isinstance(good, bool)}
    lines = [
        f"{options.model}: prefill {options.prefill} -> decode {options.decode} over {report['transport']}, pages on "
        f"{options.device}",
        f"all {report['new_tokens']} tokens are those of the cache that was not moved: {said['tokens_identical']}",
        f"a page or slot of noise in any component ({', '.join(options.family.components)}) is caught: "
        f"{said['negative_control_caught']}",
        f"aux rows are the same on both sides: {said['rows_identical']}; {report['aux_rows']} written by "
        f"the transport, {report['aux_fallbacks']} to be but sent by message",
    ]
    if moves := report["moves"]:
        middle = _medians(moves)
        both = [
            (path, f"{n['bytes_moved']:,}", f"{n['descriptors']:,}", f"{n['seconds'] * 1e3:.1f}",
             f"{n['bytes_moved'] / n['seconds'] / 1e9:.3f}")
            for path, n in middle.items()
        ]  # fmt: skip
        direct, staged = middle["direct"], middle["staged"]
        lines += [
            "", f"the transfer alone, with nothing else going on (medians of {len(moves) // 2} moves each, in turn):",
            *table(("path", "bytes", "descriptors", "ms", "GB/s"), both),
            f"staged moved the caches {direct['seconds'] / staged['seconds']:.1f} times as fast as direct, in "
            f"{staged['descriptors']:,} writes for {direct['descriptors']:,}",
        ]  # fmt: skip
    rows = [
        (number, len(room.prompt), _path(room.moved), f"{room.moved['bytes_written']:,}",
         f"{room.moved['descriptors']:,}", f"{max(0.0, room.came_at - room.handed_at) * 1e3:.1f}",
         "identical" if room.tokens == room.truth else "different")
        for number, room in enumerate(rooms)
    ]  # fmt: skip
    head = ("room", "prompt", "path", "bytes", "descriptors", "wait", "tokens")
    lines += [
        "", "the rooms, sent chunk by chunk while prefill computes:", *table(head, rows),
        "wait: milliseconds from the last chunk's being computed until every decode rank has the room",
        f"model: {report['model']}, computed by one process; ranks store and move their shares",
    ]  # fmt: skip
    print("\n".join(lines))


def picture(moves: Sequence[Report]) -> str:
    """Direct beside staged as bars, in SVG."""
    bars, y = [], 0
    for what, key, unit, scale in (("writes", "descriptors", "", 1), ("time", "seconds", " ms", 1e3)):
        middle = _medians(moves)
        most = max(move[key] for move in middle.values())
        for path, move in middle.items():
            bars.append(
                f'<text x="8" y="{y + 27}">{what}, {path}</text><rect x="130" y="{y + 12}" height="20" '
                f'width="{max(1.0, 400 * move[key] / most):.1f}" fill="{_COLOURS[path]}"/><text '
                f'x="{140 + 400 * move[key] / most:.1f}" y="{y + 27}">{move[key] * scale:,.0f}{unit}</text>'
            )
            y += 28
        y += 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{y}" font-family="sans-serif" font-size="14">'
    return "\n".join([head, *bars, "</svg>", ""])
