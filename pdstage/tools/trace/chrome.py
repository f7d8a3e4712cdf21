"""The trace file: Chrome's JSON trace format, which Perfetto (https://ui.perfetto.dev) opens.

A process of the file is a rank's node. A track is a lane of one peer, or all direct transfers to a peer. If chunks of a
lane overlap, the lane has a second row, since slices of one track must nest. Lease waits and rooms overlap often, so
they are asynchronous slices, which viewers stack. A flow leads from a chunk's gather to its write to its scatter.
Sources: the Trace Event Format document of the Chromium project, and Perfetto's docs/getting-started/other-formats.md
for the parts of it that are drawn.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pdstage.errors import UsageError
from pdstage.tools.trace.model import Clock, Node, RoomLife, Stage, Trace, rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = 1
_LEAST_US = 0.01  # flows attach to the middle of a slice, so it must have one
_TRACKS = 1000
"""The most tracks of one process; some viewers need ids that are unique per process."""
_Json: TypeAlias = dict[str, Any]


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
    found: dict[Track, list[Stage]] = {}
    order = sorted(units, key=lambda key: (key[0], key[1] is None, key[1] or 0))
    for peer, lane in order:
        chunks = list(units[peer, lane].values())
        spans = [(min(s.began_at for s in chunk), max(s.ended_at for s in chunk)) for chunk in chunks]
        placed = sorted(zip(rows(spans), spans, chunks, strict=True), key=lambda one: one[:2])
        for row, _, chunk in placed:
            found.setdefault(Track(peer, lane, row), []).extend(sorted(chunk, key=lambda stage: stage.began_at))
    return found


def document(trace: Trace) -> _Json:
    """The whole file as JSON values."""
    events: list[_Json] = []
    slices: dict[tuple[int, ...], list[tuple[Stage, int, int]]] = {}
    for pid, node in enumerate(trace.ordered_nodes, 1):
        words = f"{node.name} ({node.place})" if node.place else node.name
        events += [_meta("process_name", pid, 0, name=words), _meta("process_sort_index", pid, 0, sort_index=pid)]
        for number, (track, stages) in enumerate(tracks(trace, node).items(), 1):
            tid = pid * _TRACKS + number
            events.append(_meta("thread_name", pid, tid, name=track.name(node.role)))
            events.append(_meta("thread_sort_index", pid, tid, sort_index=number))
            for stage in stages:
                events.append(_slice(stage, pid, tid))
                slices.setdefault(stage.claim, []).append((stage, pid, tid))
        events += _waits(trace, node, pid)
        events += _rooms(trace, node, pid)
    events += _flows(slices)
    nodes = [node._replace(incarnation=f"{node.incarnation:016x}")._asdict() for node in trace.ordered_nodes]  # type: ignore[arg-type]
    about = {
        "producer": "pdstage", "version": VERSION, "clock": "CLOCK_MONOTONIC", "clock_of": trace.clock.name,
        "wall_offset_s": trace.clock.wall_offset_s, "events_dropped": trace.n_dropped, "nodes": nodes,
    }  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _us(at: float) -> float:
    """Whole nanoseconds, so that a slice does not overlap one that began when it ended."""
    return round(at * 1e9) / 1e3


def _lasted(stage: Stage) -> float:
    return max((round(stage.ended_at * 1e9) - round(stage.began_at * 1e9)) / 1e3, _LEAST_US)


def _meta(kind: str, pid: int, tid: int, /, **args: object) -> _Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(stage: Stage, pid: int, tid: int) -> _Json:
    dur = _lasted(stage)
    args = _arguments(stage)
    if stage.nbytes:
        args["GB/s"] = round(stage.nbytes / dur / 1e3, 3)
    return {
        "ph": "X", "name": stage.kind, "cat": "stage", "pid": pid, "tid": tid, "ts": _us(stage.began_at), "dur": dur,
        "args": args,
    }  # fmt: skip


def _arguments(stage: Stage) -> _Json:
    args: _Json = {
        "room": stage.room, "chunk": stage.chunk, "bytes": stage.nbytes, "lane": stage.lane, "peer": stage.peer,
        "epoch": stage.epoch, "session": f"{stage.decode:016x}-{stage.writer:016x}",
    }  # fmt: skip
    return args | ({"error": stage.error} if stage.error else {})


def _waits(trace: Trace, node: Node, pid: int) -> Iterator[_Json]:
    number = 0
    for stage in trace.stages:
        if stage.incarnation == node.incarnation and stage.kind == "lease_wait":
            number += 1
            what = {"cat": "lease_wait", "name": "lease wait", "id": f"{pid:x}-{number:x}", "pid": pid, "tid": pid}
            yield what | {"ph": "b", "ts": _us(stage.began_at), "args": _arguments(stage)}
            yield what | {"ph": "e", "ts": _us(stage.ended_at)}


def _rooms(trace: Trace, node: Node, pid: int) -> Iterator[_Json]:
    """From its opening to its end, or to the end of the trace."""
    mine = [life for life in trace.rooms if life.incarnation == node.incarnation]
    last = max((s.ended_at for s in trace.stages if s.incarnation == node.incarnation), default=0.0)
    for life in mine:
        what = {
            "cat": "room", "name": f"room {life.room}", "id": f"{pid:x}-{life.number:x}", "pid": pid, "tid": pid,
        }  # fmt: skip
        args = {name: value for name, value in life._asdict().items() if name != "incarnation"}
        yield what | {"ph": "b", "ts": _us(life.opened_at), "args": args}
        for name, at in (("bound", life.bound_at), ("first chunk", life.moved_at)):
            if at is not None:
                yield what | {"ph": "n", "ts": _us(at), "args": {"what": name}}
        yield what | {"ph": "e", "ts": _us(life.ended_at or max(last, life.opened_at))}


def _flows(slices: dict[tuple[int, ...], list[tuple[Stage, int, int]]]) -> Iterator[_Json]:
    for number, chunk in enumerate(slices.values(), 1):
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
        path.write_text(json.dumps(document(trace), separators=(",", ":")) + "\n")
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror})", remedy="name another file", field="trace"
        ) from error


def read(path: Path) -> Trace:
    """A trace that `write` wrote. Raises `UsageError` for other files."""
    try:
        held = json.loads(path.read_text())
        return _parsed(held["traceEvents"], held["otherData"])
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})", remedy="name a trace file", field="trace") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a trace of this version of pdstage: {error!r}",
            remedy="make one with --trace",
            field="trace",
        ) from error


def _parsed(events: list[_Json], about: _Json) -> Trace:
    if about["producer"] != "pdstage" or about["version"] != VERSION:
        raise ValueError(f"made by {about['producer']!r}, version {about['version']!r}")
    nodes = [Node(**{**args, "incarnation": int(args["incarnation"], 16)}) for args in about["nodes"]]
    by_pid = {pid: node.incarnation for pid, node in enumerate(nodes, 1)}
    clock = Clock(str(about["clock_of"]), float(about["wall_offset_s"]))
    trace = Trace(clock, {node.incarnation: node for node in nodes}, n_dropped=int(about["events_dropped"]))
    ends = {(event["cat"], event["id"]): event["ts"] for event in events if event["ph"] == "e"}
    for event in events:
        match event["ph"], event.get("cat"):
            case "X", "stage":
                trace.stages.append(_stage(event, by_pid[event["pid"]], event["name"], event["ts"] + event["dur"]))
            case "b", "lease_wait":
                ended = ends["lease_wait", event["id"]]
                trace.stages.append(_stage(event, by_pid[event["pid"]], "lease_wait", ended))
            case "b", "room":
                trace.rooms.append(RoomLife(**{**event["args"], "incarnation": by_pid[event["pid"]]}))
            case _:
                pass
    return trace


def _stage(event: _Json, incarnation: int, kind: str, end_us: float) -> Stage:
    args = event["args"]
    decode, writer = (int(half, 16) for half in args["session"].split("-"))
    return Stage(
        incarnation, kind, str(args["room"]), decode, writer, int(args["epoch"]), int(args["peer"]), args["lane"],
        int(args["chunk"]), event["ts"] / 1e6, end_us / 1e6, int(args["bytes"]), str(args.get("error", "")),
    )  # fmt: skip
