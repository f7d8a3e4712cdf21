"""Hosts of one network: a namespace each, and a switch in between that delays, loses and cuts by order.

The switch is a process that holds a TAP device in every namespace and passes Ethernet frames on. It does what netem and
a bridge would do, without netem, which many kernels lack: a delay and a loss for each host, and cuts between any two,
both ways or one. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import processes

_PREFIX = "pdfleet"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_NBYTES = 1 << 16
MTU = 16_000
_MAX_WAITING = 20_000
_BROADCAST = 0x01
"""Of a MAC's first byte: it is for all."""
_BURST = 64


@dataclass(slots=True)
class Link:
    """One host's: `delay_s` and up to `jitter_s` more each way, and the part of frames that is lost."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


class Switch:
    """The process: orders come on stdin as lines of JSON, until it closes."""

    def __init__(self, namespaces: list[str]) -> None:
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._taps = []
        for number, namespace in enumerate(namespaces):
            processes.enter(namespace)
            self._taps.append(_tap(number))
        processes.enter(own)
        os.close(own)
        self._links = [Link() for _ in namespaces]
        self._cut: set[tuple[int, int]] = set()
        """From, to."""
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._n = 0
        self._rng = random.Random(1)
        self.counts = {"passed": 0, "lost": 0, "cut": 0, "overflown": 0}

    def run(self) -> None:
        ready = select.epoll()
        hosts = {fd: number for number, fd in enumerate(self._taps)}
        for fd in (*hosts, 0):
            ready.register(fd, select.EPOLLIN)
        os.set_blocking(0, False)
        print(json.dumps({"up": len(hosts)}), flush=True)
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
                    self._obey(json.loads(line))
            self._pass_on()

    def _read(self, source: int, fd: int) -> None:
        for _ in range(_BURST):
            try:
                frame = os.read(fd, _FRAME_NBYTES)
            except BlockingIOError:
                return
            if frame[0] & _BROADCAST:
                for target in range(len(self._taps)):
                    if target != source:
                        self._take(source, target, frame)
            else:
                target = frame[4] << 8 | frame[5]
                if target < len(self._taps):
                    self._take(source, target, frame)

    def _take(self, source: int, target: int, frame: bytes) -> None:
        if (source, target) in self._cut:
            self.counts["cut"] += 1
            return
        here, there = self._links[source], self._links[target]
        if (loss := here.loss + there.loss) and self._rng.random() < loss:
            self.counts["lost"] += 1
            return
        delay_s = here.delay_s + there.delay_s
        if jitter_s := here.jitter_s + there.jitter_s:
            delay_s += self._rng.random() * jitter_s
        if not delay_s:
            self._write(target, frame)
        elif len(self._waiting) < _MAX_WAITING:
            self._n += 1
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, self._n, target, frame))
        else:
            self.counts["overflown"] += 1

    def _pass_on(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._waiting)
            self._write(target, frame)

    def _write(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._taps[target], frame)
        except OSError:  # its queue is full, or it is down: as on a wire, TCP sends it again
            self.counts["overflown"] += 1
        else:
            self.counts["passed"] += 1

    def _obey(self, order: dict) -> None:
        match order.pop("do"):
            case "link":
                host = order.pop("host")
                self._links[host] = Link(**order)
            case "cut":
                self._cut.update((a, b) for a, b in order["pairs"])
            case "heal":
                self._cut.difference_update((a, b) for a, b in order["pairs"])
            case "counts":
                print(json.dumps(self.counts), flush=True)


def _tap(number: int) -> int:
    """This namespace's eth0; it exists while the descriptor is open."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
    for one in ("all", "default", "eth0"):  # its multicasts of hundreds of hosts to each other are a load
        Path(f"/proc/sys/net/ipv6/conf/{one}/disable_ipv6").write_text("1")
    commands = (
        ("link", "set", "dev", "eth0", "address", f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"),
        ("link", "set", "dev", "eth0", "mtu", str(MTU)),
        ("addr", "add", f"{host_of(number)}/16", "dev", "eth0"),
        ("link", "set", "dev", "eth0", "up"),
        ("link", "set", "dev", "lo", "up"),
    )
    for command in commands:
        _ip(*command)
    return fd


def host_of(number: int) -> str:
    return f"10.78.{number // 250}.{number % 250 + 1}"


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


class Network:
    """`n` hosts, by number, and their switch. A context manager."""

    def __init__(self, n: int) -> None:
        sweep_dead()
        self.namespaces = [f"{_PREFIX}-{os.getpid()}-{number}" for number in range(n)]
        self.cuts: set[tuple[int, int]] = set()
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        try:
            for namespace in self.namespaces:
                _ip("netns", "add", namespace)
            command = [sys.executable, "-m", "tests.fleet.switch", *self.namespaces]
            self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._answer()
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._switch is not None:
            self._switch.kill()
            self._switch.communicate()
        for namespace in self.namespaces:
            if Path(f"/run/netns/{namespace}").exists():
                _ip("netns", "del", namespace)

    def host(self, number: int) -> str:
        return host_of(number)

    def link(self, number: int, *, delay_s: float = 0.0, jitter_s: float = 0.0, loss: float = 0.0) -> None:
        self._order("link", host=number, delay_s=delay_s, jitter_s=jitter_s, loss=loss)

    def cut(self, pairs: list[tuple[int, int]]) -> None:
        """Frames from the first to the second of each pair vanish."""
        self._order("cut", pairs=pairs)
        self.cuts.update(pairs)

    def heal(self, pairs: list[tuple[int, int]]) -> None:
        self._order("heal", pairs=pairs)
        self.cuts.difference_update(pairs)

    def counts(self) -> dict[str, int]:
        self._order("counts")
        return self._answer()

    def _order(self, what: str, **fields: object) -> None:
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._switch.stdin.flush()

    def _answer(self) -> dict[str, int]:
        assert self._switch is not None
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline()
        if not line:
            raise OSError("the switch did not start: it needs root and /dev/net/tun")
        return json.loads(line)


def sweep_dead() -> None:
    """Takes away namespaces of supervisors that were killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            _ip("netns", "del", path.name)


def permitted() -> bool:
    """Whether such a network can be made here; tried."""
    try:
        with Network(2):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    processes.die_with_parent()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        Switch(sys.argv[1:]).run()
