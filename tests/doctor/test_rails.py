"""The doctor's lines on rails, on machines made from sysfs trees; and UCX's own choice, asked of a real NIXL."""

from __future__ import annotations

import socket

import pytest

from pdstage.tools.doctor import rails, ucx
from pdstage.tools.doctor.child import Outcome
from pdstage.tools.doctor.site import Asked, Site
from pdstage.transport import available
from tests.doctor.conftest import doctor
from tests.transport.sysfs import build, machine


class Answers(Site):
    """A site whose CUDA driver has these devices, by PCI address; no process is started."""

    def __init__(self, *addresses: str) -> None:
        super().__init__(Asked(transports=("local",)))
        self.addresses = addresses

    def ask(self, probe: str, **given: object) -> Outcome:
        assert probe == "driver"
        return Outcome("done", facts={"devices": [{"address": address} for address in self.addresses]})


def lines(root, *devices: str) -> dict[str, object]:
    found = {name: look(Answers(*devices)) for name, look in rails.checks(root)}
    return {name: line for name, line in found.items() if line is not None}


def test_a_machine_where_all_is_well(tmp_path):
    machine("dgx-h100", tmp_path / "sys")
    found = lines(tmp_path, "0000:1B:00.0")
    assert [*found] == [*(f"rails gpu {i}" for i in range(8)), "rails host"]
    assert {line.level for line in found.values()} == {"ok"}
    says = "GPU 0000:1b:00.0 (cuda:0): mlx5_0 (400 Gb/s, InfiniBand) at PXB; its PCIe link carries 504 Gb/s"
    assert found["rails gpu 0"].says == says
    assert found["rails gpu 1"].says.startswith("GPU 0000:3d:00.0: mlx5_3 (400"), "of none that CUDA shows here"
    facts = found["rails gpu 0"].facts
    assert (facts["chosen"], facts["device"], facts["gbps"]) == (["mlx5_0:1"], "cuda:0", 400)
    far = {nic["name"]: nic["distance"] for nic in facts["nics"]}
    assert far["mlx5_0"] == "PXB" and far["mlx5_3"] == "NODE" and far["mlx5_9"] == "SYS"
    host = found["rails host"].says
    assert host.startswith(
        "memory of node 0: mlx5_0, mlx5_3, mlx5_4, mlx5_5 (1600 Gb/s, InfiniBand); memory of node 1:"
    )


@pytest.mark.parametrize(
    ("name", "gpu", "said", "remedy"),
    [
        ("hgx-4-nics", 0, "shared with GPU 1", "sum"),
        ("roce-bonds", 1, "mlx5_2 at PIX is down (mlx5_2:1 DOWN (Ethernet, 40 Gb/sec (4X)))", "ibstat"),
        (
            "roce-bonds",
            2,
            "mlx5_bond_1 carries 100 Gb/s, with 8 of 16 lanes, where NICs of other GPUs carry 200",
            "slot",
        ),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(tmp_path, name, gpu, said, remedy):
    machine(name, tmp_path / "sys")
    line = lines(tmp_path)[f"rails gpu {gpu}"]
    assert line.level == "warn" and said in line.says and remedy in line.remedy, line


FAR = """
pci0000:00 node=0
  0000:00:01.0 32x16 gpu
pci0000:40 node=1
  0000:40:01.0 32x16 nic mlx5_0 InfiniBand {} 400
"""


@pytest.mark.parametrize(("state", "said"), [("ACTIVE", "no NIC on its NUMA node"), ("DOWN", "no NIC has an active")])
def test_no_near_nic_or_none_at_all(tmp_path, state, said):
    build(FAR.format(state), tmp_path / "sys")
    line = lines(tmp_path)["rails gpu 0"]
    assert line.level == "warn" and said in line.says and line.remedy


def test_a_host_without_rdma_has_no_line_a_gpu(tmp_path):
    build("pci0000:00 node=0\n  0000:00:01.0 32x16 gpu\n", tmp_path / "sys")
    found = lines(tmp_path)
    assert {name: line.level for name, line in found.items()} == {"rails host": "ok"}
    assert "no active RDMA NIC" in found["rails host"].says


@pytest.mark.parametrize(
    ("machine_name", "taken", "said"),
    [
        ("p5", {"srd/rdmap80s0:1": 50, "srd/rdmap81s0:1": 50}, "UCX spreads a write over 2 of its 4 NICs"),
        ("dgx-h100", {"rc_mlx5/mlx5_0:1": 50, "rc_mlx5/mlx5_3:1": 50}, "UCX itself takes mlx5_3"),
        ("dgx-h100", {"rc_mlx5/mlx5_0:1": 100}, ""),
        ("dgx-h100", {"tcp/eth0": 100}, ""),
    ],
)
def test_ucx_s_choice_beside_ours(tmp_path, monkeypatch, machine_name, taken, said):
    machine(machine_name, tmp_path / "sys")
    monkeypatch.setattr(rails, "_asked", lambda site, memory: taken)
    first = "0000:4f:00.0" if machine_name == "p5" else "0000:1b:00.0"
    line = lines(tmp_path, first)["rails gpu 0"]
    assert (line.level == "warn") == bool(said) and said in line.says and line.facts["ucx"] == taken
    assert f"UCX writes over {next(iter(taken))}" in line.says


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
    root = machine("vm", tmp_path / "sys")
    for module in ("nvidia", *(["nvidia_peermem"] if has_peermem else [])):
        (root / "module" / module).mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(version)
    (root / "devices/pci0000:00/0000:00:05.0/iommu_group").mkdir()
    (root / "devices/pci0000:00/0000:00:05.0/iommu_group/type").write_text(f"{iommu}\n")
    line = lines(tmp_path)["gpudirect"]
    assert (line.level, bool(line.remedy)) == (level, level == "warn") and said in line.says


TABLE = """\
[1.7] [vm:1:0]   | pdstage.39 self cfg#0                                    |
[1.7] [vm:1:0]   | remote memory write by ucp_put* from {} memory to {} |
[1.7] [vm:1:0]   | Range  | Description |              Config               |
[1.7] [vm:1:0]   {}
[1.7] [vm:1:0]   | 0..inf | short | tcp/never |
"""


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("| 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |", {"tcp/lo": 52, "tcp/eth0": 48}),
        ("|   0..255 | short | tcp/a |\n|  256..inf | zero-copy | rc_mlx5/mlx5_0:1 |", {"rc_mlx5/mlx5_0:1": 100}),
        ("| 0..inf | zero-copy | 25% on dc/m:1/path0 and 25% on dc/m:1/path1 and 50% on dc/n:2 |",
         {"dc/m:1": 50, "dc/n:2": 50}),
    ],
)  # fmt: skip
def test_what_ucx_says_of_a_put(row, found):
    assert ucx.puts("before\n" + TABLE.format("host", "host", row)) == found
    assert ucx.puts("nothing of the kind") == {}


@pytest.mark.skipif(bool(available()["nixl"]), reason="NIXL does not import here")
@pytest.mark.parametrize(("devices", "wanted"), [("lo", {"tcp/lo": 100}), (None, {"tcp/lo"})])
def test_ucx_is_asked_for_its_own_choice(devices, wanted):
    """A real put over TCP: this UCX still writes its table as `ucx.puts` reads it."""
    environment = {"UCX_NET_DEVICES": devices} if devices else {}
    line = doctor("--only", "network", UCX_TLS="tcp,self", **environment).line("rails host")
    taken = line.facts["ucx"]
    assert taken == wanted if devices else wanted <= set(taken), line
    assert {name.partition("/")[2] for name in taken} <= {name for _, name in socket.if_nameindex()}
