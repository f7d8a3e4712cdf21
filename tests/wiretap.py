"""A TCP proxy that writes down everything that passes, and what a process listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import threading
from pathlib import Path

_LISTEN = "0A"


class Wiretap:
    """Listens on loopback and passes every connection on to `port`. `seen` is all bytes of both directions."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: list[bytes] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._sockets = [self._server]
        self._threads[0].start()

    @property
    def seen(self) -> bytes:
        return b"".join(self._seen)

    def __enter__(self) -> Wiretap:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._server.accept()
                theirs = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [ours, theirs]
                for src, dst in ((ours, theirs), (theirs, ours)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(src, dst), daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, src: socket.socket, dst: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := src.recv(65536):
                self._seen.append(data)
                dst.sendall(data)
        with contextlib.suppress(OSError):
            dst.shutdown(socket.SHUT_WR)


def listeners(pid: int | str = "self") -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process listens, as the kernel tells."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(fd))  # noqa: PTH115  (no path: "socket:[inode]")
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                words = struct.pack(
                    f"={len(address) // 8}I", *(int(address[i : i + 8], 16) for i in range(0, len(address), 8))
                )
                found.add((str(ipaddress.ip_address(words)), int(port, 16)))
    return found
