"""The transport over NIXL, by its UCX plugin: RDMA, NVLink, shared memory or TCP, as UCX finds them. The default.

Needs `pdstage[nixl]`; written for NIXL 1.5.1's Python API.

What was seen of NIXL 1.5.1 (UCX over tcp and over shared memory, 256 MiB in flight), and what follows here:

* Removing the remote agent, like releasing a handle, cancels nothing: all the bytes still landed, read from the source
  as it then was; no notification came; and from that moment the transfer's state was an error that says nothing. So an
  agent with posts in flight is kept until the last has ended, `stops_reads` is false, and `disconnect` ends no ticket.
* Nothing here stops a peer's writes, deregistering included: so `fences` is false. What a dead peer sent may still be
  in our sockets and lands while we poll (`_sockets`): a death is proved once they are empty, and only of a process of
  this host and these namespaces.
* What a failed write has sent may lie in the peer's sockets, and lands when the peer polls: no failure is settled.
* Adding an agent's newer metadata while posts to it are in flight does them no harm.
* Agents' names are never reused: an old name is refused until it is removed.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from pdstage.errors import PeerError, UsageError
from pdstage.transport._nixl_agent import MEMORY, Errors, Memory, attempt, descriptors, failed, figures, start
from pdstage.transport._peer import Here, Identity, Met, Target, own_identity, target_of
from pdstage.transport._sockets import hold_bytes_of_the_dead
from pdstage.transport.base import (
    Done,
    Event,
    Inbound,
    PostFailed,
    Ranges,
    Traits,
    Transport,
    check_kinds,
    check_spans,
    closed,
    is_itself,
    not_connected,
    not_registered,
    read_description,
    write_description,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.layout import Region
    from pdstage.spans import Spans

MAX_TAG_NBYTES = 16 << 20


class _Description(msgspec.Struct, frozen=True, tag="pdstage.nixl.1", array_like=True):
    agent: Annotated[str, Meta(max_length=64)]
    metadata: bytes
    identity: Identity


class _Link(NamedTuple):
    description: _Description
    prepared: Ranges


class _InFlight(NamedTuple):
    handle: Any
    peer: str
    agent: str


class NixlTransport(Transport):
    """Transport `nixl`.

    `progress_thread`: let UCX move on in a thread of its own; without it, only while `poll` is called, on both sides.
    NIXL 1.5.1's thread spins on a whole core even when idle (its Python API sets no delay), so it is off unless asked
    for. `n_threads`: so many threads share the posts of 1,024 descriptors and more. `devices`: the network devices to
    use ("mlx5_0", "mlx5_1:1", "eth0"), instead of what UCX finds or `UCX_NET_DEVICES` says; UCX spreads a large write
    over two of them. `numa_node`: keep those threads to its processors, and without `devices` the RDMA traffic to its
    network cards. `telemetry`: measure each post, for `Done.figures` and the node's metrics.
    """

    traits: ClassVar[Traits] = Traits(
        name="nixl",
        notifies=True,
        max_descriptors=65_536,
        kinds=frozenset({"cpu", "cuda"}),
        post_blocks=True,  # over shared memory the copy is made inside the call
        fences=False,
        stops_reads=False,
        bytes_per_s=3e9,
        descriptor_s=2.6e-6,
        post_s=25e-6,
    )
    preference: ClassVar[int] = 20

    def __init__(
        self,
        *,
        progress_thread: bool = False,
        n_threads: int = 0,
        devices: Sequence[str] = (),
        numa_node: int | None = None,
        telemetry: bool = False,
    ) -> None:
        """Raises `UsageError` for a device or node not here, `TransportError` if NIXL cannot start its UCX plugin."""
        self._name = f"pdstage.{secrets.token_hex(16)}"
        self._agent: Any = start(
            self._name,
            progress_thread=progress_thread,
            n_threads=n_threads,
            devices=devices,
            numa_node=numa_node,
            telemetry=telemetry,
        )
        self._telemetry = telemetry
        self._identity = own_identity()
        self._met = Met()
        Here.lives.add(self._name)
        self._memory = Memory(self._agent)
        self._links: dict[str, _Link] = {}
        self._flights: dict[int, _InFlight] = {}
        self._users: Counter[str] = Counter()  # of a remote agent: peers' labels and posts in flight
        self._events: deque[Event] = deque()
        self._tickets = count(1)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        check_kinds(regions, self.traits)
        self._memory.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._check_open()
        self._memory.unregister(regions)

    def describe(self) -> bytes:
        self._check_open()
        return write_description(_Description(self._name, self._agent.get_agent_metadata(), self._identity))

    def connect(self, peer: str, description: bytes) -> None:
        self._check_open()
        told = read_description(peer, description, _Description, self.traits)
        if told.agent == self._name:
            raise is_itself(peer)
        link = self._links.get(peer)
        if link is not None and link.description == told:
            return
        if link is not None and link.description.agent == told.agent:
            self._add_agent(peer, told)
            self._links[peer] = link._replace(description=told)
            return
        target = self._target(peer, told)
        try:
            self._add_agent(peer, told)
        except PeerError:
            target.close()
            raise
        self._met.add(peer, target)
        self._users[told.agent] += 1
        self.disconnect(peer)
        self._links[peer] = _Link(told, Ranges(f"what was prepared for peer {peer!r}"))

    def identify(self, peer: str, description: bytes) -> None:
        self._check_open()
        self._met.add(peer, self._target(peer, read_description(peer, description, _Description, self.traits)))

    def _target(self, peer: str, told: _Description) -> Target:
        return target_of(told.identity, told.agent, self._identity, peer)

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        link = self._link(peer)
        check_kinds(regions, self.traits)
        prepared = Ranges(link.prepared.whose, regions)
        for region in prepared.regions:
            rows = self._agent.get_xfer_descs([(region.base, region.nbytes, region.device)], MEMORY[region.kind])
            try:
                known = self._agent.check_remote_metadata(link.description.agent, rows)
            except Errors:
                known = False
            if not known:
                raise not_registered(peer, region)
        self._links[peer] = link._replace(prepared=prepared)

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        link = self._link(peer)
        check_spans(spans, self.traits)
        if len(tag) > MAX_TAG_NBYTES:
            raise UsageError(f"a tag of {len(tag)} bytes", remedy=f"nixl carries at most {MAX_TAG_NBYTES}")
        local = descriptors(spans.src, spans.nbytes, self._memory.own)
        remote = descriptors(spans.dst, spans.nbytes, link.prepared)
        name = link.description.agent
        try:
            handle = self._agent.initialize_xfer("WRITE", local, remote, name, tag)
        except Errors as error:
            raise failed(f"no write to peer {peer!r} can begin", error) from error
        ticket = next(self._tickets)
        self._flights[ticket] = _InFlight(handle, peer, name)
        self._users[name] += 1
        try:
            state = self._agent.transfer(handle)
        except Errors as error:
            self._end(ticket, error)
        else:
            self._advance(ticket, state)
        return ticket

    def poll(self) -> list[Event]:
        if self._agent is None:
            return []
        for ticket, flight in list(self._flights.items()):
            try:
                state = self._agent.check_xfer_state(flight.handle)
            except Errors as error:
                self._end(ticket, error)
            else:
                self._advance(ticket, state)
        try:
            for tags in self._agent.get_new_notifs().values():
                self._events.extend(map(Inbound, tags))
        except Errors as error:
            raise failed("NIXL cannot read its notifications", error) from error
        events = list(self._events)
        self._events.clear()
        return events

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._let_go(link.description.agent)

    def proved_dead(self, peer: str) -> bool:
        if self._agent is None or not self._met.all_gone(peer):
            return False
        self._events.extend(self.poll())  # reads what its sockets still hold
        return not hold_bytes_of_the_dead()

    def forget(self, peer: str) -> None:
        self._met.forget(peer)

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        self._met.close()
        self._links.clear()
        for flight in self._flights.values():
            attempt(flight.handle.release)
        for name in self._users:
            attempt(agent.remove_remote_agent, name)
        self._memory.close()
        self._flights.clear()
        self._users.clear()
        self._events.clear()
        del agent
        Here.lives.discard(self._name)

    def _check_open(self) -> None:
        if self._agent is None:
            raise closed()

    def _link(self, peer: str) -> _Link:
        self._check_open()
        link = self._links.get(peer)
        if link is None:
            raise not_connected(peer)
        return link

    def _add_agent(self, peer: str, told: _Description) -> None:
        """Loads a peer's metadata, newer one over older; raises `PeerError` if NIXL refuses it."""
        try:
            named = self._agent.add_remote_agent(told.metadata)
        except Errors as error:
            raise PeerError(
                f"NIXL refuses the metadata of peer {peer!r} ({error})",
                remedy="install one version of NIXL on both sides",
                peer=peer,
            ) from error
        name = named.decode() if isinstance(named, bytes) else named
        if name != told.agent:
            if name not in self._users:
                attempt(self._agent.remove_remote_agent, name)
            raise PeerError(f"peer {peer!r} is {told.agent} but describes {name}", remedy="trust it no more", peer=peer)

    def _advance(self, ticket: int, state: str) -> None:
        if state != "PROC":
            self._end(ticket, None if state == "DONE" else RuntimeError(f"state {state}"))

    def _end(self, ticket: int, error: Exception | None) -> None:
        """Turns a post that ended into its event. Only here, and in close, is a handle released: never in flight."""
        flight = self._flights.pop(ticket)
        if error is None:
            self._events.append(Done(ticket, figures(self._agent, flight.handle) if self._telemetry else None))
        else:
            unknown = failed(f"a write to peer {flight.peer!r} failed", error)
            self._events.append(PostFailed(ticket, unknown, settled=False))
        attempt(flight.handle.release)
        self._let_go(flight.agent)

    def _let_go(self, name: str) -> None:
        """Removes the remote agent with its last user; any earlier would hide how its posts end."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            attempt(self._agent.remove_remote_agent, name)


TRANSPORT = NixlTransport
