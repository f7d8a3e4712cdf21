"""How ranks reach each other, and how they are cut off: namespaces on one bridge, or a proxy before each prefill rank.

In a namespace of its own a rank is cut off whole, control and data: silently (its port leaves the bridge: packets
vanish, as behind a dead switch), loudly (the link goes down), or one way (packets to all others go to an address nobody
has). The proxy stands in front of the control sockets only: it holds bytes back in both ways or in one, or drops the
connections and takes none.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from pdstage.control.bootstrap import BootstrapServer
from tests import processes

KINDS = ("silent", "loud", "one way")
_NOBODY = "02:00:00:00:00:99"
_PREFIX = "pdchaos"


def permitted() -> bool:
    """Whether namespaces and a bridge can be made here; tried, since capabilities say little in a container."""
    if shutil.which("ip") is None:
        return False
    try:
        Namespaces("try", ["a"]).close()
    except OSError:
        return False
    return True


class Namespaces:
    """One namespace a rank, and a hub that holds the bridge and the directory. Names carry the supervisor's pid."""

    def __init__(self, site: str, ranks: list[str]) -> None:
        self._names = {rank: f"{_PREFIX}-{os.getpid()}-{site}-{i}" for i, rank in enumerate(ranks)}
        self._hub = f"{_PREFIX}-{os.getpid()}-{site}-hub"
        self._hosts = {rank: f"10.77.0.{i + 2}" for i, rank in enumerate(ranks)}
        self._ports = {rank: f"port{i}" for i, rank in enumerate(ranks)}
        self._cut: dict[str, str] = {}
        try:
            self._build()
        except OSError:
            self.close()
            raise

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "set", "lo", "up")
        _ip("-n", self._hub, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", self._hub, "addr", "add", "10.77.0.1/24", "dev", "br0")
        _ip("-n", self._hub, "link", "set", "br0", "up")
        for rank, name in self._names.items():
            port = self._ports[rank]
            _ip("netns", "add", name)
            _ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._hub, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self._hosts[rank]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def where(self, rank: str) -> str:
        return self._names.get(rank, self._hub)

    def host(self, rank: str) -> str:
        return self._hosts.get(rank, "10.77.0.1")

    def cut(self, rank: str, kind: str) -> None:
        self._cut[rank] = kind
        if kind == "silent":
            _ip("-n", self._hub, "link", "set", self._ports[rank], "nomaster")
        elif kind == "loud":
            _ip("-n", self._hub, "link", "set", self._ports[rank], "down")
        else:
            for host in (set(self._hosts.values()) | {"10.77.0.1"}) - {self._hosts[rank]}:
                _ip(
                    "-n",
                    self._names[rank],
                    "neigh",
                    "replace",
                    host,
                    "lladdr",
                    _NOBODY,
                    "dev",
                    "eth0",
                    "nud",
                    "permanent",
                )

    def heal(self, rank: str) -> None:
        kind = self._cut.pop(rank, None)
        if kind == "silent":
            _ip("-n", self._hub, "link", "set", self._ports[rank], "master", "br0")
        elif kind == "loud":
            _ip("-n", self._hub, "link", "set", self._ports[rank], "up")
        elif kind == "one way":
            _ip("-n", self._names[rank], "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def close(self) -> None:
        for name in (*self._names.values(), self._hub):
            if Path(f"/run/netns/{name}").exists():
                _ip("netns", "del", name)


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


def sweep_dead() -> None:
    """Takes away namespaces of supervisors that were killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        if not Path(f"/proc/{path.name.split('-')[1]}").exists():
            _ip("netns", "del", path.name)


class SameNetwork:
    """All ranks on loopback; prefill ranks are cut off by the directory's proxies, decode ranks cannot be."""

    def __init__(self) -> None:
        self.pipe: Connection | None = None

    def where(self, rank: str) -> str:
        del rank
        return ""

    def host(self, rank: str) -> str:
        del rank
        return "127.0.0.1"

    def cut(self, rank: str, kind: str) -> None:
        if rank.startswith("prefill") and self.pipe is not None:
            self.pipe.send(("cut", int(rank.split()[1]), kind))

    def heal(self, rank: str) -> None:
        if rank.startswith("prefill") and self.pipe is not None:
            self.pipe.send(("heal", int(rank.split()[1]), ""))

    def close(self) -> None:
        pass


def serve_directory(where: str, host: str, proxied: bool, pipe: Connection) -> None:
    """The directory's process: says its address, then cuts and heals what it is told to, until the pipe closes."""
    processes.enter(where)
    with BootstrapServer(f"{host}:0", insecure=bool(where)) as server:
        proxies = Proxies(server) if proxied else None
        pipe.send(server.address)
        while True:
            try:
                kind, rank, how = pipe.recv()
            except EOFError:
                return
            if proxies is not None:
                proxies.tell(rank, how if kind == "cut" else "")


class Proxies:
    """A proxy before each prefill rank: the directory names it in the rank's place."""

    def __init__(self, server: BootstrapServer) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._doors: dict[int, _Door] = {}
        table = server.directory
        lookup = table.lookup

        def through_proxies(*args, **named):
            return [self._before(advert) for advert in lookup(*args, **named)]

        table.lookup = through_proxies  # the table is this test's own instance

    def tell(self, rank: int, how: str) -> None:
        self._loop.call_soon_threadsafe(lambda: self._doors[rank].cut(how) if rank in self._doors else None)

    def _before(self, advert):
        rank = advert.topology.tp_rank
        door = self._doors.get(rank)
        if door is None:
            door = _Door()
            asyncio.run_coroutine_threadsafe(door.open(), self._loop).result(10)
            self._doors[rank] = door
        door.target = int(advert.endpoint.rpartition(":")[2])
        return msgspec.structs.replace(advert, endpoint=f"tcp://127.0.0.1:{door.port}")


class _Door:
    """Passes bytes between those who connect and `target`, a port of this host, unless cut."""

    def __init__(self) -> None:
        self.target = self.port = 0
        self._how = ""
        self._open = [asyncio.Event(), asyncio.Event()]  # towards the rank, and back
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut("")

    async def open(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    def cut(self, how: str) -> None:
        self._how = how
        shut = {"": (False, False), "silent": (True, True), "one way": (False, True), "loud": (True, True)}[how]
        for event, closed in zip(self._open, shut, strict=True):
            (event.clear if closed else event.set)()
        if how == "loud":
            for writer in self._writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._how == "loud":
                raise ConnectionRefusedError
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, to_writer)
        self._writers.update(ends)
        await asyncio.gather(
            self._pass(reader, to_writer, self._open[0], ends), self._pass(to_reader, writer, self._open[1], ends)
        )
        self._writers.difference_update(ends)

    async def _pass(self, reader, writer, may: asyncio.Event, ends) -> None:
        try:
            while data := await reader.read(1 << 16):
                await may.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        for end in ends:  # a half-closed connection is of no use to zmq
            end.transport.abort()
