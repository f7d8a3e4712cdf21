"""What a node writes down: all of it, before anything leaves that follows from it, and harming no room."""

from __future__ import annotations

import logging
import os

import msgspec
import pytest

from pdstage import UsageError
from pdstage.manager import journal as journals
from pdstage.manager.journal import Head, Line
from pdstage.protocol import state
from tests.manager.engine import Rank


@pytest.fixture
def pair(site, tmp_path):
    return site.pair(path="staged", journal=tmp_path)


def lines(node) -> list[Line]:
    head, *held = node.journal.path.read_bytes().splitlines()
    assert msgspec.json.decode(head, type=Head).incarnation == f"{node.incarnation:016x}"
    return [msgspec.json.decode(line, type=Line) for line in held]


def test_a_rooms_life_and_its_chunks(pair):
    pair.move(1)
    pair.p.close()
    pair.d.close()
    at_p, at_d = lines(pair.p), lines(pair.d)
    assert [one.n for one in at_p] == list(range(len(at_p)))
    assert [one.at for one in at_d] == sorted(one.at for one in at_d)
    room = ["OPENED", "CONNECTED", "MOVED", "COMPLETED", "RELEASED"]
    assert [one.event for one in at_d if one.what == "room"] == room
    assert [one.event for one in at_p if one.what == "room"] == room
    chunk = [one for one in at_p if one.what == "chunk" and one.chunk == 0]
    assert [one.event for one in chunk] == ["LEASED", "QUEUED", "GATHER", "WRITE", "WRITTEN"]
    lease = [one for one in at_d if one.what == "lease" and one.chunk == 0]
    assert [(one.before, one.after) for one in lease] == [("GRANTED", "LANDED"), ("LANDED", "RELEASED")]
    names = ("session", "epoch", "chunk", "lane", "cursor", "nbytes")
    assert [getattr(lease[0], name) for name in names] == [getattr(chunk[-1], name) for name in names]
    assert (at_p[-1].what, at_d[-1].what, at_d[-1].proved) == ("closed", "closed", True)


def test_a_line_is_in_the_file_before_what_follows_from_it_leaves(pair, monkeypatch):
    n_left = 0

    def watched(node, part, name):
        real = getattr(part, name)

        def leave(*given):
            nonlocal n_left
            n_left += 1
            assert len(lines(node)) == node.journal._n_lines, f"{name} before the lines that led to it"
            return real(*given)

        monkeypatch.setattr(part, name, leave)

    for node in pair.nodes:
        watched(node, node.socket, "send")
    watched(pair.p, pair.p.transport, "notify")
    watched(pair.p, pair.p.data_path, "gather")  # into the lease itself, which is mapped
    for room in range(3):
        pair.move(room)
    assert n_left > 12


def test_each_node_of_a_process_writes_its_own(site, tmp_path):
    """And one without a journal writes none; without any nobody watches."""
    assert state.watch is None
    folders = [tmp_path / name for name in "ab"]
    pairs = []
    for room, folder in enumerate((*folders, None)):  # the latest is the one that the directory names
        if folder:
            folder.mkdir()
        pairs.append(site.pair(journal=folder))
        pairs[room].move(room)
    assert state.watch is not None
    for room, pair in enumerate(pairs[:2]):
        for node in pair.nodes:
            assert {one.name for one in lines(node) if one.what == "room"} == {str(room)}
    assert pairs[2].p.journal is None
    assert len(list(tmp_path.rglob("*.journal"))) == 4
    *others, last = [node for pair in pairs for node in pair.nodes]
    for node in others[:3]:
        node.close()
    assert state.watch is not None
    others[3].close()
    others[3].close()
    assert state.watch is None
    assert not last.closed


def test_a_full_disk_ends_the_journal_and_no_room(pair, tmp_path, monkeypatch, caplog):
    real, full = os.write, []

    def write(file, data):
        if file == pair.p.journal._file and full:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(journals.os, "write", write)
    pair.move(1)
    full.append(True)
    with caplog.at_level(logging.ERROR, "pdstage"):
        pair.move(2)
    (record,) = caplog.records
    assert "is removed: [Errno 28] No space left" in record.getMessage()
    pair.p.close()
    pair.d.close()
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["decode"]


def test_a_bug_of_the_journal_harms_no_room(pair, monkeypatch, caplog):
    monkeypatch.setattr(journals, "_lease", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "pdstage"):
        pair.move(1)
    assert caplog.records[0].getMessage() == "a line of the journal failed"
    assert not pair.d.journal.path.exists()
    assert pair.p.journal.path.exists()


@pytest.mark.parametrize("journal", ["", "not/there", 7, b"bytes", "with\0null", __file__, None])
def test_a_folder_that_is_none_or_cannot_be_written_is_refused(site, tmp_path, monkeypatch, journal):
    words = None
    if journal is None:
        journal, words = tmp_path, "cannot be written .Permission denied"
        refuse = lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))  # noqa: E731
        monkeypatch.setattr(journals.os, "open", refuse)
    with pytest.raises(UsageError, match=words):
        site.decode(Rank(), journal=journal)
    assert state.watch is None
