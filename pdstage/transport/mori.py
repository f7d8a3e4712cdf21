"""The transport over MORI-IO, AMD's point-to-point library, by its RDMA backend.

**This project has never run it on hardware.** Its tests use a double of MORI-IO (tests/transport/mori_double.py), which
enforces the rules below and moves bytes.

Written for the Python API of amd-mori 1.2.4 (`mori.io`; ROCm/mori: python/mori/io/engine.py, src/pybind/pybind_io.cpp,
src/io/engine.cpp, src/io/rdma/). Version 1.0.0 has every call used here. What the sources say, and the consequences
here:

* A transfer is `session.batch_write(local_offsets, remote_offsets, sizes, uid)`. A session joins one local and one
  remote memory. So a post becomes one batch for each pair of memories; each pair's session is made once.
* `create_session` connects over TCP, may block and may raise: the first post of a pair calls it.
  `register_remote_engine` only notes an address: so `connect` never blocks.
* The library writes to a status by its raw pointer: each is kept until it has ended, or the engine is gone.
* Nothing announces completion: statuses are polled. `pop_inbound_transfer_status` tells the peer about one transfer id,
  which it would have to know, and carries no bytes. So `notifies` is false, and MORI's own notifications are off.
* A batch that finds a send queue full waits 10 ms and fails, perhaps after posting a part. So at most `MAX_IN_FLIGHT`
  descriptors to a peer are in flight, and further posts wait here. No failure of a begun write is settled.
* A failed queue pair stays failed: a peer is reached again in its next life, whose engine has another key.
* Deregistering an engine ends no transfer: `fences` and `stops_reads` are false. No peer's death is proved here.
* Statuses of the XGMI backend end only in a blocking wait: MORI_DISABLE_AUTO_XGMI=0, which adds it, is refused.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport._backend import Backend, Description, Link, Post
from pdstage.transport._fabric import own_address
from pdstage.transport.base import Done, PostFailed, Traits, write_description

if TYPE_CHECKING:
    from pdstage.transport._peer import Target

_io: Any = import_module("mori.io")
MAX_IN_FLIGHT = 2048
"""Descriptors to one engine of a peer, over all labels that name it. The smallest send queue seen in the field takes
4,351.
"""
_LOCATIONS = {"cpu": _io.MemoryLocationType.CPU, "cuda": _io.MemoryLocationType.GPU}


class _Description(Description, frozen=True, tag="pdstage.mori.1", array_like=True):
    """Describes a peer: its life is its engine's key, and `memory` holds MORI's descriptor of each region."""

    engine: Annotated[bytes, Meta(max_length=4096)]
    memory: list[Annotated[bytes, Meta(max_length=4096)]]


@dataclass(slots=True, eq=False)
class _Target:
    """A peer's engine. All labels of it share its queue pairs, its waiting posts and its posts in flight."""

    engine: Any
    waiting: deque[_Post] = field(default_factory=deque)
    n_in_flight: int = 0  # descriptors


class _Way(Link[_Description]):
    """A connected peer. Its posts keep it and their sessions alive after `disconnect`."""

    target: _Target

    def __init__(self, peer: str, description: _Description) -> None:
        self.memory: dict[Region, bytes] = {}
        self.sessions: dict[tuple[Region, Region], Any] = {}
        super().__init__(peer, description)
        self.engine = _understood(peer, _io.EngineDesc, description.engine)
        if self.engine.key != description.life:
            raise PeerError(f"peer {peer!r} describes the engine of another peer", remedy="stop using it", peer=peer)

    def learn(self, description: _Description) -> None:
        if len(description.memory) != len(description.regions):
            raise PeerError(f"peer {self.peer!r} describes too little memory", remedy="stop using it", peer=self.peer)
        super().learn(description)
        memory = dict(zip((Region(*pair) for pair in description.regions), description.memory, strict=True))
        changed = {region for region, packed in self.memory.items() if memory.get(region) != packed}
        self.sessions = {pair: session for pair, session in self.sessions.items() if pair[1] not in changed}
        self.memory = memory


