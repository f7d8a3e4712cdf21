"""The network devices of this host, to choose which of them a transport uses.

RDMA devices are read from sysfs (sysfs-class-infiniband in the kernel's documentation). Plain devices are asked of the
kernel, since sysfs may show another network namespace's.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from pdstage.errors import UsageError

_SYS, _DEV = Path("/sys"), Path("/dev")


class Port(NamedTuple):
    """One port of an RDMA device. `state`, `link` and `rate` in the kernel's words, "unknown" where it has none."""

    device: str
    port: str
    state: str
    link: str
    rate: str

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state

    @property
    def name(self) -> str:
        """As UCX names it: `mlx5_0:1`."""
        return f"{self.device}:{self.port}"

    def __str__(self) -> str:
        return f"{self.name} {self.state.partition(': ')[2] or self.state} ({self.link}, {self.rate})"


def rdma_ports(root: Path | None = None) -> list[Port]:
    """Every port of every RDMA device, by the sysfs below `root`; by default of this host."""
    folders = sorted(((root or _SYS) / "class/infiniband").glob("*/ports/*"))
    words = ("state", "link_layer", "rate")
    return [Port(one.parts[-3], one.name, *(_text(one / word) or "unknown" for word in words)) for one in folders]


def device_ports(devices: Sequence[str]) -> list[str]:
    """The devices by the names that UCX uses: `eth0` unchanged, an RDMA device as `mlx5_0:1`, once per active port.

    Raises `UsageError` for a device or port that this host does not have, or that is down.
    """
    if isinstance(devices, str):
        raise UsageError(f"devices={devices!r}", remedy=f"give a list of names, such as [{devices!r}]", field="devices")
    rdma = rdma_ports()
    plain = sorted(psutil.net_if_stats())
    found = []
    for device in devices:
        name, _, number = device.partition(":")
        ports = [port for port in rdma if port.device == name and number in ("", port.port)]
        if not ports and device not in plain:
            raise UsageError(
                f"no network device {device!r} on this host",
                remedy=f"name some of {', '.join([*dict.fromkeys(port.device for port in rdma), *plain]) or 'none'}",
                field="devices",
            )
        usable = [port.name for port in ports if port.active] if ports else [device] * _is_up(device)
        if not usable:
            states = ", ".join(map(str, ports)) or f"{device} is not up"
            raise UsageError(
                f"network device {device!r} is down: {states}",
                remedy="bring its link up (`ibstat`, `ip link`), or name another: `pdstage doctor --only network`",
                field="devices",
            )
        found += usable
    return found


def devices_at(host: str) -> list[str]:
    """The devices that keep UCX's TCP on the network of `host`, an address of this machine: the interface that holds
    it, loopback, and every port of an RDMA device, by the names that UCX uses.

    None if that would leave UCX without a network: no interface holds the address, or a bridge does, which UCX does not
    use.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    holders = (
        name.partition(":")[0]  # a second address of an interface may be labelled eth0:1
        for name, held in psutil.net_if_addrs().items()
        if str(address) in [one.address.partition("%")[0] for one in held]
    )
    interface = "lo" if address.is_loopback else next(holders, "")
    if not interface or (_SYS / "class/net" / interface / "bridge").is_dir():
        return []
    return [*dict.fromkeys(("lo", interface)), *_usable_ports()]


def own_address() -> str:
    """This host's address on its default route, found without sending; 127.0.0.1 without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _usable_ports() -> list[str]:
    """The active ports of RDMA devices that this process may open. UCX complains about others if they are named."""
    openable = {
        _text(folder / "ibdev")
        for folder in (_SYS / "class/infiniband_verbs").glob("uverbs*")
        if os.access(_DEV / "infiniband" / folder.name, os.R_OK | os.W_OK)
    }
    return [port.name for port in rdma_ports() if port.active and port.device in openable]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing, or the kernel refuses
        return ""


def _is_up(interface: str) -> bool:
    return "up" in psutil.net_if_stats()[interface].flags.split(",")
