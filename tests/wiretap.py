"""A TCP proxy that writes down everything that passes, and what a process listens on."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import socketserver
import struct
import threading
from pathlib import Path

_LISTEN = "0A"


class Wiretap(socketserver.ThreadingTCPServer):
    """Listens on loopback and passes every connection on to `target`. `seen` is all bytes of both directions."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Both)
        self.target, self.port, self.seen = target, self.server_address[1], b""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()


class _Both(socketserver.BaseRequestHandler):
    server: Wiretap

    def handle(self) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.server.target)) as target,
            selectors.DefaultSelector() as selector,  # not select(), which ends at descriptor 1,023
        ):
            selector.register(self.request, selectors.EVENT_READ, target)
            selector.register(target, selectors.EVENT_READ, self.request)
            while True:
                for end, _ in selector.select():
                    data = end.fileobj.recv(65536)
                    if not data:
                        return
                    self.server.seen += data
                    end.data.sendall(data)


def listeners() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens, as the kernel tells."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(fd))  # noqa: PTH115  (no path: "socket:[inode]")
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                words = struct.pack(
                    f"={len(address) // 8}I", *(int(address[i : i + 8], 16) for i in range(0, len(address), 8))
                )
                found.add((str(ipaddress.ip_address(words)), int(port, 16)))
    return found
