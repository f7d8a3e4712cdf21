"""How a run makes a trace: a tracer observes the nodes of one process, and several files are merged into one."""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdstage.errors import UsageError
from pdstage.layout.topology import Topology, places_of
from pdstage.manager.observer import Event, Observer, Origin, RoomBound, RoomEnded, RoomOpened, RoomReleased, StageOver
from pdstage.tools.trace import chrome
from pdstage.tools.trace.model import Clock, Node, RoomLife, Stage, Trace, merged, room_text

MAX_EVENTS = 200_000


class Tracer:
    """An `Observer` that keeps the latest `MAX_EVENTS` events of this process's nodes: about 100 MB of them."""

    def __init__(self) -> None:
        self._clock = Clock.here()
        self._events: deque[tuple[Origin, Event]] = deque(maxlen=MAX_EVENTS)
        self._n_events = 0

    def observe(self, origin: Origin, event: Event) -> None:
        self._n_events += 1
        self._events.append((origin, event))

    def trace(self) -> Trace:
        """The trace of what was observed so far."""
        events = list(self._events)
        trace = Trace(self._clock, n_dropped=max(0, self._n_events - len(events)))
        lives: dict[tuple[int, int], RoomLife] = {}
        for origin, event in events:
            if origin.incarnation not in trace.nodes:
                trace.nodes[origin.incarnation] = Node(
                    origin.incarnation, origin.role, origin.rank, place(origin.topology), platform.node(), os.getpid()
                )  # fmt: skip
            if isinstance(event, StageOver):
                trace.stages.append(_stage(origin, event))
            else:
                key = origin.incarnation, event.number
                lives[key] = _lived(lives.get(key), origin, event)
        trace.rooms = list(lives.values())
        return trace


def place(topology: Topology) -> str:
    """A topology as text: each axis with more than one rank."""
    return ", ".join(f"{axis} {rank}/{size}" for axis, rank, size in places_of(topology) if size > 1)


def _stage(origin: Origin, event: StageOver) -> Stage:
    return Stage(
        origin.incarnation, event.kind, room_text(event.room), event.session.decode, event.session.writer, event.epoch,
        event.peer, event.lane, event.chunk, event.began_at, event.ended_at, event.nbytes, event.error,
    )  # fmt: skip


def _lived(life: RoomLife | None, origin: Origin, event: RoomOpened | RoomBound | RoomEnded | RoomReleased) -> RoomLife:
    at = event.opened_at if isinstance(event, RoomEnded) else event.at
    if life is None:  # if earlier events were dropped, the room begins with the first one kept
        life = RoomLife(origin.incarnation, event.number, room_text(event.room), at)
    match event:
        case RoomOpened():
            return life
        case RoomBound():
            return life._replace(bound_at=event.at)
        case RoomEnded():
            return life._replace(
                opened_at=event.opened_at, bound_at=event.bound_at, moved_at=event.moved_at, ended_at=event.ended_at,
                state=event.state.name.lower(), reason=event.reason,
            )  # fmt: skip
        case RoomReleased():
            return life._replace(released_at=event.at)


@contextmanager
def tracing(path: Path | None) -> Iterator[tuple[Observer, ...]]:
    """Implements `--trace FILE` in one process: observers for its nodes, and the file once the nodes are closed.

    None: no observers, and no timing. Raises `UsageError` at once if the file could not be written.
    """
    if path is None:
        yield ()
        return
    check(path)
    tracer = Tracer()
    try:
        yield (tracer,)
    finally:
        chrome.write(tracer.trace(), path)


def check(path: Path | None) -> None:
    """Raises `UsageError` if `path` is not writable: before a run, not after it."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UsageError(f"--trace {path}: no file can be written there", remedy="name a file in a folder that exists")


def load(paths: Iterable[Path]) -> Trace:
    """The trace files of several processes as one trace, on the clock of the first by name."""
    traces = [chrome.read(path) for path in sorted(paths)]
    if not traces:
        raise UsageError("no trace files", remedy="name at least one")
    return merged(traces)


def merge_files(paths: Iterable[Path], into: Path) -> None:
    """Writes the trace files of several processes as one."""
    chrome.write(load(paths), into)
