"""Which NICs are near which memory, by sysfs trees of known machines; and that UCX takes those that "auto" chooses."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from transport.sysfs import MACHINES, build, machine

from pdstage.errors import UsageError
from pdstage.kernels import driver
from pdstage.transport import _fabric, _rails, open_from_config, open_transport
from pdstage.transport._rails import Distance


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a machine, by its name or its text, that this process takes for its own."""

    def make(name: str) -> _rails.Tree:
        root = tmp_path / "sys"
        build(name, root) if "\n" in name else machine(name, root)
        monkeypatch.setattr(_rails, "SYS", root)
        monkeypatch.setattr(_rails, "_DEV", root / "dev")
        return _rails.read(root)

    return make


def chosen(tree: _rails.Tree) -> list[tuple[str, list[str], int, int]]:
    """Of each GPU: the distance, its NICs, their Gb/s and those of its PCIe link."""
    found = [tree.of_gpu(gpu) for gpu in tree.gpus]
    return [
        (one.distance.name, [nic.name for nic in one.nics], round(one.gbps), round(one.bound_gbps)) for one in found
    ]


WANTED = {
    "dgx-h100": [("PXB", [f"mlx5_{i}"], 400, 504) for i in (0, 3, 4, 5, 6, 9, 10, 11)],
    "hgx-4-nics": [("PIX", [f"mlx5_{i // 2}"], 200, 252) for i in range(8)],
    "no-switch": [
        ("PHB", ["mlx5_0"], 100, 252),
        ("NODE", ["mlx5_0", "mlx5_1"], 200, 252),
        ("NODE", ["mlx5_3"], 100, 252),
        ("NODE", ["mlx5_3"], 100, 252),
    ],
    "gb200": [("NODE", [f"mlx5_{i}"], 400, 0) for i in range(4)],
    "roce-bonds": [
        ("PIX", ["mlx5_bond_0"], 200, 252),
        ("NODE", ["mlx5_bond_0"], 200, 252),
        ("PIX", ["mlx5_bond_1"], 100, 252),
    ],
    "vm": [("PHB", [f"mlx5_{i}"], 400, 504) for i in range(2)],
    "p5": [
        ("PIX", [f"rdmap{bus + i}s0" for i in range(1, 5)], 400, 252)
        for bus in (0x4F, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0)
    ],
}


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.txt")))
def test_each_gpu_gets_its_nearest_nics(made, name):
    assert chosen(made(name)) == WANTED[name]


@pytest.mark.parametrize(
    ("name", "node", "wanted"),
    [
        ("dgx-h100", 0, ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"]),  # not the slower ones, of Ethernet
        ("no-switch", 0, ["mlx5_0", "mlx5_1"]),
        ("roce-bonds", 1, ["mlx5_bond_1"]),
        ("roce-bonds", None, ["mlx5_bond_0"]),
        ("vm", 0, ["mlx5_0", "mlx5_1"]),  # of a host that reports no nodes: all
        ("gb200", None, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]),
    ],
)
def test_host_memory_gets_the_nics_of_its_node(made, name, node, wanted):
    assert [nic.name for nic in made(name).of_node(node).nics] == wanted


BUS = "pci0000:00 node=0\n  0000:00:01.0 32x16\n    0000:01:00.0 32x16\n"


@pytest.mark.parametrize(
    ("text", "far"),
    [
        (f"{BUS}      0000:02:00.0 32x16 gpu\n      0000:02:01.0 32x16 nic a InfiniBand ACTIVE 400\n", Distance.PIX),
        ("pci0000:00 node=0\n  0000:00:01.0 32x16 gpu\n  0000:00:02.0 32x16 nic a InfiniBand ACTIVE 1\n", Distance.PHB),
        ("pci0000:00 node=0\n  0000:00:01.0 32x16 gpu=amd\npci0000:40 node=0\n  0000:40:01.0 32x16 nic a I ACTIVE 1\n",
         Distance.NODE),
        ("pci0000:00 node=0\n  0000:00:01.0 32x16 gpu\npci0000:40 node=1\n  0000:40:01.0 32x16 nic a I ACTIVE 1\n",
         Distance.SYS),
        ("pci0000:00 node=-1\n  0000:00:01.0 32x16 gpu\nvirtual nic rxe0 Ethernet ACTIVE 10\n", Distance.SYS),
    ],
)  # fmt: skip
def test_distances(made, text, far):
    tree = made(text)
    assert _rails.distance(tree.gpus[0].place, tree.nics[0].place) is far


