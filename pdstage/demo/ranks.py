"""What one rank's process does, prefill or decode: load its slice, announce itself, work, report, leave.

Layer 6 (demo). Must not know the other ranks' weights or pools. A decode rank is told the prompts' lengths and nothing
else of them: all it knows of a prompt came through the transfer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  (pickled with the job)
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pdstage.demo.engine import Engine
from pdstage.demo.group import Group
from pdstage.demo.model import ShardedLlama, head_share
from pdstage.demo.options import Options  # noqa: TC001  (pickled with the job)
from pdstage.demo.paged import HND, NHD, PagedKV, PagedShape, pages_for
from pdstage.demo.transfer import Moved, Place, ReceivingSide, SendingSide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

SPARE_PAGES = 16
LISTEN_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's work. `prompts` is empty at decode; `folder` holds the weights and the groups' meeting points."""

    side: str
    rank: int
    options: Options
    folder: Path
    rooms: tuple[tuple[str, int], ...]
    prompts: tuple[tuple[int, ...], ...] = ()

    @property
    def tp(self) -> int:
        return self.options.prefill_tp if self.side == "prefill" else self.options.decode_tp

    @property
    def name(self) -> str:
        return f"{self.side} rank {self.rank}"

    @property
    def weights(self) -> Path:
        return self.folder / f"{self.side}-{self.rank}.pt"

    def place(self, bootstrap: str) -> Place:
        """`bootstrap` is HOST:PORT of the directory."""
        return Place(
            tp=self.tp,
            rank=self.rank,
            kv_heads=self.options.kv_heads,
            transport=self.options.transport,
            path=self.options.path,
            bootstrap=bootstrap,
            deadline_s=self.options.deadline_s,
        )


class Ready(NamedTuple):
    """The rank is announced and waits to be told to start. `transport`: the one in use, told by prefill ranks."""

    transport: str = ""


class Prefilled(NamedTuple):
    n_tokens: int


class Sent(NamedTuple):
    """A prefill rank is done with a room, given by its place in `Job.rooms`; times as in `report.RoomReport`."""

    room: int
    moved: Moved
    began_at: float
    handed_at: float


class Arrived(NamedTuple):
    """A decode rank has all of a room."""

    room: int
    at: float


class Decoded(NamedTuple):
    n_tokens: int


class Finished(NamedTuple):
    """A rank has done its work. Decode rank 0 tells the tokens of all rooms; those of room 0 decoded once more from
    the same pages (`again`); and those of room 0 after one of these pages was corrupted (`control`)."""

    tokens: tuple[list[int], ...] = ()
    again: tuple[int, ...] = ()
    control: tuple[int, ...] = ()


def prefill_rank(work: tuple[Job, str], pipe: Connection) -> None:
    """Prefills prompt by prompt, handing each chunk over as soon as it is computed. `work`: the job, the directory."""
    job, bootstrap = work
    engine = _engine(job, NHD, job.options.prefill_page, [n for _, n in job.rooms])
    side = SendingSide(engine.kv, job.place(bootstrap))
    pipe.send(Ready(side.transport))
    pipe.recv()
    for i, ((room, _), prompt) in enumerate(zip(job.rooms, job.prompts, strict=True)):
        pipe.send(Sent(i, *_send_room(job, engine, side, room, prompt, pipe=pipe)))
    pipe.send(Finished())
    _linger(pipe, side.turn)
    side.close()
    engine.group.close()


def _send_room(
    job: Job, engine: Engine, side: SendingSide, room: str, prompt: Sequence[int], *, pipe: Connection
) -> tuple[Moved, float, float]:
    """What was moved, when its first chunk was handed over, and when its last."""
    pages = engine.kv.allocate(len(prompt))
    side.open(room)
    handed_at, token = [], 0
    for start, stop, token in engine.prefill(prompt, pages, job.options.chunk_tokens):  # noqa: B007
        handed_at.append(time.monotonic())
        side.chunk(pages, start, stop)
        if not job.rank:
            pipe.send(Prefilled(stop - start))
    side.finish(token)
    moved = side.settle()
    engine.kv.free(pages)
    return moved, handed_at[0], handed_at[-1]


def decode_rank(work: tuple[Job, str], pipe: Connection) -> None:
    """Waits until every room is complete on every rank, continues all of them, then runs the negative control."""
    job, bootstrap = work
    n_new = job.options.new_tokens
    engine = _engine(job, HND, job.options.decode_page, [n + n_new for _, n in job.rooms])
    side = ReceivingSide(engine.kv, job.place(bootstrap))
    pipe.send(Ready())
    pipe.recv()
    held = [engine.kv.allocate(n + n_new) for _, n in job.rooms]
    for (room, n_tokens), pages in zip(job.rooms, held, strict=True):
        side.expect(room, pages, n_tokens)
    _await_rooms(job, side, engine.group, pipe)
    contexts = [(pages, n, side.token(room)) for (room, n), pages in zip(job.rooms, held, strict=True)]

    def stepped() -> None:
        side.turn()
        if not job.rank:
            pipe.send(Decoded(len(contexts)))

    tokens = engine.decode(contexts, n_new, stepped)
    (again,) = engine.decode(contexts[:1], n_new, side.turn)
    if not job.rank:
        pages, n_tokens, _ = contexts[0]
        engine.kv.corrupt(int(pages[n_tokens // 2 // job.options.decode_page]), job.options.seed)
    (control,) = engine.decode(contexts[:1], n_new, side.turn)
    pipe.send(Finished() if job.rank else Finished(tuple(tokens), tuple(again), tuple(control)))
    _linger(pipe, side.turn)
    side.close()
    engine.group.close()


def _engine(job: Job, order: str, page_size: int, lengths: list[int]) -> Engine:
    # One thread a rank: a dozen ranks share a machine that may have two cores.
    torch.set_num_threads(1)
    shape, options = job.options.shape, job.options
    share = head_share(shape, job.tp, job.rank)
    paged = PagedShape(
        order=order,
        n_pages=sum(pages_for(n, page_size) for n in lengths) + SPARE_PAGES,
        page_size=page_size,
        layers=shape.layers,
        heads=share.kv_stop - share.kv_start,
        head_dim=shape.head_dim,
    )
    group = Group(job.tp, job.rank, job.folder / f"{job.side}-group", options.deadline_s)
    weights = torch.load(job.weights, weights_only=True)
    model = ShardedLlama(shape, weights, job.tp, job.rank, group.sum)
    # Every rank shuffles differently: page numbers mean nothing outside their own pool.
    return Engine(model, PagedKV(paged, seed=options.seed * 1000 + job.rank + (500 if order == HND else 0)), group)


def _await_rooms(job: Job, side: ReceivingSide, group: Group, pipe: Connection) -> None:
    """As an engine's scheduler does: poll, take the minimum over the ranks, go on when all agree."""
    here = np.zeros(len(job.rooms), dtype=bool)
    while True:
        complete = side.poll()
        for i in np.flatnonzero(complete & ~here):
            pipe.send(Arrived(int(i), time.monotonic()))
        here = complete
        if group.lowest(complete.astype(np.int8)).all():
            return
        side.pause()


def _linger(pipe: Connection, turn: Callable[[], None]) -> None:
    """Keeps the node answering its peers until the parent says that all are done."""
    while not pipe.poll(LISTEN_S):
        turn()
    pipe.recv()
