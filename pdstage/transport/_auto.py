"""Several transports as one: each peer is reached by the most preferred transport that both sides have and that works.

`AutoTransport` is given the transports, best first, and asks each what it can do.

`prepare` settles a peer's transport, because only then it is known which memory will be written. Until then a transport
may refuse the peer, or the kind of memory there, and the next one is tried. A rank that is only written to calls
`identify` and does not learn which transport the writer settled on. It therefore relies only on what every transport
promises.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from pdstage.errors import PeerError, TransportError
from pdstage.transport.base import (
    Event,
    Inbound,
    Mapped,
    Ranges,
    Traits,
    Transport,
    check_kinds,
    not_connected,
    read_description,
    write_description,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdstage.layout import Region
    from pdstage.plan.spans import Spans

log = logging.getLogger(__name__)


class _Description(msgspec.Struct, frozen=True, tag="pdstage.auto.1", array_like=True):
    offers: dict[str, bytes]


class AutoTransport(Transport):
    """Transport `auto` over `ways`: open transports, the most preferred first. It owns them from now on. After `close`
    it is they that refuse each verb.
    """

    traits: ClassVar[Traits]

    def __init__(self, ways: Sequence[Transport]) -> None:
        self._ways = {way.traits.name: way for way in ways}
        self.traits = _weakest("auto", ways)  # type: ignore[misc]
        self._own = Ranges("this process's registered memory")
        self._offers: dict[str, Mapping[str, bytes]] = {}
        self._over: dict[str, Transport] = {}
        self._met: dict[str, dict[str, Transport]] = {}

    def register(self, regions: Sequence[Region]) -> None:
        check_kinds(regions, self.traits)
        own = self._own.with_regions(regions)
        new = [region for region in own.regions if region not in self._own.regions]
        done = []
        try:
            for way in self._ways.values():
                way.register(_movable(way, new))
                done.append(way)
        except BaseException:
            for way in done:
                way.unregister(_movable(way, new))
            raise
        self._own = own

    def unregister(self, regions: Sequence[Region]) -> None:
        self._own = self._own.without(regions)
        for way in self._ways.values():
            way.unregister(_movable(way, regions))

    def describe(self) -> bytes:
        return self.described(self.offers())

    def offers(self) -> dict[str, bytes]:
        return {name: way.describe() for name, way in self._ways.items()}

    def described(self, offers: Mapping[str, bytes]) -> bytes:
        return write_description(_Description(dict(offers)))

    def connect(self, peer: str, description: bytes) -> None:
        self._settle(peer, self._read(peer, description), None)

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        self._link(peer)
        check_kinds(regions, self.traits)
        self._settle(peer, self._offers[peer], regions)

    def _settle(self, peer: str, offers: Mapping[str, bytes], regions: Sequence[Region] | None) -> None:
        """Reaches a peer by the first transport that connects and, unless None, prepares `regions`. The one that
        reaches it now is tried first: a refreshed description of the same life keeps its transport.
        """
        before, ways = self._over.get(peer), self._common(offers)
        if before is not None and before in ways:
            ways = [before, *(way for way in ways if way is not before)]
        kinds = {region.kind for region in (*regions, *self._own.regions)} if regions is not None else set()
        refused = []
        for way in ways:
            name = way.traits.name
            if unmoved := kinds - way.traits.kinds:
                what = f"{name} does not move {' and '.join(sorted(unmoved))} memory"
                refused.append(PeerError(what, remedy="use memory of a kind that it moves"))
                continue
            try:
                self._meet(peer, way, way.connect, offers[name])
                if regions is not None:
                    way.prepare(peer, regions)
            except PeerError as error:
                refused.append(error)
                log.info("peer %s not over %s: %s", peer, name, error)
                if way is not before:
                    way.disconnect(peer)
                continue
            if before is not None and before is not way:
                before.disconnect(peer)
            self._over[peer], self._offers[peer] = way, offers
            return
        raise _unreachable(peer, refused)

    def _meet(self, peer: str, way: Transport, verb: Callable[[str, bytes], None], offer: bytes) -> None:
        """Connects or identifies a peer. Unless it is refused, this transport may know the peer's process from now on:
        `forget` must reach it, and if the process has ended its `proved_dead` may know.
        """
        try:
            verb(peer, offer)
        except TransportError:
            self._met.setdefault(peer, {})[way.traits.name] = way
            raise
        self._met.setdefault(peer, {})[way.traits.name] = way

    def identify(self, peer: str, description: bytes) -> None:
        offers = self._read(peer, description)
        refused = []
        ways = self._common(offers)
        for way in ways:
            try:
                self._meet(peer, way, way.identify, offers[way.traits.name])
            except PeerError as error:
                refused.append(error)
        if len(refused) == len(ways):
            raise _unreachable(peer, refused)

    def _read(self, peer: str, description: bytes) -> dict[str, bytes]:
        return read_description(peer, description, _Description, self.traits).offers

    def _common(self, offers: Mapping[str, bytes]) -> list[Transport]:
        return [way for name, way in self._ways.items() if name in offers]

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        over = self._link(peer)
        return self._ticket(over, over.post(peer, spans, tag))

    def mapped(self, peer: str, address: int, nbytes: int) -> Mapped | None:
        over = self._over.get(peer)
        return over.mapped(peer, address, nbytes) if over is not None else None

    def notify(self, peer: str, tag: bytes) -> int:
        over = self._link(peer)
        return self._ticket(over, over.notify(peer, tag))

    def poll(self) -> list[Event]:
        return [
            event if isinstance(event, Inbound) else replace(event, ticket=self._ticket(way, event.ticket))
            for way in self._ways.values()
            for event in way.poll()
        ]

    def filenos(self) -> Sequence[int]:
        watched = [way.filenos() for way in self._ways.values()]
        return [fd for fds in watched for fd in fds] if all(watched) else ()

    def disconnect(self, peer: str) -> None:
        self._offers.pop(peer, None)
        over = self._over.pop(peer, None)
        if over is not None:
            over.disconnect(peer)

    def traits_of(self, peer: str) -> Traits:
        over, met = self._over.get(peer), self._met.get(peer)
        if over is not None:
            return over.traits_of(peer)
        return _weakest("+".join(met), met.values(), peer) if met else self.traits

    def proved_dead(self, peer: str) -> bool:
        met = self._met.get(peer, {})
        return bool(met) and all(way.proved_dead(peer) for way in met.values())

    def forget(self, peer: str) -> None:
        for way in self._met.pop(peer, {}).values():
            way.forget(peer)

    def close(self) -> None:
        for way in self._ways.values():
            way.close()

    def _link(self, peer: str) -> Transport:
        over = self._over.get(peer)
        if over is None:
            raise not_connected(peer)
        return over

    def _ticket(self, way: Transport, ticket: int) -> int:
        """This transport's ticket for a ticket of one of `ways`. Tickets are unique, and each transport's keep their
        order.
        """
        return ticket * len(self._ways) + list(self._ways.values()).index(way)


def _movable(way: Transport, regions: Iterable[Region]) -> list[Region]:
    return [region for region in regions if region.kind in way.traits.kinds]


_WEAKEST: dict[str, Callable[[Iterable[Any]], Any]] = {
    "notifies": all, "max_descriptors": min, "post_blocks": any, "fences": all, "stops_reads": all, "maps": any,
    "polled": any,
}  # fmt: skip


def _weakest(name: str, ways: Iterable[Transport], peer: str | None = None) -> Traits:
    """The traits that hold over every one of `ways`; `kinds` is their union. The costs are those of the first."""
    all_traits = [way.traits if peer is None else way.traits_of(peer) for way in ways]
    weakest = {trait: of(getattr(traits, trait) for traits in all_traits) for trait, of in _WEAKEST.items()}
    return replace(all_traits[0], name=name, kinds=frozenset().union(*(one.kinds for one in all_traits)), **weakest)


def _unreachable(peer: str, refused: Sequence[PeerError]) -> PeerError:
    if len(refused) == 1:
        return refused[0]
    why = "; ".join(map(str, refused)) or "both sides have no transport in common"
    return PeerError(f"no transport reaches peer {peer!r}: {why}", remedy="fix one of these reasons", peer=peer)
