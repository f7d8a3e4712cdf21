"""The base of every transport here: what is registered, who is connected, what was prepared, tickets and events.

A backend that derives from `Backend` writes only what its library does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta

from pdstage.errors import PdstageError, PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport._peer import Elsewhere, Ended, Met
from pdstage.transport.base import (
    Event,
    Ranges,
    Transport,
    check_kinds,
    check_spans,
    closed,
    is_itself,
    not_connected,
    not_registered,
    read_description,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdstage.spans import Spans
    from pdstage.transport._peer import Target
    from pdstage.transport.base import Place


class Described(Protocol):
    """What a description holds, whatever else a backend says in it. `life` names one life of one transport and never
    another.
    """

    @property
    def life(self) -> str: ...

    def offered(self, peer: str) -> Ranges:
        """The memory that its process registered. Raises `PeerError` for regions that cannot be."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The least of one; a backend's own class adds a tag with its name and version, and fields.

    `regions` are (address, bytes), by address.
    """

    life: Annotated[str, Meta(max_length=200)]
    regions: list[tuple[int, int]]

    def offered(self, peer: str) -> Ranges:
        return offered(peer, (Region(*pair) for pair in self.regions))


def offered(peer: str, regions: Iterable[Region]) -> Ranges:
    """What a peer says that it registered. Raises `PeerError` for regions that cannot be."""
    try:
        return Ranges(f"what peer {peer!r} registered", regions)
    except UsageError as error:
        raise PeerError(f"peer {peer!r}: {error}", remedy="trust it no more", peer=peer) from error


AnyDescription = TypeVar("AnyDescription", bound=Described)


class Link(Generic[AnyDescription]):
    """A connected peer: what it described, what it offers, and what of that may be written now."""

    def __init__(self, peer: str, description: AnyDescription) -> None:
        """Raises `PeerError` for regions that cannot be."""
        self.peer = peer
        self.prepared = Ranges(f"what was prepared for peer {peer!r}")
        self.learn(description)

    def learn(self, description: AnyDescription) -> None:
        """Takes a description of the same life; what it no longer offers is not prepared any more."""
        self.offered = description.offered(self.peer)
        self.description = description
        kept = [region for region in self.prepared.regions if self.offered.holds(region.base, region.nbytes)]
        self.prepared = Ranges(self.prepared.whose, kept)


AnyLink = TypeVar("AnyLink", bound=Link)  # type: ignore[type-arg]


class Post(NamedTuple):
    """One write, checked. `src` and `dst`: the kind and device that the spans are of here, and at the peer."""

    ticket: int
    spans: Spans
    tag: bytes
    src: Place
    dst: Place


@contextmanager
def _as_typed(peer: str) -> Iterator[None]:
    """What the system refuses meanwhile, descriptors above all, is `TransportError`, and costs one session."""
    try:
        yield
    except PdstageError:  # one of them is an OSError too
        raise
    except OSError as error:
        raise TransportError(
            f"peer {peer!r} cannot be met: {error.strerror or error}",
            remedy="see how many files this process may open (`ulimit -n`), and who holds them",
            peer=peer,
        ) from error


class Backend(Transport, Generic[AnyLink, AnyDescription]):
    """A transport but for the hooks: `describe`, `_write` and `_progress`, and where they have work to do, the others.

    The verbs check everything that the contract wants checked, before a hook is called. Events go to `self.events`.
    `description_type` is what its descriptions hold, `link_type` what it keeps of a connected peer: `Link`, or one
    derived from it. `life` is its own, as its descriptions say it.
    """

    description_type: type[AnyDescription]
    link_type: type[AnyLink]
    max_tag_nbytes = 1 << 30
    life: str

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "told" in vars(cls):
            where = f"{cls.__module__}.{cls.__qualname__}"
            raise UsageError(
                f"{where} is written for an earlier Backend: `told` is `description_type` now, and hooks have changed",
                remedy="see docs/transports.md, Your own transport",
            )

    def __init__(self) -> None:
        self.own = Ranges("this process's registered memory")
        self.links: dict[str, AnyLink] = {}
        self.met = Met()
        self.events: deque[Event] = deque()
        self.closed = False
        self.tickets = count(1)

    # Hooks.

    def _register(self, regions: Sequence[Region]) -> None:
        """Registers regions that are new, or raises `TransportError` with none of them registered."""

    def _unregister(self, regions: Sequence[Region]) -> None: ...

    def _check(self, peer: str, description: AnyDescription) -> None:
        """Raises `PeerError` for a description of the right kind that cannot be of use here."""

    def _target(self, peer: str, description: AnyDescription) -> Target:
        """The process that wrote a description, to tell when it has ended. Raises `TransportError` if it has."""
        return Elsewhere()

    def _attach(self, peer: str, description: AnyDescription, target: Target) -> AnyLink:
        """Connects to a life of a peer; may raise `PeerError` or `TransportError`, and the old state stands."""
        return self.link_type(peer, description)

    def _refresh(self, link: AnyLink, description: AnyDescription) -> None:
        """A connected peer described itself anew."""
        link.learn(description)

    def _offers(self, link: AnyLink, region: Region) -> bool:
        """Whether the peer registered all of `region`."""
        return link.offered.holds(region.base, region.nbytes)

    def _prepare(self, link: AnyLink, prepared: Ranges) -> None:
        """Makes `link.prepared` what may be written from now on, or raises `PeerError`."""
        link.prepared = prepared

    @abstractmethod
    def _write(self, link: AnyLink, post: Post) -> None:
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
        self.own = self.own.without(regions)  # first: of what a refusal leaves half done, nothing may be posted
        self._unregister(list(dict.fromkeys(regions)))

    def connect(self, peer: str, description: bytes) -> None:
        with _as_typed(peer):
            self._connect(peer, self._read(peer, description))

    def _connect(self, peer: str, given: AnyDescription) -> None:
        if given.life == self.life:
            raise is_itself(peer)
        link = self.links.get(peer)
        if link is not None and link.description.life == given.life:
            self._refresh(link, given)
            return
        target = self._process(peer, given)
        try:
            fresh = self._attach(peer, given, target)
        except BaseException:
            target.close()
            raise
        self.met.add(peer, target)
        self.disconnect(peer)
        self.links[peer] = fresh

    def identify(self, peer: str, description: bytes) -> None:
        with _as_typed(peer):
            self.met.add(peer, self._process(peer, self._read(peer, description)))

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        link = self.link(peer)
        check_kinds(regions, self.traits)
        prepared = Ranges(link.prepared.whose, regions)
        for region in prepared.regions:
            if not self._offers(link, region):
                raise not_registered(peer, region)
        self._prepare(link, prepared)

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        link = self.link(peer)
        check_spans(spans, self.traits_of(peer))
        self.check_tag(tag)
        src, dst = self.own.find(spans.src, spans.nbytes), link.prepared.find(spans.dst, spans.nbytes)
        ticket = next(self.tickets)
        self._write(link, Post(ticket, spans, tag, src, dst))
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

    def proved_dead(self, peer: str) -> bool:
        return not self.closed and self.met.all_gone(peer)

    def forget(self, peer: str) -> None:
        self.met.forget(peer)

    def close(self) -> None:
        if self.closed:
            return
        for peer in list(self.links):
            self.disconnect(peer)
        self.closed = True
        self._shut()
        self.met.close()
        self.events.clear()

    def check_tag(self, tag: bytes) -> None:
        """Raises `UsageError` for one that is too long."""
        if len(tag) > self.max_tag_nbytes:
            name = self.traits.name
            raise UsageError(f"a tag of {len(tag)} bytes", remedy=f"{name} carries at most {self.max_tag_nbytes}")

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

    def _process(self, peer: str, description: AnyDescription) -> Target:
        """`_target`. A process that has ended already is remembered as one that was met: its death is proved."""
        try:
            return self._target(peer, description)
        except TransportError:
            self.met.add(peer, Ended())
            raise

    def _read(self, peer: str, description: bytes) -> AnyDescription:
        self.check_open()
        given = read_description(peer, description, self.description_type, self.traits)
        self._check(peer, given)
        return given
