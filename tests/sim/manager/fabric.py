"""The transport: posts between real memory that land late, in any order, or fail; tags that are lost.

It keeps the contract of `transport.base`, and holds its caller to it: verbs do not overlap. What a post reads of its
source it reads as it lands, so memory that is reused too early shows in what arrives.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.errors import TransportError, UsageError
from pdstage.transport._backend import Backend, Description, Link, Post
from pdstage.transport.base import Done, Event, Inbound, Mapped, PostFailed, Traits, write_description
from tests.sim.manager.network import Descriptor, Network

if TYPE_CHECKING:
    from tests.sim.manager.scheduler import Process, Scheduler, Task


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances of each post, and how long things take."""

    usual_s: float = 1e-3
    slow: float = 0.0
    slow_s: float = 0.5
    refuse: float = 0.0
    fail: float = 0.0
    lose_tag: float = 0.0


class _Process:
    """Whether a peer's process has ended and all that it wrote has landed."""

    def __init__(self, there: SimTransport) -> None:
        self._there = there

    def gone(self) -> bool:
        there = self._there
        return (there.closed or there.process.dead) and not there.n_under_way

    def close(self) -> None: ...


class Fabric:
    """All transports, by life."""

    def __init__(self, scheduler: Scheduler, network: Network, rng: random.Random, faults: Faults) -> None:
        self.scheduler, self.network, self.rng, self.faults = scheduler, network, rng, faults
        self.lives: dict[str, SimTransport] = {}

    def delay_s(self) -> float:
        rng, faults = self.rng, self.faults
        return rng.uniform(0, faults.slow_s if rng.random() < faults.slow else faults.usual_s)


def _alone(verb: Callable) -> Callable:
    """A verb of a transport, which its caller serialises."""

    @functools.wraps(verb)
    def alone(self: SimTransport, *given: object) -> object:
        with self.inside(verb.__name__):
            return verb(self, *given)

    return alone


class SimTransport(Backend[Link[Description], Description]):
    traits = Traits(
        name="sim", notifies=True, max_descriptors=1 << 20, kinds=frozenset({"cpu"}), post_blocks=False, fences=True,
        stops_reads=True, bytes_per_s=5e9, descriptor_s=1e-6, post_s=1e-5,
    )  # fmt: skip
    description_type = Description
    link_type = Link

    def __init__(self, fabric: Fabric, process: Process, traits: Traits, *, announces: bool) -> None:
        super().__init__()
        self.fabric, self.process, self.announces = fabric, process, announces
        self.traits = traits  # type: ignore[misc]
        self.life = f"{process.name} {len(fabric.lives)}"
        fabric.lives[self.life] = self
        self.fenced: set[str] = set()
        self.bell = Descriptor(fabric.network)
        self.n_under_way = 0
        """Posts that may land yet."""
        self._scheduler = fabric.scheduler
        self._user: Task | None = None
        self._verb = self._doing = ""

    @contextmanager
    def inside(self, verb: str) -> Iterator[None]:
        """One verb, in which its thread may call others."""
        scheduler = self._scheduler
        me = scheduler.current
        if self._user is me:
            yield
            return
        if self._user is not None:
            scheduler.violate(f"{me.name} calls {verb} of the transport of {self.process.name} while {self._doing}")
        self._user, self._verb, self._doing = me, verb, f"{me.name} is in {verb}"
        try:
            scheduler.pause(verb)
            yield
        finally:
            self._user = None

    connect = _alone(Backend.connect)
    identify = _alone(Backend.identify)
    prepare = _alone(Backend.prepare)
    post = _alone(Backend.post)
    proved_dead = _alone(Backend.proved_dead)
    forget = _alone(Backend.forget)
    close = _alone(Backend.close)

    def describe(self) -> bytes:
        return write_description(Description(self.life, [(region.base, region.nbytes) for region in self.own.regions]))

    def _target(self, peer: str, description: Description) -> _Process:
        there = self.fabric.lives[description.life]
        if there.closed or there.process.dead:
            raise TransportError(f"the process of {peer} has ended")
        return _Process(there)

    @_alone
    def disconnect(self, peer: str) -> None:
        if self._verb != "connect":  # else it makes place for the connection that follows
            self.fenced.add(peer)
        super().disconnect(peer)

    @_alone
    def poll(self) -> list[Event]:
        return super().poll()

    def _progress(self) -> None:
        self.bell.readable = False

    def _shut(self) -> None: ...

    def filenos(self) -> tuple[int, ...]:
        return (self.bell.number,) if self.announces and not self.closed else ()

    def tell(self, event: Event) -> None:
        if not self.closed and not self.process.dead:
            self.events.append(event)
            self.bell.readable = True

    def mapped(self, peer: str, address: int, nbytes: int) -> Mapped | None:
        link = self.links.get(peer)
        if not self.traits.maps or link is None or not link.prepared.holds(address, nbytes):
            return None
        return Mapped(address, None)

    @_alone
    def notify(self, peer: str, tag: bytes) -> int:
        if not self.traits.maps:
            raise UsageError("maps no memory")
        ticket = next(self.tickets)
        under_way = _UnderWay(self, peer, ticket, self.fabric.lives[self.link(peer).description.life], tag)
        self._scheduler.at(self.fabric.delay_s(), under_way.arrived)
        return ticket

    def _write(self, link: Link[Description], post: Post) -> None:
        fabric, rng, faults = self.fabric, self.fabric.rng, self.fabric.faults
        there = fabric.lives[link.description.life]
        if rng.random() < faults.refuse or there.closed or there.process.dead:
            raise TransportError("the post was refused")
        fails = rng.random() < faults.fail
        under_way = _UnderWay(self, link.peer, post.ticket, there, post.tag)
        under_way.spans = list(zip(*(column.tolist() for column in post.spans), strict=True))
        self.n_under_way += 1
        self._scheduler.at(fabric.delay_s(), under_way.land)
        if fails:
            self._scheduler.at(fabric.delay_s(), under_way.fail)
        if self.traits.post_blocks:
            self._scheduler.block("its post", ready=lambda: under_way.told)


