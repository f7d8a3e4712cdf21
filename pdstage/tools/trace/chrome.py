"""The trace file: Chrome's JSON trace format, which Perfetto (https://ui.perfetto.dev) opens.

A process of the file is a rank's node. A track is a lane of one peer, or all direct transfers to a peer. If chunks of a
lane overlap, the lane has a second row, since slices of one track must nest. Lease waits and rooms overlap often, so
they are asynchronous slices, which viewers stack. A flow leads from a chunk's gather to its write to its scatter.
Sources: the Trace Event Format document of the Chromium project, and Perfetto's docs/getting-started/other-formats.md
for the parts of it that are drawn. What this project reads of a file again is the trace itself, beside the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from pdstage.errors import UsageError
from pdstage.tools.trace.model import Node, Stage, Trace, rows

VERSION = 2
_LEAST_US = 0.01  # flows attach to the middle of a slice, so it must have one
_TRACKS = 1000
"""The most tracks of one process; some viewers need ids that are unique per process."""
_Json: TypeAlias = dict[str, Any]


class _About(msgspec.Struct):
    producer: str
    version: int
    trace: Trace


class _File(msgspec.Struct):
    """The parts that are read again."""

    otherData: _About  # noqa: N815  (the format's name)


class Track(NamedTuple):
    """A row of slices: of a `lane` of `peer`, or of direct transfers. At decode, a lane belongs to all its peers."""

    peer: int
    lane: int | None
    row: int

    def name(self, role: str) -> str:
        again = f" ({self.row + 1})" if self.row else ""
        if role == "decode":
            return f"lane {self.lane}{again}"
        return f"{'direct' if self.lane is None else f'lane {self.lane}'} of decode {self.peer}{again}"


def tracks(trace: Trace, node: Node) -> dict[Track, list[Stage]]:
    """The slices on a node's tracks, in drawing order: all but lease waits."""
    units: dict[tuple[int, int | None], dict[tuple[int, ...], list[Stage]]] = {}
    for stage in trace.stages:
        if stage.incarnation == node.incarnation and stage.kind != "lease_wait":
            peer = 0 if node.role == "decode" else stage.peer
            units.setdefault((peer, stage.lane), {}).setdefault(stage.claim, []).append(stage)
    found = defaultdict[Track, list[Stage]](list)
    for peer, lane in sorted(units, key=lambda key: (key[0], key[1] is None, key[1] or 0)):
        chunks = list(units[peer, lane].values())
        spans = [(min(s.began_at for s in chunk), max(s.ended_at for s in chunk)) for chunk in chunks]
        placed = sorted(zip(rows(spans), spans, chunks, strict=True), key=lambda one: one[:2])
        for row, _, chunk in placed:
            found[Track(peer, lane, row)] += sorted(chunk, key=lambda stage: stage.began_at)
    return found


def document(trace: Trace) -> _Json:
    """The whole file as JSON values."""
    events = []
    slices = defaultdict(list)
    for pid, node in enumerate(trace.ordered_nodes, 1):
        words = f"{node.name} ({node.place})" if node.place else node.name
        events += [_meta("process_name", pid, 0, name=words), _meta("process_sort_index", pid, 0, sort_index=pid)]
        for tid, (track, stages) in enumerate(tracks(trace, node).items(), pid * _TRACKS + 1):
            events.append(_meta("thread_name", pid, tid, name=track.name(node.role)))
            events.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
            for stage in stages:
                events.append(_slice(stage, pid, tid))
                slices[stage.claim].append((stage, pid, tid))
        waits = [s for s in trace.stages if s.incarnation == node.incarnation and s.kind == "lease_wait"]
        for number, stage in enumerate(waits):
            what = {"cat": "lease_wait", "name": "lease wait", "id": f"{pid:x}-{number:x}", "pid": pid, "tid": pid}
            events.append(what | {"ph": "b", "ts": _us(stage.began_at), "args": _arguments(stage)})
            events.append(what | {"ph": "e", "ts": _us(stage.ended_at)})
        events += _rooms(trace, node, pid)
    events += _flows(slices.values())
    about = {"producer": "pdstage", "version": VERSION, "clock": "CLOCK_MONOTONIC"}
    about["trace"] = msgspec.to_builtins(trace)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _us(at: float) -> float:
    """Whole nanoseconds, so that a slice does not overlap one that began when it ended."""
    return round(at * 1e9) / 1e3


