"""Whatever ends a program with open nodes, at whatever moment: it ends, its locks are free, and its peers go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from pdstage import State
from pdstage.errors import UsageError
from tests.manager.engine import Rank, decode_node, drive, prefill_node
from tests.manager.interrupts import Peer, decode_life, forked, places, prefill_life, run, serve_lives
from tests.manager.test_lifecycle import move
from tests.rows import rows, usable

_HERE = usable("local", "nixl", "mooncake")
LIVES = {"decode": decode_life, "prefill": prefill_life}


@contextmanager
def other_side(role: str, transport: str) -> Iterator[object]:
    """Serves lives of the other role; gives what tells it of the next one. What did not end well there is an error."""
    ours, theirs = forked.Pipe()
    process = forked.Process(target=serve_lives, args=(theirs, role), kwargs={"transport": transport})
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        address, n = ours.recv(), 0

        def expect() -> Peer:
            nonlocal n
            n += 1
            peer = Peer(address, f"life {n}", (2 * n, 2 * n + 1))
            ours.send(peer)
            assert ours.poll(60)
            assert ours.recv() == "expected"
            return peer

        yield expect
        ours.send(None)
        assert ours.poll(300)
        wrong = ours.recv()
        assert not wrong, wrong
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("n", [20, pytest.param(2_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", rows(_HERE, full={"nixl", "mooncake"}))
@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("role", LIVES)
def test_a_ctrl_c_at_any_place(role, progress, transport, n):
    """The node closes in time, with no lock held, its rooms end, its process does, and its peer serves others (I10)."""
    options = {"transport": transport, "progress": progress}
    with other_side("decode" if role == "prefill" else "prefill", transport) as expect:
        whole, code = run(LIVES[role], None, expect(), **options)
        assert (whole.broken, code) == ("", 0)
        n_interrupted = 0
        for place in places(whole.seen, n, seed=1):
            outcome, code = run(LIVES[role], place, expect(), **options)
            assert (outcome.broken, code) == ("", 0), place
            n_interrupted += outcome.interrupted
        assert n_interrupted > n // 2 or n_interrupted > len(whole.seen) // 2
        again, code = run(LIVES[role], None, expect(), **options)
        assert (again.broken, code) == ("", 0)


_ENDS_S = 60.0
"""Far beyond what it takes, which docs/reliability.md has: so long may a busy machine take."""


def program(end: str, transport: str, progress: str, **environment: str) -> subprocess.Popen[str]:
    """`exit_programs`, once it is ready to end."""
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.manager.exit_programs", end, transport, progress],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert started.stdout.readline() == "ready\n", started.communicate()
    return started


@pytest.mark.parametrize("transport", rows(_HERE, full={"mooncake"}))
@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("end", ["closed", "in_a_global", "in_a_thread", "in_a_loop"])
def test_a_program_ends_with_nodes_open(end, transport, progress):
    """Wherever they are, the interpreter takes them down without a word, a hang or a crash."""
    with program(end, transport, progress) as ended:
        _, errors = ended.communicate(timeout=_ENDS_S)
    assert ended.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("transport", rows(_HERE, full={"nixl", "mooncake"}))
@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("end", ["waiting", "awaiting"])
def test_a_ctrl_c_from_outside(end, transport, progress):
    """A wait ends at once, the node is as it was, and closes; the room ends (I10)."""
    with program(end, transport, progress) as ended:
        ended.send_signal(signal.SIGINT)
        said, errors = ended.communicate(timeout=_ENDS_S)
    assert ended.returncode == 0, errors
    assert said == "interrupted, FAILED\n"
    assert "Traceback" not in errors


def interruption() -> mock.Mock:
    return mock.Mock(side_effect=KeyboardInterrupt)


@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_who_is_interrupted_while_it_waits_may_go_on(site, monkeypatch, progress):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, progress="thread"), site.decode(dst, progress=progress)
    receiver = d.receive(7, site.address)
    with monkeypatch.context() as patched:
        patched.setattr(*((d.socket, "wait") if progress == "inline" else (d.roster, "wait")), interruption())
        with pytest.raises(KeyboardInterrupt):
            receiver.wait(60)
    receiver.abort()
    move(p, src, d, dst, 8)
    assert d.close()


@pytest.mark.parametrize("turn", ["turn", "look", "kick"])
def test_who_is_interrupted_in_a_turn_has_lost_the_node_and_no_more(site, monkeypatch, turn):
    """What was half done is not gone on with: the rooms fail, and say why, and the node closes (I10)."""
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, progress="thread"), decode_node(dst)
    move(p, src, d, dst, 1)
    receiver = d.receive(2, site.address)
    with monkeypatch.context() as patched:
        patched.setattr(d, "_on_changed", interruption())
        patched.setattr(d.core, "take_effects", interruption())
        with pytest.raises(KeyboardInterrupt):
            getattr(d.driver, turn)()
    assert receiver.state is State.FAILED
    assert "KeyboardInterrupt" in str(receiver.error)
    with pytest.raises(UsageError, match="failed before"):
        d.receive(3, site.address)
    others = threading.Thread(target=d.close)
    others.start()
    others.join(60)
    assert not others.is_alive()
    with decode_node(dst := Rank()) as another:
        move(p, src, another, dst, 4)


def test_a_room_of_the_next_node_at_an_interrupted_ones_address_ends(site):
    """Decode still has a session with the one before, which could not say Bye, and opens the room under that (I10)."""
    src, dst = Rank(), Rank()
    p, d = site.prefill(src), site.decode(dst)
    move(p, src, d, dst, 1)
    p.driver.fail(KeyboardInterrupt())
    p.close()
    again = site.prefill(src, bind=p.socket.endpoint)
    sender, receiver = again.send(2), d.receive(2, site.address)
    receiver.bind(dst.allocate(8), 8)
    drive([again, d], lambda: sender.released and receiver.released)
    assert "does not know this session" in str(receiver.error)
    assert "does not know this session" in str(sender.error)
    move(again, src, d, dst, 3)


@pytest.mark.parametrize("where", ["directory", "_copy_thread", "socket"])
def test_a_close_that_is_interrupted_is_gone_on_with(site, monkeypatch, where):
    """It had said True the second time, with everything left open."""
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, progress="thread"), decode_node(dst, progress="thread")
    move(p, src, d, dst, 1)
    with monkeypatch.context() as patched:
        patched.setattr(type(getattr(d, where)), "close", interruption())
        with pytest.raises(KeyboardInterrupt):
            d.close()
    assert d.close()
    assert d.socket.closed
    assert d.transport.closed
    assert "pdstage-copies" not in [thread.name for thread in threading.enumerate()]


def test_a_prefill_node_that_is_interrupted_as_it_publishes_is_found_nowhere(site, monkeypatch):
    """Its advert would be renewed by a thread that nobody can end."""
    with monkeypatch.context() as patched:
        patched.setattr("pdstage.manager.driver.Driver.start", interruption())
        with pytest.raises(KeyboardInterrupt):
            prefill_node(Rank(), site.address)
    assert "pdstage-lease" not in [thread.name for thread in threading.enumerate()]
    with decode_node(Rank()) as d:
        receiver = d.receive(1, site.address, deadline_s=1.0)
        drive([d], lambda: receiver.state is State.FAILED)
    assert not d.sessions.over
