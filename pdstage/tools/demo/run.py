"""The whole demo: starts the processes, compares their tokens with those of one process, and reports."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from pdstage.errors import UsageError
from pdstage.tools.demo.crew import Crew
from pdstage.tools.demo.ranks import (
    STOP,
    TRACE,
    Again,
    Arrived,
    Decoded,
    Finished,
    Job,
    Prefilled,
    Rows,
    Sent,
    decode_rank,
    prefill_rank,
)
from pdstage.tools.demo.report import Bars, Move, Report, RoomReport, path_of, show
from pdstage.tools.demo.transfer import serve_directory
from pdstage.tools.trace import check, merge_files
from pdstage.transport import available

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdstage.tools.demo.options import Options
    from pdstage.tools.demo.reference import Truth

DIRECTORY = "directory"


@dataclass(slots=True)
class Outcome:
    """The ranks' reports and the expected tokens: per room what moved and when, and decode rank 0's result."""

    rooms: list[RoomReport]
    truths: list[Truth] = field(default_factory=list)
    transports: set[str] = field(default_factory=set)
    finished: Finished = field(default_factory=Finished)
    aux_rows: int = 0
    aux_fallbacks: int = 0
    moves: list[Move] = field(default_factory=list)


def run(options: Options) -> Report:
    """Runs the demo and prints its tables. Raises `PdstageError` naming the rank that failed."""
    if options.transport is None:
        options = replace(options, transport="auto" if available()["nixl"] else "nixl")
    # The table needs some 90 columns; a pipe claims 80.
    console, prompts = Console(width=max(100, Console().width)), options.prompts()
    check(options.trace)
    check_device(options.device)
    outcome = Outcome([RoomReport(len(prompt)) for prompt in prompts])
    with (
        tempfile.TemporaryDirectory(prefix="pdstage-demo-") as folder,
        Bars(console, options, sum(map(len, prompts))) as bars,
        Crew(*_preload(options), deadline_s=options.deadline_s) as crew,
    ):
        _conduct(crew, bars, outcome, prompts, _jobs(options, Path(folder), prompts))
        if options.trace is not None:
            merge_files(Path(folder).glob(f"*{TRACE}"), options.trace)
    for room, tokens, truth in zip(outcome.rooms, outcome.finished.tokens, outcome.truths, strict=True):
        room.identical = identical([tokens], [truth])
    report = _report(options, outcome)
    show(console, options, report, outcome.rooms, min(truth.margin for truth in outcome.truths))
    if options.json is not None:
        report.write(options.json)
    return report


def check_device(device: str) -> None:
    """Raises `UsageError` for a GPU that does not exist here."""
    n_devices = torch.cuda.device_count()
    if device != "cpu" and (torch.device(device).index or 0) >= n_devices:
        raise UsageError(
            f"--device {device}: torch finds {n_devices} CUDA devices here",
            remedy="leave it out: the demo runs on the CPU too",
            field="device",
        )


def _preload(options: Options) -> tuple[str, ...]:
    return ("pdstage.tools.demo.ranks", "pdstage.tools.demo.reference", options.family.modules[1])


def identical(decoded: Sequence[Sequence[int]], truths: Sequence[Truth]) -> bool:
    """The check: every room's tokens equal the single process's, token for token."""
    return [list(tokens) for tokens in decoded] == [truth.tokens for truth in truths]


def _jobs(options: Options, folder: Path, prompts: list[list[int]]) -> list[Job]:
    rooms = tuple((f"room-{i}", len(prompt)) for i, prompt in enumerate(prompts))
    prompts_of = {"prefill": tuple(map(tuple, prompts)), "decode": ()}
    sides = {"prefill": options.prefill, "decode": options.decode}
    return [
        Job(side=name, place=place, options=options, folder=folder, rooms=rooms, prompts=prompts_of[name])
        for name, side in sides.items()
        for place in side.places()
    ]


def _conduct(crew: Crew, bars: Bars, outcome: Outcome, prompts: list[list[int]], jobs: list[Job]) -> None:
    """Starts all processes, computes the expected tokens, and reads messages until every rank has finished."""
    crew.start(DIRECTORY, serve_directory, None)
    from pdstage.tools.demo.reference import build_model, true_continuation  # noqa: PLC0415  (seconds, while processes start)

    torch.set_num_threads(1)  # the ranks use the other cores, and two threads here would wait for them
    options = jobs[0].options
    model = build_model(options)
    inbox = crew.hear()
    _, bootstrap = next(inbox)
    for job in jobs:
        crew.start(job.name, prefill_rank if job.side == "prefill" else decode_rank, (job, bootstrap))
    outcome.truths = [true_continuation(model, options, prompt) for prompt in prompts]
    for _ in jobs:
        next(inbox)
        bars.advance("started", 1)
    crew.tell("start", but=DIRECTORY)
    working = len(jobs)
    while working:
        _, message = next(inbox)
        _take(message, outcome, bars)
        working -= isinstance(message, Finished)
    for path in options.moves:
        outcome.moves.append(_move_again(crew, inbox, jobs, path))
        bars.advance("moved", 1)
    crew.tell(STOP)
    for name, message in inbox:
        raise RuntimeError(f"{name} said {message} after its end")


def _move_again(crew: Crew, inbox: Iterator[tuple[str, object]], jobs: list[Job], path: str) -> Move:
    """All rooms once more, whole and at once, on the idle machine, into the pages that hold them already."""
    crew.tell(path, to="decode")
    messages: list[object] = [next(inbox)[1] for job in jobs if job.side == "decode"]  # each has requested all rooms
    crew.tell(path, to="prefill")
    n_prefill, n_rooms = sum(job.side == "prefill" for job in jobs), len(jobs[0].rooms)
    messages += [next(inbox)[1] for _ in range(n_prefill + n_rooms * (len(jobs) - n_prefill))]
    sent = [message for message in messages if isinstance(message, Again)]
    came_at = max(message.at for message in messages if isinstance(message, Arrived))
    return Move(
        path=path,
        descriptors=sum(one.descriptors for one in sent),
        bytes_moved=sum(one.nbytes for one in sent),
        seconds=came_at - min(one.began_at for one in sent),
    )


def _take(message: object, outcome: Outcome, bars: Bars) -> None:
    match message:
        case Prefilled(n):
            bars.advance("prefilled", n)
        case Sent(index, moved, began_at, handed_at):
            room = outcome.rooms[index]
            room.nbytes += moved.nbytes
            room.descriptors += moved.descriptors
            room.rows.add(moved.row)
            outcome.aux_rows += moved.aux_rows
            outcome.aux_fallbacks += moved.aux_fallbacks
            room.paths.update(moved.paths)
            outcome.transports.update(moved.over)
            room.began_at = min(room.began_at, began_at)
            room.handed_at = max(room.handed_at, handed_at)
        case Arrived(index, at):
            outcome.rooms[index].came_at = max(outcome.rooms[index].came_at, at)
            bars.advance("arrived", 1)
        case Rows(digests):
            for room, row in zip(outcome.rooms, digests, strict=True):
                room.rows.add(row)
        case Decoded(n):
            bars.advance("decoded", n)
        case Finished(tokens) if tokens:
            outcome.finished = message
        case _:
            pass


def _report(options: Options, outcome: Outcome) -> Report:
    rooms, truths, (tokens, again, controls) = outcome.rooms, outcome.truths, outcome.finished
    return Report(
        transport="+".join(sorted(outcome.transports)),
        path=path_of(set().union(*(room.paths for room in rooms))),
        model=options.described,
        device=options.device,
        prefill_tp=options.prefill_tp,
        decode_tp=options.decode_tp,
        prefill_pp=options.prefill_pp,
        decode_pp=options.decode_pp,
        requests=options.requests,
        new_tokens=sum(map(len, tokens)),
        tokens_identical=identical(tokens, truths),
        # Room 0 decoded again from the same pages passes the check, and fails it once any component's is spoilt.
        negative_control_caught=identical([again], truths[:1])
        and bool(controls)
        and not any(identical([control], truths[:1]) for control in controls),
        bytes_moved=sum(room.nbytes for room in rooms),
        descriptors=sum(room.descriptors for room in rooms),
        seconds=max(room.came_at for room in rooms) - min(room.began_at for room in rooms),
        rows_identical=all(len(room.rows) == 1 for room in rooms),
        aux_rows=outcome.aux_rows,
        aux_fallbacks=outcome.aux_fallbacks,
        moves=tuple(outcome.moves),
    )
