"""Hosts of one network, each in a network namespace of its own, and how they are cut off from each other.

One namespace more between them passes packets on, and drops those of the ways that are cut: by rules of the kernel's
routing. `Shared` is one namespace, for transports that cross none. Both need root and iproute2. Without hosts a network
is loopback, and nothing can be cut.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import processes
from tests.cables import ip

_PREFIX = "pdchaos"
_serials = itertools.count(1)


class Network:
    """A namespace for each of `hosts`, and the router between them."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self.hosts = {name: number for number, name in enumerate(hosts)}
        self._cuts: dict[str, list[int]] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as building:
            building.callback(self.close)
            if self.hosts:
                self._build()
            building.pop_all()

    def _build(self) -> None:
        self._router = self._namespace()
        self._namespaces = [self._namespace() for _ in self.hosts]
        for number, namespace in enumerate(self._namespaces):
            cable, address = f"host{number}", _address(number)
            ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", cable, "netns", self._router)
            ip("-n", namespace, "addr", "add", f"{address}/16", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", self._router, "link", "set", cable, "up")
            ip("-n", self._router, "route", "add", f"{address}/32", "dev", cable)
        passing = "cd /proc/sys/net/ipv4; echo 1 > ip_forward; echo 1 > conf/all/proxy_arp"
        ip("netns", "exec", self._router, "sh", "-c", passing)

    def _namespace(self) -> str:
        name = f"{_PREFIX}-{os.getpid()}-{next(_serials)}"
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "del", name)
        ip("-n", name, "link", "set", "lo", "up")
        return name

    def where(self, host: str) -> str:
        """Its namespace."""
        return self._namespaces[self.hosts[host]] if self.hosts else ""

    def address(self, host: str) -> str:
        return _address(self.hosts[host]) if self.hosts else "127.0.0.1"

    def command(self, host: str) -> tuple[str, ...]:
        """What starts a command there."""
        return ("ip", "netns", "exec", self.where(host))

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread is there for a while, and stays where its sockets were made."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        processes.enter(self.where(host))
        try:
            yield
        finally:
            processes.enter(own)
            os.close(own)

    def cut(self, host: str, peer: str = "", *, one_way: bool = False) -> None:
        """What `host` sends to `peer`, or to all, vanishes; and what comes back, unless `one_way`."""
        ways = [(self.address(host), self.address(peer) if peer else "all")]
        ways += [] if one_way else [ways[0][::-1]]
        for source, target in ways:
            number = next(_serials)
            ip("-n", self._router, "rule", "add", "from", source, "to", target, "blackhole", "priority", str(number))
            self._cuts.setdefault(host, []).append(number)

    def heal(self, host: str) -> None:
        """Ends the host's cuts."""
        for number in self._cuts.pop(host, ()):
            ip("-n", self._router, "rule", "del", "priority", str(number))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Shared(Network):
    """One namespace, and an address of it for each of `hosts`, which is cut off from all by taking that away."""

    def _build(self) -> None:
        self._namespaces = [self._namespace()] * len(self.hosts)
        for host in self.hosts:
            self.heal(host)

    def cut(self, host: str, peer: str = "", *, one_way: bool = False) -> None:
        del peer, one_way
        ip("-n", self.where(host), "addr", "del", f"{self.address(host)}/32", "dev", "lo")

    def heal(self, host: str) -> None:
        ip("-n", self.where(host), "addr", "replace", f"{self.address(host)}/32", "dev", "lo")


def _address(number: int) -> str:
    return f"10.78.{number // 250}.{number % 250 + 1}"


def permitted() -> bool:
    """Whether such networks can be made here: tried, since capabilities say little in a container."""
    try:
        Network("ab").close()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def sweep_dead() -> None:
    """Takes away namespaces of supervisors that were killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            ip("netns", "del", path.name)
