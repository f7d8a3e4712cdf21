"""Where rooms' time went: steps that follow each other, and are all of it."""

from __future__ import annotations

import pytest

from pdstage import cli
from pdstage.errors import UsageError
from pdstage.tools.trace import chrome, steps
from pdstage.tools.trace.model import merged
from tests.rows import both_paths
from tests.trace.conftest import Run

AT_DIRECT = {"gather", "to the write", "tag", "scatter"}


@both_paths
def test_a_rooms_steps_add_up_to_it(site, path):
    run = Run(site, path=path)
    for room in range(3):
        run.move(room)
    found = list(steps.waterfalls(merged(run.traces())))
    assert [life.room for life, _ in found] == ["0", "1", "2"]
    for life, steps_s in found:
        assert sum(steps_s) == pytest.approx(life.ended_at - life.opened_at)
        took = dict(zip(steps.STEPS, steps_s, strict=True))
        assert min(steps_s) >= 0.0
        assert {name for name, s in took.items() if s == 0.0} >= (AT_DIRECT if path == "direct" else set())
        assert took["write"] > 0 and took["Open"] > 0
        assert (took["scatter"] > 0) == (took["gather"] > 0) == (path == "staged")


def test_the_command_prints_them(run, tmp_path, capsys):
    run.move("one")
    chrome.write(merged(run.traces()), tmp_path / "t.json")
    assert cli.main(["plot", str(tmp_path / "t.json"), "--steps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 rooms, median ")
    assert [line[: len(name)] for name, line in zip(steps.STEPS, lines[2:], strict=True)] == list(steps.STEPS)


def test_a_trace_of_one_side_alone_says_so(run):
    run.move("one")
    prefill, *_ = run.traces()
    with pytest.raises(UsageError, match="give both sides' files"):
        steps.table(prefill)
