"""The calls of a control socket that every message passes: send, receive, wait, wake.

A port may be used by several threads: one waits and receives, any may send and wake. There are two of them. `_native`'s
keeps the interpreter through every call but a wait with nothing to do; a busy Python thread would hold each call that
gives it away for a switch interval. `ControlPort` here does the same through pyzmq, which gives it away in every call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

import zmq

from pdstage import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    Messages = list[tuple[bytes, list[bytes]]]

# Plain integers: combining pyzmq's flag enums costs more than a small send.
_LAST = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT) | int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
_SRCFD = int(zmq.SRCFD)
_SHORT = 255
"""ZMTP 3 (RFC 23): before a frame go flags and its length, of one byte up to this size, else of eight."""
_BACKEND = "zmq.backend.cython._zmq"


class Port(Protocol):
    """What both ports do. None of it may be called after `close`, but `wake` and `close` do nothing then."""

    def send(self, route: bytes, frames: Sequence[bytes]) -> int:
        """Queues one message without waiting; 0 or the errno."""

    def recv(self, max_messages: int, max_frames: int, enough_nbytes: int) -> tuple[Messages, int]:
        """What has arrived, as (route, frames), and how many messages of no or too many frames were dropped.

        None after the one with which it is `enough_nbytes`.
        """

    def taken(self, connection: int) -> int:
        """Bytes of the wire that were taken out, of messages that came by this descriptor."""

    def forget(self, connection: int) -> None:
        """The descriptor is another connection's from now on: nothing was taken of it."""

    def wait(self, timeout_ms: int, fds: Sequence[int]) -> tuple[bool, bool, tuple[int, ...]]:
        """(a message is there, `wake` was called, which of `fds` are readable); a negative timeout has no end."""

    def wake(self) -> None:
        """Ends the current or the next wait."""

    def look_again(self) -> None:
        """After a call of the socket itself, which may have taken in the word of an arrival: tells a waiting thread."""

    def close(self) -> None:
        """Ends a wait of another thread; the caller then closes the socket and the descriptor."""


def open_port(socket: zmq.Socket[bytes], wake_fd: int, using: threading.Lock, sealing_nbytes: int = 0) -> Port:
    """The native port of `socket`, or the Python one where the extension is off or cannot see pyzmq's libzmq.

    `wake_fd` is a non-blocking eventfd. `using` is held by whoever calls `socket` itself: the Python port takes it too,
    the native one needs none beside pyzmq's connect and setsockopt, which keep the interpreter. `sealing_nbytes` is
    what encryption adds to a frame.
    """
    backend = sys.modules.get(_BACKEND)
    if native.ext is not None and backend is not None and backend.__file__:
        try:
            port: Port = native.ext.ControlPort(backend.__file__, socket.underlying, wake_fd, sealing_nbytes)
        except RuntimeError:  # a libzmq linked in privately, or of a version unknown here
            pass
        else:
            return port
    return ControlPort(socket, wake_fd, using, sealing_nbytes)


class ControlPort:
    """The port through pyzmq."""

    def __init__(self, socket: zmq.Socket[bytes], wake_fd: int, using: threading.Lock, sealing_nbytes: int = 0) -> None:
        self._socket = socket
        self._sealing_nbytes = sealing_nbytes
        self._taken: Counter[int] = Counter()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._wake_fd = wake_fd
        self._using = using
        self._wake_lock = threading.Lock()
        self._wake_pending = False
        self._n_waiting = 0
        self._closed = False

    def send(self, route: bytes, frames: Sequence[bytes]) -> int:
        send = self._socket.send
        for frame in frames:
            if not isinstance(frame, bytes):  # seen before the first is sent: half a message would begin the next one
                raise TypeError(f"a frame of type {type(frame).__name__}, not bytes")
        with self._using:
            try:
                send(route, _MORE)
                for frame in frames[:-1]:
                    send(frame, _MORE)
                send(frames[-1], _LAST)
            except zmq.ZMQError as error:
                return int(error.errno or 0)
        self.look_again()
        return 0

    def recv(self, max_messages: int, max_frames: int, enough_nbytes: int) -> tuple[Messages, int]:
        messages: Messages = []
        n_malformed = n_taken = 0
        with self._using:
            for _ in range(max_messages):
                # Asked, because raising zmq.Again costs 10 us.
                if n_taken >= enough_nbytes or not self._has_message():
                    break
                first = self._socket.recv(_LAST, copy=False)
                route, frames = first.bytes, self._socket.recv_multipart(_LAST) if first.more else []
                sealed = [len(frame) + self._sealing_nbytes for frame in frames]
                nbytes = sum(sealed) + 2 * len(sealed) + 7 * sum(n > _SHORT for n in sealed)
                self._taken[int(first.get(_SRCFD))] += nbytes
                n_taken += nbytes
                if 1 <= len(frames) <= max_frames:
                    messages.append((route, frames))
                else:
                    n_malformed += 1
        return messages, n_malformed

    def taken(self, connection: int) -> int:
        return self._taken[connection]

    def forget(self, connection: int) -> None:
        self._taken.pop(connection, None)

    def wait(self, timeout_ms: int, fds: Sequence[int]) -> tuple[bool, bool, tuple[int, ...]]:
        until = time.monotonic() + timeout_ms / 1000
        watched = [(fd, _POLLIN) for fd in (self._fd, self._wake_fd, *fds)]
        self._n_waiting += 1
        try:
            while True:
                with self._using:
                    messages = self._has_message()
                left_ms = max(0, round((until - time.monotonic()) * 1000)) if timeout_ms >= 0 else -1
                ready = {fd for fd, _ in zmq.zmq_poll(watched, 0 if messages else left_ms)}
                woken = self._wake_fd in ready
                with self._wake_lock:
                    if self._closed:
                        return False, True, ()
                    if woken:
                        self._wake_pending = False  # first: a Ctrl-C in between costs no wake-up then
                        os.eventfd_read(self._wake_fd)
                if not messages and self._fd in ready:
                    with self._using:
                        messages = self._has_message()
                readable = tuple(fd for fd in fds if fd in ready)
                if messages or woken or readable or left_ms == 0:
                    return messages, woken, readable
        finally:
            self._n_waiting -= 1

    def wake(self) -> None:
        if self._wake_pending:
            return  # read without the lock: the waiter clears it before it returns, so that wake-up covers this call
        with self._wake_lock:
            if not self._wake_pending and not self._closed:
                self._wake_pending = True
                os.eventfd_write(self._wake_fd, 1)

    def look_again(self) -> None:
        with self._using:
            unheard = self._n_waiting and self._has_message()
        if unheard:
            self.wake()

    def close(self) -> None:
        self.wake()
        with self._wake_lock:
            self._closed = True

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)
