"""An operator's request to a running node: begin no room any more, and say what is still open.

It comes by the node's control socket, so it works with every directory and in both roles, and passes the same keys as
a peer. It is no frame of the protocol between prefill and decode (it has a magic of its own, docs/wire.md): no core
reads it, and it opens no session.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from pdstage import arguments
from pdstage.control.keys import Keys, keys_of
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PeerError, TransportError, UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

_MAGIC = b"Po\x01"
"""Of requests from operators and of their answers; the last byte is their version."""
REQUEST = _MAGIC + b"drain"
"""The whole message. It is repeated until the node is drained: the first one begins it, each is answered."""
_AGAIN_S = 0.5
_SILENT_S = 20.0
"""A node that has not answered for so long does not run: its driver answers in every turn."""
_Word = Annotated[str, Meta(max_length=64)]
_Count = Annotated[int, Meta(ge=0)]


class Draining(msgspec.Struct, frozen=True):
    """How far a node is. `rooms` are those that hold something there, by state; `oldest_s` is the oldest one's age in
    seconds, 0 where there is none.
    """

    role: _Word
    rank: _Count
    drained: bool
    """No room begins there any more, none is left, and its advert, if it had one, is withdrawn."""
    rooms: Annotated[dict[_Word, _Count], Meta(max_length=16)]
    oldest_s: float

    def __str__(self) -> str:
        who = f"{self.role} rank {self.rank}"
        if self.drained:
            return f"{who} is drained"
        if not self.rooms:
            return f"{who} is about to drain"
        states = ", ".join(f"{n} {state}" for state, n in sorted(self.rooms.items()))
        return f"{who} is not drained: {states}, the oldest for {self.oldest_s:.1f} s"


_draining = msgspec.json.Decoder(Draining)  # made before any thread decodes, as directory_api's


def encode(draining: Draining) -> bytes:
    """A node's answer."""
    return _MAGIC + msgspec.json.encode(draining)


def drain(
    endpoints: Sequence[str], *, keys: Keys | str | os.PathLike[str] | None = None, wait_s: float = 60.0
) -> dict[str, Draining]:
    """Asks the nodes at `endpoints`, their control sockets' (`tcp://host:port`), to drain, all at once. Returns how far
    each is, once all are drained, or after `wait_s` seconds and an answer of each. A node that drains takes no room
    until its process ends.

    `keys` are a key file's path or `Keys` that those nodes allow. Raises `UsageError` for a bad address or key file,
    `PeerError` if keys do not match or for an answer that is none, and `TransportError` if a node does not answer.
    """
    wait_s = arguments.number("wait_s", wait_s, above=0.0)
    if not endpoints:
        raise UsageError("no endpoint to drain", remedy="name control endpoints, as tcp://host:port")
    held = keys_of(keys)
    said: dict[bytes, Draining] = {}
    with ControlSocket(None, identity=secrets.token_bytes(8), keys=held) as socket:
        routes = {endpoint: socket.connect(endpoint) for endpoint in endpoints}
        waiting = {route: endpoint for endpoint, route in routes.items()}
        heard_at, until = dict.fromkeys(waiting, time.monotonic()), time.monotonic() + wait_s
        while waiting and (time.monotonic() < until or len(said) < len(heard_at)):
            for route in waiting:
                socket.send(route, [REQUEST])
            for route, frames in socket.arrivals(time.monotonic() + _AGAIN_S):
                said[route], heard_at[route] = _read(socket.endpoint_of(route), frames), time.monotonic()
                if said[route].drained:
                    waiting.pop(route, None)
                if not waiting:
                    break
            for route, endpoint in waiting.items():
                silent_s = time.monotonic() - heard_at[route]
                if silent_s > _SILENT_S:
                    last = f"; when it last did, {said[route]}" if route in said else ""
                    raise TransportError(
                        f"the node at {endpoint} has not answered for {silent_s:.0f} s{last}",
                        remedy="check the endpoint, and that the process runs"
                        + ("" if held is not None else "; if the node has keys, pass keys= (--keys)"),
                        endpoint=endpoint,
                    )
    return {endpoint: said[route] for endpoint, route in routes.items()}


def _read(endpoint: str, frames: list[bytes]) -> Draining:
    try:
        if len(frames) == 1 and frames[0].startswith(_MAGIC):
            return _draining.decode(frames[0][len(_MAGIC) :])
        why = f"{len(frames)} frames"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    raise PeerError(
        f"what listens at {endpoint} gives no answer that is one ({why})",
        remedy="give a node's control endpoint, of a release that can be drained",
        endpoint=endpoint,
    )
