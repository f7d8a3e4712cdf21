"""Real runs are judged good, whatever became of their rooms; and the judge has seen all of it."""

from __future__ import annotations

import pytest

from pdstage import State
from pdstage.protocol import state
from pdstage.tools.judge import judge
from tests.judge.runs import LATE, SOON, rules, run


@pytest.mark.parametrize(("path", "progress"), [("staged", "inline"), ("direct", "inline"), ("staged", "thread")])
def test_a_run_is_judged_good(tmp_path, path, progress):
    ended = run(tmp_path, path=path, progress=progress, faults=LATE)
    verdict = judge([tmp_path])
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert ended.count(State.SUCCESS) >= 9
    assert verdict.counts["nodes"] == 3
    assert sum(verdict.rooms.values()) == 3 * len(ended)
    assert verdict.counts["writes"] >= verdict.counts["writes seen at both ends"] >= 9 * 2 * 2
    assert verdict.counts["bytes arrived"] >= 9 * 2 * 3 * 50 * 4 * 16
    assert (verdict.counts["leases"] > 0) == (path == "staged")
    assert state.watch is None, "nobody writes any more"


@pytest.mark.parametrize(
    "faults",
    [{"fail": 0.2}, {"fail_written": 0.2}, {"lose_tag": 0.2}, {"refuse": 0.2}, {"die_after": 20}],
    ids=lambda faults: next(iter(faults)),
)
@pytest.mark.parametrize("path", ["staged", "direct"])
def test_a_run_with_faults_is_judged_good(tmp_path, path, faults):
    faults = {"seed": 5, "delay": 0.5, "delay_s": 0.01, **faults}
    ended = run(tmp_path, path=path, faults=faults, rooms=8, config=SOON)
    verdict = judge([tmp_path])
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.counts["writes"] > 0
    assert State.FAILED in ended


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_a_short_run_is_judged_good(tmp_path, path):
    """What `test_planted` tries deliberate bugs with: it says which rules are broken, and waits for no room long."""
    run(tmp_path, path=path, faults=LATE, rooms=8, limit_s=5.0)
    verdict = judge([tmp_path])
    assert not verdict.wrong, f"judged wrong: {rules(verdict.wrong)}"
    assert verdict.judged
