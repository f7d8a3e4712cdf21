"""Mooncake's Transfer Engine: starting one per protocol, names of peers' segments, and transfers one by one.

Seen with Mooncake 0.3.13.post1 over tcp, and the consequences here:

* `transfer_check_status` reports only the first entry of a batch: of 240 MiB in 16 entries it said "done" with 45 MiB
  there. `get_batch_transfer_status` is right but spins until the end. So each span is a transfer of its own.
* A peer's queue takes about 2,000 transfers and fails the rest. So at most `WINDOW` are in flight to each peer.
* The first transfer to a peer, and `send_probe`, ask the peer for its metadata and wait: 61 s for a stopped one. So a
  thread makes both calls, and posts wait meanwhile.
* It caches a segment for ever, by name: a process that came back on the same port was written to at its predecessor's
  data port. A zero before the port is another name for the same place. So each life gets its own name.
* It keeps four connections to each peer that it has sent to (MC_TCP_LANES_PER_PEER), also to dead peers, and closes
  them only when it ends. That takes up to a second and holds the interpreter's lock. Over tcp, an engine that only
  sends needs no registered memory and starts in a millisecond: mooncake.py takes a fresh one for new peers when many
  have gone, and ends it with its last peer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pdstage.errors import TransportError, UsageError
from pdstage.transport._backend import environment_of

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read at load time; each start would log a dozen lines
try:
    library: Any = import_module("mooncake.engine")
except ImportError as error:
    if "shared object" not in str(error):
        raise
    raise ImportError(f"{error}; apt-get install -y libibverbs1 libnuma1 libcurl4") from error

WINDOW = 512
_NO_TRANSFER = frozenset({0, -1, (1 << 64) - 1})
_DONE, _PENDING = 1, frozenset({0, -2})  # -2: later than MC_SLICE_TIMEOUT, but still in flight
PROTOCOLS = {
    "tcp": ("MC_FORCE_TCP",),
    "rdma": ("MC_FORCE_HCA",),
    "nvlink": ("MC_FORCE_MNNVL",),
    "nvlink_intra": ("MC_INTRANODE_NVLINK", "MC_INTRA_NVLINK"),
}
"""The engine chooses by the hardware it finds and by these variables, whatever protocol it is given."""
_NICS = Path("/sys/class/infiniband")
_BUILT_WITH = {"nvlink": "SUPPORT_MNNVL", "nvlink_intra": "SUPPORT_INTRA_NVLINK"}
_MEANINGS = {
    -1: "invalid argument, or no more detail from the engine",
    -2: "too many requests",
    -3: "the address is not registered",
    -6: "no such device",
    -7: "the memory overlaps what is registered",
    -101: "the peer's host name has no address",
    -102: "the peer's port does not answer",
    -103: "the peer's answer is damaged",
    -104: "the peer refused the handshake",
    -200: "no metadata",
    -201: "no endpoint",
    -202: "no device context",
    -302: "out of memory",
}
"""Its return codes (error.h)."""


class Engine:
    """One Transfer Engine, and the life of a process that each of its segment names stands for."""

    def __init__(self, protocol: str, host: str, devices: str) -> None:
        """Raises `TransportError` if it does not start."""
        self.protocol, self.host, self.devices = protocol, host, devices
        self.n_left = 0
        """Past lives of peers: over tcp it keeps connections to them."""
        self._lives: dict[tuple[str, int], tuple[str, int]] = {}
        self.raw: Any = library.TransferEngine()
        # The environment that makes the engine install `protocol` and nothing else.
        unset = {name: None for names in PROTOCOLS.values() for name in names}
        with environment_of(unset | dict.fromkeys(PROTOCOLS[protocol], "1")):
            code = self.raw.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code:
            raise TransportError(
                f"Mooncake does not start with protocol {protocol!r}{said(code)}",
                remedy="see its log on stderr; MC_LOG_LEVEL=INFO says more",
                code=code,
            )
        self.port: int = self.raw.get_rpc_port()

    def name_of(self, host: str, port: int, life: str) -> str:
        """The name for the peer's segment, so that nothing cached of an earlier life is used."""
        before, n_before = self._lives.get((host, port), (life, 0))
        if life != before:
            n_before += 1
        self._lives[host, port] = (life, n_before)
        return f"{f'[{host}]' if ':' in host else host}:{'0' * n_before}{port}"


