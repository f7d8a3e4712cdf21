"""The verdict on transports, present, absent and broken: real processes, broken installs of NIXL on their path."""

from __future__ import annotations

import pytest

from pdstage.tools.doctor import transports
from pdstage.tools.doctor.probe import Outcome
from pdstage.transport import available
from tests.doctor.conftest import doctor

ONLY = ("--only", "transports", "--transport", "nixl")
BLOCKED = """\
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13") else find(name, path, target)

PathFinder.find_spec = find_others
"""
# As much of NIXL's Python API as it takes to get to the fault; a package before the real one on the path.
WORKING = """\
import enum, os, signal
class nixl_thread_sync_t(enum.Enum):
    NIXL_THREAD_SYNC_STRICT = 1
def nixl_agent_config(**options):
    return options
class nixl_agent:
    def __init__(self, name, config):
        {}
"""
UCX_LOG = """
[1.0] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    agent.a self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.1] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    agent.a intra-node cfg#1 rma(rc_mlx5/mlx5_0:1) am(sysv/memory)
[1.2] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    agent.b inter-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0)
"""


@pytest.fixture
def blocked(tmp_path):
    """A folder whose sitecustomize makes NIXL a package that is not there."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    return tmp_path


@pytest.mark.skipif(bool(available()["nixl"]), reason="NIXL does not import here")
def test_present():
    """It moves bytes over TCP, which every host has."""
    run = doctor(*ONLY)
    verdict = run.report.transports["nixl"]
    assert verdict.usable and "tcp" in verdict.ways
    assert verdict.says.startswith("usable over tcp")
    assert run.line("nixl").level == "ok" and run.code == 0, run.raw


def test_absent(blocked):
    """Asked for it is a failure; else a warning, and the other transports are judged all the same."""
    asked = doctor(*ONLY, path=blocked)
    assert (asked.line("nixl").level, asked.code) == ("fail", 1)
    assert "not installed" in asked.line("nixl").says and "pdstage[nixl]" in asked.line("nixl").remedy
    assert not asked.report.transports["nixl"].usable
    run = doctor("--only", "transports", path=blocked)
    assert run.line("nixl").level == "warn"
    assert run.report.transports["local"].usable


@pytest.mark.parametrize(
    ("init", "how", "ended", "at", "said"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "", "failed", "import", "libcudart"),
        ("raise RuntimeError('built for another Python')", "", "crashed", "import", "built for another Python"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "", "crashed", "import", "SIGSEGV"),
        ("", "os._exit(3)", "crashed", "start", "exit code 3"),
        pytest.param("", "signal.pause()", "hung", "start", "within 8 s, at start", marks=pytest.mark.full),
    ],
)
def test_broken(tmp_path, init, how, ended, at, said):
    package = tmp_path / "nixl"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "_api.py").write_text(WORKING.format(how or "pass"))
    (package / "_bindings.py").write_text("class nixlBackendError(Exception): pass\n")
    run = doctor(*ONLY, "--deadline", "8" if ended == "hung" else "60", path=tmp_path)
    line = run.line("nixl")
    assert (line.level, run.code) == ("fail", 1), line
    assert (line.facts["ended"], line.facts["step"]) == (ended, at) and said in line.says, line
    assert "installed, but not usable" in line.says and line.remedy
    assert not run.report.transports["nixl"].usable


def test_a_process_that_crashes_at_its_very_end(tmp_path):
    """As where a second libnl was loaded: the bytes have moved, but exit codes lie. Any transport shows it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, signal, sys\n"
        "atexit.register(lambda: 'pdstage.tools.doctor.talk' in sys.modules and os.kill(os.getpid(), signal.SIGSEGV))\n"
    )
    run = doctor("--only", "transports", "--transport", "local", path=tmp_path)
    line = run.line("local")
    assert line.level == "warn" and "SIGSEGV at exit" in line.says and line.remedy
    assert run.report.transports["local"].usable


def test_what_ucx_says_of_its_ways():
    assert transports.ways(UCX_LOG) == ["shm", "rdma"]
    assert transports.ways("") == []


MOVED = {"path direct": {}, "path staged": {}}
GOOD = Outcome("done", "exit", {"installed": True, "caveat": "", **MOVED}, ucx=UCX_LOG)
BAD = Outcome("failed", "hello", {"installed": True}, "ibv_reg_mr failed", "look")


@pytest.mark.parametrize(
    ("name", "probe", "others", "level", "said", "remedy"),
    [
        ("nixl", GOOD, {"tcp": GOOD, "rdma": GOOD}, "ok", "usable over tcp, rdma, shm", ""),
        ("nixl", GOOD, {"rdma": BAD}, "warn", "not over rdma: ibv_reg_mr failed", "look"),
        ("nixl", BAD, {}, "fail", "not usable: ibv_reg_mr failed", "look"),
        (
            "nixl",
            Outcome("crashed at exit", "exit", GOOD.facts, "died"),
            {},
            "warn",
            "no RDMA, but died",
            "UCX_MODULES",
        ),
        ("nixl", Outcome("done", "exit", MOVED), {"tcp": GOOD}, "warn", "no RDMA", "RDMA devices are here"),
        ("mori", GOOD, {}, "warn", "never on hardware", "trials"),
    ],
)
def test_verdicts_by_way(name, probe, others, level, said, remedy):
    result = transports.judge(name, probe, others, has_rdma=True, wanted=())
    assert result.level == level and said in result.says and remedy in result.remedy, result
    assert result.facts["verdict"].usable == (level != "fail")