class _UnderWay:
    """One post."""

    def __init__(self, here: SimTransport, peer: str, ticket: int, there: SimTransport, tag: bytes) -> None:
        self.here, self.peer, self.ticket, self.there, self.tag = here, peer, ticket, there, tag
        self.spans: list[tuple[int, int, int]] = []
        """Of (source, destination, bytes); empty once they can land no more."""
        self.caught: list[bytes] = []
        """What has left its memory already."""
        self.failed = False
        """Or done: nothing more is told."""
        self.told = False

    def land(self) -> None:
        here, there = self.here, self.there
        if not self.spans:
            return
        if here.process.dead and not self.caught and here.fabric.rng.random() < 0.5:
            self._take_out()
            return
        stopped = here.traits.stops_reads and self.peer in here.fenced and not self.caught
        if there.process.dead or there.closed or (there.traits.fences and self.peer in there.fenced) or stopped:
            self._take_out()
            self.fail(settled=True)
            return
        for (src, dst, nbytes), data in itertools.zip_longest(self.spans, self.caught):
            ctypes.memmove(dst, src if data is None else data, nbytes)
        self._take_out()
        self.arrived()

    def arrived(self) -> None:
        """All bytes are there: the tag follows, and the word of it."""
        fabric, faults = self.here.fabric, self.here.fabric.faults
        if self.tag and self.here.traits.notifies and fabric.rng.random() >= faults.lose_tag:
            tag = Inbound(self.tag)
            fabric.scheduler.at(fabric.delay_s(), lambda: self.there.tell(tag))
        if not self.failed:
            self.failed = True
            late_s = 0.0 if self.here.traits.post_blocks else fabric.delay_s()
            fabric.scheduler.at(late_s, lambda: self._tell(Done(self.ticket)))

    def fail(self, settled: bool | None = None) -> None:
        """The source is told; what has not landed is lost, or may land yet."""
        if self.failed:
            return
        self.failed = True
        rng = self.here.fabric.rng
        if settled is None:
            settled = not self.spans or rng.random() < 0.5
        if settled:
            self._take_out()
        else:
            self.caught = [ctypes.string_at(src, nbytes) for src, _, nbytes in self.spans]
            self.here.fabric.scheduler.at(rng.uniform(0, 1.0), self.land)
        if rng.random() < 0.5:
            self.tag = b""
        self._tell(PostFailed(self.ticket, TransportError("the post failed"), settled))

    def _tell(self, event: Event) -> None:
        self.told = True
        self.here.tell(event)

    def _take_out(self) -> None:
        self.here.n_under_way -= bool(self.spans)
        self.spans.clear()
