"""The transport over Mooncake's Transfer Engine: TCP, RDMA, NVLink across nodes or within one.

Needs `pdstage[mooncake]` and the libraries libibverbs1, libnuma1 and libcurl4; written for Mooncake 0.3.13's Python
API.

What was seen of 0.3.13.post1 over tcp, and what follows here (more in `_transfer_engine`):

* A transfer is done when the peer has said that the bytes are in its memory (its framing 2, off with MC_TCP_PROTO=1):
  a tag said as a message comes after them.
* A stopped peer's transfer fails after 30 s (MC_TCP_PROGRESS_TIMEOUT_SEC), and 4 MiB that it had sent landed when the
  peer went on: so no failure of what was sent is settled.
* No call ends a connection, or stops a peer's writes: `fences` and `stops_reads` are false. What goes to memory that
  the peer has not registered, or no longer, is refused there.
* It listens on all interfaces and asks nobody who he is: docs/transports.md.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections import deque
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region  # noqa: TC001  (msgspec resolves it at run time)
from pdstage.transport._peer import Here, Identity, Met, own_identity, target_of
from pdstage.transport._sockets import hold_bytes_of_the_dead
from pdstage.transport._transfer_engine import Engine, Post, Way, check_protocol, failed, library, said
from pdstage.transport.base import (
    Done,
    Event,
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
    from pdstage.transport._peer import Target

MAX_LEFT = 16
"""So many lives that are gone, of four connections each, one engine may have left behind when a new one comes."""
_HOST = re.compile(r"[0-9A-Za-z.:_-]{1,255}")


class _Description(msgspec.Struct, frozen=True, tag="pdstage.mooncake.1", array_like=True):
    protocol: Annotated[str, Meta(max_length=16)]
    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    life: Annotated[str, Meta(max_length=64)]
    identity: Identity
    regions: list[Region]


class _Link:
    def __init__(self, peer: str, told: _Description, way: Way, target: Target) -> None:
        self.told, self.way, self.target = told, way, target
        self.prepared = Ranges(f"what was prepared for peer {peer!r}")


class MooncakeTransport(Transport):
    """Transport `mooncake`, taken only where it is asked for.

    `protocol`: "tcp", "rdma", "nvlink" (across nodes) or "nvlink_intra" (within one), the same on both sides. `host`:
    this host's address as peers reach it; else that of the default route. `devices`: RDMA devices by name, with commas.
    """

    traits: ClassVar[Traits] = Traits(
        name="mooncake",
        notifies=False,
        max_descriptors=65_536,
        kinds=frozenset({"cpu"}),
        post_blocks=False,
        fences=False,
        stops_reads=False,
        bytes_per_s=1.7e9,
        descriptor_s=16e-6,
        post_s=75e-6,
    )
    preference: ClassVar[int] = 0

    def __init__(self, *, protocol: str = "tcp", host: str = "", devices: str = "") -> None:
        """Raises `UsageError` for a protocol that is unknown or that host or wheel lack, `TransportError` else."""
        check_protocol(protocol)
        if host and not _HOST.fullmatch(host):
            raise UsageError(f"host {host!r}", remedy="give an address or a name, without a port", field="host")
        self._engine: Engine | None = Engine.take(protocol, host or _own_host(), devices)
        self._sending = self._engine
        self._engines = {self._engine}  # and those before `_sending` that still reach somebody
        self._life = secrets.token_hex(16)
        Here.lives.add(self._life)
        self._identity = own_identity()
        self._own = Ranges("this process's registered memory")
        self._met = Met()
        self._links: dict[str, _Link] = {}
        self._ways: dict[str, Way] = {}
        self._events: deque[Event] = deque()
        self._tickets = count(1)

    def register(self, regions: Sequence[Region]) -> None:
        engine = self._open_engine()
        check_kinds(regions, self.traits)
        own = self._own.with_regions(regions)
        done: list[Region] = []
        for region in (region for region in own.regions if region not in set(self._own.regions)):
            location = f"cuda:{region.device}" if region.kind == "cuda" else "*"
            code = engine.raw.register_memory(region.base, region.nbytes, location)
            if code:
                for other in done:
                    engine.raw.unregister_memory(other.base)
                what = f"Mooncake does not register {region}{said(code)}"
                raise TransportError(what, remedy="check the address, and `ulimit -l` for RDMA", code=code)
            done.append(region)
        self._own = own

    def unregister(self, regions: Sequence[Region]) -> None:
        engine = self._open_engine()
        self._own = self._own.without(regions)
        for region in dict.fromkeys(regions):
            code = engine.raw.unregister_memory(region.base)
            if code:
                raise TransportError(f"Mooncake does not unregister {region}{said(code)}", code=code)

    def describe(self) -> bytes:
        engine = self._open_engine()
        told = _Description(
            engine.key[0], engine.host, engine.port, self._life, self._identity, list(self._own.regions)
        )
        return write_description(told)

    def connect(self, peer: str, description: bytes) -> None:
        engine = self._open_engine()
        told = self._read(peer, description)
        if told.life == self._life:
            raise is_itself(peer)
        link = self._links.get(peer)
        if link is not None and link.told.life == told.life:
            link.told = told
            return
        way = self._ways.get(told.life)
        if way is None:  # if the connection fails below, the next poll takes it away
            sending = self._fresh(engine)
            way = self._ways[told.life] = Way(sending, sending.name_of(told.host, told.port, told.life))
        target = target_of(told.identity, told.life, self._identity, peer)
        self._met.add(peer, target)
        self.disconnect(peer)
        way.n_labels += 1
        self._links[peer] = _Link(peer, told, way, target)

    def _fresh(self, engine: Engine) -> Engine:
        """What writes to a life not met yet: another engine, once the last has left many connections behind.

        Peers write to `engine`, which `describe` names, whichever that is. Not over RDMA, where memory would have to be
        registered twice and nothing of the kind was seen.
        """
        before = self._sending
        if before.n_left >= MAX_LEFT and engine.key[0] == "tcp":
            self._sending = Engine.take(*engine.key)
            self._engines.add(self._sending)
        return self._sending

    def _read(self, peer: str, description: bytes) -> _Description:
        told = read_description(peer, description, _Description, self.traits)
        ours = self._open_engine().key[0]
        if not _HOST.fullmatch(told.host) or told.protocol != ours:
            raise PeerError(
                f"peer {peer!r} is at {told.host!r} by protocol {told.protocol!r}, and {ours!r} is spoken here",
                remedy="choose one protocol and an address for both sides",
                peer=peer,
            )
        return told

    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        link = self._link(peer)
        check_kinds(regions, self.traits)
        prepared = Ranges(link.prepared.whose, regions)
        known = Ranges(f"what peer {peer!r} registered", link.told.regions)
        for region in prepared.regions:
            if not known.holds(region.base, region.nbytes):
                raise not_registered(peer, region)
        link.prepared = prepared

    def identify(self, peer: str, description: bytes) -> None:
        told = self._read(peer, description)
        self._open_engine().is_known = True
        self._met.add(peer, target_of(told.identity, told.life, self._identity, peer))

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        del tag  # it travels as a message: `notifies` is false
        link = self._link(peer)
        check_spans(spans, self.traits)
        self._own.find(spans.src, spans.nbytes)
        link.prepared.find(spans.dst, spans.nbytes)
        if link.target.gone():
            raise failed(peer, "has ended", "fail its rooms; it may connect anew")
        post = Post(next(self._tickets), peer, spans)
        link.way.waiting.append(post)
        self._move(link.way)
        return post.ticket

    def poll(self) -> list[Event]:
        for life, way in list(self._ways.items()):
            self._move(way)
            if not way.n_labels and way.at_rest:
                del self._ways[life]
                way.leave()
        if len(self._engines) > 1:
            for engine in self._engines - {self._engine, self._sending}:
                if not engine.n_ways:
                    self._engines.remove(engine)
                    engine.leave()
        events = list(self._events)
        self._events.clear()
        return events

    def _move(self, way: Way) -> None:
        for post in way.move():
            over = Done(post.ticket) if post.error is None else PostFailed(post.ticket, post.error, post.settled)
            self._events.append(over)

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        link.way.n_labels -= 1
        for post in link.way.waiting:
            if post.peer == peer:
                post.error = post.error or failed(peer, "was disconnected before all was sent", "connect it again")

    def proved_dead(self, peer: str) -> bool:
        return self._engine is not None and self._met.all_gone(peer) and not hold_bytes_of_the_dead()

    def forget(self, peer: str) -> None:
        self._met.forget(peer)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for region in self._own.regions:
            engine.raw.unregister_memory(region.base)
        for way in self._ways.values():
            way.leave()
        for each in self._engines:
            each.leave()
        Here.lives.discard(self._life)
        self._met.close()
        self._links.clear()
        self._ways.clear()
        self._events.clear()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise closed()
        return self._engine

    def _link(self, peer: str) -> _Link:
        self._open_engine()
        link = self._links.get(peer)
        if link is None:
            raise not_connected(peer)
        return link


def _own_host() -> str:
    """This host's address on its default route, which nothing is sent over; 127.0.0.1 without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


if getattr(library, "SUPPORT_CUDA", False):  # not of the wheel that is named non-cuda
    MooncakeTransport.traits = replace(MooncakeTransport.traits, kinds=frozenset({"cpu", "cuda"}))

TRANSPORT = MooncakeTransport
