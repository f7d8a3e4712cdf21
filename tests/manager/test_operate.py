"""What operators ask of real nodes from outside, over their control sockets, by endpoint and by name."""

from __future__ import annotations

import contextlib
import threading

import pytest

from pdstage import Keys, PeerError, State, Topology, TransportError, UsageError, cli
from pdstage.control import operate as operator
from pdstage.control.bootstrap import Advert, BootstrapServer, client_of
from pdstage.control.operate import drain
from pdstage.control.zmq import ControlSocket
from tests.manager.engine import TOKENS, Rank, drive, prefill_node
from tests.manager.test_lifecycle import lost_peer


def half_sent(pair):
    room = pair.open(0)
    room.sender.chunk(room.pages, (0, 20))
    drive(pair.nodes, lambda: room.receiver.state is State.TRANSFERRING)
    return room


@contextlib.contextmanager
def again_and_again(do):
    """Another thread does it until the end."""
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            do()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_drained_node_begins_no_room(site, capsys, caplog):
    """And who asks is no peer: it opens no session, and its request is no malformed frame."""
    pair = site.pair(progress="thread")
    p, d = pair.nodes
    assert cli.main(["drain", p.socket.endpoint.removeprefix("tcp://")]) == 0
    assert capsys.readouterr().out == f"{p.socket.endpoint}: prefill rank 0 is drained\n"
    assert "an operator asks this node to drain" in caplog.text
    bare = p.socket.endpoint.removeprefix("tcp://")
    assert drain([bare, p.socket.endpoint]).keys() == {bare, p.socket.endpoint}, "one node by two names"
    assert cli.main(["drain", p.socket.endpoint, d.socket.endpoint]) == 0
    assert "decode rank 0 is drained" in capsys.readouterr().out
    with pytest.raises(UsageError, match="takes no new rooms: it drains"):
        pair.receive(1)
    assert not d.core.sessions
    assert d.stats()["frames_malformed"] == 0
    with pytest.raises(UsageError, match="no node is named"):
        drain([])
    assert p.close()


def listed(directory):
    """Roles and instances there."""
    return sorted((one.advert.role, one.advert.instance) for one in operator.members(client_of(directory.address)))


def test_nodes_of_both_roles_are_found_and_drained_by_name(site, capsys):
    with BootstrapServer() as directory:
        pair = site.pair(progress="thread")
        for node in pair.nodes:
            node.list_in(directory.address, instance="e0", engine="vllm", metrics="127.0.0.1:1")
        drive(pair.nodes, lambda: listed(directory) == [("decode", "e0"), ("prefill", "e0")])
        assert cli.main(["instances", directory.address]) == 0
        assert " vllm " in capsys.readouterr().out
        assert cli.main(["top", "--once", "e0", "--directory", directory.address]) == 1, "nobody listens at port 1"
        assert "127.0.0.1:1" in capsys.readouterr().out
        assert cli.main(["doctor", "--node", pair.d.socket.endpoint]) == 0
        assert capsys.readouterr().out.endswith("decode rank 0 serves, and has no room\n")
        assert cli.main(["drain", "e9", "--directory", directory.address]) == 2
        assert "instance 'e9' is not in the directory at" in capsys.readouterr().err
        assert cli.main(["drain", "e0", "--directory", directory.address]) == 0
        assert capsys.readouterr().out.count("rank 0 is drained\n") == 2
        assert not listed(directory)


def test_a_killed_process_is_fenced_by_its_name(site, monkeypatch, capsys):
    """I14: decode gives back what that process might have written, once nothing says that it lives."""
    with BootstrapServer() as directory, lost_peer(site, monkeypatch) as (d, receiver):
        (lost,), client = d.sessions.lost, client_of(directory.address)
        d.list_in(directory.address, instance="d0")
        drive([d], lambda: listed(directory))
        killed = Advert(
            instance="p0", topology=Topology(), endpoint="tcp://127.0.0.1:1", incarnation=lost.id.writer, layout=""
        )
        client.publish(killed, 1.0)
        command = ["fence", directory.address, "p0", "--wait"]
        assert cli.main([*command, "0.01"]) == 1
        assert "1 of 1 processes at p0 are registered" in capsys.readouterr().err
        assert not receiver.released
        with again_and_again(lambda: d.turn(0.01)):
            for garbage in (b"", b"\xff#", b"#" + b"f" * 99):
                said = operator.ask([d.socket.endpoint], operator._FENCE + garbage)
                assert [(state.fenced, state.unfenced) for state in said.values()] == [(0, 1)]
            assert cli.main([*command, "60"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said == [
            f"fenced p0 rank 0 tcp://127.0.0.1:1 {lost.id.writer:016x}",
            "1 nodes were told; they kept memory for 1 lost sessions",
        ]
        drive([d], lambda: receiver.released)


def test_rooms_under_way_end_and_are_waited_for(site, capsys):
    pair = site.pair(progress="thread")
    room = half_sent(pair)
    command = ["drain", *(node.socket.endpoint for node in pair.nodes), "--wait"]
    assert cli.main([*command, "3"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert all("rank 0 is not drained: 1 transferring, the oldest for " in line for line in said)
    room.sender.chunk(room.pages, (20, TOKENS))
    room.sender.finish()
    assert cli.main([*command, "60"]) == 0
    assert room.receiver.state is State.SUCCESS
    assert pair.dst.holds(0, TOKENS, room.into)


def test_who_holds_a_key_may_drain_and_nobody_else(tmp_path, capsys, monkeypatch):
    keys, others = tmp_path / "cluster.key", tmp_path / "other.key"
    Keys.make(keys)
    Keys.make(others)
    with prefill_node(Rank(), None, keys=keys, progress="thread") as p:
        plain = p.socket.endpoint.rpartition("@")[2]
        assert cli.main(["drain", p.socket.endpoint]) == 2
        assert "is encrypted, and this node has no keys" in capsys.readouterr().err
        assert cli.main(["drain", plain, "--keys", str(others)]) == 1
        assert "key" in capsys.readouterr().err
        monkeypatch.setattr(operator, "_SILENT_S", 0.2)
        with pytest.raises(TransportError, match="has not answered for .* s;") as caught:
            drain([f"tcp://{plain}"])
        assert "keys=" in caught.value.remedy
        p.send(1).abort()
        monkeypatch.undo()
        assert cli.main(["drain", plain, "--keys", str(keys)]) == 0


def test_a_node_that_ends_meanwhile_is_named_with_what_it_said_last(site, monkeypatch):
    monkeypatch.setattr(operator, "_SILENT_S", 0.2)
    pair = site.pair(progress="thread")
    p, _ = pair.p, half_sent(pair)
    send, sent = p.socket.send, []

    def send_one(route, frames):  # its first answer, and none after
        if frames[0].startswith(operator._MAGIC):
            sent.append(route)
            if len(sent) > 1:
                return True
        return send(route, frames)

    monkeypatch.setattr(p.socket, "send", send_one)
    words = "has not answered for .*; when it last did, prefill rank 0 is not drained"
    with pytest.raises(TransportError, match=words):
        drain([p.socket.endpoint])


@pytest.mark.parametrize("said", [[b"Po\x01{}"], [b"x", b"y"], [b"Po\x01\xff"]])
def test_what_is_no_node_is_said(said):
    with ControlSocket(identity=b"stranger") as stranger:

        def answer() -> None:
            stranger.wait(0.05)
            for route, _ in stranger.recv():
                stranger.send(route, said)

        with again_and_again(answer), pytest.raises(PeerError, match="gives no answer that is one"):
            drain([stranger.endpoint])
