"""The connections of a control socket, and a limit on the received bytes that libzmq holds for each.

libzmq limits the size of a frame and the number of whole messages that wait, but not the number of frames in a message.
It takes in all frames of a message that does not end, and cannot be told to close the connection. But the kernel counts
the bytes received by each connection (TCP_INFO) and those that libzmq has not read (FIONREAD, up to tcp_rmem, which may
be more than a message), and the port counts the bytes taken out. Shutting libzmq's descriptor down from outside makes
it release what it held of that connection.

The thread that waits on the socket checks this some times a second, and only if the process has grown. A check reads
the counts one after the other, and a busy machine may stop the thread in between. Whole messages of honest peers may
have arrived since it found that none waits, or more than the node could take out. So a connection is ended only if two
checks in a row find too much, and nothing was taken out of it in between. The second follows as soon as the node has
taken out its share of messages.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket as sockets
import struct
import termios
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq

from pdstage.control.guard import HANDSHAKE_EVENTS
from pdstage.errors import PeerError
from pdstage.log_limit import LogLimit

if TYPE_CHECKING:
    from pdstage.control.counters import ControlCounters
    from pdstage.control.guard import Guard
    from pdstage.control.port import ControlPort

log = logging.getLogger(__name__)

MAX_UNFINISHED_NBYTES = 24 << 20
"""Limit for one connection while no whole message waits. Honest messages stay below it."""
MAX_HELD_NBYTES = 128 << 20
"""Limit for all connections together, whole messages included: beyond it their senders are faster than this node."""
LOOK_S = 0.05
_LOOK_AGAIN_S = 0.001
_SERVE_S = 0.005
_GROWN_NBYTES = 8 << 20
_SMALL_NBYTES = 1 << 20
"""Connections that hold less are never ended: many honest ones may add up."""

_MONITOR = "inproc://pdstage.monitor"
_EVENT = struct.Struct("=HI")
_ACCEPTED, _CONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_CONNECTED)
_GONE = int(zmq.EVENT_DISCONNECTED)
_POLLIN = int(zmq.POLLIN)
_MAX_AT_ONCE = 4096
_COUNT = struct.Struct("=i")
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` of linux/tcp.h's tcp_info, since Linux 4.1."""
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


class _Open(NamedTuple):
    """A connection. `port` is this end's if it was accepted, else the other end's; it reveals a reused descriptor."""

    accepted: bool
    port: int


