"""What operators ask of running nodes: to begin no room any more, to give back what a process kept that has ended, and
how they are. And which nodes a directory lists.

It comes by the node's control socket, so it works in both roles, in engines too, and passes the same keys as a peer. It
is no frame of the protocol between prefill and decode (it has a magic of its own, docs/wire.md): no core reads it, and
it opens no session.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pdstage import arguments
from pdstage.control.address import is_at
from pdstage.control.directory import Advert, Conflict
from pdstage.control.etcd import EtcdClient
from pdstage.control.keys import GivenKeys, keys_of
from pdstage.control.zmq import ControlSocket, name_of
from pdstage.errors import PeerError, TransportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.control.bootstrap import DirectoryClient

_MAGIC = b"Po\x01"
"""Of requests from operators and of their answers; the last byte is their version."""
REQUESTS = DRAIN, STATE, _FENCE = _MAGIC + b"drain", _MAGIC + b"state", _MAGIC + b"fence "
"""Whole messages, but that names of what has ended follow the last. Each is answered; `DRAIN` is repeated until the
node is drained.
"""
_FENCE_AGAIN_S = 1.0
_AGAIN_S = 0.5
_SILENT_S = 20.0
"""A node that has not answered for so long does not run: its driver answers in every turn."""
_Word = Annotated[str, Meta(max_length=64)]
_Count = Annotated[int, Meta(ge=0)]


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """How a node is. `rooms` are those that hold something there, by state; `oldest_s` is the oldest one's age in
    seconds, 0 where there is none.
    """

    role: _Word
    rank: _Count
    drained: bool
    """No room begins there any more, none is left, and its adverts, if it had any, are withdrawn."""
    rooms: Annotated[dict[_Word, _Count], Meta(max_length=16)]
    oldest_s: float
    draining: bool = True
    failed: bool = False
    unfenced: _Count = 0
    """Lost sessions that keep memory of this node out of use."""
    fenced: _Count = 0
    """And those that this request gave back."""

    def __str__(self) -> str:
        who = f"{self.role} rank {self.rank}"
        kept = f"; {self.unfenced} lost sessions keep memory from use" if self.unfenced else ""
        if self.failed:
            return f"{who} has failed{kept}"
        if self.drained:
            return f"{who} is drained{kept}"
        if not self.rooms:
            return f"{who} {'is about to drain' if self.draining else 'serves, and has no room'}{kept}"
        states = ", ".join(f"{n} {state}" for state, n in sorted(self.rooms.items()))
        what = "is not drained" if self.draining else "serves"
        return f"{who} {what}: {states}, the oldest for {self.oldest_s:.1f} s{kept}"


class Listed(msgspec.Struct, frozen=True):
    """A node in a directory. `expires_in_s` is negative once its lease has ended without its being withdrawn."""

    expires_in_s: float
    advert: Advert


# Made before any thread decodes, as directory_api's.
_state, _listed = msgspec.json.Decoder(NodeState), msgspec.json.Decoder(dict[str, list[Listed]])


def ended_of(request: bytes) -> list[str]:
    """What has ended, as the operator says, by the names that `Sessions.fence` takes; none if it says another thing."""
    return request[len(_FENCE) :].decode(errors="replace").split() if request.startswith(_FENCE) else []


def encode(state: NodeState) -> bytes:
    """A node's answer."""
    return _MAGIC + msgspec.json.encode(state)


def drain(endpoints: Sequence[str], *, keys: GivenKeys = None, wait_s: float = 60.0) -> dict[str, NodeState]:
    """Asks the nodes at `endpoints`, their control sockets' (`tcp://host:port`), to drain, all at once. Returns how far
    each is, once all are drained, or after `wait_s` seconds. A node that drains takes no room until its process ends.

    `keys` are a key file's path or `Keys` that those nodes allow. Raises `UsageError` for a bad address or key file,
    `PeerError` if keys do not match or for an answer that is none, and `TransportError` if a node does not answer in
    that time, or for 20 s.
    """
    return ask(endpoints, DRAIN, keys=keys, wait_s=arguments.number("wait_s", wait_s, above=0.0))


def members(client: DirectoryClient, names: Sequence[str] = ()) -> list[Listed]:
    """The nodes that a directory lists; those of the instances `names`, if there are any. Raises `UsageError` for one
    of which there is no node, and what the directory raises.
    """
    found = [one for group in _listed.decode(client.instances()).values() for one in group]
    there = sorted({one.advert.instance for one in found})
    if missing := [name for name in names if name not in there]:
        raise UsageError(
            f"instance {missing[0]!r} is not in the directory at {client.address}",
            remedy=f"there are {', '.join(there)}" if there else "none is there: see that engines are given it",
        )
    return [one for one in found if not names or one.advert.instance in names]


