"""Hosts of one network, in network namespaces, and how they are cut off from each other.

`Network` gives each host a namespace of its own. A switch, a process that holds a TAP device in every namespace, passes
Ethernet frames on. It does what netem and a bridge would do, without netem, which many kernels lack: each way between
two hosts has a delay and a loss, and a loss of 1 cuts it. Needs root, iproute2 and /dev/net/tun.

`SharedNetwork` is one namespace for transports that do not cross any. A host is an address there, and is cut off from
all the others by taking it away. Neither is needed: without hosts a network is loopback, and nothing can be cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests import processes
from tests.cables import ip

_PREFIX = "pdchaos"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_MTU, _FRAME_NBYTES = 16_000, 1 << 16
_BROADCAST = 0x01
"""Of a MAC's first byte: it is for all."""
_BURST = 64
_serials = itertools.count()


class SharedNetwork:
    """One namespace; each of `hosts` is an address of it. Without hosts it is where this process is, on loopback."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        self.hosts = {name: number for number, name in enumerate(hosts)}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as building:
            building.callback(self.close)
            self._build()
            building.pop_all()

    def _build(self) -> None:
        if self.hosts:
            self._namespaces = [self._namespace()] * len(self.hosts)
            for host in self.hosts:
                self.heal(host)

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
        return ("ip", "netns", "exec", self.where(host)) if self.hosts else ()

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
        """Whole, here: `peer` and `one_way` are for those that are apart."""
        del peer, one_way
        ip("-n", self.where(host), "addr", "del", f"{self.address(host)}/32", "dev", "lo")

    def heal(self, host: str, peer: str = "") -> None:
        del peer
        ip("-n", self.where(host), "addr", "replace", f"{self.address(host)}/32", "dev", "lo")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> SharedNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Network(SharedNetwork):
    """A namespace for each of `hosts`, and their switch."""

    def _build(self) -> None:
        self._namespaces = [self._namespace() for _ in self.hosts]
        command = [sys.executable, "-m", "tests.chaos.network", *self._namespaces]
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stack.callback(self._switch.communicate)
        self._stack.callback(self._switch.kill)
        assert self._switch.stdout is not None
        if not self._switch.stdout.readline():
            raise OSError("the switch did not start: it needs root and /dev/net/tun")

    def cut(self, host: str, peer: str = "", *, one_way: bool = False) -> None:
        """Frames from `host` to `peer`, or to all, vanish; and those back, unless `one_way`."""
        self.link(host, peer, loss=1.0, one_way=one_way)

    def heal(self, host: str, peer: str = "") -> None:
        self.link(host, peer)

    def link(
        self, host: str, peer: str = "", *, delay_s: float = 0.0, loss: float = 0.0, one_way: bool = False
    ) -> None:
        """Each frame takes half to one and a half times `delay_s`; `loss` is the part that vanishes."""
        one = self.hosts[host]
        others = [self.hosts[peer]] if peer else [number for number in self.hosts.values() if number != one]
        ways = [(one, other) for other in others] + [(other, one) for other in others if not one_way]
        assert self._switch.stdin is not None
        for way in ways:
            self._switch.stdin.write(json.dumps((*way, delay_s, loss)) + "\n")
        self._switch.stdin.flush()


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


class Switch:
    """The process: what a way is from now on comes on stdin as lines of JSON, until it closes."""

    def __init__(self, namespaces: list[str]) -> None:
        self._taps = [_tap(number, namespace) for number, namespace in enumerate(namespaces)]
        self._ways: dict[tuple[int, int], tuple[float, float]] = {}
        """From and to: delay and loss."""
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(1)

    def run(self) -> None:
        ready = select.epoll()
        hosts = {fd: number for number, fd in enumerate(self._taps)}
        for fd in (*hosts, 0):
            ready.register(fd, select.EPOLLIN)
        os.set_blocking(0, False)
        print("up", flush=True)
        tail = b""
        while True:
            due_s = self._waiting[0][0] - time.monotonic() if self._waiting else 1.0
            for fd, _ in ready.poll(max(0.0, due_s)):
                if fd:
                    self._read(hosts[fd], fd)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, tail = (tail + data).split(b"\n")
                for line in lines:
                    source, target, delay_s, loss = json.loads(line)
                    self._ways[source, target] = delay_s, loss
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                self._write(*heapq.heappop(self._waiting)[2:])

    def _read(self, source: int, fd: int) -> None:
        for _ in range(_BURST):
            try:
                frame = os.read(fd, _FRAME_NBYTES)
            except BlockingIOError:
                return
            broadcast = frame[0] & _BROADCAST
            for target in range(len(self._taps)) if broadcast else [frame[4] << 8 | frame[5]]:
                if target != source and target < len(self._taps):
                    self._pass(source, target, frame)

    def _pass(self, source: int, target: int, frame: bytes) -> None:
        delay_s, loss = self._ways.get((source, target), (0.0, 0.0))
        if self._rng.random() < loss:
            return
        if delay_s:
            at = time.monotonic() + delay_s * self._rng.uniform(0.5, 1.5)
            heapq.heappush(self._waiting, (at, next(self._numbers), target, frame))
        else:
            self._write(target, frame)

    def _write(self, target: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # its queue is full, or it is down: as on a wire, TCP sends it again
            os.write(self._taps[target], frame)


def _tap(number: int, namespace: str) -> int:
    """A namespace's eth0; it exists while the descriptor is open."""
    processes.enter(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    mac = f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"
    # Without addresses of IPv6, whose multicasts of hundreds of hosts to each other are a load.
    ip("link", "set", "dev", "eth0", "address", mac, "mtu", str(_MTU), "addrgenmode", "none")
    ip("addr", "add", f"{_address(number)}/16", "dev", "eth0")
    ip("link", "set", "dev", "eth0", "up")
    return fd


if __name__ == "__main__":
    processes.die_with_parent()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        Switch(sys.argv[1:]).run()