def test_a_port_that_is_down_is_no_rail_and_a_second_port_is(made):
    tree = made(f"{BUS}      0000:02:00.0 32x16 gpu\n      0000:02:01.0 32x16 nic a InfiniBand DOWN,ACTIVE 400\n")
    assert tree.of_gpu(tree.gpus[0]).ports == ["a:2"]
    assert tree.nics[0].gbps == 400


def test_without_a_nic_there_is_no_choice(made):
    tree = made(f"{BUS}      0000:02:00.0 32x16 gpu\n")
    assert tree.of_gpu(tree.gpus[0]) == _rails.Rails(()) and tree.of_node(0).ports == []
    assert _rails.auto("cpu") == [] == _rails.auto("cuda:7")


def test_links_say_what_they_carry(made):
    text = "pci0000:00 node=0\n  0000:00:01.0 {}\n    0000:01:00.0 {} nic a InfiniBand ACTIVE 400\n"
    tree = made(text.format("16x16", "32x8/16"))
    assert round(tree.nics[0].place.gbps) == 126, "the slower end's speed, on the lanes there are"
    assert (tree.nics[0].place.width, tree.nics[0].place.max_width) == (8, 16)
    assert round(tree.nics[0].gbps) == 126, "a port is no faster than its link"


class Numbered:
    """A driver that numbers the GPUs in its own order."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses

    def pci_address(self, device: int) -> str:
        if device >= len(self.addresses):
            raise driver.DriverError("cuDeviceGetPCIBusId", 101)
        return self.addresses[device]


def test_auto_goes_by_the_gpu_as_this_process_numbers_it(made, monkeypatch):
    made("dgx-h100")
    monkeypatch.setattr(driver, "cuda", lambda: Numbered("0000:DD:00.0", "0000:1B:00.0"))
    assert _rails.auto("cuda:0") == ["mlx5_11:1"] and _rails.auto("cuda:1") == ["mlx5_0:1"]
    with pytest.raises(UsageError, match="does not find cuda:2") as refused:
        _rails.auto("cuda:2")
    assert "devices=" in refused.value.remedy


def test_auto_takes_only_what_this_process_may_open(made):
    made("vm")
    (_rails.SYS / "dev/infiniband/uverbs0").unlink()
    assert _rails.auto("cpu") == ["mlx5_1:1"]


def test_host_memory_is_of_the_node_that_the_process_runs_on(made, monkeypatch):
    made("dgx-h100")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {60, 61})
    assert _rails.auto("cpu") == [f"mlx5_{i}:1" for i in (6, 9, 10, 11)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 61})
    assert len(_rails.auto("cpu")) == 8


@pytest.mark.parametrize("named", ["mlx5_2", "mlx5_2:1"])
def test_a_device_that_is_down_is_refused_by_name(made, named):
    made("roce-bonds")
    with pytest.raises(UsageError, match=r"'mlx5_2(:1)?' is down: mlx5_2:1 DOWN \(Ethernet") as refused:
        _fabric.device_ports([named])
    assert refused.value.fields == {"field": "devices"} and "ibstat" in refused.value.remedy


TWO = """pci0000:00 node=0
  0000:00:01.0 32x16 nic mlx5_0 InfiniBand ACTIVE 100
  0000:00:02.0 32x16 nic mlx5_1 InfiniBand ACTIVE,{} 100
