"""The verdict on NIXL, present, absent and broken: each a real process, the broken installs packages on its path."""

from __future__ import annotations

import pytest

from pdstage.control.address import Address
from pdstage.transport import available
from tests.doctor.conftest import WORKING, doctor, fake_nixl

ONLY = ("--only", "transports", "--transport", "nixl")
present = pytest.mark.skipif(bool(available()["nixl"]), reason="NIXL does not import here")


@present
def test_present():
    """It moves bytes over TCP, which every host has; and of its plugins UCX starts."""
    run = doctor(*ONLY)
    verdict = run.report.transports["nixl"]
    assert verdict.usable and "tcp" in verdict.ways
    assert verdict.says.startswith("usable over tcp")
    assert run.line("nixl").level == "ok" and run.code == 0, run.raw
    plugins = run.line("nixl plugins")
    assert "UCX" in plugins.facts["loaded"] and set(plugins.facts["loaded"]).isdisjoint(plugins.facts["not_loaded"])


@present
def test_what_a_peer_reaches():
    """What docs/security.md says of UCX is so: where it listens, and that nobody is kept to what was registered."""
    given = ("--only", "transports", "--transport", "nixl", "--bind", "tcp://127.0.0.1:0")
    line = doctor(*given, UCX_TLS="tcp,self").line("nixl reach")
    assert (line.level, line.facts["listens"], line.facts["beyond"]) == ("ok", ["127.0.0.1"], []), line
    assert line.facts["not_enforced"] == ["default"], "better than the page says: mend the page"


@present
@pytest.mark.skipif(Address("", 1).reachable().is_loopback, reason="this host has no network but loopback")
def test_a_listener_beyond_the_control_planes_network():
    run = doctor(*ONLY, "--bind", "tcp://127.0.0.1:0", UCX_TLS="tcp,self", UCX_NET_DEVICES="all")
    line = run.line("nixl reach")
    assert line.level == "warn" and line.facts["beyond"] == [Address("", 1).reachable().host], line
    assert "UCX_NET_DEVICES" in line.remedy


def test_absent(blocked):
    """Asked for it is a failure; else a warning, and the other transports are judged all the same."""
    asked = doctor(*ONLY, path=blocked)
    assert (asked.line("nixl").level, asked.code) == ("fail", 1)
    assert "not installed" in asked.line("nixl").says and "pdstage[nixl]" in asked.line("nixl").remedy
    assert not asked.report.transports["nixl"].usable
    local = doctor("--only", "transports", "--transport", "local", path=blocked)
    assert (local.line("local").level, local.code) == ("ok", 0)
    assert local.report.transports.keys() == {"local"}


def test_absent_and_not_asked_for(blocked):
    run = doctor("--only", "transports", path=blocked)
    assert run.line("nixl").level == "warn"
    assert run.report.transports["local"].usable


@pytest.mark.parametrize(
    ("init", "how", "ended", "at", "said"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "", "failed", "import", "libcudart"),
        ("raise RuntimeError('built for another Python')", "", "crashed", "import", "built for another Python"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "", "crashed", "import", "SIGSEGV"),
        ("", "os.kill(os.getpid(), signal.SIGABRT)", "crashed", "start, default", "SIGABRT"),
        ("", "os._exit(3)", "crashed", "start, default", "exit code 3"),
        ("", "raise RuntimeError('no UCX')", "done", "exit", "no UCX"),
    ],
)
def test_broken(tmp_path, init, how, ended, at, said):
    run = doctor(*ONLY, path=fake_nixl(tmp_path, api=WORKING % (how or "pass"), init=init))
    line = run.line("nixl")
    assert (line.level, run.code) == ("fail", 1), line
    assert (line.facts["ended"], line.facts["step"]) == (ended, at) and said in line.says, line
    assert "installed, but not usable" in line.says and line.remedy
    assert not run.report.transports["nixl"].usable


@pytest.mark.full
def test_one_that_hangs_is_ended_at_its_deadline(tmp_path):
    hangs = WORKING.replace('self.create_backend("UCX")', "signal.pause()") % "pass"
    run = doctor(*ONLY, "--deadline", "8", path=fake_nixl(tmp_path, api=hangs))
    line = run.line("nixl")
    assert (line.level, run.code) == ("fail", 1)
    assert line.facts["ended"] == "hung" and "within 8 s, at start, default" in line.says


def test_a_plugin_that_takes_the_process_down_is_named_and_the_others_are_tried(tmp_path):
    path = fake_nixl(tmp_path, api=WORKING % "os.kill(os.getpid(), signal.SIGSEGV) if name == 'GDS' else None")
    line = doctor(*ONLY, path=path).line("nixl plugins")
    assert line.level == "warn" and "GDS took the process down" in line.says
    assert line.facts["loaded"] == ["UCX", "POSIX"] and "SIGSEGV" in line.facts["crashed"]["GDS"]


def test_a_process_that_crashes_at_its_very_end(tmp_path):
    """As where a second libnl was loaded: the bytes have moved, but exit codes lie. Any transport shows it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, signal, sys\n"
        "atexit.register(lambda: 'pdstage.tools.doctor.pair' in sys.modules and os.kill(os.getpid(), signal.SIGSEGV))\n"
    )
    run = doctor("--only", "transports", "--transport", "local", path=tmp_path)
    line = run.line("local")
    assert line.level == "warn" and "SIGSEGV at exit" in line.says and line.remedy
    assert run.report.transports["local"].usable
