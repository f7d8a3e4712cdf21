"""The transport within one host.

It copies within one process and into memory that another process shares. It uses process_vm_writev(2) for other memory
of another process, and CUDA IPC for device memory. It needs no package and no set-up: the embedded default.

`post` copies before it returns, and the tag follows as a datagram. While the peer has no room for the tag, `Done` waits
too. Peers map memory of `pdstage.shared`, and their callers may write there themselves (`mapped`). Nothing can stop a
peer's writes into this process: `fences` is false, and only a peer's proved death fences.

Device memory is copied only between memories of one kind. `post` enqueues its copies in a stream and returns. The tag
leaves when `poll` finds them done, also after `disconnect`: so `stops_reads` is false for such a peer.
"""

from __future__ import annotations

import errno
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from pdstage import shared
from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.shared import Backing  # noqa: TC001  (msgspec resolves it at run time)
from pdstage.transport import _cuda_ipc
from pdstage.transport._backend import Backend, Link, Post, offered
from pdstage.transport._datagrams import MAX_NBYTES, Bell, Inbox, Outbox
from pdstage.transport._device import KIND, ON_DEVICE, Devices, ExportedRegion, Views
from pdstage.transport._peer import Here, Identity, Process, Target, allow_writers, own_identity
from pdstage.transport.base import Done, Event, Inbound, Mapped, PostFailed, Ranges, Traits, write_description

_SHARE = 'let the peer expose only staging memory that it allocates itself (path="staged"), or fix the reason above'


class _Description(msgspec.Struct, frozen=True, tag="pdstage.local.1", array_like=True):
    identity: Identity
    life: Annotated[str, Meta(max_length=100)]
    """The inbox's name."""
    regions: list[tuple[int, int]]
    shared: list[tuple[int, Backing]] = []
    """The regions that peers can map: base, and backing file."""
    devices: list[ExportedRegion] = []
    """Registered device memory; `regions` contains none of it."""

    def offered(self, peer: str) -> Ranges:
        return offered(peer, [*(Region(*pair) for pair in self.regions), *(one.region() for one in self.devices)])


class _Link(Link[_Description]):
    """A connected peer: its process, the memory there that may be written, and its tags."""

    def __init__(self, peer: str, description: _Description, target: Process | Here) -> None:
        super().__init__(peer, description)
        self.target = target
        self.views = Views()
        self.outbox = Outbox(description.life)
        self.waiting: deque[tuple[int, bytes]] = deque()
        """Tags that the inbox had no room for, by ticket."""

    def check_alive(self) -> None:
        """Raises `TransportError` if the peer's process ended, even if its pid is in use again, or if it closed its
        inbox.
        """
        try:
            self.outbox.check()
        except OSError as error:
            raise self.gone() from error
        if self.target.gone():
            raise self.gone()

    def gone(self) -> TransportError:
        return TransportError(
            f"the transport of peer {self.peer!r} is gone",
            remedy="fail its rooms; it may connect again",
            peer=self.peer,
        )


