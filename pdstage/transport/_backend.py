"""The base class of the transports here. It keeps registrations, connected peers, prepared ranges, tickets and events.

A backend that derives from `Backend` contains only the calls of its library.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections import Counter, deque
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Annotated, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta

from pdstage.errors import PdstageError, PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport._peer import Here, Identity, Met, Process, Target, under_mps
from pdstage.transport.base import (
    Event,
    Place,
    Ranges,
    Transport,
    check_kinds,
    check_spans,
    not_connected,
    read_description,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pdstage.plan.spans import Spans

_environment = threading.Lock()


class Described(Protocol):
    """What every description holds. `life` identifies one life of one transport and is never reused."""

    @property
    def life(self) -> str: ...

    def offered(self, peer: str) -> Ranges:
        """The memory that the peer's process registered. Raises `PeerError` for impossible regions."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    """The minimal description. A backend's own class adds fields and a tag with its name and version.

    `regions` are (address, bytes), sorted by address.
    """

    life: Annotated[str, Meta(max_length=200)]
    regions: list[tuple[int, int]]

    def offered(self, peer: str) -> Ranges:
        return offered(peer, (Region(*pair) for pair in self.regions))


def offered(peer: str, regions: Iterable[Region]) -> Ranges:
    """The regions that a peer says it registered. Raises `PeerError` for impossible ones."""
    try:
        return Ranges(f"what peer {peer!r} registered", regions)
    except UsageError as error:
        raise PeerError(f"peer {peer!r}: {error}", remedy="stop using that peer", peer=peer) from error


AnyDescription = TypeVar("AnyDescription", bound=Described)


class Link(Generic[AnyDescription]):
    """A connected peer: its description, the memory it offers, and the part of it that may be written now."""

    def __init__(self, peer: str, description: AnyDescription) -> None:
        """Raises `PeerError` for impossible regions."""
        self.peer = peer
        self.prepared = Ranges(f"what was prepared for peer {peer!r}")
        self.learn(description)

    def learn(self, description: AnyDescription) -> None:
        """Takes a newer description of the same life. Memory that it no longer offers is no longer prepared."""
        self.offered = description.offered(self.peer)
        self.description = description
        kept = [region for region in self.prepared.regions if self.offered.holds(region.base, region.nbytes)]
        self.prepared = Ranges(self.prepared.whose, kept)


AnyLink = TypeVar("AnyLink", bound=Link)  # type: ignore[type-arg]


class Post(NamedTuple):
    """One checked write. `src` and `dst` are the kind and device of the spans here and at the peer."""

    ticket: int
    spans: Spans
    tag: bytes
    src: Place
    dst: Place


@contextmanager
def environment_of(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Inside, where a library starts, variables have these values, or with None are not set. One block at a time: what
    a library that starts elsewhere reads is not changed either.
    """
    with _environment:
        before = {name: os.environ.pop(name, None) for name in changes}
        os.environ.update({name: value for name, value in changes.items() if value is not None})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextmanager
def _as_typed(peer: str) -> Iterator[None]:
    """Turns a refusal by the system, such as no free descriptors, into `TransportError`, which costs one session."""
    try:
        yield
    except PdstageError:  # one of these classes is an OSError too
        raise
    except OSError as error:
        raise TransportError(
            f"peer {peer!r} cannot be identified: {error.strerror or error}",
            remedy="see how many files this process may open (`ulimit -n`), and that /proc shows it the peer's",
            peer=peer,
        ) from error


