"""Tags between processes of one host, over AF_UNIX datagrams in the abstract namespace.

A datagram arrives whole or not at all. The kernel queues only a few for a receiver (net.unix.max_dgram_qlen) and
refuses the next one. Nothing here ever blocks.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct

from pdstage import native

MAX_NBYTES = 64 << 10
_PER_RECEIVE = 256
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class _End:
    """One end's socket."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Inbox(_End):
    """Receives under a random name, so that a later life of a process is never taken for this one."""

    def __init__(self) -> None:
        super().__init__()
        self.name = f"pdstage.{secrets.token_hex(16)}"
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + self.name)

    def receive(self) -> list[bytes]:
        """The tags that have arrived, at most a few hundred; the descriptor stays readable for the rest. What another
        user sent, or was cut short, is dropped.
        """
        tags: list[bytes] = []
        ours = (0, os.geteuid())  # abstract names have no permissions: any user may send to them
        if native.ext is not None:
            tags, _ = native.ext.recv_datagrams(self._socket.fileno(), ours, _PER_RECEIVE, MAX_NBYTES)
            return tags
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        for _ in range(_PER_RECEIVE):
            try:
                tag, extra, flags, _ = self._socket.recvmsg(MAX_NBYTES, room)
            except BlockingIOError:
                break
            uid = _CREDENTIALS.unpack(extra[0][2])[1] if extra else -1
            if uid in ours and not flags & socket.MSG_TRUNC:
                tags.append(tag)
        return tags


class Outbox(_End):
    """Sends to one inbox."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_NBYTES)

    def check(self) -> None:
        """Raises `OSError` if the inbox was closed. Its process may still live."""
        if native.ext is None:
            self._socket.connect("\0" + self._name)
        elif code := native.ext.connect_abstract(self._socket.fileno(), self._name):
            raise OSError(code, os.strerror(code))

    def send(self, tag: bytes) -> int:
        """0 or the errno: EAGAIN if the inbox has no room."""
        if native.ext is not None:
            return int(native.ext.send_datagram(self._socket.fileno(), tag))
        try:
            self._socket.send(tag)
        except OSError as error:
            return error.errno or errno.EIO
        return 0


class Bell:
    """A descriptor that is readable between `ring` and `lower`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        if native.ext is not None:
            native.ext.raise_event(self._fd)
        else:
            os.eventfd_write(self._fd, 1)

    def lower(self) -> None:
        if native.ext is not None:
            native.ext.lower_event(self._fd)
        else:
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)
