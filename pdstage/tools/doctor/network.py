"""Area "network": addresses, ports that can be bound, RDMA devices and their state.

It reads sysfs by `pdstage.transport._rails` and binds ports briefly.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.control.address import Address
from pdstage.tools.doctor.found import Result, fail, ok, warn
from pdstage.transport._rails import Port, read

if TYPE_CHECKING:
    from pdstage.tools.doctor.site import Site

_DIRECTORY_PORT = 8998
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEW_PORTS = 8192


def rdma_ports(root: Path = Path("/sys")) -> list[Port]:
    """Every port of every RDMA device of this host."""
    return [port for nic in read(root).nics for port in nic.ports]


def rdma(site: Site, root: Path = Path("/")) -> Result:
    """RDMA ports, and whether this process may open their devices."""
    del site
    ports = rdma_ports(root / "sys")
    facts = {"ports": [port._asdict() for port in ports]}
    if not ports:
        return warn(
            "no RDMA device: between hosts bytes go over TCP",
            "nothing, where that is fast enough; in a container pass /dev/infiniband and the host's network",
            **facts,
        )
    says = ", ".join(map(str, ports))
    if not any(port.active for port in ports):
        return fail(f"no RDMA port is active: {says}", "bring the link and its subnet manager up, see ibstat", **facts)
    nodes = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        remedy = "pass /dev/infiniband into the container, and let this user open it"
        return fail(f"{says}, but no /dev/infiniband/uverbs* can be opened here", remedy, **facts)
    if not all(port.active for port in ports):
        return warn(says, "name the active ones to the transport: devices=[...], or UCX_NET_DEVICES", **facts)
    return ok(says, **facts)


def own_host() -> str:
    """The address of this host's default route, found without sending."""
    return Address("", 1).reachable().host


def address(site: Site) -> Result:
    """The address that peers would get, and whether this host's name resolves to it."""
    del site
    own, name = own_host(), socket.gethostname()
    try:
        named = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        named = []
        why = str(error)
    else:
        why = ""
    facts = {"host": name, "address": own, "named": named, "interfaces": [held for _, held in socket.if_nameindex()]}
    if Address(own, 1).is_loopback:
        remedy = "fine for one host; to reach others give this one a route, or share the host's network"
        return warn(f"no route to other hosts: {name} is reached at {own} only", remedy, **facts)
    if own not in named:
        said = f"its name leads to {', '.join(named)}" if named else f"its name does not resolve ({why})"
        remedy = f"name addresses rather than hosts: bind=tcp://{own}:0"
        return warn(f"{name} is reached at {own}, but {said}", remedy, **facts)
    return ok(f"{name} is reached at {own}", **facts)


def ports(site: Site) -> Result:
    """Whether a node can listen: on loopback, on this host's address, and, as a directory, on the usual port."""
    del site
    own = own_host()
    problems, taken = [], False
    for host in dict.fromkeys(("127.0.0.1", own)):
        if problem := _cannot_bind(host, 0):
            problems.append(f"no port of {host} can be bound ({os.strerror(problem)})")
    if problem := _cannot_bind("127.0.0.1", _DIRECTORY_PORT):
        taken = problem == errno.EADDRINUSE
        problems += [] if taken else [f"port {_DIRECTORY_PORT} cannot be bound ({os.strerror(problem)})"]
    first, last = map(int, _PORT_RANGE.read_text().split()) if _PORT_RANGE.exists() else (32768, 60999)
    facts = {"own": own, "directory_port_taken": taken, "first_port": first, "last_port": last}
    if problems:
        return fail("; ".join(problems), "let this user listen: see the container's and the host's policies", **facts)
    if last - first < _FEW_PORTS:
        remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        return warn(f"only ports {first} to {last} are the system's to give", remedy, **facts)
    held = f"; {_DIRECTORY_PORT} is taken, by a directory perhaps" if taken else ""
    return ok(f"ports can be bound at 127.0.0.1 and {own}{held}", **facts)


def _cannot_bind(host: str, port: int) -> int:
    """The errno of a failed bind; 0 if it succeeds."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno or errno.EIO
    return 0
