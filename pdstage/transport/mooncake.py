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
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport._backend import Backend, Link, Post, offered
from pdstage.transport._peer import Here, Identity, own_identity, target_of
from pdstage.transport._sockets import hold_bytes_of_the_dead
from pdstage.transport._transfer_engine import Engine, Transfer, Way, check_protocol, failed, library, said
from pdstage.transport.base import Done, PostFailed, Ranges, Traits, write_description

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def offered(self, peer: str) -> Ranges:
        return offered(peer, self.regions)


class _Link(Link[_Description]):
    way: Way
    target: Target


class MooncakeTransport(Backend[_Link, _Description]):
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
    description_type = _Description
    link_type = _Link

    def __init__(self, *, protocol: str = "tcp", host: str = "", devices: str = "") -> None:
        """Raises `UsageError` for a protocol that is unknown or that host or wheel lack, `TransportError` else."""
        super().__init__()
        check_protocol(protocol)
        if host and not _HOST.fullmatch(host):
            raise UsageError(f"host {host!r}", remedy="give an address or a name, without a port", field="host")
        self._engine = Engine.take(protocol, host or _own_host(), devices)
        self._sending = self._engine
        self._engines = {self._engine}  # and those before `_sending` that still reach somebody
        self.life = secrets.token_hex(16)
        Here.lives.add(self.life)
        self._identity = own_identity()
        self._ways: dict[str, Way] = {}

    def _register(self, regions: Sequence[Region]) -> None:
        raw, done = self._engine.raw, list[Region]()
        for region in regions:
            location = f"cuda:{region.device}" if region.kind == "cuda" else "*"
            code = raw.register_memory(region.base, region.nbytes, location)
            if code:
                for other in done:
                    raw.unregister_memory(other.base)
                what = f"Mooncake does not register {region}{said(code)}"
                raise TransportError(what, remedy="check the address, and `ulimit -l` for RDMA", code=code)
            done.append(region)

    def _unregister(self, regions: Sequence[Region]) -> None:
        for region in regions:
            code = self._engine.raw.unregister_memory(region.base)
            if code:
                raise TransportError(f"Mooncake does not unregister {region}{said(code)}", code=code)

    def describe(self) -> bytes:
        self.check_open()
        engine = self._engine
        return write_description(
            _Description(engine.key[0], engine.host, engine.port, self.life, self._identity, list(self.own.regions))
        )

    def _check(self, peer: str, description: _Description) -> None:
        ours = self._engine.key[0]
        if not _HOST.fullmatch(description.host) or description.protocol != ours:
            what = f"peer {peer!r} is at {description.host!r} by protocol {description.protocol!r}"
            remedy = "choose one protocol and an address for both sides"
            raise PeerError(f"{what}, and {ours!r} is spoken here", remedy=remedy, peer=peer)

    def _target(self, peer: str, description: _Description) -> Target:
        return target_of(description.identity, description.life, self._identity, peer)

    def _attach(self, peer: str, description: _Description, target: Target) -> _Link:
        link = _Link(peer, description)
        way = self._ways.get(description.life)
        if way is None:  # if the connection fails below, the next poll takes it away
            sending = self._fresh(self._engine)
            name = sending.name_of(description.host, description.port, description.life)
            way = self._ways[description.life] = Way(sending, name)
        way.n_labels += 1
        link.way, link.target = way, target
        return link

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

    def identify(self, peer: str, description: bytes) -> None:
        given = self._read(peer, description)
        self._engine.is_known = True  # even to a process that has ended: it may have written here
        self.met.add(peer, self._process(peer, given))

    def _write(self, link: _Link, post: Post) -> None:
        if link.target.gone():
            raise failed(link.peer, "has ended", "fail its rooms; it may connect anew")
        link.way.waiting.append(Transfer(post.ticket, link.peer, post.spans))
        self._move(link.way)

    def _progress(self) -> None:
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

    def _move(self, way: Way) -> None:
        for post in way.move():
            over = Done(post.ticket) if post.error is None else PostFailed(post.ticket, post.error, post.settled)
            self.events.append(over)

    def _detach(self, link: _Link) -> None:
        link.way.n_labels -= 1
        for post in link.way.waiting:
            if post.peer == link.peer:
                post.error = post.error or failed(link.peer, "was disconnected before all was sent", "connect it again")

    def proved_dead(self, peer: str) -> bool:
        return super().proved_dead(peer) and not hold_bytes_of_the_dead()

    def _shut(self) -> None:
        for region in self.own.regions:
            self._engine.raw.unregister_memory(region.base)
        for way in self._ways.values():
            way.leave()
        for each in self._engines:
            each.leave()
        Here.lives.discard(self.life)
        self._ways.clear()


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