class Backend(Transport, Generic[AnyLink, AnyDescription]):
    """A transport without the library calls. A backend writes the hooks `describe`, `_write` and `_progress`, and any
    other hook that it needs.

    The public methods make every check that the contract demands before they call a hook. Events go to `self.events`.
    `description_type` is the class of its descriptions. `link_type` is the class of a connected peer: `Link` or a
    subclass. `life` is this transport's own, as its descriptions give it; `identity` its process, if they give that.
    `users` counts what uses a peer's life until `let_go`: its labels, and what a backend adds, such as posts in flight.
    """

    description_type: type[AnyDescription]
    link_type: type[AnyLink]
    max_tag_nbytes = 1 << 30
    life: str
    identity: Identity

    def __init__(self) -> None:
        self.own = Ranges("this process's registered memory")
        self.links: dict[str, AnyLink] = {}
        self.users: Counter[str] = Counter()
        self.met = Met()
        self.events: deque[Event] = deque()
        self.closed = False
        self.tickets = count(1)

    # Hooks.

    def _register(self, region: Region) -> None:
        """Registers a new region, or raises `TransportError`."""

    def _unregister(self, region: Region) -> None: ...

    def _check(self, peer: str, description: AnyDescription) -> None:
        """Raises `PeerError` for a description of the right kind that this process cannot use."""

    def _target(self, peer: str, description: AnyDescription) -> Target:
        """The process that wrote a description, held to tell when it ends: by default the one that its `identity`
        names, if it has one. Raises `TransportError` if it has ended.
        """
        there = getattr(description, "identity", None)
        if there is not None:
            here = self.identity
            if there == here:
                return Here(description.life)
            if (there.boot_id, there.namespaces) == (here.boot_id, here.namespaces):  # its pid means the same
                return Process(there, peer)
        return Target()

    def _attach(self, peer: str, description: AnyDescription, target: Target) -> AnyLink:
        """Connects to one life of a peer. May raise `PeerError` or `TransportError`; the old connection then stays."""
        return self.link_type(peer, description)

    def _refresh(self, link: AnyLink, description: AnyDescription) -> None:
        """A connected peer sent a newer description."""
        link.learn(description)

    def _offers(self, link: AnyLink, region: Region) -> bool:
        """Whether the peer registered all bytes of `region`."""
        return link.offered.holds(region.base, region.nbytes)

    def _prepare(self, link: AnyLink, prepared: Ranges) -> None:
        """Makes `prepared` the ranges that may be written from now on, or raises `PeerError`."""
        link.prepared = prepared

    @abstractmethod
    def _write(self, link: AnyLink, post: Post) -> None:
        """Starts a post. Raises `TransportError` if no byte is or will be written."""

    @abstractmethod
    def _progress(self) -> None:
        """Advances the transfers, and appends what happened to `self.events`."""

    def _detach(self, link: AnyLink) -> None:
        """A peer was disconnected: no new post to it starts."""

    def _leave(self, life: str) -> None:
        """Nothing uses a peer's life any more."""

    @abstractmethod
    def _shut(self) -> None:
        """Releases everything. Called once, after all peers are disconnected."""

    # Verbs.

    def register(self, regions: Sequence[Region]) -> None:
        self.check_open()
        check_kinds(regions, self.traits)
        own = self.own.with_regions(regions)
        done = []
        try:
            for region in own.regions:
                if region not in self.own.regions:
                    self._register(region)
                    done.append(region)
        except BaseException:
            for region in done:
                with suppress(TransportError):  # the first refusal is told
                    self._unregister(region)
            raise
        self.own = own

    def unregister(self, regions: Sequence[Region]) -> None:
        self.check_open()
        self.own = self.own.without(regions)  # first: after a refusal halfway, none of them may be posted
        for region in dict.fromkeys(regions):
            self._unregister(region)

    def connect(self, peer: str, description: bytes) -> None:
        with _as_typed(peer):
            given = self._read(peer, description)
            if given.life == self.life:
                raise UsageError(f"peer {peer!r} is this transport itself", remedy="connect two transports", peer=peer)
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
            self.users[given.life] += 1
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
                raise PeerError(
                    f"peer {peer!r} has not registered {region}", remedy="connect again with its newest description"
                )
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
            self.let_go(link.description.life)

    def let_go(self, life: str) -> None:
        self.users[life] -= 1
        if not self.users[life]:
            del self.users[life]
            self._leave(life)

    def proved_dead(self, peer: str) -> bool:
        gone_at = None if self.closed else self.met.gone_at(peer)
        if gone_at is None or (under_mps() and any(one.kind != "cpu" for one in self.own.regions)):
            return False
        return not self._may_land(gone_at)

    def _may_land(self, since: float) -> bool:
        """Whether bytes may still land that were written by a process of this host that was dead at `since`."""
        return False

    def forget(self, peer: str) -> None:
        self.met.forget(peer)

    def close(self) -> None:
        if self.closed:
            return
        for peer in list(self.links):
            self.disconnect(peer)
        self.closed = True
        Here.lives.pop(self.life, None)
        self._shut()
        self.met.close()
        self.events.clear()

    def check_tag(self, tag: bytes) -> None:
        """Raises `UsageError` for a tag that is too long."""
        if len(tag) > self.max_tag_nbytes:
            raise UsageError(
                f"a tag of {len(tag)} bytes", remedy=f"{self.traits.name} carries at most {self.max_tag_nbytes}"
            )

    def check_open(self) -> None:
        """Raises `UsageError` once this transport is closed: every verb does but `close` and `poll`."""
        if self.closed:
            raise UsageError("this transport is closed", remedy="open a new one")

    def link(self, peer: str) -> AnyLink:
        """Raises `UsageError` for a peer that is not connected."""
        self.check_open()
        link = self.links.get(peer)
        if link is None:
            raise not_connected(peer)
        return link

    def _process(self, peer: str, description: AnyDescription) -> Target:
        """`_target`; a process that has ended already still counts as identified, with its death proved."""
        try:
            return self._target(peer, description)
        except TransportError:
            self.met.add(peer, None)
            raise

    def _read(self, peer: str, description: bytes) -> AnyDescription:
        self.check_open()
        given = read_description(peer, description, self.description_type, self.traits)
        self._check(peer, given)
        return given
