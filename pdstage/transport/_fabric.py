"""The network devices and NUMA nodes of this host, to choose which of them a transport uses.

It asks the kernel (sysfs-class-infiniband and sysfs-devices-node in its documentation; plain devices by name, since
sysfs may show another network namespace's).
"""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SYS = Path("/sys")


def device_ports(devices: Sequence[str]) -> list[str]:
    """The devices by the names that UCX knows: `eth0` as it is, an RDMA device as `mlx5_0:1`, one for each port.

    Raises `UsageError` for a device or port that is not here.
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
                f"there is no network device {device!r} here",
                remedy=f"name some of {', '.join([*rdma, *plain]) or 'none'}",
                field="devices",
            )
    return found


def near_devices(node: int) -> list[str]:
    """The RDMA devices on the same NUMA node; none where the host does not say."""
    return [name for name in _listed("class/infiniband") if _node_of(name) == node]


@contextmanager
def on_node(node: int | None) -> Iterator[None]:
    """Keeps this thread, and for good the threads that it starts meanwhile, to the processors of a NUMA node.

    Raises `UsageError` for a node that is not here, or that has no processor this process may use.
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
    """From the kernel's form: 0-3,8."""
    cpus: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
