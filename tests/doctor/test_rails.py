"""The doctor's lines on rails, on machines made from sysfs trees."""

from __future__ import annotations

import pytest

from pdstage.tools.doctor import rails
from pdstage.tools.doctor.probe import Asked, Outcome, Site
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
    found = {name: look(Answers(*devices)) for _, name, look in rails.checks(root)}
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
