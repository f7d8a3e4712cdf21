"""The network devices that a transport is given, by sysfs trees."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from transport.sysfs import nic

from pdstage import UsageError
from pdstage.transport import _fabric, open_from_config, open_transport


@pytest.fixture
def host(tmp_path, monkeypatch):
    """This host's devices: mlx5_1 has two ports, mlx5_2 is down."""
    nic(tmp_path, "mlx5_0", "ACTIVE")
    nic(tmp_path, "mlx5_1", "ACTIVE", "ACTIVE")
    nic(tmp_path, "mlx5_2", "DOWN", link="Ethernet")
    monkeypatch.setattr(_fabric, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(_fabric, "_DEV", tmp_path / "dev")
    return tmp_path


def test_devices_get_the_names_that_ucx_knows(host):
    assert _fabric.device_ports(["mlx5_0", "lo"]) == ["mlx5_0:1", "lo"]
    assert _fabric.device_ports(["mlx5_1"]) == ["mlx5_1:1", "mlx5_1:2"]
    assert _fabric.device_ports(["mlx5_1:2"]) == ["mlx5_1:2"]


@pytest.mark.parametrize("devices", [["mlx5_7"], ["mlx5_0:2"], ["lo:1"], ["lo", ""], "lo"])
def test_what_is_not_here_is_refused_by_name(host, devices):
    with pytest.raises(UsageError, match="device.*lo") as refused:
        _fabric.device_ports(devices)
    assert refused.value.fields == {"field": "devices"}


@pytest.mark.parametrize("named", ["mlx5_2", "mlx5_2:1", "lo"])
def test_a_device_that_is_down_is_refused_by_name(host, monkeypatch, named):
    assert _fabric._is_up("lo")
    monkeypatch.setattr(_fabric, "_is_up", lambda name: name != "lo")
    why = "lo is not up" if named == "lo" else r"mlx5_2:1 DOWN \(Ethernet"
    with pytest.raises(UsageError, match=f"'{named}' is down: {why}") as refused:
        _fabric.device_ports([named])
    assert refused.value.fields == {"field": "devices"} and "ibstat" in refused.value.remedy


def test_rdma_ports_stay_where_the_network_is_chosen(host):
    """Those that are active and that this process may open."""
    (host / "dev/infiniband/uverbs0").unlink()
    assert _fabric.devices_at("127.0.0.1") == ["lo", "mlx5_1:1", "mlx5_1:2"]
    assert _fabric.devices_at("::1") == ["lo", "mlx5_1:1", "mlx5_1:2"]
    assert _fabric.devices_at("192.0.2.254") == [], "nobody's: what UCX finds"
    (host / "dev/infiniband/uverbs1").unlink()
    assert _fabric.devices_at("127.0.0.1") == ["lo"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"devices": {"cuda:1": ["mlx5_0", "mlx5_1:2"]}}, "mlx5_0:1,mlx5_1:2"), ({}, None), ({"host": "127.0.0.1"}, "lo")],
)
def test_the_choice_for_a_node_s_pool_reaches_ucx(monkeypatch, host, options, wanted):
    agent = pytest.importorskip("pdstage.transport._nixl_agent", exc_type=ImportError)
    started = []

    def start(name, config):
        started.append([os.environ.get(f"UCX_{name}") for name in ("NET_DEVICES", "TCP_USER_TIMEOUT")])
        raise agent.Errors[0]("seen enough")

    monkeypatch.setattr(agent._api, "nixl_agent", start)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr(_fabric, "_usable_ports", list)
    for _ in range(2):
        with pytest.raises(Exception, match="seen enough"):
            open_from_config({"name": "nixl", **options}, "cuda:1")
        monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "7s")
    assert started == [[wanted, "60s"], [wanted, "7s"]]
    assert os.environ["UCX_TCP_USER_TIMEOUT"] == "7s" and "UCX_NET_DEVICES" not in os.environ


def test_mooncake_gets_devices_without_their_ports(host):
    mooncake = pytest.importorskip("pdstage.transport.mooncake", exc_type=ImportError)
    with mock.patch.object(mooncake, "Engine", side_effect=InterruptedError) as start:
        for devices, wanted in (("mlx5_0,mlx5_1", "mlx5_0,mlx5_1"), ("", "")):
            with pytest.raises(InterruptedError):
                open_transport("mooncake", host="127.0.0.1", devices=devices)
            assert start.call_args.args == ("tcp", "127.0.0.1", wanted)
