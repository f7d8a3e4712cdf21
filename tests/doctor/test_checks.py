"""The lines on this host: limits lowered, calls forbidden, devices stood in for; and the report's schema."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from pdstage import cli
from pdstage.control.keys import Keys
from pdstage.tools.doctor import found, gpu, host, network, transports, ucx
from pdstage.tools.doctor.child import Outcome
from pdstage.tools.doctor.found import Found, Report
from pdstage.tools.doctor.show import Coloured, Plain, show
from pdstage.tools.doctor.site import Asked, Site
from tests.doctor.conftest import ROOT, doctor

SITE = Site(Asked())
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"
RDMA = """
import resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({0}, {0}))
from pdstage.tools.doctor import host
host._has_capability = lambda number: False
host.rdma_ports = lambda: [{1}]
"""
SECCOMP = "from tests.transport.endpoint import Endpoint\nEndpoint.forbid_writing_to_processes(None)"


@pytest.mark.parametrize(("limit", "level", "code"), [(20_000, "ok", 0), (1024, "warn", 0), (200, "fail", 1)])
def test_open_files(limit, level, code):
    run = doctor("--only", "host", before=LIMIT.format(limit))
    line = run.line("files")
    assert (line.level, run.code, line.facts["limit"]) == (level, code, limit)
    assert bool(line.remedy) == (level != "ok")


@pytest.mark.parametrize(("nbytes", "device", "level"), [(4 << 20, "1", "fail"), (4 << 20, "", "ok")])
def test_locked_memory_is_rdma_s(nbytes, device, level):
    run = doctor("--only", "host", before=RDMA.format(nbytes, device))
    assert run.line("memlock").level == level
    assert run.line("memlock").facts["nbytes"] == nbytes


def test_locked_memory_for_staging_but_not_for_any_pool(monkeypatch):
    """A limit this process may not raise its own to, so that the kernel's answer is stood in for."""
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (1 << 30, 1 << 30))
    monkeypatch.setattr(host, "_has_capability", lambda number: False)
    monkeypatch.setattr(host, "rdma_ports", lambda: ["a port"])
    assert host.memlock(SITE).level == "warn"


def test_writing_to_processes_forbidden():
    """The direct path is out, and said to be; staged chunks go through shared memory, so that `local` is usable."""
    run = doctor("--only", "host,transports", "--transport", "local", before=SECCOMP)
    assert run.line("process memory").level == "warn" and run.line("process memory").facts["seccomp"] == "filtered"
    assert "EPERM" in run.line("process memory").says and "SYS_PTRACE" in run.line("process memory").says
    assert run.line("process memory").remedy
    assert run.line("local").level == "warn" and "not over process_vm_writev" in run.line("local").says
    verdict = run.report.transports["local"]
    assert verdict.usable and verdict.ways == ["shared memory"] and run.code == 0


def test_the_numpy_half_is_told_of():
    assert doctor("--only", "kernels", PDSTAGE_NATIVE="no").line("host").level == "warn"


def test_key_files(tmp_path):
    path = tmp_path / "cluster.key"
    keys = Keys.make(path)
    good = doctor("--only", "host", "--keys", str(path)).line("keys")
    assert good.level == "ok" and keys.public.hex() in good.says
    path.chmod(0o644)
    bad = doctor("--only", "host", "--keys", str(path))
    assert (bad.line("keys").level, bad.code) == ("fail", 1) and "chmod 600" in bad.line("keys").remedy


def test_a_calibration_file_that_nodes_would_refuse(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text("{}")
    run = doctor("--only", "host", PDSTAGE_CALIBRATION=str(path))
    assert (run.line("calibration").level, run.code) == ("fail", 1) and str(path) in run.line("calibration").says


def test_a_device_that_is_not_here():
    run = doctor("--only", "gpu", "--device", "cuda:77")
    assert (run.line("driver").level, run.code) == ("fail", 1)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--transport", "pigeon"], "no transport 'pigeon'"),
        (["--only", "weather"], "no area 'weather'"),
        (["--only", "peer"], "without a peer"),
        (["--deadline", "0"], "a deadline of 0 s"),
        (["--allow", "list"], "--allow without --keys"),
    ],
)
def test_words_that_mean_nothing_are_refused(capsys, args, said):
    assert cli.main(["doctor", *args]) == 2
    assert said in capsys.readouterr().err


def test_the_report_is_what_the_schema_says():
    """Each key, and no other; every one of them is in docs/doctor.md; the plain lines name every check."""
    run = doctor("--only", "host,network")
    assert msgspec.to_builtins(run.report) == run.raw and run.raw["version"] == found.VERSION
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs/doctor.md").read_text()))
    for kind in (Report, Found, found.Verdict, found.PeerReport, found.Stage, found.Moved, found.Side):
        assert set(kind.__struct_fields__) <= words, kind
    lines: list[str] = []
    shown = Plain(lines.append)
    for line in run.report.checks:
        shown.line(line)
    shown.end(run.report)
    text = "\n".join(lines)
    assert all(f"{line.area}/{line.name}: {line.says}" in text for line in run.report.checks)
    assert "verdict: " in lines[-1]


