"""Whether this process's TCP sockets still hold what a process that ended has sent.

Layer 4, beneath nixl.py and mooncake.py. Must not know peers or tags: it reads what the kernel says of all sockets in
this network namespace (proc_net_tcp in the kernel's documentation), and cannot see beyond it.

Seen with UCX over tcp: of a writer killed in the middle of a write, 10 MiB landed at our first poll after its death.
They waited in our socket, and in the dead writer's, which the kernel goes on emptying as an orphan.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED, _CLOSE_WAIT = "01", "08"
_ORPHANS = frozenset({"04", "05", "09", "0B"})  # FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING
_ONLY_THE_END = 1
"""Unread "bytes" of a socket whose peer has closed and whose data was all read: the end itself counts."""


class _Socket(NamedTuple):
    local: str
    remote: str
    state: str
    n_unread: int
    inode: str


def hold_bytes_of_the_dead() -> bool:
    """Whether a socket of ours has an end that nobody owns any more, and bytes that were not read or have not come.

    Reading until the end, which any progress of the owner does, makes it false. True also where /proc cannot be read:
    then nothing is proved.
    """
    try:
        sockets = [entry for table in _TABLES if table.exists() for entry in _read(table)]
        ours = _own_inodes()
    except OSError:
        return True
    orphans = {(entry.local, entry.remote) for entry in sockets if entry.inode == "0" and entry.state in _ORPHANS}
    for entry in sockets:
        if entry.inode not in ours:
            continue
        if entry.state == _CLOSE_WAIT and entry.n_unread > _ONLY_THE_END:
            return True
        if entry.state == _ESTABLISHED and (entry.remote, entry.local) in orphans:
            return True
    return False


def _read(table: Path) -> list[_Socket]:
    lines = (line.split() for line in table.read_text().splitlines()[1:])
    return [_Socket(f[1], f[2], f[3], int(f[4].partition(":")[2], 16), f[9]) for f in lines if len(f) > 9]


def _own_inodes() -> set[str]:
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:  # closed meanwhile; the listing's own descriptor too
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes
