"""The network devices of this host, to choose which of them a transport uses.

RDMA devices are read from sysfs (sysfs-class-infiniband in the kernel's documentation). Plain devices are looked up by
name, since sysfs may show another network namespace's.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SYS, _DEV = Path("/sys"), Path("/dev")
_IF_INET6 = Path("/proc/thread-self/net/if_inet6")
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_UP = 1
_IFREQ_NBYTES = 40
_MAX_ADDRESSES = 4096


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
    plain = sorted(name for _, name in socket.if_nameindex())
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
            remedy = "bring its link up (`ibstat`, `ip link`), or name another: `pdstage doctor --only network`"
            raise UsageError(f"network device {device!r} is down: {states}", remedy=remedy, field="devices")
        found += usable
    return found


def devices_at(host: str) -> list[str]:
    """The devices that keep UCX's TCP on the network of `host`, an address of this machine: the interface that holds
    it, loopback, and every port of an RDMA device, by the names that UCX uses.

    None if that would leave UCX without a network: no interface holds the address, or a bridge does, which UCX does not
    use.
    """
    interface = "lo" if ipaddress.ip_address(host).is_loopback else interface_of(host)
    if not interface or (_SYS / "class/net" / interface / "bridge").is_dir():
        return []
    return [*dict.fromkeys(("lo", interface)), *_usable_ports()]


def interface_of(host: str) -> str:
    """The interface that holds an address (netdevice(7) for IPv4, proc_net(5) for IPv6); empty if none does."""
    address = ipaddress.ip_address(host)
    if address.version == 6:
        lines = _IF_INET6.read_text().split("\n") if _IF_INET6.exists() else []
        held = {fields[0]: fields[-1] for fields in map(str.split, filter(None, lines))}
        return held.get(address.packed.hex(), "")
    rows = array("B", bytes(_IFREQ_NBYTES * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", len(rows), rows.buffer_info()[0]))
    filled = rows.tobytes()[: struct.unpack("iP", answer)[0]]
    for at in range(0, len(filled), _IFREQ_NBYTES):
        if filled[at + 20 : at + 24] == address.packed:
            label = filled[at : at + 16].partition(b"\0")[0].decode()
            return label.partition(":")[0]  # a second address of an interface may be labelled eth0:1
    return ""


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
    openable = set()
    for folder in (_SYS / "class/infiniband_verbs").glob("uverbs*"):
        if os.access(_DEV / "infiniband" / folder.name, os.R_OK | os.W_OK):
            openable.add(_text(folder / "ibdev"))
    return [port.name for port in rdma_ports() if port.active and port.device in openable]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing, or the kernel refuses
        return ""


def _is_up(interface: str) -> bool:
    """Whether a plain device is up in this thread's network namespace (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16sH22x", interface.encode(), 0))
    return bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)