@dataclass(slots=True, eq=False)
class _Post:
    """One ticket: its batches, and the statuses of those that have begun. A batch is the spans from one region into
    another: their session, and lists of their local offsets, remote offsets and sizes, as C++ bindings take them.
    """

    ticket: int
    way: _Way
    batches: list[tuple[Any, list[list[int]]]]
    n_descriptors: int
    statuses: list[Any] = field(default_factory=list)
    error: TransportError | None = None


class MoriTransport(Backend[_Way, _Description]):
    """Transport `mori`.

    `host`: this host's address for peers; default: that of its default route. `qp_per_transfer`: queue pairs to each
    peer.
    """

    traits = Traits(
        name="mori",
        notifies=False,
        max_descriptors=1024,
        kinds=frozenset({"cpu", "cuda"}),
        post_blocks=True,  # the first write of a pair of memories connects
        fences=False,
        stops_reads=False,
        bytes_per_s=4e10,
        descriptor_s=0.14e-6,  # docs/MORI-IO-BENCHMARK.md of ROCm/mori: 32,768 of 1 KiB in 4.6 ms, by one NIC
        post_s=10e-6,
    )
    caveat = "never run on hardware by this project; tested over a double of MORI-IO only"
    description_type = _Description
    link_type = _Way

    def __init__(self, *, host: str = "", qp_per_transfer: int = 1) -> None:
        """Raises `TransportError` if MORI-IO does not start (no RDMA device)."""
        super().__init__()
        if os.environ.get("MORI_DISABLE_AUTO_XGMI", "").startswith("0"):
            raise UsageError(
                "MORI_DISABLE_AUTO_XGMI=0 adds a backend whose transfers cannot be polled", remedy="unset it"
            )
        self.life = f"pdstage.{secrets.token_hex(16)}"
        config = _io.RdmaBackendConfig(qp_per_transfer=qp_per_transfer, enable_notification=False)
        try:
            self._engine: Any = _io.IOEngine(self.life, _io.IOEngineConfig(host=host or own_address(), port=0))
            self._engine.create_backend(_io.BackendType.RDMA, config)
        except RuntimeError as error:
            raise _failed("MORI-IO does not start", error, "it needs an RDMA device: see ibv_devices") from error
        self._memory: dict[Region, Any] = {}
        self._targets: dict[str, _Target] = {}
        self._flying: list[_Post] = []

    def describe(self) -> bytes:
        self.check_open()
        engine = self._engine.get_engine_desc().pack()
        regions = [(region.base, region.nbytes) for region in self.own.regions]
        memory = [self._memory[region].pack() for region in self.own.regions]
        return write_description(_Description(self.life, regions, engine, memory))

    def _register(self, region: Region) -> None:
        device, location = region.device if region.kind == "cuda" else -1, _LOCATIONS[region.kind]
        try:
            self._memory[region] = self._engine.register_memory(region.base, region.nbytes, device, location)
        except RuntimeError as error:
            raise _failed(f"cannot register {region}", error, "check the address, and `ulimit -l`") from error

    def _unregister(self, region: Region) -> None:
        for way in self.links.values():  # no session may outlive its memory
            way.sessions = {pair: session for pair, session in way.sessions.items() if pair[0] != region}
        self._engine.deregister_memory(self._memory.pop(region))

    def _attach(self, peer: str, description: _Description, target: Target) -> _Way:
        link = _Way(peer, description)
        if description.life not in self._targets:
            self._engine.register_remote_engine(link.engine)
            self._targets[description.life] = _Target(link.engine)
        link.target = self._targets[description.life]
        return link

    def _detach(self, link: _Way) -> None:
        for post in [post for post in link.target.waiting if post.way is link]:
            link.target.waiting.remove(post)
            post.error = TransportError(f"peer {link.peer!r} was disconnected before this write began")
            self._end(post)

    def _leave(self, life: str) -> None:
        self._engine.deregister_remote_engine(self._targets.pop(life).engine)

    def _write(self, link: _Way, post: Post) -> None:
        spans = post.spans
        pairs = np.stack([self.own.index(spans.src), link.offered.index(spans.dst)], axis=1)
        batches = []
        for pair in np.unique(pairs, axis=0):
            held = (pairs == pair).all(axis=1)
            local, remote = self.own.regions[pair[0]], link.offered.regions[pair[1]]
            columns = spans.src[held] - local.base, spans.dst[held] - remote.base, spans.nbytes[held]
            try:
                session = self._session(link, local, remote)
            except RuntimeError as error:
                raise _failed(f"peer {link.peer!r} cannot be reached", error, "look at its log") from error
            batches.append((session, [column.tolist() for column in columns]))
        self.users[link.description.life] += 1
        link.target.waiting.append(_Post(post.ticket, link, batches, len(spans.nbytes)))
        self._begin(link.target)

    def _session(self, way: _Way, local: Region, remote: Region) -> Any:  # noqa: ANN401
        pair = local, remote
        if pair not in way.sessions:
            theirs = _understood(way.peer, _io.MemoryDesc, way.memory[remote])
            if (theirs.engine_key, theirs.data, theirs.size) != (way.engine.key, remote.base, remote.nbytes):
                raise PeerError(f"peer {way.peer!r} describes other memory than it offers", remedy="stop using it")
            session = self._engine.create_session(self._memory[local], theirs)
            if session is None:
                raise RuntimeError("no backend of MORI-IO connects these two memories")
            way.sessions[pair] = session
        return way.sessions[pair]

    def _begin(self, target: _Target) -> None:
        """Begins the posts that wait for a peer's engine, as many as fit into `MAX_IN_FLIGHT`."""
        while target.waiting and target.n_in_flight + target.waiting[0].n_descriptors <= MAX_IN_FLIGHT:
            post = target.waiting.popleft()
            try:
                for session, columns in post.batches:
                    uid = self._engine.allocate_transfer_uid()
                    post.statuses.append(session.batch_write(*columns, uid))
            except RuntimeError as error:
                post.error = _failed(f"no write to peer {post.way.peer!r} can begin", error)
            target.n_in_flight += post.n_descriptors
            self._flying.append(post)

    def _progress(self) -> None:
        flying, self._flying = self._flying, []
        for post in flying:
            if not all(status.Succeeded() or status.Failed() for status in post.statuses):
                self._flying.append(post)
                continue
            post.way.target.n_in_flight -= post.n_descriptors
            self._end(post)
            self._begin(post.way.target)

    def _end(self, post: _Post) -> None:
        """Turns a post that has ended into its event."""
        failed = next((status for status in post.statuses if status.Failed()), None)
        if post.error is None and failed is not None:
            post.error = _failed(
                f"a write to peer {post.way.peer!r} failed", RuntimeError(f"{failed.Code()}: {failed.Message()}")
            )
        if post.error is None:
            self.events.append(Done(post.ticket))
        else:
            self.events.append(PostFailed(post.ticket, post.error, settled=not post.statuses))
        self.let_go(post.way.description.life)

    def _shut(self) -> None:
        for post in self._flying:
            post.way.sessions.clear()
            post.batches = []
        for descriptor in self._memory.values():
            self._engine.deregister_memory(descriptor)
        self._engine.remove_backend(_io.BackendType.RDMA)  # joins the threads that write to the statuses
        self._engine = None
        self._flying.clear()
        self._memory.clear()


def _understood(peer: str, kind: Any, packed: bytes) -> Any:  # noqa: ANN401
    try:
        return kind.unpack(packed)
    except RuntimeError as error:
        raise PeerError(
            f"MORI-IO does not understand peer {peer!r} ({error})", remedy="install one version of it on both sides"
        ) from error


def _failed(what: str, error: Exception, remedy: str = "mori.io.set_log_level('info') logs more") -> TransportError:
    return TransportError(f"{what}: {error}", remedy=remedy)


TRANSPORT = MoriTransport
