"""Whether this process's TCP sockets still hold bytes that a dead process has sent.

It reads the kernel's tables of all sockets in this network namespace (proc_net_tcp in the kernel's documentation) and
this process's own sockets. It sees nothing beyond them.

Seen with UCX over tcp: a writer was killed in the middle of a write, and 10 MiB landed at our first poll after its
death. The bytes had waited in our socket and in the dead writer's socket, which the kernel goes on emptying as an
orphan. Bytes in a reset connection, or in one that nobody has accepted yet, can still be read, although no table lists
that connection. A writer that dies with an unread answer resets its connection and leaves no orphan, while what it sent
may wait in a processor's queue of packets: then our end is established, and the other is nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_SO_PEERNAME = 28  # Linux's; Python names it nowhere
ESTABLISHED, FIN_WAIT1, CLOSE, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = 1, 4, 7, 8, 9, 10, 11


class _Row(NamedTuple):
    """A socket in the kernel's table. For a listening socket `n_unread` counts connections not accepted yet."""

    local: str
    remote: str
    state: int
    n_unread: int
    inode: str


def hold_bytes_of_the_dead(since: float) -> bool:
    """Whether a socket of ours has an other end that was dead at `since` (monotonic), and bytes that are unread or
    still on their way.

    It turns false once the owner of the socket reads to the end, which any progress call does. It is also true if /proc
    cannot be read, since nothing is proved then.
    """
    try:
        # IPv4 addresses in IPv6's table lose their prefix: the other end of a dual-stack listener's is in IPv4's.
        rows = [
            _Row(f[1], f[2], int(f[3], 16), int(f[4].partition(":")[2], 16), f[9])
            for table in _TABLES
            if table.exists()
            for f in map(str.split, table.read_text().replace("0000000000000000FFFF0000", "").splitlines()[1:])
            if len(f) > 9
        ]
        own = _own_sockets()
        # In the order in which bytes move, so that none is missed: into a socket of ours, then out of it.
        return _are_coming(rows, own, since) or any(_holds_the_rest(fd) for fd in own.values())
    except OSError:
        return True


def _are_coming(rows: list[_Row], own: dict[str, int], since: float) -> bool:
    """Whether bytes are on the way from the dead to our sockets, or wait in a connection that was not accepted."""
    ends = {(row.remote, row.local): row for row in rows}
    waiting: Counter[str] = Counter()  # by port, of live processes
    coming, is_here = False, cache(_is_here)
    for row in rows:
        fd, end = own.get(row.inode), ends.get((row.local, row.remote))
        if row.state != ESTABLISHED or (fd is None and row.inode != "0"):
            continue
        here, there = _host_of(row.local), _host_of(row.remote)
        if end is None and (here == there or is_here(there)):  # it was reset, or vanished; else it lives elsewhere
            coming |= fd is not None and not _answers(fd, since)
        elif end is not None and end.inode == "0" and end.state in {FIN_WAIT1, LAST_ACK, CLOSING}:
            coming = True  # an orphan, whose end is not acknowledged yet
        elif fd is None:
            waiting[_port_of(row)] += 1
    return coming or any(
        row.n_unread > waiting[_port_of(row)] for row in rows if row.state == LISTEN and row.inode in own
    )


def _port_of(row: _Row) -> str:
    return row.local.partition(":")[2]


def _host_of(end: str) -> str:
    words = end.partition(":")[0]
    return _shown(b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)))


def _shown(address: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET6 if len(address) > 4 else socket.AF_INET, address)


def _is_here(host: str) -> bool:
    """Whether it is an address of this network namespace, to which alone a socket can be bound; with the kernel's
    ip_nonlocal_bind any is.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((host, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket of somebody's, who closes it. Without SOCK_NONBLOCK Python might make it non-blocking."""
    held = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=fd)
    try:
        yield held
    finally:
        held.detach()


def _answers(fd: int, since: float) -> bool:
    """Whether the other end has answered since then: it lives elsewhere, behind a translated address.

    The kernel asks it every second from now on: who is not there resets, should the word of an earlier reset be lost.
    """
    with _borrowed(fd) as held:
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        last_ack_recv = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)[56:]  # of tcp_info, in ms
    return time.monotonic() - int.from_bytes(last_ack_recv, sys.byteorder) * 1e-3 > since + 0.5


def _holds_the_rest(fd: int) -> bool:
    """Whether it is a TCP socket with unread bytes whose peer, of this network namespace, has closed or reset it."""
    unread = bytes(4)
    with contextlib.suppress(OSError), _borrowed(fd) as held:  # closed meanwhile, or of another kind
        if held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in {CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING}:
            unread = fcntl.ioctl(fd, termios.FIONREAD, unread)  # an int
    if not any(unread):
        return False
    with _borrowed(fd) as held:  # by getpeername(2) a reset connection has no peer
        at, nbytes = (slice(8, 24), 28) if held.family == socket.AF_INET6 else (slice(4, 8), 16)
        name = held.getsockopt(socket.SOL_SOCKET, _SO_PEERNAME, nbytes)
    return _is_here(_shown(name[at]))


def _own_sockets() -> dict[str, int]:
    """A descriptor of each socket, by inode."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:  # closed meanwhile; the listing's own descriptor too
            continue
        if target.startswith("socket:["):
            found[target[8:-1]] = int(fd.name)
    return found
