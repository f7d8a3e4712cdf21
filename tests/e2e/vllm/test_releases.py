"""A fleet between two releases of pdstage: prefill has one and decode the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e import compare, load
from tests.e2e.vllm.engines import handed_over, pair
from tests.fleet import releases

pytestmark = pytest.mark.full
ROWS = [pair((2, 128), (1, 128)), pair((1, 128), (2, 32), model="gemma3"), pair((1, 128), (1, 128), model="granite")]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("version", releases.released())
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_answers_are_those_of_one_engine_beside_an_earlier_release(fleet, row, version, side):
    row = replace(row, **{side: replace(getattr(row, side), release=version)})
    prompts = load.prompts(30, 5)
    prefill, decode, _ = fleet.fresh(*row.engines)
    assert [loads(one, version) for one in (prefill, decode)] == [side == "prefill", side == "decode"]
    right = fleet.right(row.reference, prompts)
    compare.check(load.ask_all(handed_over(prefill, decode), prompts, 8), right)


def loads(server, version: str) -> bool:
    """Whether a process of this server has that release's extension in its memory."""
    group = [path for path in Path("/proc").glob("[0-9]*") if stat(path)[2:3] == [str(server.process.pid)]]
    assert group
    return any(f"/releases/{version}-vllm/" in (path / "maps").read_text() for path in group)


def stat(path: Path) -> list[str]:
    """Of a process that may have ended: its state, its parent, its process group, and so on."""
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
