"""The book-keeping of a transport: what is registered, who is connected, what was prepared, tickets and events.

A backend that derives from `Backend` writes only what its library does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from pdstage.errors import PeerError, UsageError
from pdstage.layout import Region
from pdstage.transport.base import (
    Event,
    Ranges,
    Transport,
    check_kinds,
    check_spans,
    closed,
    not_connected,
    not_registered,
    read_description,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.spans import Spans


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What a description holds; a backend's own class adds a tag with its name and version, and fields.

    `life` names one life of one transport and never another. `regions` are (address, bytes), by address.
    """

    life: Annotated[str, Meta(max_length=200)]
    regions: list[tuple[int, int]]


class Link:
    """A connected peer: what it told, what it offers, and what of that may be written now."""

    def __init__(self, peer: str, told: Told) -> None:
        """Raises `PeerError` for regions that cannot be."""
        self.peer = peer
        self.prepared = Ranges(f"what was prepared for peer {peer!r}")
        self.learn(told)

    def learn(self, told: Told) -> None:
        """Takes a description of the same life; what it no longer offers is not prepared any more."""
        try:
            self.offered = Ranges(f"what peer {self.peer!r} registered", (Region(*pair) for pair in told.regions))
        except UsageError as error:
            raise PeerError(f"peer {self.peer!r}: {error}", remedy="trust it no more", peer=self.peer) from error
        self.told = told
        kept = [region for region in self.prepared.regions if self.offered.holds(region.base, region.nbytes)]
        self.prepared = Ranges(self.prepared.whose, kept)


AnyLink = TypeVar("AnyLink", bound=Link)


class Backend(Transport, Generic[AnyLink]):
    """A transport but for the hooks: `describe`, `_write` and `_progress`, and where they have work to do, the others.

    The verbs check everything that the contract wants checked, before a hook is called. Events go to `self.events`.
    `told` is what its descriptions hold, `link_type` what it keeps of a connected peer: `Link`, or one derived from it.
    """

    told: type[Told]
    link_type: type[AnyLink]

    def __init__(self) -> None:
        self.own = Ranges("this process's registered memory")
        self.links: dict[str, AnyLink] = {}
        self.events: deque[Event] = deque()
        self.closed = False
        self._tickets = count(1)

    # Hooks.

    def _register(self, regions: Sequence[Region]) -> None:
        """Registers regions that are new, or raises `TransportError` with none of them registered."""

    def _unregister(self, regions: Sequence[Region]) -> None: ...

    def _attach(self, link: AnyLink) -> None:
        """A peer is about to be connected; may raise `PeerError` or `TransportError`, and the old state stands."""

    def _identify(self, peer: str, told: Told) -> None:
        """`peer` told this, to connect or not."""

    @abstractmethod
    def _write(self, link: AnyLink, ticket: int, spans: Spans, tag: bytes) -> None:
        """Starts a post; raises `TransportError` if none of it is or will be written."""

    @abstractmethod
    def _progress(self) -> None:
        """Moves things on, and adds what happened to `self.events`."""

    def _detach(self, link: AnyLink) -> None:
        """A peer was disconnected: no post to it begins any more."""

    @abstractmethod
    def _shut(self) -> None:
        """Gives everything back; called once, with all peers disconnected."""

    # Verbs.

    def register(self, regions: Sequence[Region]) -> None:
        self.check_open()
        check_kinds(regions, self.traits)
        own = self.own.with_regions(regions)
        self._register([region for region in own.regions if region not in self.own.regions])
        self.own = own

    def unregister(self, regions: Sequence[Region]) -> None:
        self.check_open()
        own = self.own.without(regions)
        self._unregister(list(dict.fromkeys(regions)))
        self.own = own

    def connect(self, peer: str, description: bytes) -> None:
        told = self._read(peer, description)
        link = self.links.get(peer)
        if link is not None and link.told.life == told.life:
            link.learn(told)
            return
        fresh = self.link_type(peer, told)
        self._attach(fresh)
        self._identify(peer, told)
        self.disconnect(peer)
        self.links[peer] = fresh

    def identify(self, peer: str, description: bytes) -> None:
        self._identify(peer, self._read(peer, description))

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        link = self.link(peer)
        check_kinds(regions, self.traits)
        prepared = Ranges(link.prepared.whose, regions)
        for region in prepared.regions:
            if not link.offered.holds(region.base, region.nbytes):
                raise not_registered(peer, region)
        link.prepared = prepared

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        link = self.link(peer)
        check_spans(spans, self.traits)
        self.own.find(spans.src, spans.nbytes)
        link.prepared.find(spans.dst, spans.nbytes)
        ticket = next(self._tickets)
        self._write(link, ticket, spans, tag)
        return ticket

    def poll(self) -> list[Event]:
        if self.closed:
            return []
        self._progress()
        events = list(self.events)
        self.events.clear()
        return events

    def disconnect(self, peer: str) -> None:
        link = self.links.pop(peer, None)
        if link is not None:
            self._detach(link)

    def forget(self, peer: str) -> None:
        """Here, nothing is kept of a peer that is not connected."""

    def close(self) -> None:
        if self.closed:
            return
        for peer in list(self.links):
            self.disconnect(peer)
        self.closed = True
        self._shut()
        self.events.clear()

    def check_open(self) -> None:
        """Raises `UsageError` once this transport is closed."""
        if self.closed:
            raise closed()

    def link(self, peer: str) -> AnyLink:
        """Raises `UsageError` for a peer that is not connected."""
        self.check_open()
        link = self.links.get(peer)
        if link is None:
            raise not_connected(peer)
        return link

    def _read(self, peer: str, description: bytes) -> Told:
        self.check_open()
        return read_description(peer, description, self.told, self.traits)