class Inflow:
    """The connections of one socket. Created before it binds. `guard` is served by the same waits."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        guard: Guard | None,
        counters: ControlCounters,
    ) -> None:
        self._guard = guard
        self._counters = counters
        socket.monitor(_MONITOR, _ACCEPTED | _CONNECTED | _GONE | (HANDSHAKE_EVENTS if guard is not None else 0))
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(_MONITOR)
        self._monitor.getsockopt(zmq.EVENTS)  # a pipe announces nothing until it was found empty once
        own = int(self._monitor.getsockopt(zmq.FD))
        self.fds = frozenset([own] if guard is None else [own, guard.fd])
        self.sockets = (self._monitor,) if guard is None else (self._monitor, guard.socket)
        self._open: dict[int, _Open] = {}
        self._look_at = self._serve_at = 0.0
        self._low_nbytes = 0
        self._unfinished: dict[int, int] = {}
        """Connections that held too much of an unfinished message at the last check, and what was taken out of each."""
        self._excess_nbytes = 0
        """Bytes held by all connections together, at the last check."""
        self._log_limit = LogLimit()

    def pause_s(self, left_s: float) -> float:
        """How much of a wait passes before the next `look`; a negative wait has no end."""
        pause_s = _LOOK_AGAIN_S if self._unfinished or self._excess_nbytes else LOOK_S
        if not self._open or 0 <= left_s < pause_s:
            return left_s
        return pause_s

    def serve_sometimes(self, port: ControlPort, now: float) -> None:
        """`serve` for a caller that never waits; most calls only read the clock."""
        if now >= self._serve_at:
            self._serve_at = now + _SERVE_S
            self.serve(port)

    def serve(self, port: ControlPort) -> None:
        """Answers libzmq's requests and takes in its events until none is left."""
        if self._guard is not None:
            self._guard.answer()
        events: list[tuple[int, int, str]] = []
        while int(self._monitor.getsockopt(zmq.EVENTS)) & _POLLIN:
            head, endpoint = self._monitor.recv_multipart()
            events.append((*_EVENT.unpack(head), endpoint.decode()))
            if len(events) == _MAX_AT_ONCE:
                self._take_in(events, port)
                events = []
        self._take_in(events, port)

    def _take_in(self, events: list[tuple[int, int, str]], port: ControlPort) -> None:
        for what, value, endpoint in events:
            number = endpoint.rpartition(":")[2]
            if what in (_ACCEPTED, _CONNECTED) and number.isdigit():  # no number if it is gone already
                self._open[value] = _Open(what == _ACCEPTED, int(number))
                port.forget(value)
            elif what == _GONE:
                self._open.pop(value, None)
        if self._guard is not None:
            self._guard.take_in(events)

    def look(self, port: ControlPort, now: float, *, drained: bool) -> None:
        """Ends connections that hold too much, the largest first. `drained`: no whole message waits.

        Most calls only read the clock.
        """
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        try:
            resident_nbytes = _resident_nbytes()
        except OSError:  # no descriptor is left: check all the same
            resident_nbytes = self._low_nbytes + _GROWN_NBYTES
        self._low_nbytes = min(self._low_nbytes, resident_nbytes)
        if resident_nbytes - self._low_nbytes < _GROWN_NBYTES:
            self._unfinished, self._excess_nbytes = {}, 0
            return
        held = self._held(port)
        excess_nbytes = max(0, sum(held.values()) - MAX_HELD_NBYTES)
        large = {fd: port.taken(fd) for fd, nbytes in held.items() if nbytes > MAX_UNFINISHED_NBYTES}
        again = {fd: taken for fd, taken in large.items() if self._unfinished.get(fd) == taken}
        excess = min(excess_nbytes, self._excess_nbytes)
        unfinished = large if drained else again
        for fd, nbytes in sorted(held.items(), key=lambda one: -one[1]):
            if nbytes < _SMALL_NBYTES:
                break
            if excess > 0 or (drained and fd in again):
                self._cut(fd, nbytes, now)
                excess -= nbytes
                excess_nbytes -= nbytes
                unfinished.pop(fd, None)
        self._unfinished, self._excess_nbytes = unfinished, max(0, excess_nbytes)
        if self._unfinished or self._excess_nbytes:
            self._look_at = now + _LOOK_AGAIN_S
        else:
            self._low_nbytes = resident_nbytes

    def _held(self, port: ControlPort) -> dict[int, int]:
        """By descriptor: the bytes that libzmq has read from each connection and that were not taken out."""
        held = {}
        for fd, known in list(self._open.items()):
            try:
                held[fd] = _read_nbytes(fd, known) - port.taken(fd)
            except (OSError, struct.error):  # libzmq does not report those that it closes itself
                del self._open[fd]
        return held

    def _cut(self, fd: int, nbytes: int, now: float) -> None:
        with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as connection:
            if not _is(connection, self._open[fd]):
                return
            host = str(connection.getpeername()[0])
            connection.shutdown(sockets.SHUT_RDWR)
            del self._open[fd]
            self._counters.ended += 1
            error = PeerError(
                f"ended a connection with {host}: {nbytes >> 20} MiB of it waited for the end of a message, or for "
                "this node",
                remedy="if it belongs to this cluster, let this node turn more often; else keep it off this port",
            )
            if self._log_limit.due(host, error.remedy, now):  # not the numbers: they differ each time
                log.warning("%s", error)


def _read_nbytes(fd: int, known: _Open) -> int:
    """The bytes read from a connection so far. Raises `OSError` if the descriptor is no longer that connection's."""
    connection = sockets.socket(sockets.AF_INET, sockets.SOCK_STREAM, fileno=fd)
    try:
        if not _is(connection, known):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _BYTES_RECEIVED.size)
        (unread_nbytes,) = _COUNT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(_COUNT.size)))
        return int(_BYTES_RECEIVED.unpack(info)[0]) - int(unread_nbytes)
    finally:
        connection.detach()


def _is(connection: sockets.socket, known: _Open) -> bool:
    """Whether the descriptor is still that connection: libzmq may have closed it and opened another."""
    address = connection.getsockname() if known.accepted else connection.getpeername()
    return len(address) > 1 and address[1] == known.port


def _resident_nbytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_NBYTES