def _lasted(stage: Stage) -> float:
    return max((round(stage.ended_at * 1e9) - round(stage.began_at * 1e9)) / 1e3, _LEAST_US)


def _meta(kind: str, pid: int, tid: int, /, **args: object) -> _Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(stage: Stage, pid: int, tid: int) -> _Json:
    dur, args = _lasted(stage), _arguments(stage)
    if stage.nbytes:
        args["GB/s"] = round(stage.nbytes / dur / 1e3, 3)
    what = {"ph": "X", "name": stage.kind, "cat": "stage", "pid": pid, "tid": tid}
    return what | {"ts": _us(stage.began_at), "dur": dur, "args": args}


def _arguments(stage: Stage) -> _Json:
    args = {
        "room": stage.room, "chunk": stage.chunk, "bytes": stage.nbytes, "lane": stage.lane, "peer": stage.peer,
        "epoch": stage.epoch, "session": f"{stage.decode:016x}-{stage.writer:016x}",
    }  # fmt: skip
    return args | ({"error": stage.error} if stage.error else {})


def _rooms(trace: Trace, node: Node, pid: int) -> Iterator[_Json]:
    """From its opening to its end, or to the end of the trace."""
    last = max((s.ended_at for s in trace.stages if s.incarnation == node.incarnation), default=0.0)
    for life in trace.rooms:
        if life.incarnation != node.incarnation:
            continue
        what = {"cat": "room", "name": f"room {life.room}", "id": f"{pid:x}-{life.number:x}", "pid": pid, "tid": pid}
        args = {name: value for name, value in life._asdict().items() if name != "incarnation"}
        yield what | {"ph": "b", "ts": _us(life.opened_at), "args": args}
        for name, at in (("bound", life.bound_at), ("first chunk", life.moved_at)):
            if at is not None:
                yield what | {"ph": "n", "ts": _us(at), "args": {"what": name}}
        yield what | {"ph": "e", "ts": _us(life.ended_at or max(last, life.opened_at))}


def _flows(chunks: Iterable[list[tuple[Stage, int, int]]]) -> Iterator[_Json]:
    for number, chunk in enumerate(chunks, 1):
        ordered = sorted(chunk, key=lambda one: one[0].began_at)
        for place, (stage, pid, tid) in enumerate(ordered) if len(ordered) > 1 else ():
            phase = "s" if not place else "f" if place == len(ordered) - 1 else "t"
            # A write's end may be seen after its chunk was scattered, so the arrow attaches to the write's beginning.
            inside = _us(stage.began_at) + (min(0.5, _lasted(stage) / 2) if phase == "t" else _lasted(stage) / 2)
            arrow = {"ph": phase, "name": "chunk", "cat": "chunk", "id": number, "pid": pid, "tid": tid}
            yield arrow | {"ts": round(inside, 3)} | ({"bp": "e"} if phase == "f" else {})


def write(trace: Trace, path: Path) -> None:
    """Raises `UsageError` if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.encode(document(trace)) + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror})", remedy="name another file") from error


def read(path: Path) -> Trace:
    """A trace that `write` wrote. Raises `UsageError` for other files."""
    try:
        about = msgspec.json.decode(path.read_bytes(), type=_File).otherData
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})", remedy="name a trace file") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _not_a_trace(path, str(error)) from error
    if (about.producer, about.version) != ("pdstage", VERSION):
        raise _not_a_trace(path, f"made by {about.producer!r}, version {about.version}")
    return about.trace


def _not_a_trace(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a trace of this version of pdstage: {why}", remedy="make one with --trace")
