"""One ROUTER socket per node: it listens, and it connects to any number of peers.

It moves lists of frames, and may lose them.

Sockets per peer have run fleets into libzmq's cap of 1023 sockets, and out of ports and descriptors. A ROUTER holds any
number of connections. This module makes a *route* for each endpoint that it connects to. A peer that connected to this
node is addressed by `route_of` its identity. Each side answers on the route a message came from. A restarted peer at
the same endpoint has the same route; the sessions inside the frames tell the processes apart. `renew` also keeps the
route, but gives the connection another name at libzmq and at the peer. A connection that claims a name in use cuts its
owner off silently, for as long as the owner uses it.

Each socket has its own libzmq context, which costs 6 descriptors and 2 threads; another socket in it would cost 1
descriptor. But a context has one handler of keys. In a shared context, a node whose driver does not turn would block
connections to every other node, and a flood at one node would slow the thread that all share. A process is one rank and
holds one node, seldom two.
"""

from __future__ import annotations

import math
import os
import re
import resource
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import zmq

from pdstage.closing import Closing
from pdstage.control.address import Address
from pdstage.control.guard import Guard
from pdstage.control.port import open_port
from pdstage.errors import PeerError, TransportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdstage.control.keys import Keys

MAX_FRAME_NBYTES = 16 << 20
MAX_FRAMES = 4096
"""Maximal frames of one message: libzmq caps a frame's size but not their number."""
MAX_MESSAGE_NBYTES = 16 << 20
"""Maximal size of a message of several frames: a sender splits a larger one."""
_MAX_MESSAGES_A_RECV = 1024
_SEALING_NBYTES = 33
"""Bytes that CURVE adds to a frame (RFC 26): command name, nonce, flags and authenticator."""
_HIGH_WATER = 4096
_DESCRIPTORS = 32
"""As many as a node takes: a context, its threads and a guarded socket, a transport, and a few for connections."""
_AGAIN = re.compile(rb"#[0-9a-f]{16}$")
"""A random suffix of a node's identity for each renewed connection, so that nobody can guess the name and take it."""


@dataclass(slots=True)
class ControlCounters:
    """Totals of one socket, in messages; a message is the frames of one turn to one route."""

    sent: int = 0
    received: int = 0
    unroutable: int = 0
    """Not sent: the route has no connection. This is loss, as on any wire."""
    full: int = 0
    """Not sent: the peer has stopped reading, and its queue is full."""
    refused: int = 0
    """Connections that failed, here or at the peer, because the keys did not match."""
    malformed: int = 0
    """Received and dropped: no frames, or more than `MAX_FRAMES`."""


class Ready(NamedTuple):
    """Why a wait ended; all empty after a timeout."""

    messages: bool
    woken: bool
    fds: tuple[int, ...]


def name_of(incarnation: int) -> str:
    """A process's name among its peers, as `ControlSocket.endpoint_of` gives it where it connected."""
    return incarnation.to_bytes(8, "little").hex()


def route_of(identity: bytes) -> bytes:
    """The route by which the peers of a node with this identity address it, after it connected to them.

    It adds a prefix to the identity, since libzmq reserves names that begin with a zero byte.
    """
    return b"=" + identity


