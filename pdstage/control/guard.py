"""Who may connect to a CURVE socket, and why connections failed.

libzmq asks a ZAP handler (RFC 27) of its context about every client key, and reports handshakes on a monitor socket.
The thread that waits on the control socket serves both in between, so no extra thread can outlive the socket. libzmq's
reports wait in a bounded queue. If nothing waits on the socket, the queue fills and libzmq's thread waits too. With an
enforced ZAP domain, a missing handler lets nobody in.
"""

from __future__ import annotations

import logging
import re
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING

import zmq

from pdstage.control.port import is_readable
from pdstage.errors import PeerError
from pdstage.log_limit import LogLimit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.control.keys import Keys

log = logging.getLogger(__name__)

_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://pdstage.monitor"
_EVENT = struct.Struct("=HI")
_DOMAIN = b"pdstage"
_GOOD = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_PROTOCOL, _AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_IP = re.compile(r"tcp://([\d.]+|\[.*\]):")
_OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_BROKEN_OFF_IS_FINAL = 3
"""A server that expects another key of itself is silent: it closes the connection, as a server that ends does."""


class Guard:
    """Guards one socket: makes it a CURVE server, answers its ZAP requests, and collects refusals.

    Created before the socket binds. `targets`: what the socket is connected to, by libzmq's name, with its key.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        keys: Keys,
        targets: Mapping[str, bytes],
    ) -> None:
        self._keys = keys
        self._targets = targets
        self._handler = context.socket(zmq.ROUTER)  # a REP is stuck if a Ctrl-C comes between request and answer
        self._handler.bind(_ZAP)
        socket.monitor(_MONITOR, _GOOD | _BROKEN_OFF | _PROTOCOL | _AUTH)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.connect(_MONITOR)
        self._monitor.getsockopt(zmq.EVENTS)  # a pipe announces nothing until it was found empty once
        self.sockets = self._handler, self._monitor
        self.fds = frozenset(int(one.getsockopt(zmq.FD)) for one in self.sockets)
        socket.zap_enforce_domain = 1
        socket.zap_domain = _DOMAIN
        socket.curve_server = 1
        socket.curve_secretkey = keys.secret
        self.port = 0
        """Where the socket listens, once it does. libzmq reports an accepted connection by our end's address alone."""
        self.refusals: list[tuple[str, PeerError]] = []
        """Connections that failed: the peer that this node tried to reach, empty if the peer connected; and why."""
        self._log_limit = LogLimit()
        self._broken_off: Counter[str] = Counter()

    def forget(self, target: str) -> None:
        """The socket no longer connects to `target`."""
        self._broken_off.pop(target, None)

    def serve(self) -> None:
        """Answers libzmq's requests and takes in its events until none is left."""
        while is_readable(self._handler):
            who, empty, *request = self._handler.recv_multipart()
            self._handler.send_multipart([who, empty, *self._answer(request)])
        while is_readable(self._monitor):
            head, where = self._monitor.recv_multipart()
            (what, value), endpoint = _EVENT.unpack(head), where.decode()
            if target := self._target(endpoint):
                self._on_connect(what, value, target)
            elif what in (_BROKEN_OFF, _PROTOCOL) and endpoint.endswith(f":{self.port}"):
                self._refuse("", _why_theirs(what, value))  # _AUTH was our own answer: reported already

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """RFC 27: the request is version, id, domain, address, identity, mechanism and the client's key."""
        version, number, _, address, _, mechanism, *credentials = request
        key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
        if self._keys.allows(key):
            return [version, number, b"200", b"", key.hex().encode(), b""]
        self._refuse(f" from {address.decode(errors='replace')}", f"its key {key.hex()} is not let in here")
        return [version, number, b"400", b"", b"", b""]

    def _target(self, endpoint: str) -> str:
        """The peer that an event is about, if this node connects to it; empty for an accepted connection.

        libzmq reports a host's address where it was given a name, so names are matched by port.
        """
        if endpoint in self._targets:
            return endpoint
        port = endpoint.rpartition(":")[2]
        # A copy: other threads connect and disconnect meanwhile.
        named = (t for t in list(self._targets) if t.rpartition(":")[2] == port and not _IP.match(t))
        return next(named, "")

    def _on_connect(self, what: int, value: int, target: str) -> None:
        key = self._targets.get(target)
        if key is None:
            return
        if what == _BROKEN_OFF:
            self._broken_off[target] += 1
            if self._broken_off[target] < _BROKEN_OFF_IS_FINAL:
                return
        self._broken_off.pop(target, None)
        if what == _GOOD:
            return
        where = target.removeprefix("tcp://")
        if what == _AUTH:
            why, remedy = "refuses this node's key", f"add {self._keys.public.hex()} to its allow list"
        elif what == _PROTOCOL and value == _OTHER_MECHANISM:
            why, remedy = "does not encrypt", "start it with keys"
        else:
            why, remedy = (
                f"does not prove that it holds the key {key.hex()}",
                "see its log; look its address up again",
            )
        error = PeerError(f"the peer at {where} {why}", remedy=f"{remedy}, or give both the same key file")
        self.refusals.append((target, error))
        self._warn(target, error)

    def _refuse(self, whence: str, why: str) -> None:
        error = PeerError(
            f"refused a connection{whence}: {why}",
            remedy="if it belongs to this cluster, give it the cluster's key file, or add its key to the allow list",
        )
        self.refusals.append(("", error))
        self._warn(whence, error)

    def _warn(self, peer: str, error: PeerError) -> None:
        if text := self._log_limit.due(peer, str(error), time.monotonic()):
            log.warning("%s", text)


def _why_theirs(what: int, value: int) -> str:
    if what == _BROKEN_OFF:
        return "it broke off the handshake (it has no keys, or expects another key of this node)"
    if value == _OTHER_MECHANISM:
        return "it does not encrypt"
    return "it expects another key of this node, or does not speak this protocol"