def test_with_colours_it_says_the_same(capsys, monkeypatch):
    """Where somebody looks and rich is there; else plain lines."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    line = Found(area="host", name="files", level="warn", says="1024 files", remedy="ulimit -n 65536")
    report = Report(
        version=1, made_at="", host="", pdstage="", verdict="warn", checks=[line], transports={}, peer=None
    )  # fmt: skip
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = show(print)
    assert isinstance(shown, Coloured)
    shown.line(line)
    shown.end(report)
    text = capsys.readouterr().out
    assert all(words in text for words in ("warn", "1024 files", "-> ulimit -n 65536", "0 failed, 1 to look at, of 1"))
    monkeypatch.setattr("pdstage.tools.doctor.show.find_spec", lambda name: None)
    assert isinstance(show(print), Plain)


def tree(root: Path, *files: str, **contents: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(contents.get(Path(name).name, ""))
    return root


@pytest.mark.parametrize(
    ("states", "node", "level", "said"),
    [
        ([], False, "warn", "no RDMA device"),
        (["4: ACTIVE"], True, "ok", "mlx5_0:1 ACTIVE (InfiniBand, 400 Gb/sec (4X NDR))"),
        (["4: ACTIVE", "1: DOWN"], True, "warn", "mlx5_1:1 DOWN"),
        (["1: DOWN"], True, "fail", "no RDMA port is active"),
        (["4: ACTIVE"], False, "fail", "uverbs"),
    ],
)
def test_rdma_devices(tmp_path, states, node, level, said):
    for number, state in enumerate(states):
        port = f"sys/class/infiniband/mlx5_{number}/ports/1"
        held = {"state": state, "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
        tree(tmp_path, *(f"{port}/{name}" for name in held), **held)
    if node:
        tree(tmp_path, "dev/infiniband/uverbs0")
    result = network.rdma(SITE, tmp_path)
    assert result.level == level and said in result.says
    assert bool(result.remedy) == (level != "ok")


@pytest.mark.skipif(transports.find_spec("nixl") is None, reason="NIXL is not installed")
def test_two_libnl(tmp_path, monkeypatch):
    """Debian's ibverbs-providers beside NIXL's wheel, which brings its own libibverbs."""
    apart = transports.two_libnl(SITE, tmp_path)
    assert apart is not None and apart.level == "ok"
    if not apart.facts["wheel"]:
        pytest.skip("this NIXL brings no libibverbs")
    tree(tmp_path, "etc/libibverbs.d/mlx5.driver", "usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so")
    beside = transports.two_libnl(SITE, tmp_path)
    assert beside is not None and beside.level == "warn" and "ibverbs-providers" in beside.remedy
    monkeypatch.setenv("UCX_MODULES", "^ib")
    kept = transports.two_libnl(SITE, tmp_path)
    assert kept is not None and kept.level == "ok"


def test_what_ucx_says_of_its_ways():
    log = """
[1.0] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    agent.a self cfg#0 rma_am(tcp/lo)  am(tcp/lo cma/memory)
[1.1] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    agent.a intra-node cfg#1 rma(rc_mlx5/mlx5_0:1) am(sysv/memory)
[1.2] [vm:1:0]  ucp_worker.c:1997 UCX  INFO    agent.b inter-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0)
"""
    assert ucx.lanes(log) == ["rc_mlx5", "sysv"] and ucx.ways(ucx.lanes(log)) == ["shm", "rdma"]
    assert ucx.lanes("") == [] and ucx.ways(["self"]) == []


def verdict(tried: dict[str, str], *, lanes=(), has_rdma=False, name="nixl", **facts):
    held = {f"way {way}": {"error": error, "remedy": "look", "seconds": 0.0} for way, error in tried.items()}
    told = Outcome("done", "exit", {"installed": True, "caveat": "", "peer_ended": "", **held, **facts})
    return transports.judge(name, told, lanes=list(lanes), has_rdma=has_rdma, wanted=())


def test_verdicts_by_way():
    both = verdict({"default": "", "tcp": ""}, lanes=["tcp", "cma"])
    assert both.level == "ok" and both.says == "usable over tcp, shm; no RDMA"
    rdma = verdict({"default": "", "tcp": "", "rdma": ""}, lanes=["rc_mlx5", "cma"], has_rdma=True)
    assert rdma.level == "ok" and rdma.says == "usable over tcp, rdma, shm"
    broken = verdict({"default": "", "tcp": "", "rdma": "ibv_reg_mr failed"}, lanes=["tcp"], has_rdma=True)
    assert broken.level == "warn" and "not over rdma: ibv_reg_mr failed" in broken.says and broken.remedy == "look"
    none = verdict({"default": "no device", "tcp": "no device"})
    assert none.level == "fail" and not none.facts["verdict"].usable
    crashed = verdict({"default": ""}, lanes=["tcp"], peer_ended="died of signal 11")
    assert crashed.level == "warn" and "died of signal 11" in crashed.says and "UCX_MODULES=^ib" in crashed.remedy
    mori = verdict({"default": ""}, name="mori")
    assert mori.level == "warn" and "never on hardware" in mori.says


class Stood(Site):
    """A site whose driver says what is given."""

    def __init__(self, told: Outcome, **asked: str) -> None:
        super().__init__(Asked(**asked))
        self.told = told

    def ask(self, probe, **given):
        del probe, given
        return self.told


H100 = {"name": "H100", "nbytes": 80 << 30, "capability": "9.0"}


def test_gpus_that_do_not_reach_each_other():
    facts = {"version": 13000, "devices": [H100, H100], "peers": [[True, False], [True, True]]}
    site = Stood(Outcome("done", "exit", facts))
    assert gpu.driver(site).says == "CUDA driver for 13.0, 2 devices"
    devices, access = gpu.devices(site), gpu.peer_access(site)
    assert devices is not None and "0: H100, 80 GiB, sm_90" in devices.says
    assert access is not None and access.level == "warn" and "not 0 to 1" in access.says


def test_a_driver_that_is_there_and_does_not_work():
    told = Outcome("failed", "cuInit", {}, "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)", "see nvidia-smi")
    result = gpu.driver(Stood(told))
    assert result.level == "fail" and "803" in result.says