def messages_of(frames: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The frames in messages that peers accept: at most `MAX_FRAMES`, and `MAX_MESSAGE_NBYTES` if several."""
    start = nbytes = 0
    for i, frame in enumerate(frames):
        nbytes += len(frame)
        if i > start and (nbytes > MAX_MESSAGE_NBYTES or i - start == MAX_FRAMES):
            yield frames[start:i]
            start, nbytes = i, len(frame)
    if frames:
        yield frames[start:]


_OPTIONS: dict[int, int | bytes] = {
    zmq.ROUTER_MANDATORY: 1,  # an unroutable message is counted, not silently dropped
    zmq.ROUTER_HANDOVER: 1,  # a peer that reconnects takes its name over from its dead connection
    zmq.LINGER: 0,
    zmq.SNDHWM: _HIGH_WATER,
    zmq.RCVHWM: _HIGH_WATER,
    zmq.RECONNECT_IVL: 20,
    zmq.RECONNECT_IVL_MAX: 1000,
    # Detects connections that a vanished machine or a middlebox left half open, by the kernel's probes: ZMTP's own
    # timer aborts the process if input is held back while a connection breaks ("!_io_error", libzmq issue 4364).
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 2,
    zmq.TCP_MAXRT: 15000,
}


def check_descriptors() -> None:
    """Raises `TransportError` if too few descriptors are left for a node: libzmq aborts the process without one."""
    held = []
    try:
        for _ in range(_DESCRIPTORS):
            held.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise TransportError(
            f"no node can be opened: fewer than {_DESCRIPTORS} descriptors are left ({error.strerror})",
            remedy=f"raise the limit of open files (`ulimit -n`, now {limit}), or find what holds them",
            limit=limit,
        ) from error
    finally:
        for fd in held:
            os.close(fd)


def _end(context: zmq.Context[zmq.Socket[bytes]], sockets: Iterable[zmq.Socket[bytes]]) -> None:
    for socket in sockets:
        socket.close(linger=0)
    context.term()


class ControlSocket(Closing):
    """A node's control socket. One thread at a time may wait and receive; meanwhile any may send, connect and `wake`.

    `bind` is `tcp://host:port`. With port 0 the system chooses; host "*" means every interface, and `advertise` then
    names the host for peers. With None nothing listens: the socket only connects. `identity` is unique to this process
    life, 1 to 240 bytes: the node's incarnation. With `keys` everything is encrypted, both ends authenticate, and
    `endpoint` carries this node's public key. `take_refusals` returns connections that fail on it.

    Raises `UsageError` for a bad address, `TransportError` if the address cannot be bound.
    """

    def __init__(
        self,
        bind: str | None = "tcp://127.0.0.1:0",
        *,
        identity: bytes,
        advertise: str | None = None,
        insecure: bool = False,
        keys: Keys | None = None,
    ) -> None:
        address = Address.parse(bind, "tcp", listening=True) if bind is not None else None
        if address is not None:
            address.check_exposure(insecure, keys)
        check_descriptors()
        self._identity = identity
        self._keys = keys
        self.counters = ControlCounters()
        self._routes: dict[str, bytes] = {}
        self._targets_at: dict[bytes, str] = {}  # the same, by route
        self._targets: dict[str, bytes] = {}  # what is connected to, with the key found there
        self._renewed: dict[bytes, bytes] = {}  # libzmq's id of a renewed route
        self._renewed_from: dict[bytes, bytes] = {}
        """The route by every id that a renewal has given it: messages of ended connections may still come."""
        self._gave_up = False
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        sealed_nbytes = MAX_FRAME_NBYTES + (_SEALING_NBYTES if keys is not None else 0)
        try:
            for option, value in (_OPTIONS | {zmq.IDENTITY: route_of(identity), zmq.MAXMSGSIZE: sealed_nbytes}).items():
                self._socket.setsockopt(option, value)
            self._guard = Guard(self._context, self._socket, keys, self._targets) if keys is not None else None
            self.endpoint = self._bind(address, advertise) if address is not None else ""
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # A context that is collected before its sockets waits for them for ever, and garbage is collected in no order.
        # A finalizer that holds them all makes an unclosed node harmless.
        guarding = self._guard.sockets if self._guard is not None else ()
        self._finalizer = weakref.finalize(self, _end, self._context, (self._socket, *guarding))
        self._finalizer.atexit = False  # at exit the process ends anyway, and a thread may still use them
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._using = threading.Lock()
        self._port = open_port(self._socket, self._wake_fd, self._using, MAX_FRAMES)

    def _bind(self, address: Address, advertise: str | None) -> str:
        self._socket.ipv6 = address.is_ipv6
        try:
            self._socket.bind(f"tcp://{address}" if address.host else f"tcp://*:{address.port}")
        except zmq.ZMQError as error:
            raise TransportError(
                f"the control socket cannot listen on {address} ({error.strerror})",
                remedy="name an address of this machine and a free port, or port 0",
                address=str(address),
            ) from error
        bound = Address.parse(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), "tcp", listening=True)
        if self._guard is not None:
            self._guard.port = bound.port
        return f"tcp://{bound.reachable(advertise, self._keys).keyed}"

    def connect(self, endpoint: str) -> bytes:
        """The route to `endpoint`; connects if there is none yet. Never blocks, even if nothing listens there.

        Messages wait in a queue until the peer listens. Raises `UsageError` for an invalid endpoint, if only one side
        has keys, or if the peer's key is not allowed here.
        """
        address = Address.parse(endpoint, "tcp")
        target = f"tcp://{address}"
        key, fresh = address.key_of_peer(self._keys), False
        with self._using:
            if target in self._routes and self._targets[target] != key:  # another process listens there now
                self._disconnect(target)
            route = self._routes.get(target)
            if route is None:
                route = self._connect(target, address, key)
                self._routes[target], self._targets_at[route], self._targets[target] = route, target, key
                fresh = True
        if fresh:
            self._port.look_again()
        return route

    def renew(self, route: bytes) -> None:
        """Replaces the connection of a route; its queued messages are lost. Unknown routes are ignored."""
        with self._using:
            target = self._targets_at.get(route)
            if target is None:
                return
            self._drop(target)
            known_as = self._connect(target, Address.parse(target, "tcp"), self._targets[target])
            self._renewed[route], self._renewed_from[known_as] = known_as, route
        self._port.look_again()

    def _connect(self, target: str, address: Address, key: bytes) -> bytes:
        """Connects, and returns libzmq's id of the connection."""
        # libzmq aborts the process over a routing id in use, also by a closing connection. So no id is used twice, and
        # no peer can guess and claim one.
        route = b"@" + secrets.token_bytes(15)
        # The name under which the peer knows us is not used twice either: its handover between two connections of one
        # name keeps the one whose greeting it serves last, which may be the older, closing one.
        again = b"#" + secrets.token_hex(8).encode() if self._gave_up else b""
        self._socket.identity = route_of(self._identity) + again
        self._socket.ipv6 = address.is_ipv6
        self._socket.connect_routing_id = route
        if self._keys is not None:  # from here on a client: the listener copied its options when it was bound
            self._socket.curve_publickey = self._keys.public
            self._socket.curve_secretkey = self._keys.secret
            self._socket.curve_serverkey = key
        try:
            self._socket.connect(target)
        except zmq.ZMQError as error:
            raise UsageError(
                f"cannot connect the control socket to {target!r} ({error.strerror})",
                remedy="give the endpoint a node published",
                address=target,
            ) from error
        return route

    def endpoint_of(self, route: bytes) -> str:
        """The endpoint that `route` was connected to; for a peer that connected to us, its identity in hexadecimal, the
        same over all its connections.
        """
        with self._using:
            return self._targets_at.get(route) or _AGAIN.sub(b"", route.removeprefix(b"=")).hex() or "unknown"

    def disconnect(self, route: bytes) -> None:
        """Drops a connection made by `connect`, and its queued messages. Unknown routes are ignored.

        The next connection to the same endpoint has another route there.
        """
        with self._using:
            target = self._targets_at.get(route)
            if target is not None:
                self._disconnect(target)
        self._port.look_again()

    def _disconnect(self, target: str) -> None:
        route = self._routes.pop(target)
        del self._targets_at[route], self._targets[target]
        if self._renewed.pop(route, None) is not None:
            self._renewed_from = {one: to for one, to in self._renewed_from.items() if to != route}
        self._drop(target)

    def _drop(self, target: str) -> None:
        if self._guard is not None:
            self._guard.forget(target)
        self._gave_up = True
        if failed := self._port.disconnect(target):
            raise TransportError(f"{target} is not let go of ({zmq.strerror(failed)})", remedy="make a new node")

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        """Sends `frames` to `route` as one message, without waiting. False: it was lost, and counted.

        Raises `UsageError` for a frame that peers do not accept, for no frames, or for too many.
        """
        largest = max(map(len, frames), default=0)
        if not 1 <= len(frames) <= MAX_FRAMES or largest > MAX_FRAME_NBYTES:
            raise UsageError(
                f"a control message of {len(frames)} frames, the largest of {largest} bytes",
                remedy=f"send 1 to {MAX_FRAMES} frames of at most {MAX_FRAME_NBYTES} bytes",
            )
        failed = self._port.send(self._renewed.get(route, route), frames)
        if not failed:
            self.counters.sent += 1
        elif failed == zmq.EAGAIN:
            self.counters.full += 1
        elif failed == zmq.EHOSTUNREACH:
            self.counters.unroutable += 1
        else:
            raise TransportError(f"the control socket failed ({zmq.strerror(failed)})", remedy="make a new node")
        return not failed

    def recv(self) -> list[tuple[bytes, list[bytes]]]:
        """What has arrived, as (route, frames), oldest first; empty if nothing. At most 1024 messages per call, and no
        more after 16 MiB.
        """
        if self._guard is not None:
            self._guard.serve()
        messages, n_malformed = self._port.recv(_MAX_MESSAGES_A_RECV, MAX_MESSAGE_NBYTES)
        self.counters.malformed += n_malformed
        self.counters.received += len(messages)
        if self._renewed_from:
            messages = [(self._renewed_from.get(route, route), frames) for route, frames in messages]
        return messages

    def arrivals(self, until: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """What arrives until then (monotonic), as (route, frames). Raises `PeerError` if a connection fails on keys."""
        while (left_s := until - time.monotonic()) > 0:
            self.wait(left_s)
            yield from self.recv()
            for _, error in self.take_refusals():
                raise error

    def wait(self, timeout_s: float | None, extra_fds: Sequence[int] = ()) -> Ready:
        """Waits until a message is there, `wake` was called, one of `extra_fds` is readable, or `timeout_s` is over.

        None waits without limit, 0 only checks. `messages` stays true while any is left. One wake-up is reported for
        all calls of `wake` before it. A refusal counts as a wake-up.
        """
        until = math.inf if timeout_s is None else time.monotonic() + max(0.0, timeout_s)
        guard = self._guard
        guarding = guard.fds if guard is not None else frozenset()
        while True:
            refused = guard is not None and bool(guard.refusals)
            left_s = 0.0 if refused else -1.0 if timeout_s is None else max(0.0, until - time.monotonic())
            messages, woken, fds = self._port.wait(left_s, (*extra_fds, *guarding))
            if guard is not None and not guarding.isdisjoint(fds):
                guard.serve()
                refused = bool(guard.refusals)
                fds = tuple(fd for fd in fds if fd not in guarding)
            if messages or woken or refused or fds or time.monotonic() >= until:
                return Ready(messages, woken or refused, fds)

    def take_refusals(self) -> list[tuple[bytes, PeerError]]:
        """The connections that failed on keys since the last call: the route, if this node made it, and why.

        Such a route is gone: messages sent on it are lost, and `connect` makes a new one.
        """
        if self._guard is None or not self._guard.refusals:
            return []
        refusals, self._guard.refusals = self._guard.refusals, []
        self.counters.refused += len(refusals)
        taken = []
        with self._using:
            for target, error in refusals:
                taken.append((self._routes.get(target, b""), error))
                if target in self._routes:
                    self._disconnect(target)
        return taken

    def wake(self) -> None:
        """Ends the current or the next `wait`; does nothing once closed. Any thread may call it, cheaply."""
        self._port.wake()

    @property
    def closed(self) -> bool:
        return self._wake_fd < 0

    def close(self) -> None:
        """Closes every connection and drops unsent messages. Idempotent."""
        if self.closed:
            return
        self._port.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)
        self._finalizer()
