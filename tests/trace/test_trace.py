"""Trace files: what viewers ask of them holds, all that was observed is there, and files of processes become one."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage.errors import UsageError
from pdstage.tools.trace import chrome, load, merge_files, tracing
from pdstage.tools.trace.model import Clock, Trace, merged, rows
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
    assert names == ["prefill rank 0 (tp 0/2)", "prefill rank 1 (tp 1/2)", "decode rank 0"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] < 3}
    assert tracks <= {f"lane {lane} of decode 0{row}" for lane in (0, 1) for row in ("", " (2)", " (3)", " (4)")}
    n = {kind: sum(e["name"] == kind for e in by_phase(events, "X")) for kind in ("gather", "write", "scatter")}
    assert n["gather"] == n["write"] == n["scatter"] == len(by_phase(events, "s")) == 2 * 2 * 3
    waits = [e for e in by_phase(events, "b") if e["cat"] == "lease_wait"]
    assert len(waits) == n["gather"]
    scattered = [e["args"] for e in by_phase(events, "X") if e["name"] == "scatter"]
    assert {told["room"] for told in scattered} == {"one", "2"}
    assert sum(told["bytes"] for told in scattered) == 2 * 2 * 3 * 60 * 4 * 16  # rooms, K and V, layers, tokens
    rooms = [e for e in by_phase(events, "b") if e["cat"] == "room"]
    assert sorted(e["name"] for e in rooms) == ["room 2"] * 3 + ["room one"] * 3
    assert {e["args"]["state"] for e in rooms} == {"success"}


def test_direct_writes_have_a_track_of_their_own_and_no_flow(site):
    run = Run(site, path="direct")
    run.move("r")
    held = chrome.document(whole(run))
    check_document(held)
    assert {e["args"]["name"] for e in held["traceEvents"] if e["name"] == "thread_name"} == {"direct of decode 0"}
    assert not by_phase(held["traceEvents"], "s")


def test_a_failed_room_says_why(run):
    run.fail("gone")
    rooms = [e for e in by_phase(chrome.document(whole(run))["traceEvents"], "b") if e["cat"] == "room"]
    assert len(rooms) == 3
    assert {e["args"]["state"] for e in rooms} == {"failed"}
    assert all("no longer wanted" in e["args"]["reason"] for e in rooms)


def alike(left: Trace, right: Trace) -> None:
    """Equal but for what writing microseconds rounds."""
    assert left.nodes == right.nodes
    for ours, theirs in ((left.stages, right.stages), (left.rooms, right.rooms)):
        assert len(ours) == len(theirs)
        for one, other in zip(sorted(ours), sorted(theirs), strict=True):
            for a, b in zip(one, other, strict=True):
                assert a == pytest.approx(b, rel=0, abs=2e-8) if isinstance(a, float) else a == b


def test_what_is_written_is_read_again(run, tmp_path):
    run.move(b"\xff\x00")
    run.fail("gone")
    trace = whole(run)
    chrome.write(trace, tmp_path / "t.json")
    again = chrome.read(tmp_path / "t.json")
    alike(again, trace)
    assert again.clock == trace.clock


def test_files_of_processes_are_one_trace(run, tmp_path):
    run.move("r")
    parts = []
    for number, trace in enumerate(run.traces()):
        parts.append(tmp_path / f"{number}.json")
        chrome.write(trace, parts[-1])
        alone = chrome.document(trace)
        assert not by_phase(alone["traceEvents"], "f") or number < 2
    merge_files(parts, tmp_path / "all.json")
    alike(chrome.read(tmp_path / "all.json"), whole(run))
    check_document(json.loads((tmp_path / "all.json").read_text()))
    merge_files([tmp_path / "all.json"], tmp_path / "again.json")  # what was merged can be merged
    alike(load([tmp_path / "again.json"]), whole(run))


def test_traces_of_several_hosts_meet_by_the_time_of_day(run):
    run.move("r")
    *here, there = run.traces()
    elsewhere = Clock("another boot", here[0].clock.wall_offset_s - 1000.0)  # its monotonic clock is 1,000 s ahead
    shifted = Trace(
        elsewhere,
        there.nodes,
        [s._replace(began_at=s.began_at + 1000, ended_at=s.ended_at + 1000) for s in there.stages],
        [],
    )
    assert len(there.stages)
    back = merged([*here, shifted])
    assert back.clock == here[0].clock
    want = sorted(s.began_at for s in there.stages)
    assert sorted(s.began_at for s in back.stages if s.kind == "scatter") == pytest.approx(want, abs=1e-6)


def test_only_the_latest_events_are_kept(site):
    run = Run(site)
    run.tracers[2]._events = type(run.tracers[2]._events)(maxlen=5)
    for room in range(4):
        run.move(room)
    trace = run.tracers[2].trace()
    assert trace.n_dropped > 0
    assert len(trace.stages) + len(trace.rooms) <= 5
    assert {life.room for life in trace.rooms} <= {"3"}
    check_document(chrome.document(merged(run.traces())), whole=False)


def test_without_a_file_there_is_no_observer():
    with tracing(None) as observers:
        assert observers == ()


def test_the_file_is_written_even_if_the_run_fails(run, tmp_path):
    with pytest.raises(ZeroDivisionError), tracing(tmp_path / "t.json") as (tracer,):
        for origin, event in run_events(run):
            tracer.observe(origin, event)
        raise ZeroDivisionError
    assert load([tmp_path / "t.json"]).rooms


def run_events(run):
    run.move("r")
    return list(run.tracers[0]._events)


@pytest.mark.parametrize("where", ["no/such/folder/t.json", "."])
def test_a_file_that_could_not_be_written_is_refused_before_the_run(tmp_path, where):
    with pytest.raises(UsageError, match="--trace"), tracing(tmp_path / where):
        pytest.fail("the run began")


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {"producer": "x", "version": 1}}',
     '{"traceEvents": [], "otherData": {"producer": "pdstage", "version": 99}}', "\udcff"],
)  # fmt: skip
def test_files_that_are_no_traces(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=r"t\.json"):
        chrome.read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        load([tmp_path / "none.json"])
    with pytest.raises(UsageError, match="no trace files"):
        load([])


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 3)).map(lambda one: (one[0], one[0] + one[1] + 1e-6)), max_size=30
    )
)
def test_rows_never_overlap_and_are_as_few_as_can_be(spans):
    given_rows = rows(spans)
    for row in set(given_rows):
        mine = sorted(span for span, number in zip(spans, given_rows, strict=True) if number == row)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    deepest = max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)
    assert len(set(given_rows)) == deepest
