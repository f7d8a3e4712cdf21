"""The transport over Mooncake's Transfer Engine: TCP, RDMA, or NVLink across nodes or within one node.

Needs `pdstage[mooncake]` and the libraries libibverbs1, libnuma1 and libcurl4; written for Mooncake 0.3.13's Python
API.

Seen with 0.3.13.post1 over tcp, and the consequences here (more in `_transfer_engine`):

* A transfer is done when the peer has confirmed that the bytes are in its memory (framing 2, off with MC_TCP_PROTO=1).
  So a tag sent as a message arrives after them.
* A transfer to a stopped peer fails after 30 s (MC_TCP_PROGRESS_TIMEOUT_SEC), and 4 MiB in flight landed when the peer
  went on. So no failure of a transfer that has begun is settled.
* No call ends a connection or stops a peer's writes: `fences` and `stops_reads` are false. The peer refuses writes to
  memory that it has not registered, or has unregistered.
* It listens on all interfaces and authenticates nobody: docs/transports.md.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region  # noqa: TC001  (msgspec resolves it at run time)
from pdstage.transport._backend import Backend, Link, Post, offered
from pdstage.transport._fabric import device_ports, own_address
from pdstage.transport._peer import Here, Identity, Target, own_identity
from pdstage.transport._sockets import hold_bytes_of_the_dead
from pdstage.transport._transfer_engine import Engine, Transfer, Way, check_protocol, failed, library, said
from pdstage.transport.base import Done, PostFailed, Ranges, Traits, write_description

MAX_LEFT = 16
"""One engine may keep connections to this many dead lives, four each; then new peers get a new engine."""
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
    """Transport `mooncake`, used only by name.

    `protocol`: "tcp", "rdma", "nvlink" (across nodes) or "nvlink_intra" (within one), the same on both sides. `host`:
    this host's address for peers; default: that of the default route. `devices`: RDMA devices by name, separated by
    commas; empty: Mooncake finds them itself.
    """

    traits = Traits(
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
    description_type = _Description
    link_type = _Link

    def __init__(self, *, protocol: str = "tcp", host: str = "", devices: str = "") -> None:
        """Raises `UsageError` for a protocol that is unknown or that host or wheel lack, and for a device that is not
        here or down, else `TransportError`.
        """
        super().__init__()
        check_protocol(protocol)
        if host and not _HOST.fullmatch(host):
            raise UsageError(f"host {host!r}", remedy="give an address or a name, without a port", field="host")
        ports = device_ports(list(filter(None, devices.split(","))))
        chosen = ",".join(dict.fromkeys(port.partition(":")[0] for port in ports))  # it takes devices, no ports
        self._engine = self._sending = Engine(protocol, host or own_address(), chosen)
        self.life = secrets.token_hex(16)
        Here.lives[self.life] = self
        self.identity = own_identity()
        self._ways: dict[str, Way] = {}

    def _register(self, region: Region) -> None:
        location = f"cuda:{region.device}" if region.kind == "cuda" else "*"
        code = self._engine.raw.register_memory(region.base, region.nbytes, location)
        if code:
            raise TransportError(
                f"Mooncake does not register {region}{said(code)}",
                remedy="check the address, and `ulimit -l` for RDMA",
                code=code,
            )

    def _unregister(self, region: Region) -> None:
        code = self._engine.raw.unregister_memory(region.base)
        if code:
            raise TransportError(f"Mooncake does not unregister {region}{said(code)}", code=code)

    def describe(self) -> bytes:
        self.check_open()
        engine = self._engine
        return write_description(
            _Description(engine.protocol, engine.host, engine.port, self.life, self.identity, list(self.own.regions))
        )

    def _check(self, peer: str, description: _Description) -> None:
        ours = self._engine.protocol
        if not _HOST.fullmatch(description.host) or description.protocol != ours:
            what = f"peer {peer!r} is at {description.host!r} with protocol {description.protocol!r}"
            raise PeerError(
                f"{what}, and this rank uses {ours!r}",
                remedy="choose one protocol and an address for both sides",
                peer=peer,
            )

    def _attach(self, peer: str, description: _Description, target: Target) -> _Link:
        link = _Link(peer, description)
        if description.life not in self._ways:
            sending = self._fresh()
            name = sending.name_of(description.host, description.port, description.life)
            self._ways[description.life] = Way(sending, name)
        link.way, link.target = self._ways[description.life], target
        return link

    def _fresh(self) -> Engine:
        """The engine for writes to a new life: a new one if the last has left many connections behind.

        Peers always write to `_engine`, which `describe` names. RDMA keeps one engine: another would register memory
        twice, and no such leftovers were seen.
        """
        ours, before = self._engine, self._sending
        if before.n_left >= MAX_LEFT and ours.protocol == "tcp":
            self._sending = Engine(ours.protocol, ours.host, ours.devices)
            self._end(before)
        return self._sending

    def _end(self, engine: Engine) -> None:
        """Ends it, unless it is needed; even if something holds it, as the traceback of a room's error does."""
        if engine not in (self._engine, self._sending, *(way.engine for way in self._ways.values())):
            engine.raw = None

    def _write(self, link: _Link, post: Post) -> None:
        if link.target.gone():
            raise failed(link.peer, "has ended", "fail its rooms; it may connect again")
        life = link.description.life
        self.users[life] += 1
        rows = zip(*map(np.ndarray.tolist, post.spans), strict=True)
        link.way.waiting.append(Transfer(post.ticket, link.peer, rows))
        self._move(life)

    def _progress(self) -> None:
        for life in list(self._ways):
            self._move(life)

    def _move(self, life: str) -> None:
        for post in self._ways[life].move():
            over = Done(post.ticket) if post.error is None else PostFailed(post.ticket, post.error, post.settled)
            self.events.append(over)
            self.let_go(life)

    def _leave(self, life: str) -> None:
        engine = self._ways.pop(life).engine
        engine.n_left += 1
        self._end(engine)

    def _detach(self, link: _Link) -> None:
        for post in link.way.waiting:
            if post.peer == link.peer:
                post.error = post.error or failed(link.peer, "was disconnected before all was sent", "connect it again")

    def _may_land(self, since: float) -> bool:
        return hold_bytes_of_the_dead(since)

    def _shut(self) -> None:
        for region in self.own.regions:
            self._engine.raw.unregister_memory(region.base)
        for engine in (self._engine, self._sending, *(way.engine for way in self._ways.values())):
            engine.raw = None
        self._ways.clear()


if getattr(library, "SUPPORT_CUDA", False):  # false in the wheel named non-cuda
    MooncakeTransport.traits = replace(MooncakeTransport.traits, kinds=frozenset({"cpu", "cuda"}))

TRANSPORT = MooncakeTransport
