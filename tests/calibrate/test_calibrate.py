"""`pdstage calibrate` with real processes: numbers that can be, a file that nodes read, faults told in words."""

from __future__ import annotations

import json
import socket
from importlib.metadata import version
from unittest import mock

import msgspec
import pytest

from pdstage import cli
from pdstage.control.keys import Keys
from pdstage.control.zmq import ControlSocket
from pdstage.errors import TransportError, UsageError
from pdstage.manager.calibration import read
from pdstage.plan.cost import CostModel
from pdstage.tools.calibrate import about
from pdstage.tools.calibrate import caller as callers
from pdstage.tools.calibrate.caller import Caller, own_peer
from pdstage.tools.calibrate.peer import Copy, Peer, Pull, Stop, Took


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(callers, "QUICK", ((256, 4096, 65536), (256 << 10, 4 << 20, 8 << 20), 2))


def was_measured(cost: CostModel) -> None:
    assert [nbytes for nbytes, _ in cost.descriptors] == [256, 4096, 65536]
    assert all(seconds >= 0 for _, seconds in cost.descriptors), "on a busy machine one may be too cheap to be seen"
    assert cost.staged_s(4 << 20, 64, 1) > 0
    assert 0 <= cost.overlap <= 1


def test_the_command_measures_writes_and_prints(tmp_path, capsys):
    path = tmp_path / "costs.json"
    assert cli.main(["calibrate", "--transport", "local", "--quick", "--json", "--output", str(path)]) == 0
    made = read(path)
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    was_measured(made.transports["local"])
    assert made.prefill_host == made.decode_host


def test_a_side_names_transports_of_other_distributions_with_their_versions(tmp_path, monkeypatch):
    """Whatever their packages are called; `doctor --peer --transport acme.wire` would refuse it as not installed."""
    info = tmp_path / "acme_wire-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-wire\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[pdstage.transports]\nacme.wire = nowhere:Wire\nlocal = nowhere:Local\n")
    monkeypatch.syspath_prepend(tmp_path)
    transports = about.this_side.__wrapped__().transports
    assert transports["acme.wire"] == "2.5"
    assert transports["local"] == version("pdstage"), "a name of ours stays ours"


def test_two_sides_that_hold_keys(tmp_path):
    """As on two hosts: one serves, the other is told where; without the keys nothing is answered."""
    key = tmp_path / "key"
    keys = Keys.make(key)
    with own_peer(keys=key) as endpoint, Caller(endpoint, keys=keys) as caller:
        cost = caller.measure("local", quick=True)
        was_measured(cost)
        with pytest.raises(UsageError, match="key"):
            Caller(endpoint)


def test_faults_at_the_peer_are_told_in_words():
    with own_peer() as endpoint, Caller(endpoint) as caller:
        for question in (Pull(1, "tcp://127.0.0.1:1", 256, 16), Copy(256, 16, 1)):
            with pytest.raises(TransportError, match="no transport was started"):
                caller.ask(question)
        with pytest.raises(TransportError, match="at the peer: no transport 'pigeon'"):
            caller.measure("pigeon")
        with pytest.raises(TransportError, match="cannot be read"):
            caller.ask(Copy(1, 16, 1))


@pytest.mark.parametrize("frame", [b"\x81\xa4type\xa1\xff", b"\x81\xa1x" + b"\x91" * 100_000])
def test_a_question_that_is_none_ends_nobody(frame):
    with Peer("tcp://127.0.0.1:0") as peer:
        assert "cannot be read" in peer._answer(frame).why


def test_a_stranger_without_keys_leaves_the_peer_asleep(tmp_path, monkeypatch):
    """A wait returns at once while a refusal is there, which is taken in the next round."""
    with Peer("tcp://127.0.0.1:0", keys=Keys.make(tmp_path / "key")) as peer:
        host, port = peer.endpoint.rpartition("@")[2].rsplit(":", 1)
        socket.create_connection((host, int(port))).close()
        while not peer._socket._guard.refusals:
            peer._socket.wait(0.2)
        monkeypatch.setattr(peer._socket, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            peer.serve()
        assert not peer._socket._guard.refusals


def test_an_answer_that_comes_too_late_passes_for_no_other():
    with ControlSocket("tcp://127.0.0.1:0", identity=b"slow") as peer, Caller(peer.endpoint) as caller:
        with pytest.raises(TransportError, match="no answer") as late:
            caller.ask(Stop(), wait_s=1e-3)
        while not (asked := peer.recv()):
            peer.wait(0.2)
        peer.send(asked[0][0], [msgspec.msgpack.encode(Took([1.0]))])
        with pytest.raises(TransportError) as again:
            caller.ask(Copy(256, 16, 1), wait_s=60.0)
        assert again.value is late.value


def test_where_nothing_can_be_measured_the_last_file_stays(monkeypatch, tmp_path, capsys):
    assert cli.main(["calibrate", "--transport", "pigeon"]) == 2
    assert "no transport 'pigeon'" in capsys.readouterr().err

    def refuse(caller, name, *, quick):
        raise TransportError(f"{name} breaks here")

    monkeypatch.setattr(Caller, "measure", refuse)
    path = tmp_path / "costs.json"
    path.write_text("as it was")
    assert cli.main(["calibrate", "--quick", "--output", str(path)]) != 0
    assert "local breaks here" in capsys.readouterr().err
    assert path.read_text() == "as it was"
