"""Trace files: what viewers ask of them holds, all that was observed is there, and files of processes become one."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from pdstage import Topology
from pdstage.errors import UsageError
from pdstage.tools.trace import chrome, load, merge_files, tracer, tracing
from pdstage.tools.trace.model import Clock, Trace, merged
from tests.trace.conftest import Run


def whole(run) -> Trace:
    return merged(run.traces())


def by_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def check_document(held, *, whole=True) -> None:
    """What the format asks for: slices of one track nest (here: follow each other), and flows begin and end in them."""
    json.dumps(held, allow_nan=False)
    events = held["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    slices = {}
    for event in by_phase(events, "X"):
        assert event["dur"] > 0
        slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"], event))
    assert set(slices) == named
    assert {pid for pid, _ in named} <= processes
    for track in slices.values():
        track.sort(key=lambda one: one[:2])
        for (_, ended, before), (began, _, after) in pairwise(track):
            assert ended <= began + 1e-4, (before, after)
    flows = {}
    for event in events:
        if event["ph"] in "stf":
            (inside,) = [one for start, stop, one in slices[event["pid"], event["tid"]] if start < event["ts"] < stop]
            flows.setdefault(event["id"], []).append((event["ph"], inside["name"], event["ts"]))
    for flow in flows.values() if whole else ():
        assert [phase for phase, _, _ in flow] == ["s", "t", "f"]
        assert [name for _, name, _ in flow] == ["gather", "write", "scatter"]
        assert flow == sorted(flow, key=lambda one: one[2])
    begun = [(e["cat"], e["id"]) for e in by_phase(events, "b")]
    assert len(set(begun)) == len(begun)
    assert sorted(begun) == sorted((e["cat"], e["id"]) for e in by_phase(events, "e"))


def test_a_runs_file_holds_every_stage_and_leads_from_gather_to_scatter(run):
    run.move("one")
    run.move(2)
    held = chrome.document(whole(run))
    check_document(held)
    events = held["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["prefill rank 0", "decode rank 0"]
    assert tracer.place(Topology(tp_size=2, tp_rank=1)) == "tp 1/2"
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert tracks <= {f"lane {lane} of decode 0{row}" for lane in (0, 1) for row in ("", " (2)", " (3)", " (4)")}
    n = {kind: sum(e["name"] == kind for e in by_phase(events, "X")) for kind in ("gather", "write", "scatter")}
    assert n["gather"] == n["write"] == n["scatter"] == len(by_phase(events, "s")) == 2 * 3
    waits = [e for e in by_phase(events, "b") if e["cat"] == "lease_wait"]
    assert len(waits) == n["gather"]
    scattered = [e["args"] for e in by_phase(events, "X") if e["name"] == "scatter"]
    assert {told["room"] for told in scattered} == {"one", "2"}
    assert sum(told["bytes"] for told in scattered) == 2 * 2 * 3 * 60 * 4 * 16  # rooms, K and V, layers, tokens, heads
    rooms = [e for e in by_phase(events, "b") if e["cat"] == "room"]
    assert sorted(e["name"] for e in rooms) == ["room 2"] * 2 + ["room one"] * 2
    assert {e["args"]["state"] for e in rooms} == {"success"}


def test_direct_writes_have_a_track_of_their_own_and_a_failed_room_says_why(site):
    run = Run(site, path="direct")
    run.move("r")
    run.fail("gone")
    held = chrome.document(whole(run))
    check_document(held)
    assert {e["args"]["name"] for e in held["traceEvents"] if e["name"] == "thread_name"} == {"direct of decode 0"}
    assert not by_phase(held["traceEvents"], "s")
    failed = [e["args"] for e in by_phase(held["traceEvents"], "b") if e["name"] == "room gone"]
    assert len(failed) == 2
    assert all(told["state"] == "failed" and "no longer wanted" in told["reason"] for told in failed)


def alike(left: Trace, right: Trace, within_s: float = 2e-8) -> None:
    """Equal but for what writing microseconds rounds."""
    assert left.nodes == right.nodes
    for ours, theirs in ((left.stages, right.stages), (left.rooms, right.rooms)):
        assert len(ours) == len(theirs)
        for one, other in zip(sorted(ours), sorted(theirs), strict=True):
            for a, b in zip(one, other, strict=True):
                assert a == pytest.approx(b, rel=0, abs=within_s) if isinstance(a, float) else a == b


def test_files_of_processes_are_one_trace(run, tmp_path):
    run.move(b"\xff\x00")
    run.fail("gone")
    parts = []
    for number, trace in enumerate(run.traces()):
        parts.append(tmp_path / f"{number}.json")
        chrome.write(trace, parts[-1])
    merge_files(parts, tmp_path / "all.json")
    again = chrome.read(tmp_path / "all.json")
    alike(again, whole(run))
    assert again.clock == whole(run).clock
    check_document(json.loads((tmp_path / "all.json").read_text()))
    merge_files([tmp_path / "all.json"], tmp_path / "again.json")  # what was merged can be merged
    alike(load([tmp_path / "again.json"]), whole(run))


def test_traces_of_several_hosts_meet_by_the_time_of_day(run):
    run.move("r")
    here, there = run.traces()
    shifted = there.moved_to(Clock("another boot", there.clock.wall_offset_s - 1000.0))
    assert shifted.stages[0].began_at == pytest.approx(there.stages[0].began_at + 1000), "its clock is that far ahead"
    assert shifted.rooms[0].opened_at == pytest.approx(there.rooms[0].opened_at + 1000)
    apart_s = abs(here.clock.wall_offset_s - there.clock.wall_offset_s)  # each was read at a time of its own
    alike(merged([here, shifted]), whole(run), within_s=1e-6 + apart_s)


def test_only_the_latest_events_are_kept(site):
    run = Run(site)
    run.tracers[1]._events = type(run.tracers[1]._events)(maxlen=5)
    for room in range(4):
        run.move(room)
    trace = run.tracers[1].trace()
    assert trace.n_dropped > 0
    assert len(trace.stages) + len(trace.rooms) <= 5
    assert {life.room for life in trace.rooms} <= {"3"}
    check_document(chrome.document(merged(run.traces())), whole=False)


def test_a_file_is_written_if_one_is_asked_for_even_if_the_run_fails(run, tmp_path):
    run.move("r")
    with tracing(None) as observers:
        assert observers == ()
    with pytest.raises(ZeroDivisionError), tracing(tmp_path / "t.json") as (one,):
        for origin, event in list(run.tracers[0]._events):
            one.observe(origin, event)
        raise ZeroDivisionError
    assert load([tmp_path / "t.json"]).rooms


@pytest.mark.parametrize("where", ["no/such/folder/t.json", "."])
def test_a_file_that_could_not_be_written_is_refused_before_the_run(tmp_path, where):
    with pytest.raises(UsageError, match="--trace"), tracing(tmp_path / where):
        pytest.fail("the run began")


@pytest.mark.parametrize("text", [b"", b"[]", b'{"traceEvents": []}', b"\xff", None])
def test_files_that_are_no_traces(tmp_path, text):
    """None: one of another version."""
    path = tmp_path / "t.json"
    chrome.write(Trace(Clock("here", 0.0)), path)
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":99') if text is None else text)
    with pytest.raises(UsageError, match=r"t\.json is not a trace of this version"):
        chrome.read(path)
    with pytest.raises(UsageError, match="cannot read"):
        load([tmp_path / "none.json"])
    with pytest.raises(UsageError, match="no trace files"):
        load([])