class LocalTransport(Backend[_Link, _Description]):
    """Transport `local`; it has no options."""

    traits = Traits(
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
    preference = 30
    description_type = _Description
    link_type = _Link
    max_tag_nbytes = MAX_NBYTES

    def __init__(self) -> None:
        """Raises `UsageError` on a system other than Linux."""
        super().__init__()
        self.identity = own_identity()
        self._blocked: set[_Link] = set()
        self._devices = Devices(_cuda_ipc.here)
        self._peers_on_devices: set[str] = set()
        if _cuda_ipc.is_here():
            self.traits = replace(self.traits, kinds=self.traits.kinds | {KIND}, stops_reads=False)  # type: ignore[misc]
        self._inbox = Inbox()
        self._bell = Bell()
        self._epoll = select.epoll()
        self._epoll.register(self._inbox, select.EPOLLIN)
        self._epoll.register(self._bell, select.EPOLLIN)
        self.life = self._inbox.name
        Here.lives[self.life] = self

    def _register(self, region: Region) -> None:
        if region.kind == KIND:
            self._devices.register(region)
        allow_writers()

    def _unregister(self, region: Region) -> None:
        self._devices.unregister(region)

    def describe(self) -> bytes:
        self.check_open()
        regions = [(region.base, region.nbytes) for region in self.own.regions if region.kind != KIND]
        backings = ((base, shared.backing(base, nbytes)) for base, nbytes in regions)
        mappable = [(base, backing) for base, backing in backings if backing is not None]
        return write_description(_Description(self.identity, self.life, regions, mappable, self._devices.exported()))

    def _attach(self, peer: str, description: _Description, target: Target) -> _Link:
        assert isinstance(target, Process | Here)
        fresh = _Link(peer, description, target)
        try:
            fresh.check_alive()
        except BaseException:
            fresh.outbox.close()
            raise
        return fresh

    def _target(self, peer: str, description: _Description) -> Process | Here:
        description.identity.check_reachable_from(self.identity, peer)
        if description.identity == self.identity:
            return Here(description.life)
        target = Process(description.identity, peer)
        try:
            target.check_holds(description.life)
        except BaseException:
            target.close()
            raise
        return target

    def _prepare(self, link: _Link, prepared: Ranges) -> None:
        target = link.target
        views = self._views(link, prepared.regions)
        if isinstance(target, Process):
            on_host = [region for region in prepared.regions if region.kind != KIND]
            target.map(link.description.shared, on_host)
            for region in on_host:
                why_not = None if target.mapped(region.base, region.nbytes) else target.why_not_written(region.base)
                if why_not is not None:
                    raise PeerError(f"{region} is neither shared nor writable: {why_not}", remedy=_SHARE, region=region)
        link.prepared, link.views = prepared, views
        if views:
            self._peers_on_devices.add(link.peer)

    def _views(self, link: _Link, regions: Sequence[Region]) -> Views:
        """Where the peer's device memory lies here. A handle is opened only in the life of the peer that gave it."""
        if any(region.kind == KIND for region in regions):
            link.check_alive()
        fetch = None if isinstance(link.target, Here) else link.target.descriptor
        views = self._devices.views(link.peer, link.description.devices, regions, fetch)
        if views:
            link.check_alive()
        return views

    def traits_of(self, peer: str) -> Traits:
        traits = type(self).traits
        return replace(traits, **ON_DEVICE) if peer in self._peers_on_devices else traits

    def mapped(self, peer: str, address: int, nbytes: int) -> Mapped | None:
        link = self.links.get(peer)
        if link is None or not link.prepared.holds(address, nbytes):
            return None
        on_device = link.views.mapped(address, nbytes)
        if on_device is not None and isinstance(link.target, Process):
            return on_device
        on_host = link.target.mapped(address, nbytes)
        return on_device if on_host is not None and on_device is not None else on_host

    def _write(self, link: _Link, post: Post) -> None:
        link.check_alive()
        if post.src.kind != post.dst.kind:
            raise UsageError("a post between host and device memory", remedy="keep both sides' memory on one kind")
        if post.src.kind == KIND:
            error = link.target.why_not(post.spans) if isinstance(link.target, Here) else None
            if error is not None:
                raise error
            self._devices.start((post.ticket, link, post.tag), post.spans, link.views)
            return
        written, error = link.target.write(post.spans)
        if error is None:
            self._put(link, post.ticket, post.tag)
        elif written:
            self._tell(PostFailed(post.ticket, error))
        else:
            raise error

    def notify(self, peer: str, tag: bytes) -> int:
        link = self.link(peer)
        self.check_tag(tag)
        link.check_alive()
        ticket = next(self.tickets)
        self._put(link, ticket, tag)
        return ticket

    def _put(self, link: _Link, ticket: int, tag: bytes) -> None:
        if tag:
            link.waiting.append((ticket, tag))
            self._send(link)
        else:
            self._tell(Done(ticket))

    def _progress(self) -> None:
        for copy in self._devices.ended():
            ticket, link, tag = copy.word
            if copy.error is not None:
                self._tell(PostFailed(ticket, copy.error, copy.settled))
            elif tag and self.links.get(link.peer) is not link:
                self._tell(PostFailed(ticket, _disconnected(link.peer)))
            else:
                self._put(link, ticket, tag)
        for link in self._blocked.copy():
            self._send(link)
        if self.events:
            self._bell.lower()
        self.events.extend(map(Inbound, self._inbox.receive()))

    def filenos(self) -> Sequence[int]:
        """None while device copies are in flight, since no descriptor announces their end."""
        return () if self.closed or self._devices.under_way() else (self._epoll.fileno(),)

    def _detach(self, link: _Link) -> None:
        self._give_up(link, _disconnected(link.peer))
        self._blocked.discard(link)
        link.outbox.close()
        link.target.unmap()
        link.views = Views()

    def forget(self, peer: str) -> None:
        super().forget(peer)
        self._peers_on_devices.discard(peer)

    def _shut(self) -> None:
        self._devices.close()
        self._epoll.close()
        self._inbox.close()
        self._bell.close()

    def _tell(self, event: Event) -> None:
        if not self.events:
            self._bell.ring()
        self.events.append(event)

    def _send(self, link: _Link) -> None:
        """Sends the tags that wait for the peer. While some are left, the epoll watches for room."""
        code = 0
        while link.waiting and not (code := link.outbox.send(link.waiting[0][1])):
            self._tell(Done(link.waiting.popleft()[0]))
        if code not in (0, errno.EAGAIN):
            self._give_up(link, link.gone())
        if link.waiting and link not in self._blocked:
            self._blocked.add(link)
            self._epoll.register(link.outbox, select.EPOLLOUT)
        elif not link.waiting and link in self._blocked:
            self._blocked.remove(link)
            self._epoll.unregister(link.outbox)

    def _give_up(self, link: _Link, error: TransportError) -> None:
        while link.waiting:
            self._tell(PostFailed(link.waiting.popleft()[0], error))


def _disconnected(peer: str) -> TransportError:
    return TransportError(f"peer {peer!r} was disconnected before it took the tag")


TRANSPORT = LocalTransport
