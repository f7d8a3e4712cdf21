"""`--peer` between two real processes: what works is measured, what does not is named by its stage."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys

import pytest

from pdstage import Keys
from pdstage.protocol import wire
from pdstage.transport import available
from tests.chaos import network
from tests.doctor.conftest import ROOT, doctor

STAGES = ["connect", "control", "versions", "transport", "bootstrap", "hello", "direct", "staged"]
MAIN = "import sys\nfrom pdstage import cli\nsys.exit(cli.main(sys.argv[1:]))"
NEWER = f"from pdstage.protocol import wire\nwire.VERSION = wire.OLDEST = {wire.VERSION + 1}\n"
BREAKS = """\
import os
from pdstage.transport import local
local.LocalTransport.__init__ = lambda self: os._exit(9)
"""


@contextlib.contextmanager
def serving(*args: str, before: str = "", bind: str = "127.0.0.1:0", within: tuple[str, ...] = ()):
    """The address of `pdstage doctor --serve` in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*within, sys.executable, "-c", before + MAIN, "doctor", "--serve", bind, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def ask(endpoint: str, *args: str, **options):
    return doctor("--only", "peer", "--peer", endpoint, *args, **options)


@pytest.fixture(scope="module")
def plain():
    with serving() as endpoint:
        yield endpoint


@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_both_paths_carry_every_byte(plain, transport):
    if available()[transport]:
        pytest.skip(available()[transport])
    run = ask(plain.removeprefix("tcp://"), "--transport", transport)
    peer = run.report.peer
    assert run.code == 0 and peer is not None, run.raw
    assert [(stage.name, stage.level) for stage in peer.stages] == [(name, "ok") for name in STAGES]
    assert (peer.over, peer.failed_at) == (transport, "")
    assert peer.paths.keys() == {"direct", "staged"}
    assert all(moved.bytes_per_s > 0 and moved.latency_s > 0 for moved in peer.paths.values())
    assert peer.here == peer.there and "direct" in peer.here.features and transport in peer.here.transports
    assert peer.round_trip_s > 0


def failed(run, stage: str, said: str):
    peer = run.report.peer
    assert run.code == 1 and peer is not None, run.raw
    assert peer.failed_at == stage and said in run.line("peer").says, run.line("peer").says
    assert run.line("peer").remedy
    assert [one.name for one in peer.stages] == STAGES[: STAGES.index(stage) + 1]
    return run.line("peer")


def test_nobody_listens():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        line = failed(ask(f"127.0.0.1:{held.getsockname()[1]}"), "connect", "nobody listens")
    assert "pdstage doctor --serve" in line.remedy


def test_somebody_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as other:
        run = ask(f"127.0.0.1:{other.getsockname()[1]}", "--deadline", "8")
        failed(run, "control", "no answer")


@pytest.mark.full
def test_keys(tmp_path):
    """The same file on both sides works; another, or none, is refused with what to do."""
    own, other = tmp_path / "own.key", tmp_path / "other.key"
    Keys.make(own)
    Keys.make(other)
    with serving("--keys", str(own)) as endpoint:
        bare = endpoint.rpartition("@")[2]
        assert ask(bare, "--transport", "local", "--keys", str(own)).code == 0
        assert "key" in failed(ask(bare, "--keys", str(other)), "control", "key").remedy
        assert "--keys" in failed(ask(endpoint), "control", "is encrypted").remedy


def test_a_release_that_does_not_talk_with_this_one():
    with serving(before=NEWER) as endpoint:
        line = failed(ask(endpoint), "versions", f"speaks wire version {wire.VERSION + 1}")
        assert "releases" in line.remedy


def test_a_transport_that_one_side_lacks(plain):
    if not available()["mori"]:
        pytest.skip("mori is installed")
    failed(ask(plain, "--transport", "mori"), "versions", "not installed here")


@pytest.mark.full
def test_a_transport_that_breaks_at_the_peer():
    """Its process dies of the transport: this side says at which stage it fell silent."""
    with serving(before=BREAKS) as endpoint:
        failed(ask(endpoint, "--transport", "local", "--deadline", "8"), "transport", "no answer")


@pytest.mark.full
@pytest.mark.skipif(not network.permitted(), reason="namespaces cannot be made here")
def test_two_hosts(tmp_path):
    """Namespaces stand for hosts: bytes cross by nixl; `local` says why not; a cut is named as what it is."""
    site = network.Network("ab")
    try:
        here, there = (site.command(host) for host in "ab")
        enter = f"from tests import processes\nprocesses.enter({here[3]!r})"
        with serving("--insecure", bind=f"{site.address('b')}:0", within=there) as endpoint:
            if not available()["nixl"]:
                run = ask(endpoint, "--transport", "nixl", "--insecure", before=enter)
                assert run.code == 0 and run.report.peer.over == "nixl", run.raw
            exposed = failed(ask(endpoint, "--transport", "local", before=enter), "transport", "neither encrypted")
            assert "keys" in exposed.remedy
            far = ask(endpoint, "--transport", "local", "--insecure", "--deadline", "16", before=enter)
            failed(far, "hello", "another container")
            site.cut("b")
            cut = failed(ask(endpoint, "--insecure", before=enter), "connect", "cannot be reached")
            assert re.search("route|firewall", cut.remedy)
    finally:
        site.close()
