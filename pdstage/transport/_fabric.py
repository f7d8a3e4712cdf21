"""The network devices and NUMA nodes of this host, to choose which of them a transport uses.

The answers come from the kernel (sysfs-class-infiniband and sysfs-devices-node in its documentation). Plain devices are
looked up by name, since sysfs may show another network namespace's.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from array import array
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SYS = Path("/sys")
_DEV = Path("/dev")
_IF_INET6 = Path("/proc/thread-self/net/if_inet6")
_SIOCGIFCONF = 0x8912
_IFREQ_NBYTES = 40
_MAX_ADDRESSES = 4096


def device_ports(devices: Sequence[str]) -> list[str]:
    """The devices by the names that UCX uses: `eth0` unchanged, an RDMA device as `mlx5_0:1`, once per port.

    Raises `UsageError` for a device or port that this host does not have.
    """
    if isinstance(devices, str):
        raise UsageError(f"devices={devices!r}", remedy=f"give a list of names, such as [{devices!r}]", field="devices")
    rdma, plain = _listed("class/infiniband"), sorted(name for _, name in socket.if_nameindex())
    found = []
    for device in devices:
        name, _, port = device.partition(":")
        ports = _listed(f"class/infiniband/{name}/ports") if name in rdma else []
        if name in rdma and (not port or port in ports):
            found += [f"{name}:{each}" for each in ([port] if port else ports)]
        elif device in plain:
            found.append(device)
        else:
            raise UsageError(
                f"no network device {device!r} on this host",
                remedy=f"name some of {', '.join([*rdma, *plain]) or 'none'}",
                field="devices",
            )
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


def _usable_ports() -> list[str]:
    """The active ports of RDMA devices that this process may open. UCX complains about others if they are named."""
    found = []
    for verbs in _listed("class/infiniband_verbs"):
        named = _SYS / "class/infiniband_verbs" / verbs / "ibdev"
        if not named.is_file() or not os.access(_DEV / "infiniband" / verbs, os.R_OK | os.W_OK):
            continue
        ports = _SYS / "class/infiniband" / named.read_text().strip() / "ports"
        states = sorted(ports.glob("*/state"))
        found += [f"{ports.parent.name}:{state.parent.name}" for state in states if "ACTIVE" in state.read_text()]
    return found


def near_devices(node: int) -> list[str]:
    """The RDMA devices on the same NUMA node; empty if the host does not report nodes."""
    return [name for name in _listed("class/infiniband") if _node_of(name) == node]


@contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Binds this thread to the processors of a NUMA node for the `with` block. Threads started inside stay bound.

    Raises `UsageError` for a node that does not exist, or that has no processor this process may use.
    """
    if node is None:
        yield
        return
    before = os.sched_getaffinity(0)
    listed = _SYS / f"devices/system/node/node{node}/cpulist"
    wanted = (_cpus(listed.read_text()) if listed.exists() else set()) & before
    if not wanted:
        raise UsageError(
            f"NUMA node {node} has no processor that this process may use",
            remedy="name a node of /sys/devices/system/node, and let the container or `taskset` allow its processors",
            field="numa_node",
        )
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _listed(folder: str) -> list[str]:
    path = _SYS / folder
    return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []


def _node_of(rdma_device: str) -> int:
    path = _SYS / "class/infiniband" / rdma_device / "device/numa_node"
    return int(path.read_text()) if path.exists() else -1


def _cpus(listed: str) -> set[int]:
    """Parses the kernel's form: 0-3,8."""
    cpus: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
