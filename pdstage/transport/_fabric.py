"""The network devices of this host, to choose which of them a transport uses.

RDMA devices are read by `_rails`. Plain devices are looked up by name, since sysfs may show another network
namespace's.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.transport import _rails

if TYPE_CHECKING:
    from collections.abc import Sequence

_IF_INET6 = Path("/proc/thread-self/net/if_inet6")
_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_UP = 1
_IFREQ_NBYTES = 40
_MAX_ADDRESSES = 4096


def device_ports(devices: Sequence[str]) -> list[str]:
    """The devices by the names that UCX uses: `eth0` unchanged, an RDMA device as `mlx5_0:1`, once per active port.

    Raises `UsageError` for a device or port that this host does not have, or that is down.
    """
    if isinstance(devices, str):
        remedy = f'give a list of names, such as [{devices!r}], or "auto"'
        raise UsageError(f"devices={devices!r}", remedy=remedy, field="devices")
    rdma = {nic.name: nic for nic in _rails.read().nics}
    plain = sorted(name for _, name in socket.if_nameindex())
    found = []
    for device in devices:
        name, _, number = device.partition(":")
        ports = [port for port in rdma[name].ports if number in ("", port.port)] if name in rdma else []
        if not ports and device not in plain:
            raise UsageError(
                f"no network device {device!r} on this host",
                remedy=f"name some of {', '.join([*rdma, *plain]) or 'none'}",
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
    if not interface or (_rails.SYS / "class/net" / interface / "bridge").is_dir():
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
    openable = _rails.openable_devices()
    return [port.name for nic in _rails.read().nics if nic.name in openable for port in nic.active]


def _is_up(interface: str) -> bool:
    """Whether a plain device is up in this thread's network namespace (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16sH22x", interface.encode(), 0))
    return bool(struct.unpack_from("H", answer, 16)[0] & _IFF_UP)
