"""What a journal does not say accuses nobody: killed processes, bounded files, peers that are not there, odd clocks."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import threading
import time

import pytest

from pdstage import PdstageError, UsageError, cli
from pdstage.control.bootstrap import BootstrapServer
from pdstage.manager.journal import OLDER, Journal
from pdstage.tools.judge import judge
from pdstage.transport import open_transport
from tests.judge.runs import LATE, run, turns, written
from tests.manager.engine import Rank, decode_node, prefill_node
from tests.transport.faults import faulty


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    run(folder, faults=LATE, rooms=8)
    return folder


@pytest.fixture
def journals(good):
    return written(good)


def put(folder, journals) -> None:
    for one in journals.values():
        one.put(folder)


@pytest.mark.parametrize("nodes", [["decode 0"], ["prefill 0"], ["decode 0", "prefill 0", "prefill 1"]])
def test_any_beginning_may_be_lost(good, tmp_path, nodes):
    """Of one node's lines, or of all nodes' the same part."""
    for part in range(1, 60):
        journals = written(good)
        for one in map(journals.get, nodes):
            one.head.first = 1 + len(one.lines) * part // 60
            one.lines = one.lines[one.head.first :]
        put(tmp_path, journals)
        verdict = judge([tmp_path])
        assert not verdict.wrong, (part, verdict.wrong)
        assert f"its first {journals[nodes[0]].head.first:,} lines are gone" in verdict.notes[0]


def test_decode_may_be_killed_at_any_line_and_amid_it(good, tmp_path):
    """Prefill's journal goes on: what a process has said is in its own before it leaves."""
    decode = written(good)["decode 0"].path
    data, n = decode.read_bytes(), 0
    put(tmp_path, written(good))
    head = data.index(b"\n")
    for end in range(0, len(data), len(data) // 150):
        (tmp_path / decode.name).write_bytes(data[:end])
        verdict = judge([tmp_path])
        assert not verdict.wrong, (end, verdict.wrong)
        n += verdict.counts["nodes"] == 3
        assert end > head or verdict.counts["nodes"] == 2
    assert n > 100


def test_clocks_may_differ(journals, tmp_path):
    for hours, one in enumerate(journals.values()):
        for line in one.lines:
            line.at += hours * 3600.0
    put(tmp_path, journals)
    assert not judge([tmp_path]).wrong


def test_nodes_that_never_met(good, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    run(other, rooms=4)
    paths = [written(good)["decode 0"].path, *(written(other)[f"prefill {n}"].path for n in range(2))]
    verdict = judge(paths)
    assert not verdict.wrong
    assert verdict.counts["writes seen at both ends"] == 0
    assert verdict.counts["writes"] > 0


def test_a_bounded_journal_says_what_it_lost(tmp_path, monkeypatch):
    monkeypatch.setitem(Journal.__init__.__kwdefaults__, "max_nbytes", 12_000)
    run(tmp_path, rooms=24)
    assert len(list(tmp_path.glob(f"*{OLDER}"))) == 3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * 2 * 12_000
    verdict = judge([tmp_path])
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert len(verdict.notes) == 3
    assert all("lines are gone" in note for note in verdict.notes)


def _decode(folder, address, pipe) -> None:
    """Rooms one after the other, until it is killed."""
    rank = Rank()
    node = decode_node(rank, path="staged", staging_nbytes=1 << 14, journal=folder)
    pipe.send("up")
    for room in range(1 << 20):
        pages = rank.allocate(50)
        receiver = node.receive(room, address)
        receiver.bind(pages, 50)
        turns([node], lambda receiver=receiver: receiver.released)
        pipe.send(room)
        rank.free(pages)


def test_a_killed_process_accuses_nobody(tmp_path):
    context = multiprocessing.get_context("spawn")
    with BootstrapServer() as directory:
        ours, theirs = context.Pipe()
        rank = Rank()
        with prefill_node(
            rank,
            directory.address,
            path="staged",
            staging_nbytes=1 << 14,
            journal=tmp_path,
            transport=faulty(open_transport("local"), **LATE),
        ) as p:
            process = context.Process(target=_decode, args=(tmp_path, directory.address, theirs), daemon=True)
            process.start()
            assert ours.poll(60)
            ours.recv()
            pages = rank.allocate(50)
            for room in range(8):
                sender = p.send(room)
                sender.chunk(pages, (0, 50))
                sender.finish()
                turns([p], ours.poll, 20.0) if room < 7 else turns([p], p._in_flight, 20.0)
                if room < 7:
                    assert ours.recv() == room
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            with contextlib.suppress(PdstageError):
                turns([p], lambda s=sender: s.released, 10.0)
    verdict = judge([tmp_path])
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert verdict.counts["nodes"] == 2
    assert verdict.counts["writes seen at both ends"] >= 7


def command(*args: object) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        return cli.main(["judge", *map(str, args)]), said.getvalue()


def test_the_command(good, journals, tmp_path):
    code, said = command(good)
    assert code == 0
    assert said.splitlines()[-1] == "nothing is wrong"
    assert "3 nodes, " in said
    assert "rooms at their nodes: " in said
    decode = journals["decode 0"]
    decode.lines[decode.find(what="room", after="SUCCESS")].after = "WAITING_FOR_INPUT"
    decode.put(tmp_path)
    code, said = command(tmp_path)
    assert code == 1
    assert f"{tmp_path / decode.path.name}:" in said
    assert "WRONG" in said.splitlines()[-1]


def test_nothing_is_no_good_verdict(good, tmp_path, capsys):
    """A run that wrote nothing must not pass for a good one."""
    code, said = command(tmp_path)
    assert (code, said.splitlines()[-1]) == (2, "nothing was judged")
    empty = tmp_path / "decode-0-0.journal"
    empty.write_text("")
    assert command(empty)[0] == 2
    assert command(tmp_path / "not there")[0] == 2
    assert "cannot read" in capsys.readouterr().err
    other = written(good)["decode 0"].path.read_bytes().replace(b'"journal":1', b'"journal":2')
    empty.write_bytes(other)
    assert command(empty)[0] == 2
    assert "a journal of version 2" in capsys.readouterr().err


@pytest.mark.parametrize("line", [b"garbage", b'{"n":1}', b"[1,2]", b"\xff" * 2000])
def test_what_is_no_journal_is_named(good, tmp_path, line):
    head, *lines = written(good)["decode 0"].path.read_bytes().splitlines()
    bad = tmp_path / "bad.journal"
    bad.write_bytes(b"\n".join([head, lines[0], line, lines[1], b""]))
    with pytest.raises(UsageError, match=r"bad\.journal:3 is no line of a journal"):
        judge([bad])


def test_a_journal_is_read_while_it_is_written(tmp_path):
    """A long run can be judged before it ends."""
    done = threading.Event()

    def go() -> None:
        run(tmp_path, rooms=40, progress="thread")
        done.set()

    thread = threading.Thread(target=go)
    thread.start()
    until = time.monotonic() + 60
    while not done.is_set() and time.monotonic() < until:
        verdict = judge([tmp_path])
        assert not verdict.wrong, "\n".join(verdict.wrong)
    thread.join()
    assert not judge([tmp_path]).wrong
