"""The transport over NIXL, by its UCX plugin: RDMA, NVLink, shared memory or TCP, as UCX finds them. The default.

Layer 4. Must not know rooms, leases or what a tag means. Needs `pdstage[nixl]`; written for NIXL 1.5.1's Python API.

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

import logging
import os
import secrets
from collections import Counter, deque
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.transport._peer import Elsewhere, Identity, Met, Process, Target, own_identity
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
    read_description,
    write_description,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.layout import Region
    from pdstage.spans import Spans
    from pdstage.transport.base import Ints

_api: Any = import_module("nixl._api")
_bindings: Any = import_module("nixl._bindings")

# NIXL's exceptions share no base class but Exception.
_Errors: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_StartErrors: tuple[type[Exception], ...] = (*_Errors, RuntimeError)
_MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
MAX_TAG_NBYTES = 16 << 20
_open_here: set[str] = set()


class _Description(msgspec.Struct, frozen=True, tag="pdstage.nixl.1", array_like=True):
    agent: Annotated[str, Meta(max_length=64)]
    metadata: bytes
    identity: Identity


class _Here:
    """A transport of this same process: it ends with its `close`."""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    def gone(self) -> bool:
        return self._agent not in _open_here

    def close(self) -> None:
        pass


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
    for.
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

    def __init__(self, *, progress_thread: bool = False) -> None:
        """Raises `TransportError` if NIXL cannot start its UCX plugin."""
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints each start to stdout
        self._name = f"pdstage.{secrets.token_hex(16)}"
        config = _api.nixl_agent_config(
            enable_prog_thread=progress_thread,
            backends=["UCX"],
            sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent: Any = _api.nixl_agent(self._name, config)
        except _StartErrors as error:
            raise _failed("NIXL does not start", error) from error
        if "UCX" not in self._agent.backends:
            raise TransportError("NIXL has no UCX plugin here", remedy="install a NIXL with it, or set NIXL_PLUGIN_DIR")
        self._identity = own_identity()
        self._met = Met()
        _open_here.add(self._name)
        self._memory = _Memory(self._agent)
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
            raise UsageError(f"peer {peer!r} is this transport itself", remedy="connect two transports", peer=peer)
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

    def meet(self, peer: str, description: bytes) -> None:
        self._check_open()
        self._met.add(peer, self._target(peer, read_description(peer, description, _Description, self.traits)))

    def _target(self, peer: str, told: _Description) -> Target:
        if told.identity == self._identity:
            return _Here(told.agent)
        return Process(told.identity, peer) if told.identity.is_visible_from(self._identity) else Elsewhere()

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        link = self._link(peer)
        check_kinds(regions, self.traits)
        prepared = Ranges(link.prepared.whose, regions)
        for region in prepared.regions:
            rows = self._agent.get_xfer_descs([(region.base, region.nbytes, region.device)], _MEMORY[region.kind])
            try:
                known = self._agent.check_remote_metadata(link.description.agent, rows)
            except _Errors:
                known = False
            if not known:
                raise PeerError(
                    f"peer {peer!r} has not registered {region}", remedy="connect again with its newest description"
                )
        self._links[peer] = link._replace(prepared=prepared)

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        link = self._link(peer)
        check_spans(spans, self.traits)
        if len(tag) > MAX_TAG_NBYTES:
            raise UsageError(f"a tag of {len(tag)} bytes", remedy=f"nixl carries at most {MAX_TAG_NBYTES}")
        local = _descriptors(spans.src, spans.nbytes, self._memory.own)
        remote = _descriptors(spans.dst, spans.nbytes, link.prepared)
        name = link.description.agent
        try:
            handle = self._agent.initialize_xfer("WRITE", local, remote, name, tag)
        except _Errors as error:
            raise _failed(f"no write to peer {peer!r} can begin", error) from error
        ticket = next(self._tickets)
        self._flights[ticket] = _InFlight(handle, peer, name)
        self._users[name] += 1
        try:
            state = self._agent.transfer(handle)
        except _Errors as error:
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
            except _Errors as error:
                self._end(ticket, error)
            else:
                self._advance(ticket, state)
        try:
            for tags in self._agent.get_new_notifs().values():
                self._events.extend(map(Inbound, tags))
        except _Errors as error:
            raise _failed("NIXL cannot read its notifications", error) from error
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
            _try(flight.handle.release)
        for name in self._users:
            _try(agent.remove_remote_agent, name)
        self._memory.close()
        self._flights.clear()
        self._users.clear()
        self._events.clear()
        del agent
        _open_here.discard(self._name)

    def _check_open(self) -> None:
        if self._agent is None:
            raise UsageError("this transport is closed", remedy="open a new one")

    def _link(self, peer: str) -> _Link:
        self._check_open()
        link = self._links.get(peer)
        if link is None:
            raise UsageError(f"peer {peer!r} is not connected", remedy="connect it first", peer=peer)
        return link

    def _add_agent(self, peer: str, told: _Description) -> None:
        """Loads a peer's metadata, newer one over older; raises `PeerError` if NIXL refuses it."""
        try:
            named = self._agent.add_remote_agent(told.metadata)
        except _Errors as error:
            raise PeerError(
                f"NIXL refuses the metadata of peer {peer!r} ({error})",
                remedy="install one version of NIXL on both sides",
                peer=peer,
            ) from error
        name = named.decode() if isinstance(named, bytes) else named
        if name != told.agent:
            if name not in self._users:
                _try(self._agent.remove_remote_agent, name)
            raise PeerError(f"peer {peer!r} is {told.agent} but describes {name}", remedy="trust it no more", peer=peer)

    def _advance(self, ticket: int, state: str) -> None:
        if state != "PROC":
            self._end(ticket, None if state == "DONE" else RuntimeError(f"state {state}"))

    def _end(self, ticket: int, error: Exception | None) -> None:
        """Turns a post that ended into its event. Only here, and in close, is a handle released: never in flight."""
        flight = self._flights.pop(ticket)
        if error is None:
            self._events.append(Done(ticket))
        else:
            failed = _failed(f"a write to peer {flight.peer!r} failed", error)
            self._events.append(PostFailed(ticket, failed, settled=False))
        _try(flight.handle.release)
        self._let_go(flight.agent)

    def _let_go(self, name: str) -> None:
        """Removes the remote agent with its last user; any earlier would hide how its posts end."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
            _try(self._agent.remove_remote_agent, name)


class _Memory:
    """What this process registered with NIXL."""

    def __init__(self, agent: Any) -> None:  # noqa: ANN401  (NIXL's classes have no types)
        self.own = Ranges("this process's registered memory")
        self._agent: Any = agent
        self._held: dict[Region, Any] = {}

    def register(self, regions: Sequence[Region]) -> None:
        own = self.own.with_regions(regions)
        new = [region for region in dict.fromkeys(regions) if region not in self._held]
        try:
            for region in new:
                row = (region.base, region.nbytes, region.device, "")
                self._held[region] = self._agent.register_memory([row], _MEMORY[region.kind], ["UCX"])
        except _Errors as error:
            for region in new:
                if region in self._held:
                    _try(self._agent.deregister_memory, self._held.pop(region), ["UCX"])
            raise _failed(f"cannot register {new}", error, "check the addresses, and `ulimit -l` for RDMA") from error
        self.own = own

    def unregister(self, regions: Sequence[Region]) -> None:
        self.own = self.own.without(regions)
        for region in dict.fromkeys(regions):
            try:
                self._agent.deregister_memory(self._held.pop(region), ["UCX"])
            except _Errors as error:
                raise _failed(f"cannot unregister {region}", error) from error

    def close(self) -> None:
        for held in self._held.values():
            _try(self._agent.deregister_memory, held, ["UCX"])
        self._held.clear()
        self._agent = None  # with its last reference NIXL's thread and sockets go


def _try(release: Callable[..., None], *args: object) -> None:
    """Gives something back to NIXL; a refusal is logged, since nothing can be done about it any more."""
    try:
        release(*args)
    except _Errors:
        logging.getLogger(__name__).warning("NIXL refused %s%r", release.__name__, args, exc_info=True)


def _descriptors(addresses: Ints, nbytes: Ints, ranges: Ranges) -> Any:  # noqa: ANN401
    """NIXL's list of the spans, checked against `ranges`; raises `UsageError` where they do not fit."""
    kind, device = ranges.find(addresses, nbytes)
    if len(addresses) == 1:
        return _dlist(kind, [(int(addresses[0]), int(nbytes[0]), device)])
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return _dlist(kind, rows)


def _dlist(kind: str, rows: object) -> Any:  # noqa: ANN401
    return _bindings.nixlXferDList(_bindings.DRAM_SEG if kind == "cpu" else _bindings.VRAM_SEG, rows)


def _failed(what: str, error: Exception, remedy: str = "run with NIXL_LOG_LEVEL=INFO to learn more") -> TransportError:
    return TransportError(f"{what}: {type(error).__name__}({error})", remedy=remedy)


TRANSPORT = NixlTransport
