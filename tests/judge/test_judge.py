"""Real runs are judged good, whatever became of their rooms; planted stages and bugs in real nodes are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdstage.tools.trace.model import Trace
from tests.judge import judge
from tests.judge.runs import LATE, run
from tests.manager.engine import QUICK
from tests.rows import both_paths, rows
from tests.sim.mutants import detect, everyone

FAULTS = [{}, {"fail": 0.2}, {"fail_written": 0.2}, {"lose_tag": 0.2}, {"refuse": 0.2}, {"die_after": 20}]
SOON = replace(QUICK, transfer_s=1.0)
"""For rooms that wait for what never comes."""


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: next(iter(faults), "none"))
@pytest.mark.parametrize(("path", "progress"), [("staged", "inline"), ("direct", "inline"), ("staged", "thread")])
def test_a_run_is_judged_good(path, progress, faults):
    trace = run(path=path, progress=progress, faults=LATE | faults, rooms=8, config=SOON)
    wrong, n_writes = judge(trace)
    assert not wrong, "\n".join(wrong)
    assert n_writes > 0
    assert {life.state for life in trace.rooms} >= {"success", "failed"} or faults


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {path: run(path=path, faults=LATE, rooms=8) for path in ("staged", "direct")}


PLANTED = []


def planted(path: str, kind: str, *broken: str) -> Callable:
    """A change of the first `kind` of stage of a room that succeeded, and the rules that it breaks."""

    def add(change: Callable) -> Callable:
        PLANTED.append(pytest.param(path, kind, set(broken), change, id=f"{change.__name__} {path}"))
        return change

    return add


@planted("staged", "gather")
def nothing_is_changed(trace, stage):
    pass


@planted("staged", "gather", "I6")
def a_tag_of_what_nobody_sent(trace, stage):
    trace.stages = [one for one in trace.stages if (one.claim, one.kind) != (stage.claim, "gather")]


@planted("staged", "scatter", "I5")
def success_without_a_chunk(trace, stage):
    trace.stages.remove(stage)


@planted("staged", "scatter", "I5")
def a_chunk_of_two_sizes(trace, stage):
    put(trace, stage, nbytes=stage.nbytes - 1)


@planted("staged", "scatter", "I5")
def a_scatter_before_its_gather_ended(trace, stage):
    put(trace, stage, began_at=stage.began_at - 1.0)


@planted("staged", "scatter", "I5")
def success_before_a_scatter_ended(trace, stage):
    ended_at = next(life.ended_at for life in lives(trace, stage, "decode"))
    put(trace, stage, ended_at=ended_at + 1e-6)


@planted("staged", "scatter", "I2", "I5")
def released_before_a_scatter_ended(trace, stage):
    put(trace, stage, ended_at=stage.ended_at + 100.0)


@planted("staged", "gather", "I15")
@planted("direct", "direct", "I15")
@planted("staged", "scatter", "I7")
def a_chunk_that_is_moved_twice(trace, stage):
    trace.stages.append(stage)


@planted("staged", "write", "I2", "I8")
@planted("direct", "direct", "I2", "I8")
def a_write_that_ends_after_both_rooms_were_released(trace, stage):
    """Decode is not blamed for what was seen late: so it begins late as well."""
    released_at = max(life.released_at for role in ("prefill", "decode") for life in lives(trace, stage, role))
    put(trace, stage, began_at=released_at, ended_at=released_at + 1e-6)


@planted("direct", "direct", "I8")
def a_writer_that_was_stopped(trace, stage):
    put(trace, stage, ended_at=stage.ended_at + 100.0)


@planted("direct", "direct", "I10")
def a_room_that_never_ended(trace, stage):
    at = trace.rooms.index(next(lives(trace, stage, "decode")))
    trace.rooms[at] = trace.rooms[at]._replace(state="", ended_at=None, released_at=None)


def put(trace, stage, **changed) -> None:
    trace.stages[trace.stages.index(stage)] = stage._replace(**changed)


def lives(trace, stage, role: str):
    return (life for life in trace.rooms if life.room == stage.room and trace.nodes[life.incarnation].role == role)


@pytest.mark.parametrize(("path", "kind", "broken", "change"), PLANTED)
def test_what_is_changed_is_seen(traces, path, kind, broken, change):
    """I2, I5, I6, I7, I8, I10, I15."""
    made = traces[path]
    trace = Trace(made.clock, made.nodes, list(made.stages), list(made.rooms))
    succeeded = {life.room for life in trace.rooms if life.state == "success"}
    change(trace, next(one for one in trace.stages if one.kind == kind and one.room in succeeded))
    wrong, _ = judge(trace)
    assert {said.split(":")[0] for said in wrong} == broken, wrong


# Real nodes with a bug.

BUGS = {
    "source memory is given back before the last completion": "I8",
    "one chunk of each writer counts as all": "I5",
    "Drained before the last completion": "I2",
    "released when one writer is quiet": "I2",
}
TRIES = 4
"""Runs of a bug: what meets what in one is the machine's affair."""


@both_paths
def test_a_short_run_is_judged_good(path):
    """What deliberate bugs are tried with: it says which rules are broken, and waits for no room long."""
    wrong, _ = judge(run(path=path, faults=LATE, rooms=8, limit_s=5.0))
    assert not wrong, f"judged wrong: { {said.split(':')[0] for said in wrong} }"


@pytest.mark.parametrize("name", rows(BUGS, full={"one chunk of each writer counts as all"}))
def test_a_bug_in_real_nodes_is_seen(monkeypatch, name):
    """By the judge alone: the run itself never raises."""
    monkeypatch.setenv("COLUMNS", "400")  # so that the verdict is in the one line that pytest keeps
    mutant = next(one for one in everyone() if one.name == name)
    tried = replace(mutant, shown_by="tests/judge/test_judge.py::test_a_short_run_is_judged_good")
    said = []
    while not any("judged wrong" in words and f"'{BUGS[name]}'" in words for words in said):
        assert len(said) < TRIES, said
        said.append(detect(tried))
