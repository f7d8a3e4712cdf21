"""`pdstage drain`: an operator's request to real nodes, over their control sockets, from outside."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pdstage import Keys, State, UsageError, cli
from pdstage.control import drain as operator
from pdstage.control.bootstrap import BootstrapClient, Incomplete
from pdstage.control.drain import Draining, drain
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PeerError, TransportError
from tests.manager.engine import Rank, drive, prefill_node
from tests.manager.test_processes import Remote
from tests.manager.workers import TOKENS


class Room:
    """One of two nodes with threads, half sent."""

    def __init__(self, p, d, src: Rank, dst: Rank, address: str) -> None:
        self.places, self.pages = dst.allocate(TOKENS), src.allocate(TOKENS)
        src.write(0, TOKENS, self.pages)
        self.receiver, self.sender = d.receive(0, address), p.send(0)
        self.receiver.bind(self.places, TOKENS)
        self.sender.chunk(self.pages, (0, 20))
        drive([p, d], lambda: self.receiver.state is State.TRANSFERRING)

    def end(self) -> None:
        self.sender.chunk(self.pages, (20, TOKENS))
        self.sender.finish()


def test_a_drained_prefill_node_is_found_no_more_and_begins_no_room(site, capsys, caplog):
    p, d = site.prefill(Rank(), progress="thread"), site.decode(Rank(), progress="thread")
    assert cli.main(["drain", p.socket.endpoint.removeprefix("tcp://")]) == 0
    assert capsys.readouterr().out == f"{p.socket.endpoint}: prefill rank 0 is drained\n"
    assert "an operator asks this node to drain" in caplog.text
    with pytest.raises(Incomplete):
        BootstrapClient(site.address).lookup()
    with pytest.raises(UsageError, match="takes no new rooms: it drains"):
        p.send(1)
    assert cli.main(["drain", p.socket.endpoint, d.socket.endpoint]) == 0
    assert "decode rank 0 is drained" in capsys.readouterr().out
    with pytest.raises(UsageError, match="takes no new rooms: it drains"):
        d.receive(1, site.address)
    assert p.close()


def test_rooms_under_way_end_and_are_waited_for(site, capsys):
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, progress="thread"), site.decode(dst, progress="thread")
    room = Room(p, d, src, dst, site.address)
    command = ["drain", p.socket.endpoint, d.socket.endpoint, "--wait"]
    assert cli.main([*command, "0.01"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert all("rank 0 is not drained: 1 transferring, the oldest for " in line for line in said)
    room.end()
    assert cli.main([*command, "60"]) == 0
    assert room.receiver.state is State.SUCCESS
    assert dst.holds(0, TOKENS, room.places)


def test_a_node_without_a_thread_answers_in_its_turns(site):
    p, over = site.prefill(Rank()), threading.Event()

    def turn() -> None:
        while not over.is_set():
            p.turn(0.01)

    turning = threading.Thread(target=turn)
    turning.start()
    try:
        assert drain([p.socket.endpoint])[p.socket.endpoint].drained
    finally:
        over.set()
        turning.join()


def test_a_process_is_drained_by_the_command(site):
    """Of two prefill processes each has a room that never ends; the command says so, and others are told at once."""
    d = site.decode(Rank(), transport="local")
    with Remote(site.address, 2, "local", "staged", rooms=1, stop=0) as remote:
        receiver = d.receive(0, site.address)
        receiver.bind(list(range(13)), TOKENS)
        drive([d], lambda: receiver.state is State.TRANSFERRING)
        endpoints = [one.endpoint for one in BootstrapClient(site.address).lookup()]
        command = [sys.executable, "-m", "pdstage", "drain", *endpoints, "--wait", "0.01"]
        done = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        drive([d], lambda: done.poll() is not None)
        assert done.returncode == 1
        assert done.communicate()[0].count("is not drained: 1 transferring") == len(remote.processes)
        late = d.receive(7, site.address)
        late.bind(list(range(20, 33)), TOKENS)
        drive([d], lambda: late.state is State.FAILED)


@pytest.fixture
def keys(tmp_path):
    Keys.make(tmp_path / "cluster.key")
    return tmp_path / "cluster.key"


def test_who_holds_a_key_may_drain_and_nobody_else(keys, tmp_path, capsys, monkeypatch):
    Keys.make(tmp_path / "other.key")
    with prefill_node(Rank(), None, keys=keys, progress="thread") as p:
        plain = p.socket.endpoint.rpartition("@")[2]
        assert cli.main(["drain", p.socket.endpoint]) == 2
        assert "is encrypted, and this node has no keys" in capsys.readouterr().err
        assert cli.main(["drain", plain, "--keys", str(tmp_path / "other.key")]) == 2
        assert "key" in capsys.readouterr().err
        monkeypatch.setattr(operator, "_SILENT_S", 0.2)
        with pytest.raises(TransportError, match="has not answered for .* s;") as caught:
            drain([f"tcp://{plain}"])
        assert "--keys" in caught.value.remedy
        p.send(1).abort()
        monkeypatch.undo()
        assert cli.main(["drain", plain, "--keys", str(keys)]) == 0


def test_a_node_that_ends_meanwhile_is_named_with_what_it_said_last(site, monkeypatch):
    monkeypatch.setattr(operator, "_SILENT_S", 0.2)
    src, dst = Rank(), Rank()
    p, d = site.prefill(src, progress="thread"), site.decode(dst, progress="thread")
    Room(p, d, src, dst, site.address)
    send, sent = p.socket.send, []

    def send_one(route, frames):  # its first answer, and none after
        if frames[0].startswith(operator._MAGIC):
            sent.append(route)
            if len(sent) > 1:
                return True
        return send(route, frames)

    monkeypatch.setattr(p.socket, "send", send_one)
    with pytest.raises(
        TransportError, match="has not answered for .*; when it last did, prefill rank 0 is not drained"
    ):
        drain([p.socket.endpoint])


def test_what_is_no_node_is_said():
    with ControlSocket(identity=b"stranger") as stranger:
        over = threading.Event()

        def answer() -> None:
            said = iter([[b"Po\x01{}"], [b"x", b"y"], [b"Po\x01\xff"]])
            while not over.is_set():
                stranger.wait(0.05)
                for route, _ in stranger.recv():
                    stranger.send(route, next(said))

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            for _ in range(3):
                with pytest.raises(PeerError, match="gives no answer that is one"):
                    drain([stranger.endpoint])
        finally:
            over.set()
            answering.join()


def test_a_release_that_cannot_be_drained_counts_the_request_as_malformed(site):
    """Its core would read it: no session ends, and nobody is answered."""
    p = site.prefill(Rank())
    p.core.receive(b"route", operator.REQUEST, 0.0)
    assert p.core.counters.frames_malformed == 1


def test_a_bad_request_of_the_operator_is_said_in_one_line(capsys):
    for given in (["nowhere"], ["tcp://h:1", "--wait", "0"], ["tcp://h:1", "--allow", "list"]):
        assert cli.main(["drain", *given]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(UsageError, match="no endpoint"):
        drain([])


def test_a_node_that_finds_no_thread_drains_when_it_is_asked_again(site, monkeypatch, caplog):
    p = site.prefill(Rank())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
        assert not p._asked_to_drain().drained
    assert "no thread could be started" in caplog.text
    p._asked_to_drain()
    p._drain.join()
    assert p._asked_to_drain() == Draining("prefill", 0, True, {}, 0.0)


def test_an_operators_socket_is_no_peer(site):
    """It opens no session, and its request is no malformed frame."""
    d = site.decode(Rank(), progress="thread")
    assert drain([d.socket.endpoint])[d.socket.endpoint].drained
    assert not d.core.sessions
    assert d.stats()["frames_malformed"] == 0
