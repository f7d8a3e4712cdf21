"""What a node writes down: all of it, before anything leaves that follows from it, and harming no room."""

from __future__ import annotations

import logging
import os

import msgspec
import pytest

from pdstage import State, UsageError
from pdstage.manager import journal as journals
from pdstage.manager.journal import Head, Line
from pdstage.protocol import state
from tests.manager.engine import Rank, drive


def lines(node) -> list[Line]:
    head, *held = node.journal.path.read_bytes().splitlines()
    assert msgspec.json.decode(head, type=Head).incarnation == f"{node.incarnation:016x}"
    return [msgspec.json.decode(line, type=Line) for line in held]


def pair(site, folder, **options):
    src, dst = Rank(), Rank(hnd=True)
    options = {"path": "staged", "journal": folder} | options
    return src, dst, site.prefill(src, **options), site.decode(dst, **options)


def move(site, src, dst, p, d, room=1):
    into, pages = dst.allocate(50), src.allocate(50)
    src.write(room, 50, pages)
    receiver, sender = d.receive(room, site.address), p.send(room)
    receiver.bind(into, 50)
    sender.chunk(pages, (0, 50))
    sender.finish()
    drive([p, d], lambda: receiver.released and sender.released)
    assert receiver.state is State.SUCCESS
    assert dst.holds(room, 50, into)


def test_a_rooms_life_and_its_chunks(site, tmp_path):
    src, dst, p, d = pair(site, tmp_path)
    move(site, src, dst, p, d)
    p.close()
    d.close()
    at_p, at_d = lines(p), lines(d)
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


def test_a_line_is_in_the_file_before_what_follows_from_it_leaves(site, tmp_path, monkeypatch):
    src, dst, p, d = pair(site, tmp_path)
    n_left = 0

    def watched(node, part, name):
        real = getattr(part, name)

        def leave(*given):
            nonlocal n_left
            n_left += 1
            assert len(lines(node)) == node.journal._n_lines, f"{name} before the lines that led to it"
            return real(*given)

        monkeypatch.setattr(part, name, leave)

    for node in (p, d):
        watched(node, node.socket, "send")
    watched(p, p.transport, "notify")
    watched(p, p.data_path, "gather")  # into the lease itself, which is mapped
    for room in range(3):
        move(site, src, dst, p, d, room)
    assert n_left > 12


def test_each_node_of_a_process_writes_its_own(site, tmp_path):
    """And one without a journal writes none."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    pairs = []
    for room, folder in enumerate((*folders, None)):  # the latest is the one that the directory names
        pairs.append(pair(site, folder))
        move(site, *pairs[-1], room)
    for room, (_, _, p, d) in enumerate(pairs[:2]):
        for node in (p, d):
            assert {one.name for one in lines(node) if one.what == "room"} == {str(room)}
    assert pairs[2][2].journal is None
    assert len(list(tmp_path.rglob("*.journal"))) == 4


def test_without_a_journal_nobody_watches(site, tmp_path):
    site.decode(Rank(), journal=None)
    assert state.watch is None
    _, _, p, d = pair(site, tmp_path)
    assert state.watch is not None
    p.close()
    assert state.watch is not None
    d.close()
    d.close()
    assert state.watch is None


def test_a_full_disk_ends_the_journal_and_no_room(site, tmp_path, monkeypatch, caplog):
    src, dst, p, d = pair(site, tmp_path)
    real, full = os.write, []

    def write(file, data):
        if file == p.journal._file and full:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(journals.os, "write", write)
    move(site, src, dst, p, d, 1)
    full.append(True)
    with caplog.at_level(logging.ERROR, "pdstage"):
        move(site, src, dst, p, d, 2)
    (record,) = caplog.records
    assert "is removed: [Errno 28] No space left" in record.getMessage()
    p.close()
    d.close()
    assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == ["decode"]


def test_a_bug_of_the_journal_harms_no_room(site, tmp_path, monkeypatch, caplog):
    src, dst, p, d = pair(site, tmp_path)
    monkeypatch.setattr(journals, "_lease", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "pdstage"):
        move(site, src, dst, p, d)
    assert caplog.records[0].getMessage() == "a line of the journal failed"
    assert not d.journal.path.exists()
    assert p.journal.path.exists()


@pytest.mark.parametrize("journal", ["", "not/there", 7, b"bytes", "with\0null", __file__])
def test_a_folder_that_is_none_is_refused(site, journal):
    with pytest.raises(UsageError):
        site.decode(Rank(), journal=journal)
    assert state.watch is None


def test_a_folder_that_cannot_be_written_is_refused(site, tmp_path, monkeypatch):
    monkeypatch.setattr(journals.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UsageError, match="cannot be written .Permission denied"):
        site.prefill(Rank(), journal=tmp_path)
    assert state.watch is None
