"""Processes: what they say is heard, how they fail is told, and none is left behind."""

from __future__ import annotations

import os

import pytest
from demo import workers

from pdstage.errors import DeadlineExceeded, PdstageError, UsageError
from pdstage.tools.demo.crew import Crew
from pdstage.tools.demo.options import Side


@pytest.fixture
def crew():
    with Crew("demo.workers", deadline_s=60.0) as crew:
        yield crew


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_everyone_is_heard_and_told(crew):
    names = {"one", "two"}
    for name in names:
        crew.start(name, workers.echo, name.upper())
    heard = crew.hear()
    pids = {name: message[1] for name, message in (next(heard), next(heard))}
    assert pids.keys() == names
    assert os.getpid() not in pids.values()
    assert len(set(pids.values())) == 2
    crew.tell("go")
    assert dict(heard) == {"one": ("ONE", "go"), "two": ("TWO", "go")}


def test_the_one_named_is_not_told(crew):
    crew.start("told", workers.echo, 1)
    crew.start("spared", workers.echo, 2)
    heard = crew.hear()
    next(heard), next(heard)
    crew.tell("first", but="spared")
    assert next(heard) == ("told", (1, "first"))
    crew.tell("second", but="told")
    assert list(heard) == [("spared", (2, "second"))]


def test_an_error_names_the_process_and_keeps_its_kind(crew):
    crew.start("rank 3", workers.refuse, "this")
    with pytest.raises(PdstageError, match="rank 3: this is no good; give another") as raised:
        list(crew.hear())
    cause = raised.value.__cause__
    assert isinstance(cause, UsageError)
    assert cause.fields == {"field": "job"}


def test_a_process_that_dies_is_told_with_its_exit_code(crew):
    crew.start("rank 1", workers.die, None)
    heard = crew.hear()
    assert next(heard) == ("rank 1", "alive")
    with pytest.raises(PdstageError, match="rank 1 died with exit code 7"):
        next(heard)


def test_silence_ends_at_the_deadline_and_leaves_nobody():
    with (
        pytest.raises(DeadlineExceeded, match="rank 0"),
        Crew("demo.workers", deadline_s=0.0) as crew,
    ):
        crew.start("rank 0", workers.hang, None)
        list(crew.hear())
    assert not [member for member in crew._members.values() if member.process.is_alive()]


def test_leaving_ends_those_who_still_wait():
    with Crew("demo.workers", deadline_s=60.0) as crew:
        crew.start("rank 0", workers.hang, None)
        (_, pid) = next(crew.hear())
    assert gone(pid)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
def test_a_group_agrees_and_takes_the_minimum(crew, tmp_path, tp, pp):
    pytest.importorskip("torch")
    places = Side(tp, pp, 1, "nhd").places()
    for place in places:
        crew.start(f"rank {place.group_rank}", workers.meet, (str(tmp_path), place))
    n = tp * pp
    for name, told in crew.hear():
        rank = int(name.split()[1])
        assert told["agreed"] == [0, 10], "rank 0's values, on every rank"
        assert told["lowest"] == [4, 0, 4 - (n - 1)]
        assert told["own"] == [4, rank, 4 - rank], "the caller's array is left alone"
        assert told["gathered"] == ([("part", r) for r in range(n)] if rank == 0 else [])
