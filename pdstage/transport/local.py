"""The transport within one host: a plain copy in one process and into memory that another process shares, and
process_vm_writev(2) into the rest of another process's; device memory by CUDA IPC.

Needs no package and no set-up: the embedded default.

`post` copies before it returns, and its tag follows as a datagram; while the peer has no room for it, `Done` waits too.
Memory from `pdstage.shared` is mapped by peers, whose callers may write there themselves (`mapped`). Nobody can stop a
peer's writes into this process: `fences` is false, and only a peer's proved death fences.

Device memory goes between memories of one kind only. `post` puts its copies in a stream and returns; the tag leaves
when `poll` finds them done, also after `disconnect`: so `stops_reads` is false of such a peer.
"""

from __future__ import annotations

import select
from collections import deque
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from pdstage import shared
from pdstage.errors import PdstageError, PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.shared import Backing  # noqa: TC001  (msgspec resolves it at run time)
from pdstage.transport import _cuda_ipc
from pdstage.transport._datagrams import MAX_NBYTES, Bell, Inbox, Outbox
from pdstage.transport._device import KIND, ON_DEVICE, Devices, Told, Views
from pdstage.transport._mapped import Here, There
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


class _Description(msgspec.Struct, frozen=True, tag="pdstage.local.1", array_like=True):
    identity: Identity
    inbox: Annotated[str, Meta(max_length=100)]
    regions: list[tuple[int, int]]
    shared: list[tuple[int, Backing]] = []
    """Which of them peers can map: base, and of what they are."""
    devices: list[Told] = []
    """What is registered of device memory; `regions` has none of it."""

    def offered(self, peer: str, kind: str) -> Ranges:
        told = [one.region() for one in self.devices] if kind == KIND else [Region(*pair) for pair in self.regions]
        return Ranges(f"what peer {peer!r} registered", told)


class _Link:
    """A connected peer: where to write, what may be written there, and its tags."""

    def __init__(self, peer: str, description: _Description, target: There | Here) -> None:
        self.peer = peer
        self.description = description
        self.target = target
        self.prepared = Ranges(f"what was prepared for peer {peer!r}")
        self.views = Views()
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


