"""One rank's process, prefill or decode: makes its engine, announces itself, works, reports and ends.

A decode rank gets only the prompts' lengths: all it knows of a prompt came through the transfer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  (pickled with the job)
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from pdstage.layout.topology import Topology  # noqa: TC001  (pickled with the job)
from pdstage.tools.demo.engine import Context, Engine
from pdstage.tools.demo.group import Group
from pdstage.tools.demo.holding import Holding
from pdstage.tools.demo.options import Options, Side  # noqa: TC001  (pickled with the job)
from pdstage.tools.demo.transfer import Moved, Place, ReceivingSide, SendingSide, digest
from pdstage.tools.trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from pdstage.manager.observer import Observer
    from pdstage.tools.demo.holding import Spans
    from pdstage.tools.demo.pools import Room

    Kept: TypeAlias = tuple[Room, list[Spans]]

LISTEN_S = 0.01
TRACE = ".trace.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's work. `prompts` is empty at decode; `folder` holds the groups' rendezvous files."""

    side: str
    place: Topology
    options: Options
    folder: Path
    rooms: tuple[tuple[str, int], ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def layout(self) -> Side:
        return self.options.prefill if self.side == "prefill" else self.options.decode

    @property
    def rank(self) -> int:
        return self.place.group_rank

    @property
    def name(self) -> str:
        return f"{self.side} rank {self.rank}"

    @property
    def trace(self) -> Path | None:
        """The file for this rank's part of the run's trace, if requested."""
        return self.folder / f"{self.side}-{self.rank}{TRACE}" if self.options.trace is not None else None

    def reach(self, bootstrap: str, observers: tuple[Observer, ...]) -> Place:
        """`bootstrap` is HOST:PORT of the directory."""
        return Place(
            topology=self.place,
            transport=self.options.transport or "auto",
            path=self.options.path,
            aux=(self.side == "decode" and self.options.decode_aux) or self.options.aux,
            bootstrap=bootstrap,
            deadline_s=self.options.deadline_s,
            metrics_port=self.options.metrics_port,
            observers=observers,
            device=self.options.device,
        )


class Ready(NamedTuple):
    """The rank is announced and waits for the start."""


class Prefilled(NamedTuple):
    n_tokens: int


class Sent(NamedTuple):
    """A prefill rank is done with a room, given by its index in `Job.rooms`; times as in `report.RoomReport`."""

    room: int
    moved: Moved
    began_at: float
    handed_at: float


class Arrived(NamedTuple):
    """A decode rank has all of a room."""

    room: int
    at: float


class Rows(NamedTuple):
    """Digests of a decode rank's rows, by room."""

    digests: tuple[int, ...]


class Decoded(NamedTuple):
    n_tokens: int


class Finished(NamedTuple):
    """A rank has done its work. Decode rank 0 reports the tokens of all rooms. It decodes room 0 once more from the
    same pages (`again`). It also decodes room 0 with a spoilt page or slot of one component, once for each component
    (`controls`).
    """

    tokens: tuple[list[int], ...] = ()
    again: tuple[int, ...] = ()
    controls: tuple[tuple[int, ...], ...] = ()


class Again(NamedTuple):
    """A prefill rank has sent all rooms once more, starting at `began_at`."""

    began_at: float
    descriptors: int
    nbytes: int


STOP = ""
"""Sent instead of the path of another transfer."""


def prefill_rank(work: tuple[Job, str], pipe: Connection) -> None:
    """Prefills prompt by prompt, and sends each chunk as soon as it is computed. `work`: the job, the directory."""
    job, bootstrap = work
    with tracing(job.trace) as observers:
        _prefill(job, job.reach(bootstrap, observers), pipe)


def _prefill(job: Job, place: Place, pipe: Connection) -> None:
    engine = _engine(job, [n for _, n in job.rooms])
    side = SendingSide(engine.pools, place)
    pipe.send(Ready())
    pipe.recv()
    sent: dict[str, Kept] = {}
    for i, ((room, _), prompt) in enumerate(zip(job.rooms, job.prompts, strict=True)):
        sent[room] = engine.admit(len(prompt)), []
        pipe.send(Sent(i, *_send_room(job, engine, side, room, prompt, kept=sent[room], pipe=pipe)))
    pipe.send(Finished())
    n_moves = 0
    while path := _next_move(pipe, side.turn):
        began_at, rooms = time.monotonic(), {f"{room}, move {n_moves}": sent[room] for room in sent}
        pipe.send(Again(began_at, *side.send_again(rooms, path)))
        n_moves += 1
    for tables, _ in sent.values():
        engine.release(tables)
    side.close()
    engine.group.close()


def _send_room(
    job: Job, engine: Engine, side: SendingSide, room: str, prompt: Sequence[int], *, kept: Kept, pipe: Connection
) -> tuple[Moved, float, float]:
    """What was moved, and when its first and last chunks were handed over. `kept` receives each chunk's spans."""
    tables, chunks = kept
    side.open(room)
    handed_at, token = [], 0
    for start, stop, token, spans in engine.prefill(prompt, tables, job.options.chunk_tokens):  # noqa: B007
        handed_at.append(time.monotonic())
        side.chunk(tables, spans)
        chunks.append(spans)
        if not job.rank:
            pipe.send(Prefilled(stop - start))
    side.finish(token)
    return side.settle(), handed_at[0], handed_at[-1]


def decode_rank(work: tuple[Job, str], pipe: Connection) -> None:
    """Waits until every room is complete on every rank, decodes all of them, then runs the negative controls."""
    job, bootstrap = work
    with tracing(job.trace) as observers:
        _decode(job, job.reach(bootstrap, observers), pipe)


def _decode(job: Job, place: Place, pipe: Connection) -> None:
    n_new = job.options.new_tokens
    engine = _engine(job, [n for _, n in job.rooms])
    side = ReceivingSide(engine.pools, place, len(job.rooms))
    pipe.send(Ready())
    pipe.recv()
    held = [engine.admit(n) for _, n in job.rooms]
    for (room, _), tables in zip(job.rooms, held, strict=True):
        side.expect(room, tables)
    _await_rooms(job, side, engine.group, pipe)
    contexts = [Context(tables, n, side.token(room)) for (room, n), tables in zip(job.rooms, held, strict=True)]
    pipe.send(Rows(tuple(digest(side.row(room)) for room, _ in job.rooms)))

    def stepped() -> None:
        side.turn()
        if not job.rank:
            pipe.send(Decoded(len(contexts)))

    tokens = engine.decode(contexts, n_new, stepped)
    (again,) = engine.decode(contexts[:1], n_new, side.turn)
    controls = []
    for component in engine.components:
        put_back = engine.spoil(component, held[0], job.options.seed)
        (control,) = engine.decode(contexts[:1], n_new, side.turn)
        put_back()
        controls.append(tuple(control))
    pipe.send(Finished() if job.rank else Finished(tuple(tokens), tuple(again), tuple(controls)))
    n_moves = 0
    while _next_move(pipe, side.turn):
        side.forget()
        for (room, _), tables in zip(job.rooms, held, strict=True):
            side.expect(f"{room}, move {n_moves}", tables, with_row=False)
        pipe.send(Ready())
        _await_rooms(job, side, engine.group, pipe)
        n_moves += 1
    side.close()
    engine.group.close()


def _engine(job: Job, lengths: list[int]) -> Engine:
    # One thread per rank: a dozen ranks share a machine that may have two cores.
    torch.set_num_threads(1)
    options, group = job.options, Group(job.place, job.folder / f"{job.side}-group", job.options.deadline_s)
    # Every rank shuffles differently: page numbers mean nothing outside their pool.
    seed = options.seed * 1000 + 10 * job.rank + (500 if job.side == "decode" else 0)
    from pdstage.tools.demo.reference import build_model  # noqa: PLC0415  (takes seconds)

    holding = Holding(
        options.family, options.heads, job.place, order=job.layout.layout, page_size=job.layout.page, lengths=lengths,
        seed=seed, dtype=getattr(torch, options.kept_as), device=options.device,
    )  # fmt: skip
    return Engine(build_model(options), holding, group)


def _await_rooms(job: Job, side: ReceivingSide, group: Group, pipe: Connection) -> None:
    """Polls as an engine's scheduler does: takes the minimum over the ranks, and goes on when all agree."""
    here = np.zeros(len(job.rooms), dtype=bool)
    while True:
        complete = side.poll()
        for i in np.flatnonzero(complete & ~here):
            pipe.send(Arrived(int(i), time.monotonic()))
        here = complete
        if group.lowest(complete.astype(np.int8)).all():
            return
        side.pause()


def _next_move(pipe: Connection, turn: Callable[[], None]) -> str:
    """Keeps the node answering its peers until the parent sends the path of another transfer, or `STOP`."""
    while not pipe.poll(LISTEN_S):
        turn()
    path: str = pipe.recv()
    return path
