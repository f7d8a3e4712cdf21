"""The transport over NIXL, by its UCX plugin: RDMA, NVLink, shared memory or TCP, as UCX finds them. The default.

Needs `pdstage[nixl]`; written for NIXL 1.5.1's Python API.

Seen with NIXL 1.5.1 (UCX over tcp and over shared memory, 256 MiB in flight), and the consequences here:

* Removing the remote agent cancels nothing, and neither does releasing a handle. All bytes still landed, read from the
  source as it then was. No notification came, and from then on the transfer's state was an error without meaning. So an
  agent with posts in flight is kept until the last has ended, `stops_reads` is false, and `disconnect` ends no ticket.
* Nothing here stops a peer's writes, not even deregistering: so `fences` is false. Bytes from a dead peer may still be
  in our sockets and land while we poll (`_sockets`). A death is proved once they are empty, and only for a process of
  this host and these namespaces.
* Bytes of a failed write may lie in the peer's sockets, and land when the peer polls: no failure is settled.
* Adding newer metadata of an agent does no harm to posts in flight to it.
* Removing a remote agent whose process lives on leaves its connections open, two over TCP, and adding it again makes
  new ones. Without the removal those that there are would be used again. With that, in a run with cuts, memory was
  never proved quiet; so agents are removed all the same.
* Names of agents are never reused: an old name is refused until it is removed.
* UCX does not confine a peer to registered memory. Over TCP, and between processes of one host, a write by a forged
  description changed memory that was never registered. That holds on any path, since the
  writer chooses the address: uct/tcp copies to the address in the message, and so does UCP's emulation of remote writes
  (ucp/rma/rma_sw.c). No option of UCX 1.23 prevents it. What can be done is to listen on fewer networks: `host`.
* NIXL's reader of metadata trusts the lengths in it: 4 of 200 altered blobs ended the process. So this module checks a
  blob first (`check_metadata`), if this NIXL lays out its own blob the expected way. UCX's address inside can be
  checked only for its version, and some altered ones still end the process. A peer without keys can do that: see
  docs/security.md.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from pdstage.errors import PeerError
from pdstage.transport._backend import Backend, Link, Post
from pdstage.transport._nixl_agent import (
    MEMORY,
    Errors,
    attempt,
    check_metadata,
    descriptors,
    failed,
    figures,
    is_known,
    start,
)
from pdstage.transport._peer import Here, Identity, Target, own_identity
from pdstage.transport._sockets import hold_bytes_of_the_dead
from pdstage.transport.base import Done, Inbound, PostFailed, Ranges, Traits, write_description

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.layout import Region


_Unreadable: tuple[type[Exception], ...] = (*Errors, ValueError)
"""`ValueError` comes from `check_metadata`, and from a name that is not UTF-8."""


class _Description(msgspec.Struct, frozen=True, tag="pdstage.nixl.1", array_like=True):
    life: Annotated[str, Meta(max_length=64)]
    """The agent's name."""
    metadata: bytes
    identity: Identity

    def offered(self, peer: str) -> Ranges:
        """Empty: only NIXL can read the metadata; `_offers` asks it."""
        return Ranges(f"what peer {peer!r} registered")


class _Link(Link[_Description]):
    def learn(self, description: _Description) -> None:
        self.description = description


class _InFlight(NamedTuple):
    handle: Any
    peer: str
    agent: str


