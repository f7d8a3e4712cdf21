"""The lines on this host: limits lowered, calls forbidden, devices stood in for; and the report's schema."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from pdstage import Keys, cli
from pdstage.tools.doctor import gpu, host, report
from pdstage.tools.doctor.probe import Asked, Outcome, Site
from tests import cuda_double
from tests.doctor.conftest import ROOT, doctor
from tests.transport.sysfs import nic, written

SITE = Site(Asked())
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))"
SECCOMP = "from tests.transport.endpoint import forbid_writing_to_processes as forbid\nforbid()"
H100 = {"name": "H100", "nbytes": 80 << 30, "capability": 90, "address": "0000:1b:00.0"}


@pytest.mark.parametrize(("limit", "level", "code"), [(20_000, "ok", 0), (1024, "warn", 0), (200, "fail", 1)])
def test_open_files(limit, level, code):
    run = doctor("--only", "host", before=LIMIT.format(limit))
    line = run.line("files")
    assert (line.level, run.code, line.facts["limit"]) == (level, code, limit)
    assert bool(line.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("limit", "ports", "level"), [(4 << 20, ["a port"], "fail"), (1 << 30, ["a port"], "warn"), (4 << 20, [], "ok")]
)
def test_locked_memory_is_rdma_s(monkeypatch, limit, ports, level):
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr(host, "may_lock", lambda: False)
    monkeypatch.setattr(host, "rdma_ports", lambda: ports)
    assert host.memlock(SITE).level == level


def test_writing_to_processes_forbidden():
    """The direct path is out, and said to be; staged chunks go through shared memory, so that `local` is usable."""
    run = doctor("--only", "transports", "--transport", "local", before=SECCOMP)
    line = run.line("local")
    assert line.level == "warn" and "not over process_vm_writev" in line.says and "SYS_PTRACE" in line.remedy, line
    verdict = run.report.transports["local"]
    assert verdict.usable and verdict.ways == ["shared memory"] and run.code == 0


def test_the_numpy_half_is_told_of():
    assert doctor("--only", "kernels", PDSTAGE_NATIVE="no").line("host").level == "warn"


def test_files_that_nodes_would_refuse(tmp_path):
    path, costs = tmp_path / "cluster.key", tmp_path / "costs.json"
    keys = Keys.make(path)
    costs.write_text("{}")
    good = host.keys(Site(Asked(keys=str(path))))
    assert good.level == "ok" and keys.public.hex() in good.says
    path.chmod(0o644)
    run = doctor("--only", "host", "--keys", str(path), PDSTAGE_CALIBRATION=str(costs))
    assert (run.line("keys").level, run.code) == ("fail", 1) and "chmod 600" in run.line("keys").remedy
    assert run.line("calibration").level == "fail" and str(costs) in run.line("calibration").says


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--transport", "pigeon"], "no transport 'pigeon'"),
        (["--only", "peer"], "without a peer"),
        (["--deadline", "0.5"], "a deadline of 0.5 s"),
        (["--allow", __file__], "--allow without --keys"),
    ],
)
def test_words_that_mean_nothing_are_refused(capsys, args, said):
    assert cli.main(["doctor", *args]) == 2
    assert said in capsys.readouterr().err


def test_the_report_is_what_the_schema_says():
    """Each key, and no other; every one of them is in docs/doctor.md; the plain lines name every check."""
    run = doctor("--only", "host,network")
    assert msgspec.to_builtins(run.report) == run.raw and run.raw["version"] == report.VERSION
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs/doctor.md").read_text()))
    for kind in (report.Report, report.Found, report.Verdict, report.PeerReport, report.Stage, report.Moved):
        assert set(kind.__struct_fields__) <= words, kind
    for line in run.report.checks:
        told = report.line(line)
        assert f"{line.area}/{line.name}: {line.says}" in told and (line.remedy in told or line.level == "ok")
    assert "verdict: " in [*report.summary(run.report)][-1]


@pytest.mark.parametrize(
    ("states", "node", "level", "said"),
    [
        ([], False, "warn", "no RDMA device"),
        (["ACTIVE"], True, "ok", "mlx5_0:1 ACTIVE (InfiniBand, 400 Gb/sec (4X NDR))"),
        (["ACTIVE", "DOWN"], True, "warn", "mlx5_1:1 DOWN"),
        (["DOWN"], True, "fail", "no RDMA port is active"),
        (["ACTIVE"], False, "fail", "uverbs"),
    ],
)
def test_rdma_devices(tmp_path, states, node, level, said):
    for number, state in enumerate(states):
        nic(tmp_path, f"mlx5_{number}", state)
    if not node:
        shutil.rmtree(tmp_path / "dev", ignore_errors=True)
    result = host.rdma(SITE, tmp_path)
    assert result.level == level and said in result.says
    assert bool(result.remedy) == (level != "ok")


GPU = "sys/bus/pci/devices/0000:00:05.0"


def test_a_host_without_nics_or_gpus_has_no_line_on_them(tmp_path):
    assert host.gpudirect(SITE, tmp_path) is None


@pytest.mark.parametrize(
    ("has_peermem", "version", "iommu", "level", "said"),
    [
        (True, "NVRM version: NVIDIA UNIX x86_64 Kernel Module", "identity", "ok", "by nvidia-peermem;"),
        (False, "NVRM version: NVIDIA UNIX Open Kernel Module", "identity", "ok", "by dma-buf;"),
        (False, "NVRM version: NVIDIA UNIX x86_64 Kernel Module", "identity", "warn", "no way for NICs"),
        (True, "", "DMA-FQ", "warn", "an IOMMU translates for 0000:00:05.0"),
    ],
)
def test_the_way_between_nics_and_gpu_memory(tmp_path, has_peermem, version, iommu, level, said):
    nic(tmp_path, "mlx5_0", "ACTIVE")
    for module in ("nvidia", *(["nvidia_peermem"] if has_peermem else [])):
        (tmp_path / "sys/module" / module).mkdir(parents=True)
    files = {"vendor": "0x10de", "class": "0x030200", "iommu_group/type": iommu}
    written(tmp_path, {f"{GPU}/{name}": text for name, text in files.items()} | {"proc/driver/nvidia/version": version})
    line = host.gpudirect(SITE, tmp_path)
    assert (line.level, bool(line.remedy)) == (level, level == "warn") and said in line.says


class Stood(Site):
    """A site whose driver says what is given."""

    def __init__(self, told: Outcome, **asked: str) -> None:
        super().__init__(Asked(**asked))
        self.told = told

    def ask(self, probe, **given):
        return self.told


FACTS = {"version": 13000, "devices": [H100, H100], "peers": [[True, False], [True, True]]}


@pytest.mark.parametrize(
    ("told", "device", "level", "said"),
    [
        (Outcome("done", "exit", FACTS), "cuda:1", "ok", "CUDA driver for 13.0, 2 devices"),
        (Outcome("done", "exit", FACTS), "cuda:2", "fail", "there is no cuda:2"),
        (Outcome("failed", "cuInit", {}, "cuInit failed with 803"), "cpu", "fail", "failed with 803"),
        (Outcome("crashed", "cuInit", {}, "its process died of SIGABRT at cuInit"), "cpu", "fail", "SIGABRT"),
        (Outcome("failed", "load", {}, "no CUDA driver here"), "cuda:0", "fail", "pools in host memory only"),
    ],
)
def test_the_driver_as_it_answers(told, device, level, said):
    result = gpu.check_driver(Stood(told, device=device))
    assert result.level == level and said in result.says
    assert bool(result.remedy) == (level != "ok") or not told.remedy


def test_gpus_that_do_not_reach_each_other():
    line = gpu.check_devices(Stood(Outcome("done", "exit", FACTS)))
    assert line is not None and line.level == "warn" and "0: H100, 80 GiB, sm_90" in line.says
    assert "not 0 to 1" in line.says and "1 to 0" not in line.says


@pytest.mark.skipif(bool(cuda_double.missing()), reason="the double cannot be built")
def test_two_devices_of_the_doubles_driver(tmp_path):
    folder = cuda_double.everywhere(tmp_path)["PYTHONPATH"].partition(os.pathsep)[0]
    run = doctor("--only", "gpu", "--device", "cuda:1", path=Path(folder))
    assert [(line.name, line.level) for line in run.report.checks] == [("driver", "ok"), ("devices", "ok")]
    assert "2 devices" in run.line("driver").says and run.line("devices").says.count("sm_") == 2 and run.code == 0