@dataclass(slots=True, eq=False)
class Transfer:
    """One ticket: the spans that have not begun, and how many of its transfers are in flight."""

    ticket: int
    peer: str
    spans: Iterator[tuple[int, int, int]]
    n_under_way: int = 0
    all_begun: bool = False
    error: TransportError | None = None
    settled: bool = True


class Way:
    """One life of a peer's transport, as this engine reaches it. All labels of the peer share its queue of posts."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.waiting: deque[Transfer] = deque()
        self._under_way: deque[tuple[int, Transfer]] = deque()
        self._is_open = False
        self._opener: threading.Thread | None = None
        self._opened = (0, 0)

    def move(self) -> Iterator[Transfer]:
        """Begins the transfers that may begin, and yields the posts that ended."""
        yield from self._reap()
        if self._opener is not None:
            if self._opener.is_alive():
                return
            self._opener = None
            code, transfer = self._opened
            self._is_open = transfer not in _NO_TRANSFER
            if self._is_open:
                self._begun(self.waiting[0], transfer)
            else:
                what = f"does not answer a probe{said(code)}"
                for post in self.waiting:
                    post.error = post.error or failed(post.peer, what, "see whether it runs")
        while self.waiting and len(self._under_way) < WINDOW:
            post = self.waiting[0]
            span = None if post.error is not None else next(post.spans, None)
            if span is None:
                self.waiting.popleft()
                post.all_begun = True
                if not post.n_under_way:
                    yield post
            elif self._is_open:
                self._begun(post, self.engine.raw.transfer_submit_write(self.name, *span))
            else:
                self._opener = threading.Thread(
                    target=self._probe, args=(self.engine.raw, *span), name="pdstage-mooncake", daemon=True
                )
                self._opener.start()
                return

    def _probe(self, raw: Any, src: int, dst: int, nbytes: int) -> None:  # noqa: ANN401
        """Runs in its own thread: probes the peer, and begins the first transfer."""
        code = raw.send_probe(self.name)
        self._opened = (code, 0 if code else raw.transfer_submit_write(self.name, src, dst, nbytes))

    def _begun(self, post: Transfer, transfer: int) -> None:
        if transfer in _NO_TRANSFER:
            post.error = failed(post.peer, "takes no transfer", "see Mooncake's log on stderr")
            return
        post.n_under_way += 1
        self._under_way.append((transfer, post))

    def _reap(self) -> Iterator[Transfer]:
        """The posts whose transfers ended, in about the order in which they began."""
        while self._under_way:
            transfer, post = self._under_way[0]
            status = self.engine.raw.transfer_check_status(transfer)
            if status in _PENDING:
                return
            self._under_way.popleft()
            post.n_under_way -= 1
            if status != _DONE:
                self._is_open = False  # the peer may be gone: probe before the next transfer
                what = f"broke off a transfer, or has not registered its destination{said(status)}"
                post.error, post.settled = failed(post.peer, what, "fail its rooms; it may connect again"), False
            if post.all_begun and not post.n_under_way:
                yield post


def check_protocol(protocol: str) -> None:
    """Raises `UsageError` for a protocol that is unknown, or that this wheel, host or environment does not support."""
    if protocol not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        raise UsageError(f"protocol {protocol!r} of mooncake", remedy=f"choose one of {known}", field="protocol")
    if not getattr(library, _BUILT_WITH.get(protocol, ""), True):
        raise UsageError(
            f"this Mooncake was built without protocol {protocol!r}",
            remedy="install a wheel or build that has it; mooncake-transfer-engine-non-cuda has tcp and rdma",
            field="protocol",
        )
    if protocol == "rdma" and not (_NICS.is_dir() and any(_NICS.iterdir())):
        raise UsageError(f"protocol 'rdma', and no device in {_NICS}", remedy="choose tcp", field="protocol")
    if protocol == "tcp" and os.environ.get("MC_TCP_PROTO") == "1":
        raise UsageError("MC_TCP_PROTO=1: writes would count as done before they have landed", remedy="unset it")


def said(code: int) -> str:
    return f": Mooncake says {code}, {_MEANINGS.get(code, 'an unknown code')}" if code else ""


def failed(peer: str, what: str, remedy: str) -> TransportError:
    return TransportError(f"peer {peer!r} {what}", remedy=remedy, peer=peer)
