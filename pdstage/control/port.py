"""The socket calls on every message's path: send, receive, wait, wake.

Several threads may use a port: one waits and receives, any may send and wake. There are two ports. The one of `_native`
keeps the interpreter's lock in every call, except in a wait with nothing to do. Otherwise a busy Python thread would
delay each call for a switch interval. `ControlPort` does the same through pyzmq, which releases the lock in every call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

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
"""ZMTP 3 (RFC 23): flags and a length precede each frame; the length has one byte up to this size, else eight."""
_BACKEND = "zmq.backend.cython._zmq"


_LIBC = ctypes.CDLL(None, use_errno=True)


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def open_port(socket: zmq.Socket[bytes], wake_fd: int, using: threading.Lock, sealing_nbytes: int = 0) -> ControlPort:
    """The native port of `socket`. Without the extension, or if it cannot see pyzmq's libzmq, the Python port.

    `wake_fd` is a non-blocking eventfd. `using` is held by every caller of `socket` itself. The Python port takes it
    too. The native port needs it only beside pyzmq's connect and setsockopt, which keep the interpreter's lock.
    `sealing_nbytes` is what encryption adds to a frame.
    """
    backend = sys.modules.get(_BACKEND)
    if native.ext is not None and backend is not None and backend.__file__:
        try:
            port: ControlPort = native.ext.ControlPort(backend.__file__, socket.underlying, wake_fd, sealing_nbytes)
        except RuntimeError:  # a private libzmq, or an unknown version
            pass
        else:
            return port
    return ControlPort(socket, wake_fd, using, sealing_nbytes)


class ControlPort:
    """The port through pyzmq; the native one is used alike. After `close` only `wake` and `close` may be called, and do
    nothing.
    """

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
        self._aside: Messages = []
        self._n_malformed_aside = 0

    def send(self, route: bytes, frames: Sequence[bytes]) -> int:
        """Queues one message without waiting; 0 or the errno."""
        send = self._socket.send
        for frame in frames:
            if not isinstance(frame, bytes):  # checked before sending: half a message would become part of the next
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
        """What has arrived, as (route, frames), and how many messages were dropped for having no or too many frames.

        Stops after the message that reaches `enough_nbytes`.
        """
        n_taken = 0
        with self._using:
            for _ in range(max_messages):
                # Polled first, because raising zmq.Again costs 10 us.
                if n_taken >= enough_nbytes or not self._is_readable():
                    break
                n_taken += self._take(max_frames)
            messages, self._aside = self._aside, []
            n_malformed, self._n_malformed_aside = self._n_malformed_aside, 0
        return messages, n_malformed

    def _take(self, max_frames: int) -> int:
        """Adds the next message to those set aside; its bytes on the wire."""
        first = self._socket.recv(_LAST, copy=False)
        route, frames = first.bytes, self._socket.recv_multipart(_LAST) if first.more else []
        sealed = [len(frame) + self._sealing_nbytes for frame in frames]
        nbytes = sum(sealed) + 2 * len(sealed) + 7 * sum(n > _SHORT for n in sealed)
        self._taken[int(first.get(_SRCFD))] += nbytes
        if 1 <= len(frames) <= max_frames:
            self._aside.append((route, frames))
        else:
            self._n_malformed_aside += 1
        return nbytes

    def disconnect(self, endpoint: str, max_frames: int) -> int:
        """Ends a connection that the socket made; 0 or the errno. Its messages that were not received are lost. The
        caller holds the lock `using`.

        Looking for messages takes the first frame of the next one. libzmq 4.3 ends the process, or mixes two peers'
        frames, if that message's connection is ended then. So a message is taken whole before, for the next `recv`.
        """
        if self._is_readable():
            self._take(max_frames)
            self.wake()
        try:
            self._socket.disconnect(endpoint)
        except zmq.ZMQError as error:
            return int(error.errno or 0)
        return 0

    def taken(self, connection: int) -> int:
        """Wire bytes taken out so far, of messages that came by this descriptor."""
        return self._taken[connection]

    def forget(self, connection: int) -> None:
        """The descriptor belongs to another connection from now on: its count restarts at zero."""
        self._taken.pop(connection, None)

    def wait(self, timeout_s: float, fds: Sequence[int]) -> tuple[bool, bool, tuple[int, ...]]:
        """(a message is there, `wake` was called, which of `fds` are readable); a negative timeout has no end.

        Never ends early, and late by what the kernel's timers are (50 us by default, PR_SET_TIMERSLACK of prctl(2)).
        """
        until = time.monotonic() + timeout_s
        self._n_waiting += 1
        try:
            while True:
                with self._using:
                    messages = self._has_message()
                left_s = 0.0 if messages else max(0.0, until - time.monotonic()) if timeout_s >= 0 else -1.0
                ready = _poll((self._fd, self._wake_fd, *fds), left_s)
                woken = self._wake_fd in ready
                with self._wake_lock:
                    if self._closed:
                        return False, True, ()
                    if woken:
                        self._wake_pending = False  # first: then a Ctrl-C in between loses no wake-up
                        os.eventfd_read(self._wake_fd)
                if not messages and self._fd in ready:
                    with self._using:
                        messages = self._has_message()
                readable = tuple(fd for fd in fds if fd in ready)
                if messages or woken or readable or left_s == 0:
                    return messages, woken, readable
        finally:
            self._n_waiting -= 1

    def wake(self) -> None:
        """Ends the current or the next wait."""
        if self._wake_pending:
            return  # read without the lock: the waiter clears it before it returns, so that wake-up covers this call
        with self._wake_lock:
            if not self._wake_pending and not self._closed:
                self._wake_pending = True
                os.eventfd_write(self._wake_fd, 1)

    def look_again(self) -> None:
        """Call this after using the socket itself, which may have consumed an arrival's signal. It tells a waiting
        thread.
        """
        with self._using:
            unheard = self._n_waiting and self._has_message()
        if unheard:
            self.wake()

    def close(self) -> None:
        """Ends another thread's wait. The caller then closes the socket and the descriptor."""
        self.wake()
        with self._wake_lock:
            self._closed = True

    def _has_message(self) -> bool:
        return bool(self._aside) or self._is_readable()

    def _is_readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _poll(fds: Sequence[int], timeout_s: float) -> set[int]:
    """Those of `fds` that are readable: ppoll(2), since what Python and pyzmq have counts in milliseconds."""
    watched = (_PollFd * len(fds))(*(_PollFd(fd, select.POLLIN, 0) for fd in fds))
    longest = None if timeout_s < 0 else ctypes.byref(_Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)))
    n_ready = _LIBC.ppoll(watched, ctypes.c_ulong(len(fds)), longest, None)
    if n_ready < 0 and (number := ctypes.get_errno()) != errno.EINTR:
        raise OSError(number, os.strerror(number))
    return {one.fd for one in watched if one.revents} if n_ready > 0 else set()