class Fenced(NamedTuple):
    """`ended` are the processes, in words; `told` what each living node answered, by endpoint."""

    ended: list[str]
    told: dict[str, NodeState]


def fence(client: DirectoryClient, where: str, *, keys: GivenKeys = None, wait_s: float = 0.0) -> Fenced:
    """Tells all living nodes in a directory that the processes at `where`, an instance, a host or an endpoint, have
    ended: each gives back the memory that it kept from use for one of them. Only for an orchestrator that has ended
    them, or their host. Where none is listed, what is told is `where` itself; but not by a directory in etcd, which
    knows that none is left.

    Processes that come there after this call began are not meant. One counts as alive while it is listed under a lease;
    for up to `wait_s` seconds that is waited for, then raises `Conflict`. A directory in etcd keeps it for nodes that
    come later.
    """
    until = time.monotonic() + wait_s
    if isinstance(client, EtcdClient):
        processes = client.fence(where, wait_s=wait_s)
        ended = {incarnation: f"{process} {incarnation:016x}" for incarnation, process in processes.items()}
        listed = members(client)
    else:
        listed = members(client)
        ended = {
            one.advert.incarnation: f"{one.advert.instance} rank {one.advert.topology.unique_rank} "
            f"{one.advert.endpoint} {one.advert.incarnation:016x}"
            for one in listed
            if where == one.advert.instance or is_at(one.advert.endpoint, where)
        }
        while alive := [one.advert for one in listed if one.advert.incarnation in ended and one.expires_in_s > 0]:
            if time.monotonic() >= until:
                raise Conflict(
                    f"{len(alive)} of {len(ended)} processes at {where} are registered, first {alive[0].endpoint}",
                    remedy="end them, wait until their leases end, and fence them then",
                    endpoint=alive[0].endpoint,
                )
            time.sleep(min(_FENCE_AGAIN_S, wait_s))
            listed = members(client)
    names = [name_of(incarnation) for incarnation in ended]
    if not names and not isinstance(client, EtcdClient):  # whose table knows that nobody there is to be fenced
        names = [where]
    living = [one.advert.endpoint for one in listed if one.expires_in_s > 0]
    told = ask(living, _FENCE + " ".join(names).encode(), keys=keys) if living and names else {}
    return Fenced(list(ended.values()), told)


def ask(
    endpoints: Sequence[str],
    request: bytes,
    *,
    keys: GivenKeys = None,
    wait_s: float = 60.0,
) -> dict[str, NodeState]:
    """Sends `request` to the nodes at `endpoints`, all at once. Returns their answers; raises as `drain`."""
    if not endpoints:
        raise UsageError("no node is named", remedy="name control endpoints, as tcp://host:port")
    held = keys_of(keys)
    said: dict[bytes, NodeState] = {}
    with ControlSocket(None, identity=secrets.token_bytes(8), keys=held) as socket:
        routes = {endpoint: socket.connect(endpoint) for endpoint in endpoints}
        waiting = {route: endpoint for endpoint, route in routes.items()}
        heard_at, until = dict.fromkeys(waiting, time.monotonic()), time.monotonic() + wait_s
        while waiting and (time.monotonic() < until or len(said) < len(heard_at)):
            for route in waiting:
                socket.send(route, [request])
            for route, frames in socket.arrivals(min(until, time.monotonic() + _AGAIN_S)):
                said[route], heard_at[route] = _read(socket.endpoint_of(route), frames), time.monotonic()
                if said[route].drained or request != DRAIN:
                    waiting.pop(route, None)
                if not waiting:
                    break
            for route, endpoint in waiting.items():
                silent_s = time.monotonic() - heard_at[route]
                if silent_s > _SILENT_S or (route not in said and time.monotonic() >= until):
                    last = f"; when it last did, {said[route]}" if route in said else ""
                    raise TransportError(
                        f"the node at {endpoint} has not answered for {silent_s:.1f} s{last}",
                        remedy="check the endpoint, and that the process runs"
                        + ("" if held is not None else "; if the node has keys, pass keys="),
                        endpoint=endpoint,
                    )
    return {endpoint: said[route] for endpoint, route in routes.items()}


def _read(endpoint: str, frames: list[bytes]) -> NodeState:
    try:
        if len(frames) == 1 and frames[0].startswith(_MAGIC):
            return _state.decode(frames[0][len(_MAGIC) :])
        why = f"{len(frames)} frames"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    raise PeerError(
        f"what listens at {endpoint} gives no answer that is one ({why})",
        remedy="give a node's control endpoint, of a release that can be asked this",
        endpoint=endpoint,
    )
