"""A bench's ranks are processes: with a trace asked for, each leaves its nodes' part, and they become one file."""

from __future__ import annotations

import json

from pdstage.bench import ranks, rooms
from pdstage.tools.trace import load, merge_files
from tests.trace.test_trace import check_document


def test_the_ranks_of_a_bench_leave_their_parts(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    with ranks.traced(parts), rooms.Pair("local", "inline") as pair:
        pair.both("run", pair.rooms(5))
    merge_files(parts.iterdir(), tmp_path / "all.json")
    check_document(json.loads((tmp_path / "all.json").read_text()))
    trace = load([tmp_path / "all.json"])
    assert [node.role for node in trace.ordered_nodes] == ["prefill", "decode"]
    assert len({node.os_pid for node in trace.ordered_nodes}) == 2
    assert sorted(life.room for life in trace.rooms) == [str(room) for room in range(5) for _ in "pd"]
    assert ranks._folder is None
    with rooms.Pair("local", "inline"):
        pass
    assert len(list(parts.iterdir())) == 2, "only what runs inside is traced"