class _Copy(NamedTuple):
    """What follows a copy of device memory that is done."""

    ticket: int
    link: _Link
    tag: bytes


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
        self._devices: Devices[_Copy] = Devices(self._load_cuda)
        self._peers_on_devices: set[str] = set()
        if self._has_cuda():
            self.traits = replace(self.traits, kinds=self.traits.kinds | {KIND}, stops_reads=False)  # type: ignore[misc]
        self._inbox = Inbox()
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._inbox, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        Here.lives[self._inbox.name] = self

    _has_cuda = staticmethod(_cuda_ipc.is_here)
    _load_cuda = staticmethod(_cuda_ipc.here)

    def register(self, regions: Sequence[Region]) -> None:
        self._check_open()
        check_kinds(regions, self.traits)
        self.own = self.own.with_regions(regions)
        self._devices.register(regions)
        allow_writers()

    def unregister(self, regions: Sequence[Region]) -> None:
        self._check_open()
        self.own = self.own.without(regions)
        self._devices.unregister(regions)

    def describe(self) -> bytes:
        self._check_open()
        regions = [(region.base, region.nbytes) for region in self.own.regions if region.kind != KIND]
        backings = ((base, shared.backing(base, nbytes)) for base, nbytes in regions)
        mappable = [(base, backing) for base, backing in backings if backing is not None]
        return write_description(
            _Description(self._identity, self._inbox.name, regions, mappable, self._devices.told())
        )

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

    def identify(self, peer: str, description: bytes) -> None:
        self._check_open()
        self._met.add(peer, self._target(peer, read_description(peer, description, _Description, self.traits)))

    def _target(self, peer: str, told: _Description) -> There | Here:
        told.identity.check_reachable_from(self._identity, peer)
        if told.identity == self._identity:
            return Here(told.inbox)
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
        offered = {kind: link.description.offered(peer, kind) for kind in self.traits.kinds}
        for region in prepared.regions:
            if not offered[region.kind].holds(region.base, region.nbytes):
                raise not_registered(peer, region)
        target = link.target
        views = self._views(link, prepared.regions)
        on_host = [region for region in prepared.regions if region.kind != KIND]
        if isinstance(target, There):
            target.map(link.description.shared, on_host)
        for region in on_host:
            why_not = None if target.mapped(region.base, region.nbytes) else target.why_not_written(region.base)
            if why_not is not None:
                raise PeerError(f"{region} is neither shared nor writable: {why_not}", remedy=_SHARE, region=region)
        link.prepared, link.views = prepared, views
        if views:
            self._peers_on_devices.add(peer)

    def _views(self, link: _Link, regions: Sequence[Region]) -> Views:
        """Where device memory of the peer lies here. A handle is opened only in the life of the peer that gave it."""
        if any(region.kind == KIND for region in regions):
            link.check_alive()
        same_process = isinstance(link.target, Here)
        views = self._devices.views(link.peer, link.description.devices, regions, same_process=same_process)
        if views:
            link.check_alive()
        return views

    def traits_of(self, peer: str) -> Traits:
        traits = type(self).traits
        return replace(traits, **ON_DEVICE) if peer in self._peers_on_devices else traits

    def mapped(self, peer: str, address: int, nbytes: int) -> Mapped | None:
        link = self._links.get(peer)
        if link is None or not link.prepared.holds(address, nbytes):
            return None
        on_device = link.views.mapped(address, nbytes)
        if on_device is not None and isinstance(link.target, There):
            return on_device
        on_host = link.target.mapped(address, nbytes)
        return on_device if on_host is not None and on_device is not None else on_host

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        link = self._link(peer)
        check_spans(spans, self.traits_of(peer))
        kinds = {self.own.find(spans.src, spans.nbytes).kind, link.prepared.find(spans.dst, spans.nbytes).kind}
        self._check_tag(link, tag)
        if KIND in kinds:
            return self._post_on_device(link, spans, tag, kinds)
        written, error = link.target.write(spans)
        if error is not None and written == 0:
            raise error
        ticket = next(self._tickets)
        if error is not None:
            self._tell(PostFailed(ticket, error))
        else:
            self._put(link, ticket, tag)
        return ticket

    def _post_on_device(self, link: _Link, spans: Spans, tag: bytes, kinds: set[str]) -> int:
        if len(kinds) > 1:
            raise UsageError("a post between host and device memory", remedy="keep both sides' memory on one kind")
        error = link.target.why_not(spans) if isinstance(link.target, Here) else None
        if error is not None:
            raise error
        ticket = next(self._tickets)
        self._devices.start(_Copy(ticket, link, tag), spans, link.views)
        return ticket

    def _follow_copies(self) -> None:
        for (ticket, link, tag), error, settled in self._devices.ended():
            if error is not None:
                self._tell(PostFailed(ticket, error, settled))
            elif tag and self._links.get(link.peer) is not link:
                self._tell(PostFailed(ticket, _disconnected(link.peer)))
            else:
                self._put(link, ticket, tag)

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
        self._follow_copies()
        for link in self._blocked.copy():
            self._send(link)
        events = list(self._events)
        if events:
            self._events.clear()
            self._bell.lower()
        events.extend(map(Inbound, self._inbox.receive()))
        return events

    def filenos(self) -> Sequence[int]:
        """None while copies are under way on a device, which announces the end of none."""
        return () if self._closed or self._devices.under_way() else (self._epoll.fileno(),)

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._give_up(link, _disconnected(peer))
            self._blocked.discard(link)
            link.outbox.close()
            link.target.unmap()
            link.views = Views()

    def proved_dead(self, peer: str) -> bool:
        return self._met.all_gone(peer)

    def forget(self, peer: str) -> None:
        self._met.forget(peer)
        self._peers_on_devices.discard(peer)

    def close(self) -> None:
        if self._closed:
            return
        for peer in list(self._links):
            self.disconnect(peer)
        self._closed = True
        Here.lives.pop(self._inbox.name, None)
        self._met.close()
        self._devices.close()
        self._events.clear()
        self._epoll.close()
        self._inbox.close()
        self._bell.close()

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
            self._bell.ring()
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


def _disconnected(peer: str) -> TransportError:
    return TransportError(f"peer {peer!r} was disconnected before it took the tag")


TRANSPORT = LocalTransport
