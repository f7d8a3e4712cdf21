"""The socket calls on every message's path: send, receive, wait, wake.

Several threads may use a port: one waits and receives, any may send and wake. There are two ports. The one of `_native`
keeps the interpreter's lock in every call, except in a wait with nothing to do. Otherwise a busy Python thread would
delay each call for a switch interval. `ControlPort` does the same through pyzmq: plainly, and slower.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from collections.abc import Sequence

import zmq

from pdstage import native

_BACKEND = "zmq.backend.cython._zmq"
_LOOK_S = 0.002
"""libzmq announces an arrival once, and a call of another thread may take that in: so a wait looks this often."""


def open_port(socket: zmq.Socket[bytes], wake_fd: int, using: threading.Lock, max_frames: int) -> ControlPort:
    """The native port of `socket`. Without the extension, or if it cannot see pyzmq's libzmq, the Python port.

    `wake_fd` is a non-blocking eventfd. `using` is held by every caller of `socket` itself. The Python port takes it
    too. The native port needs it only beside pyzmq's connect and setsockopt, which keep the interpreter's lock.
    Messages of no frame, or of more than `max_frames`, are dropped.
    """
    backend = sys.modules.get(_BACKEND)
    if native.ext is not None and backend is not None and backend.__file__:
        try:
            port: ControlPort = native.ext.ControlPort(backend.__file__, socket.underlying, wake_fd, max_frames)
        except RuntimeError:  # a private libzmq, or an unknown version
            pass
        else:
            return port
    return ControlPort(socket, wake_fd, using, max_frames)


class ControlPort:
    """The port through pyzmq; the native one is used alike. After `close` only `wake` and `close` may be called, and do
    nothing.
    """

    def __init__(self, socket: zmq.Socket[bytes], wake_fd: int, using: threading.Lock, max_frames: int) -> None:
        self._socket, self._wake_fd, self._using, self._max_frames = socket, wake_fd, using, max_frames
        self._fd = int(socket.getsockopt(zmq.FD))
        self._aside: list[list[bytes]] = []
        self._wake_lock = threading.Lock()
        self._closed = False

    def send(self, route: bytes, frames: Sequence[bytes]) -> int:
        """Queues one message without waiting; 0 or the errno."""
        with self._using:
            try:
                self._socket.send_multipart([route, *frames], zmq.DONTWAIT)
            except zmq.ZMQError as error:
                return int(error.errno or 0)
        return 0

    def recv(self, max_messages: int, enough_nbytes: int) -> tuple[list[tuple[bytes, list[bytes]]], int]:
        """What has arrived, as (route, frames), and how many messages were dropped.

        Stops after the message that reaches `enough_nbytes`.
        """
        messages: list[tuple[bytes, list[bytes]]] = []
        n_malformed = nbytes = 0
        with self._using:
            while len(messages) + n_malformed < max_messages and nbytes < enough_nbytes and self._has_message():
                route, *frames = self._aside.pop(0) if self._aside else self._socket.recv_multipart(zmq.DONTWAIT)
                nbytes += sum(map(len, frames))
                if 1 <= len(frames) <= self._max_frames:
                    messages.append((route, frames))
                else:
                    n_malformed += 1
        return messages, n_malformed

    def disconnect(self, endpoint: str) -> int:
        """Ends a connection that the socket made; 0 or the errno. Its messages that were not received are lost. The
        caller holds the lock `using`.

        Looking for messages takes the first frame of the next one. libzmq 4.3 ends the process, or mixes two peers'
        frames, if that message's connection is ended then. So a message is taken whole before, for the next `recv`.
        """
        if is_readable(self._socket):
            self._aside.append(self._socket.recv_multipart(zmq.DONTWAIT))
            self.wake()
        try:
            self._socket.disconnect(endpoint)
        except zmq.ZMQError as error:
            return int(error.errno or 0)
        return 0

    def wait(self, timeout_s: float, fds: Sequence[int]) -> tuple[bool, bool, tuple[int, ...]]:
        """(a message is there, `wake` was called, which of `fds` are readable); a negative timeout has no end.

        Never ends early, and up to a millisecond late.
        """
        until = time.monotonic() + timeout_s if timeout_s >= 0 else math.inf
        poller = select.poll()
        for fd in {self._fd, self._wake_fd, *fds}:
            poller.register(fd, select.POLLIN)
        while True:
            with self._using:
                messages = self._has_message()
            left_s = 0.0 if messages else max(0.0, until - time.monotonic())
            ready = {fd for fd, _ in poller.poll(math.ceil(1000 * min(left_s, _LOOK_S)))}
            woken = self._wake_fd in ready
            with self._wake_lock:
                if self._closed:
                    return False, True, ()
                if woken:
                    os.eventfd_read(self._wake_fd)
            readable = tuple(fd for fd in fds if fd in ready)
            if messages or woken or readable or left_s == 0:
                return messages, woken, readable

    def wake(self) -> None:
        """Ends the current or the next wait."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def look_again(self) -> None:
        """Call this after using the socket itself, which may have consumed an arrival's signal. Nothing to do here,
        where a wait looks again by itself; the native port tells a waiting thread.
        """

    def close(self) -> None:
        """Ends another thread's wait. The caller then closes the socket and the descriptor."""
        self.wake()
        with self._wake_lock:
            self._closed = True

    def _has_message(self) -> bool:
        return bool(self._aside) or is_readable(self._socket)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))