class NixlTransport(Backend[_Link, _Description]):
    """Transport `nixl`. UCX advances only while `poll` is called, on both sides: NIXL 1.5.1's own thread spins on a
    whole core even when idle.

    `devices`: the network devices to use ("mlx5_0", "mlx5_1:1", "eth0"), instead of those that UCX finds or
    `UCX_NET_DEVICES` names. `host`: an address of this machine. If nothing else chooses devices, UCX uses RDMA,
    loopback and the interface that holds it. `telemetry`: measures each post, for `Done.figures` and the node's
    metrics.
    """

    traits = Traits(
        name="nixl",
        notifies=True,
        max_descriptors=65_536,
        kinds=frozenset({"cpu", "cuda"}),
        post_blocks=True,  # over shared memory the call makes the copy
        fences=False,
        stops_reads=False,
        bytes_per_s=3e9,
        descriptor_s=2.6e-6,
        post_s=25e-6,
        polled=True,
    )
    preference = 20
    description_type = _Description
    link_type = _Link
    max_tag_nbytes = 16 << 20

    def __init__(self, *, devices: Sequence[str] = (), host: str = "", telemetry: bool = False) -> None:
        """Raises `UsageError` for a device that this host lacks or that is down, `TransportError` if NIXL's UCX
        plugin does not start.
        """
        super().__init__()
        self.life = f"pdstage.{secrets.token_hex(16)}"
        self._agent: Any = start(self.life, devices=devices, host=host, telemetry=telemetry)
        self._telemetry = telemetry
        self.identity = own_identity()
        Here.lives[self.life] = self
        self._knows_metadata = is_known(self._agent.get_agent_metadata(), self.life)
        self._memory: dict[Region, Any] = {}
        self._flights: dict[int, _InFlight] = {}

    def describe(self) -> bytes:
        self.check_open()
        return write_description(_Description(self.life, self._agent.get_agent_metadata(), self.identity))

    def _register(self, region: Region) -> None:
        row = (region.base, region.nbytes, region.device, "")
        try:
            self._memory[region] = self._agent.register_memory([row], MEMORY[region.kind], ["UCX"])
        except Errors as error:
            raise failed(f"cannot register {region}", error, "check the address, and `ulimit -l` for RDMA") from error

    def _unregister(self, region: Region) -> None:
        try:
            self._agent.deregister_memory(self._memory.pop(region), ["UCX"])
        except Errors as error:
            raise failed(f"cannot unregister {region}", error) from error

    def _attach(self, peer: str, description: _Description, target: Target) -> _Link:
        self._add_agent(peer, description)
        return _Link(peer, description)

    def _refresh(self, link: _Link, description: _Description) -> None:
        if link.description != description:
            self._add_agent(link.peer, description)
            link.learn(description)

    def _offers(self, link: _Link, region: Region) -> bool:
        rows = self._agent.get_xfer_descs([(region.base, region.nbytes, region.device)], MEMORY[region.kind])
        try:
            return bool(self._agent.check_remote_metadata(link.description.life, rows))
        except Errors:
            return False

    def _write(self, link: _Link, post: Post) -> None:
        spans, name = post.spans, link.description.life
        local = descriptors(spans.src, spans.nbytes, post.src)
        remote = descriptors(spans.dst, spans.nbytes, post.dst)
        try:
            handle = self._agent.initialize_xfer("WRITE", local, remote, name, post.tag)
        except Errors as error:
            raise failed(f"no write to peer {link.peer!r} can begin", error) from error
        self._flights[post.ticket] = _InFlight(handle, link.peer, name)
        self.users[name] += 1
        self._advance(post.ticket, self._agent.transfer)

    def _progress(self) -> None:
        for ticket in list(self._flights):
            self._advance(ticket, self._agent.check_xfer_state)
        try:
            for tags in self._agent.get_new_notifs().values():
                self.events.extend(map(Inbound, tags))
        except Errors as error:
            raise failed("NIXL cannot read its notifications", error) from error

    def _may_land(self, since: float) -> bool:
        self._progress()  # reads the bytes that its sockets still hold
        return hold_bytes_of_the_dead(since)

    def _shut(self) -> None:
        agent, self._agent = self._agent, None
        for flight in self._flights.values():
            attempt(flight.handle.release)
        for name in self.users:
            attempt(agent.remove_remote_agent, name)
        for held in self._memory.values():
            attempt(agent.deregister_memory, held, ["UCX"])
        self._memory.clear()
        self._flights.clear()
        self.users.clear()

    def _add_agent(self, peer: str, description: _Description) -> None:
        """Loads a peer's metadata, newer over older. Raises `PeerError` if NIXL refuses it or `check_metadata` does."""
        try:
            if self._knows_metadata:
                check_metadata(description.metadata, description.life)
            named = self._agent.add_remote_agent(description.metadata)
            name = named.decode() if isinstance(named, bytes) else named
        except _Unreadable as error:
            if description.life not in self.users:
                with contextlib.suppress(*Errors):  # a partly loaded agent would block its owner's metadata
                    self._agent.remove_remote_agent(description.life)
            raise PeerError(
                f"NIXL refuses the metadata of peer {peer!r} ({error})",
                remedy="bind both nodes to addresses of one network, and install one version of NIXL on both sides",
                peer=peer,
            ) from error
        if name != description.life:
            if name not in self.users:
                attempt(self._agent.remove_remote_agent, name)
            raise PeerError(
                f"peer {peer!r} is {description.life} but describes {name}", remedy="stop using it", peer=peer
            )

    def _advance(self, ticket: int, call: Callable[[Any], str]) -> None:
        """`call` starts a post or asks for its state; it is over unless it is under way then, and becomes its event.

        Handles are released only here and in `close`, so never in flight.
        """
        flight = self._flights[ticket]
        refused = None
        try:
            state = call(flight.handle)
        except Errors as error:
            state, refused = "ERR", error
        if state == "PROC":
            return
        del self._flights[ticket]
        if state == "DONE":
            self.events.append(Done(ticket, figures(self._agent, flight.handle) if self._telemetry else None))
        else:
            unknown = failed(f"a write to peer {flight.peer!r} failed", refused or RuntimeError(f"state {state}"))
            self.events.append(PostFailed(ticket, unknown, settled=False))
        attempt(flight.handle.release)
        self.let_go(flight.agent)

    def _leave(self, life: str) -> None:
        """An earlier removal would hide how its posts end."""
        attempt(self._agent.remove_remote_agent, life)


TRANSPORT = NixlTransport