"""


def test_devices_get_the_names_that_ucx_knows(made):
    made(TWO.format("ACTIVE"))
    assert _fabric.device_ports(["mlx5_0", "lo"]) == ["mlx5_0:1", "lo"]
    assert _fabric.device_ports(["mlx5_1"]) == ["mlx5_1:1", "mlx5_1:2"]
    assert _fabric.device_ports(["mlx5_1:2"]) == ["mlx5_1:2"]


@pytest.mark.parametrize("devices", [["mlx5_7"], ["mlx5_0:2"], ["lo:1"], ["lo", ""], "lo"])
def test_what_is_not_here_is_refused_by_name(made, devices):
    made(TWO.format("ACTIVE"))
    with pytest.raises(UsageError, match="device.*lo") as refused:
        _fabric.device_ports(devices)
    assert refused.value.fields == {"field": "devices"}


def test_rdma_ports_stay_where_the_network_is_chosen(made):
    """Those that are active and that this process may open."""
    made(TWO.format("DOWN"))
    (_rails.SYS / "dev/infiniband/uverbs0").unlink()
    assert _fabric.devices_at("127.0.0.1") == ["lo", "mlx5_1:1"]
    assert _fabric.devices_at("::1") == ["lo", "mlx5_1:1"]
    assert _fabric.devices_at("192.0.2.254") == [], "nobody's: what UCX finds"
    (_rails.SYS / "dev/infiniband/uverbs1").unlink()
    assert _fabric.devices_at("127.0.0.1") == ["lo"]


def test_an_interface_that_is_down_is_refused_by_name(monkeypatch):
    assert _fabric._is_up("lo")
    monkeypatch.setattr(_fabric, "_is_up", lambda name: name != "lo")
    with pytest.raises(UsageError, match="'lo' is down"):
        open_transport("nixl", devices=["lo"])


@pytest.fixture
def started(monkeypatch):
    """What UCX's environment says while an agent starts."""
    agent = pytest.importorskip("pdstage.transport._nixl_agent", exc_type=ImportError)
    seen = []

    def start(name: str, config: object) -> object:
        seen.append([os.environ.get(f"UCX_{name}") for name in ("NET_DEVICES", "MAX_RMA_RAILS", "TCP_USER_TIMEOUT")])
        raise agent.Errors[0]("seen enough")

    monkeypatch.setattr(agent._api, "nixl_agent", start)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return seen


@pytest.mark.parametrize(
    ("machine", "config", "where", "wanted"),
    [
        ("dgx-h100", {"devices": "auto"}, ("cuda:1",), ["mlx5_9:1", None, "60s"]),
        ("dgx-h100", {"devices": {"cuda:1": "auto"}, "rails": 4}, ("cuda:1",), ["mlx5_9:1", "4", "60s"]),
        ("dgx-h100", {"devices": ["mlx5_1", "mlx5_2"], "rails": 1}, ("cuda:1",), ["mlx5_1:1,mlx5_2:1", "1", "60s"]),
        ("dgx-h100", {}, ("cuda:1",), [None, None, "60s"]),
        ("pci0000:00 node=0\n", {"devices": "auto"}, ("cpu", "127.0.0.1"), ["lo", None, "60s"]),
    ],
)
def test_the_choice_for_a_node_s_pool_reaches_ucx(made, started, monkeypatch, machine, config, where, wanted):
    made(machine)
    monkeypatch.setattr(driver, "cuda", lambda: Numbered("0000:1b:00.0", "0000:bd:00.0"))
    with pytest.raises(Exception, match="seen enough"):
        open_from_config({"name": "nixl", **config}, *where)
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "7s")
    with pytest.raises(Exception, match="seen enough"):
        open_from_config({"name": "nixl", **config}, *where)
    assert started == [wanted, [*wanted[:2], "7s"]]
    assert os.environ["UCX_TCP_USER_TIMEOUT"] == "7s"


@pytest.mark.parametrize("rails", [0, 65, "2"])
def test_a_number_of_rails_that_is_none_is_refused(started, rails):
    with pytest.raises(UsageError, match="rails"):
        open_transport("nixl", rails=rails)
    assert not started


def test_mooncake_gets_the_devices_of_its_memory(made, monkeypatch):
    mooncake = pytest.importorskip("pdstage.transport.mooncake", exc_type=ImportError)
    made("dgx-h100")
    monkeypatch.setattr(driver, "cuda", lambda: Numbered("0000:1b:00.0"))
    with mock.patch.object(mooncake.Engine, "take", side_effect=InterruptedError) as take:
        for devices, wanted in (("auto", "mlx5_0"), ("mlx5_1,mlx5_2", "mlx5_1,mlx5_2"), ("", "")):
            with pytest.raises(InterruptedError):
                open_from_config({"name": "mooncake", "host": "127.0.0.1", "devices": devices}, "cuda:0")
            assert take.call_args.args == ("tcp", "127.0.0.1", wanted)
