"""The transport within one host: a plain copy in one process and into memory that another process shares, and
process_vm_writev(2) into the rest of another process's.

Layer 4. Must not know rooms, leases or what a tag means. Needs no package and no set-up: the embedded default.

`post` copies before it returns, and its tag follows as a datagram; while the peer has no room for it, `Done` waits too.
Memory from `pdstage.shared` is mapped by peers, whose callers may write there themselves (`mapped`). Nobody can stop a
peer's writes into this process: `fences` is false, and only a peer's proved death fences.
"""

from __future__ import annotations

import os
import select
import weakref
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from pdstage import native, shared
from pdstage.errors import PdstageError, PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.shared import Backing  # noqa: TC001  (msgspec resolves it at run time)
from pdstage.transport._datagrams import MAX_NBYTES, Inbox, Outbox
from pdstage.transport._mapped import There, copy
from pdstage.transport._peer import Identity, Met, Process, allow_writers, own_identity
from pdstage.transport.base import (
    Done,
    Event,
    Inbound,
    Mapped,
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

    from pdstage.spans import Spans

_SHARE = 'let the peer expose only staging memory that it allocates itself (path="staged"), or do what is said above'

_here: weakref.WeakValueDictionary[str, LocalTransport] = weakref.WeakValueDictionary()


class _Description(msgspec.Struct, frozen=True, tag="pdstage.local.1", array_like=True):
    identity: Identity
    inbox: Annotated[str, Meta(max_length=100)]
    regions: list[tuple[int, int]]
    shared: list[tuple[int, Backing]] = []
    """Which of them peers can map: base, and of what they are."""


class _Here:
    """A transport of this same process, as a target: the counterpart of `Process`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def gone(self) -> bool:
        return self._name not in _here

    def close(self) -> None:
        pass

    def write(self, spans: Spans) -> tuple[int, TransportError | None]:
        try:
            _here[self._name].own.find(spans.dst, spans.nbytes)
        except UsageError as error:  # another process survives a stray write; this one would take itself down
            return 0, TransportError(str(error), remedy="the peer unregistered memory that was still being written")
        copy(spans)
        return int(spans.nbytes.sum()), None

    def why_not_written(self, address: int) -> TransportError | None:
        del address
        return None

    def unmap(self) -> None:
        pass

    def mapped(self, address: int, nbytes: int) -> Mapped | None:
        transport = _here.get(self._name)
        return Mapped(address, None) if transport is not None and transport.own.holds(address, nbytes) else None


class _Link:
    """A connected peer: where to write, what may be written there, and its tags."""

    def __init__(self, peer: str, description: _Description, target: There | _Here) -> None:
        self.peer = peer
        self.description = description
        self.target = target
        self.prepared = Ranges(f"what was prepared for peer {peer!r}")
        self.outbox = Outbox(description.inbox)

    def check_alive(self) -> None:
        """Raises `TransportError` if the peer's process ended, even if another has its pid now, or closed its end."""
        try:
            self.outbox.check()
        except OSError as error:
            raise self.gone() from error
        if self.target.gone():
            raise self.gone()

    def gone(self) -> TransportError:
        return TransportError(
            f"the transport of peer {self.peer!r} is gone", remedy="fail its rooms; it may connect anew", peer=self.peer
        )


class LocalTransport(Transport):
    """Transport `local`; it has no options."""

    traits: ClassVar[Traits] = Traits(
        name="local",
        notifies=True,
        max_descriptors=1 << 20,
        kinds=frozenset({"cpu"}),
        post_blocks=True,
        fences=False,
        stops_reads=True,
        bytes_per_s=5e9,
        descriptor_s=0.3e-6,
        post_s=12e-6,
        maps=True,
    )
    preference: ClassVar[int] = 30

    def __init__(self) -> None:
        """Raises `UsageError` on a system that is not Linux."""
        self.own = Ranges("this process's registered memory")
        self._identity = own_identity()
        self._links: dict[str, _Link] = {}
        self._met = Met()
        self._blocked: set[_Link] = set()
        self._events: deque[Event] = deque()
        self._tickets = count(1)
        self._closed = False
        self._inbox = Inbox()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._inbox, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        _here[self._inbox.name] = self

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        check_kinds(regions, self.traits)
        self.own = self.own.with_regions(regions)
        allow_writers()

    def unregister(self, regions: Sequence[Region]) -> None:
        self._check_open()
        self.own = self.own.without(regions)

    def describe(self) -> bytes:
        self._check_open()
        regions = [(region.base, region.nbytes) for region in self.own.regions]
        backings = ((region.base, shared.backing(region.base, region.nbytes)) for region in self.own.regions)
        mappable = [(base, backing) for base, backing in backings if backing is not None]
        return write_description(_Description(self._identity, self._inbox.name, regions, mappable))

    def connect(self, peer: str, description: bytes) -> None:
        self._check_open()
        told = read_description(peer, description, _Description, self.traits)
        link = self._links.get(peer)
        if link is not None and link.description.inbox == told.inbox:
            link.description = told
            return
        if told.inbox == self._inbox.name:
            raise is_itself(peer)
        target = self._target(peer, told)
        fresh = _Link(peer, told, target)
        try:
            fresh.check_alive()
        except PdstageError:
            target.close()
            fresh.outbox.close()
            raise
        self.disconnect(peer)
        self._links[peer] = fresh
        self._met.add(peer, target)

    def meet(self, peer: str, description: bytes) -> None:
        self._check_open()
        self._met.add(peer, self._target(peer, read_description(peer, description, _Description, self.traits)))

    def _target(self, peer: str, told: _Description) -> There | _Here:
        told.identity.check_reachable_from(self._identity, peer)
        if told.identity == self._identity:
            return _Here(told.inbox)
        target = Process(told.identity, peer)
        try:
            target.check_holds(told.inbox)
        except PdstageError:
            target.close()
            raise
        return There(target)

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        link = self._link(peer)
        check_kinds(regions, self.traits)
        prepared = Ranges(link.prepared.whose, regions)
        offered = Ranges(f"what peer {peer!r} registered", (Region(*pair) for pair in link.description.regions))
        for region in prepared.regions:
            if not offered.holds(region.base, region.nbytes):
                raise not_registered(peer, region)
        target = link.target
        if isinstance(target, There):
            target.map(link.description.shared, prepared.regions)
        for region in prepared.regions:
            why_not = None if target.mapped(region.base, region.nbytes) else target.why_not_written(region.base)
            if why_not is not None:
                raise PeerError(f"{region} is neither shared nor writable: {why_not}", remedy=_SHARE, region=region)
        link.prepared = prepared

    def mapped(self, peer: str, address: int, nbytes: int) -> Mapped | None:
        link = self._links.get(peer)
        return (
            link.target.mapped(address, nbytes) if link is not None and link.prepared.holds(address, nbytes) else None
        )

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        link = self._link(peer)
        check_spans(spans, self.traits)
        self.own.find(spans.src, spans.nbytes)
        link.prepared.find(spans.dst, spans.nbytes)
        self._check_tag(link, tag)
        written, error = link.target.write(spans)
        if error is not None and written == 0:
            raise error
        ticket = next(self._tickets)
        if error is not None:
            self._tell(PostFailed(ticket, error))
        else:
            self._put(link, ticket, tag)
        return ticket

    def notify(self, peer: str, tag: bytes) -> int:
        link = self._link(peer)
        self._check_tag(link, tag)
        ticket = next(self._tickets)
        self._put(link, ticket, tag)
        return ticket

    def _check_tag(self, link: _Link, tag: bytes) -> None:
        if len(tag) > MAX_NBYTES:
            raise UsageError(f"a tag of {len(tag)} bytes", remedy=f"local carries at most {MAX_NBYTES}")
        link.check_alive()

    def _put(self, link: _Link, ticket: int, tag: bytes) -> None:
        if tag:
            link.outbox.put(ticket, tag)
            self._send(link)
        else:
            self._tell(Done(ticket))

    def poll(self) -> list[Event]:
        if self._closed:
            return []
        for link in self._blocked.copy():
            self._send(link)
        events = list(self._events)
        if events:
            self._events.clear()
            _lower(self._bell)
        events.extend(map(Inbound, self._inbox.receive()))
        return events

    def filenos(self) -> Sequence[int]:
        return () if self._closed else (self._epoll.fileno(),)

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._give_up(link, TransportError(f"peer {peer!r} was disconnected before it took the tag"))
            self._blocked.discard(link)
            link.outbox.close()
            link.target.unmap()

    def proved_dead(self, peer: str) -> bool:
        return self._met.all_gone(peer)

    def forget(self, peer: str) -> None:
        self._met.forget(peer)

    def close(self) -> None:
        if self._closed:
            return
        for peer in list(self._links):
            self.disconnect(peer)
        self._closed = True
        _here.pop(self._inbox.name, None)
        self._met.close()
        self._events.clear()
        self._epoll.close()
        self._inbox.close()
        os.close(self._bell)

    def _check_open(self) -> None:
        if self._closed:
            raise closed()

    def _link(self, peer: str) -> _Link:
        self._check_open()
        link = self._links.get(peer)
        if link is None:
            raise not_connected(peer)
        return link

    def _tell(self, event: Event) -> None:
        if not self._events:
            _raise(self._bell)
        self._events.append(event)

    def _send(self, link: _Link) -> None:
        """Sends what waits for the peer, and while some is left has the epoll watch for room."""
        try:
            for ticket in link.outbox.flush():
                self._tell(Done(ticket))
        except OSError:
            self._give_up(link, link.gone())
        if link.outbox.is_empty() and link in self._blocked:
            self._blocked.remove(link)
            self._epoll.unregister(link.outbox)
        elif not link.outbox.is_empty() and link not in self._blocked:
            self._blocked.add(link)
            self._epoll.register(link.outbox, select.EPOLLOUT)

    def _give_up(self, link: _Link, error: TransportError) -> None:
        for ticket in link.outbox.drop():
            self._tell(PostFailed(ticket, error))


def _raise(bell: int) -> None:
    if native.ext is not None:
        native.ext.raise_event(bell)
    else:
        os.eventfd_write(bell, 1)


def _lower(bell: int) -> None:
    if native.ext is not None:
        native.ext.lower_event(bell)
    else:
        os.eventfd_read(bell)


TRANSPORT = LocalTransport
