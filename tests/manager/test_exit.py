"""Whatever ends a program with open nodes, at whatever moment: it ends, its locks are free, and its peers go on."""

from __future__ import annotations

import itertools
import threading
from unittest import mock

import pytest

from pdstage import State, UsageError
from pdstage.manager import driver as drivers
from tests.manager.engine import Rank, fails, prefill_node
from tests.manager.test_processes import any_transport
from tests.processes import python
from tests.rows import inline_or_thread

_ENDS_S = 240.0
"""Far beyond what it takes, which docs/reliability.md has: so long may a busy machine take."""


@any_transport
@pytest.mark.parametrize(
    ("end", "progress"),
    [("in_a_loop", "thread"), *itertools.product(("closed", "in_a_global", "in_a_thread"), ("inline", "thread"))],
)
def test_a_program_ends_with_nodes_open(end, transport, progress):
    """Wherever they are, the interpreter takes them down without a word, a hang or a crash."""
    ended = python("-m", "tests.manager.exit_programs", end, transport, progress, timeout=_ENDS_S)
    assert (ended.returncode, ended.stdout) == (0, "ready\n"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_turn_is_in_a_library_as_the_interpreter_ends(site, monkeypatch):
    """NIXL's calls abort a process whose thread ends in them: a turn under way is waited for, and none begins. But the
    main thread's does, which ends last: an engine's own atexit may close nodes after ours.
    """
    node = site.decode(Rank(), progress="inline")
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(node.transport, "poll", lambda: begun.set() or (goes_on.wait(_ENDS_S) and []))
    turn = threading.Thread(target=node.turn)
    turn.start()
    assert begun.wait(_ENDS_S)
    threading.Timer(0.05, goes_on.set).start()
    node.driver.leave(_ENDS_S)
    assert node.driver.turning.holder is None
    turn.join()
    monkeypatch.setattr(drivers, "_ends_at", 0.0)
    turns = []
    monkeypatch.setattr(node.transport, "poll", lambda: turns.append(threading.current_thread()) or [])
    late = threading.Thread(target=node.turn)
    late.start()
    late.join()
    assert node.turn() is True
    assert turns == [threading.main_thread()]


def interruption() -> mock.Mock:
    return mock.Mock(side_effect=KeyboardInterrupt)


@inline_or_thread
def test_who_is_interrupted_while_it_waits_may_go_on(site, monkeypatch, progress):
    pair = site.pair(prefill={"progress": "thread"}, decode={"progress": progress})
    d, receiver = pair.d, pair.receive(7)
    with monkeypatch.context() as patched:
        patched.setattr(*((d.socket, "wait") if progress == "inline" else (d.roster, "wait")), interruption())
        with pytest.raises(KeyboardInterrupt):
            receiver.wait(60)
    receiver.abort()
    pair.move(8)
    assert d.close()


@pytest.mark.parametrize("turn", ["turn", "kick"])
def test_who_is_interrupted_in_a_turn_has_lost_the_node_and_no_more(site, monkeypatch, turn):
    """What was half done is not gone on with: the rooms fail, and say why, and the node closes (I10)."""
    pair = site.pair(prefill={"progress": "thread"})
    d = pair.d
    pair.move(1)
    receiver = pair.receive(2)
    with monkeypatch.context() as patched:
        patched.setattr(d, "_on_changed", interruption())
        patched.setattr(d.core.endpoint, "take_effects", interruption())
        with pytest.raises(KeyboardInterrupt):
            getattr(d.driver, turn)()
    assert receiver.state is State.FAILED
    assert "KeyboardInterrupt" in str(receiver.error)
    with pytest.raises(UsageError, match="failed before"):
        pair.receive(3)
    others = threading.Thread(target=d.close)
    others.start()
    others.join(60)
    assert not others.is_alive()
    pair.d = site.decode(pair.dst)
    pair.move(4)


@pytest.mark.parametrize("where", ["directory", "socket"])
def test_a_close_that_is_interrupted_is_gone_on_with(site, monkeypatch, where):
    """It had said True the second time, with everything left open."""
    pair = site.pair(progress="thread")
    d = pair.d
    pair.move(1)
    with monkeypatch.context() as patched:
        patched.setattr(type(getattr(d, where)), "close", interruption())
        with pytest.raises(KeyboardInterrupt):
            d.close()
    assert d.close()
    assert d.socket.closed
    assert d.transport.closed


def test_a_prefill_node_that_is_interrupted_as_it_publishes_is_found_nowhere(site, monkeypatch):
    """Its advert would be renewed by a thread that nobody can end."""
    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr("pdstage.manager.driver.Driver.start", interruption())
        with pytest.raises(KeyboardInterrupt):
            prefill_node(Rank(), site.address)
    assert "pdstage-lease" not in [thread.name for thread in set(threading.enumerate()) - before]
    d = site.decode(Rank())
    receiver = d.receive(1, site.address, deadline_s=1.0)
    fails(d, receiver)
    assert not d.sessions.over
