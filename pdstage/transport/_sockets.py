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

import array
import fcntl
import socket
import sys
import termios
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED, FIN_WAIT1, CLOSE, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = 1, 4, 7, 8, 9, 10, 11
_asked_at: dict[str, float] = {}
"""By the inode of our end: a few, of connections whose other end is in no table. Each proof asks anew."""


class _Row(NamedTuple):
    """A socket in the kernel's table. For a listening socket `n_unread` counts connections not accepted yet."""

    local: str
    remote: str
    state: int
    n_unread: int
    inode: str

    @property
    def port(self) -> str:
        return self.local.rpartition(":")[2]


def hold_bytes_of_the_dead() -> bool:
    """Whether a socket of ours has a dead other end, and bytes that are unread or still on their way.

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
        if _are_coming(rows, own) or any(_holds_the_rest(fd) for fd in own.values()):
            return True
    except OSError:
        return True
    _asked_at.clear()
    return False


def _are_coming(rows: list[_Row], own: dict[str, int]) -> bool:
    """Whether bytes are on the way from the dead to our sockets, or wait in a connection that was not accepted."""
    ends = {(row.remote, row.local): row for row in rows}
    waiting: Counter[str] = Counter()  # by port, of live processes
    for row in rows:
        if row.state != ESTABLISHED:
            continue
        end = ends.get((row.local, row.remote))
        # With one address both ends are in this network namespace: one that is not there was reset, or vanished.
        if end is None and row.local.partition(":")[0] == row.remote.partition(":")[0]:
            if row.inode in own and not _answers(own[row.inode], row.inode):
                return True
        elif end is not None and end.inode == "0" and end.state in {FIN_WAIT1, LAST_ACK, CLOSING}:
            # An orphan, whose end is not acknowledged yet.
            if row.inode in own or row.inode == "0":
                return True
        elif row.inode == "0":
            waiting[row.port] += 1
    return any(row.n_unread > waiting[row.port] for row in rows if row.state == LISTEN and row.inode in own)


def _answers(fd: int, inode: str) -> bool:
    """Whether the other end has answered since this proof began: it lives elsewhere, behind a translated address.

    The kernel asks it a second after that call: who is not there resets, should the word of an earlier reset be lost.
    """
    held, now = socket.socket(fileno=fd), time.monotonic()
    try:
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        last_ack_recv = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)[56:]  # of tcp_info, in ms
    finally:
        held.detach()  # its owner closes it
    asked_at = _asked_at.get(inode, 0.0)
    if now > asked_at + 60.0:  # by a proof that was given up
        asked_at = _asked_at[inode] = now
    return now - int.from_bytes(last_ack_recv, sys.byteorder) * 1e-3 > asked_at + 0.5


def _holds_the_rest(fd: int) -> bool:
    """Whether it is a TCP socket with unread bytes whose peer has closed or reset it."""
    unread = array.array("i", [0])
    try:
        held = socket.socket(fileno=fd)
        try:
            if held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in {CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING}:
                fcntl.ioctl(fd, termios.FIONREAD, unread)
        finally:
            held.detach()  # its owner closes it
    except OSError:
        pass  # closed meanwhile, or of another kind
    return unread[0] > 0


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
