"""One transport with some memory, in this process or in another driven over a pipe: the same verbs on both."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import platform
import select
import signal
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from pdstage import PdstageError, Region, shared
from pdstage.transport import Done, Inbound, PostFailed, Spans, open_transport
from pdstage.transport.base import read_description, write_description
from tests import descriptors, processes, wiretap

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdstage.transport import Transport

multiprocessing.set_forkserver_preload([__name__])
NBYTES = 8 << 20
DEADLINE_S = 240.0
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 4, 22, 38, 2


def forbid_writing_to_processes(code=errno.EPERM):
    """What containers' seccomp profiles do: process_vm_readv and process_vm_writev give `code` in this thread."""
    first = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    rows = [
        (0x20, 0, 0, 0),
        (0x15, 1, 0, first),
        (0x15, 0, 1, first + 1),
        (6, 0, 0, 0x50000 | code),
        (6, 0, 0, 0x7FFF0000),
    ]
    filled = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(filled))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0) == 0


class Endpoint:
    """A transport and one registered region of NBYTES, addressed by offsets here and by addresses at the peer.

    `name` is the transport's, with "+shared" for memory that peers can map, "+cuda" for the double's device memory,
    "+segments" for such of cuMemCreate, "+beside" for host memory beside the double's devices.
    """

    kind = "cpu"
    forbid_writing_to_processes = staticmethod(forbid_writing_to_processes)
    double = contextlib.ExitStack()

    def __init__(self, name, **options):
        transport, _, kind = name.partition("+")
        self.kind = "cuda" if kind in ("cuda", "segments") else "cpu"
        self.sizes = [1 << 20, 2 << 20, 1 << 20, 4 << 20] if kind == "segments" else []
        if kind in ("cuda", "segments", "beside"):
            from tests import cuda_double  # noqa: PLC0415  (imports `local`, which others are tried without)

            self.double = contextlib.ExitStack()
            self.gpu = self.double.enter_context(cuda_double.use())
        memory = shared.allocate(NBYTES) if kind == "shared" else self.allocate()
        self.own(open_transport(transport, **options), memory)

    def allocate(self) -> np.ndarray:
        if self.kind == "cpu":
            return np.zeros(NBYTES, np.uint8)
        return (self.gpu.expandable(self.sizes) if self.sizes else self.gpu.allocate(NBYTES)).view

    def own(self, transport: Transport, memory: np.ndarray):
        self.transport = transport
        self.memory = memory
        self.base = self.region().base
        self.more = []
        self.transport.register([self.region()])

    def region_of(self, memory: np.ndarray) -> Region:
        return Region(memory.ctypes.data, NBYTES, self.kind)

    def region(self) -> Region:
        return self.region_of(self.memory)

    def register_more(self) -> Region:
        self.more.append(self.allocate())
        region = self.region_of(self.more[-1])
        self.transport.register([region])
        return region

    def __getattr__(self, verb):
        """The transport's other verbs."""
        if verb.startswith("__") or verb == "transport":
            raise AttributeError(verb)
        return getattr(self.transport, verb)

    def post(self, peer, spans, tag):
        """`spans`: rows of (offset here, address there, nbytes)."""
        src, dst, nbytes = np.asarray(spans, dtype=np.int64).reshape(-1, 3).T
        return self.transport.post(peer, Spans(src + self.base, dst.copy(), nbytes.copy()), tag)

    def post_raw(self, peer, spans: Spans, tag):
        return self.transport.post(peer, spans, tag)

    def poll_and_read(self, offset, nbytes) -> tuple[list[object], bytes]:
        """Events, and the memory as it is at the very moment that the first tag is seen."""
        events = self.poll()
        seen = any(isinstance(event, Inbound) for event in events)
        return events, self.read(offset, nbytes) if seen else b""

    def readable(self, timeout_s):
        """Also while there is nothing to wait on: then it must be asked."""
        waiter, fds = select.poll(), self.transport.filenos()
        if not fds:
            return True
        for fd in fds:
            waiter.register(fd, select.POLLIN)
        return bool(waiter.poll(timeout_s * 1e3))

    def fill(self, offset, data):
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, nbytes):
        return self.memory[offset : offset + nbytes].tobytes()

    def read_more(self, nbytes):
        return self.more[-1][:nbytes].tobytes()

    def close(self):
        self.transport.close()
        if self.kind == "cuda":
            self.give_up()
        self.double.close()

    def give_up(self):
        for memory in (self.memory, *self.more):
            self.gpu.give_up(memory.ctypes.data)

    def n_agents(self):
        """Remote agents that a NIXL transport has not let go of."""
        return len(self.transport.users)

    def n_fds(self, part=""):
        return descriptors.count(part)

    def listening(self) -> set[str]:
        """The addresses on which this process listens."""
        return {host for host, _ in wiretap.listeners()}

    def become_user(self, uid):
        os.setuid(uid)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as a process that was this user's from the start

    def write_mapped(self, peer, address, data, tag) -> int | None:
        """The ticket, or None if that memory of the peer is not mapped here."""
        mapped = self.transport.mapped(peer, address, len(data))
        if mapped is None:
            return None
        ctypes.memmove(mapped.address, data, len(data))
        return self.transport.notify(peer, tag)

    def notifies(self):
        return self.transport.traits.notifies


def _enter(netns):
    """As `ip netns exec` does it: the network namespace, and a sysfs that shows its devices."""
    processes.enter(netns)
    libc, new_mounts, slave, detach = ctypes.CDLL(None, use_errno=True), 0x20000, 0x84000, 2
    calls = [libc.unshare(new_mounts), libc.mount(b"", b"/", None, slave, None)]
    libc.umount2(b"/sys", detach)
    calls.append(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    assert calls == [0] * 3, os.strerror(ctypes.get_errno())


def _serve(pipe, name, environment: Mapping[str, str], netns, options: dict[str, object]):
    os.environ.update(environment)
    if netns:
        _enter(netns)
    make = Endpoint
    if "+gpu" in name:
        from gpu.endpoint import GpuEndpoint  # noqa: PLC0415  (torch, and a GPU)

        make = GpuEndpoint
    endpoint = make(name, **options)
    pipe.send((True, endpoint.region()))
    while True:
        try:
            verb, args = pipe.recv()
        except EOFError:  # the other side went away, or hung up
            break
        try:
            if verb == "renew":
                endpoint.close()
                endpoint = make(name, **options)
                result = endpoint.region()
            else:
                result = getattr(endpoint, verb)(*args)
        except PdstageError as error:
            pipe.send((False, error))
        else:
            pipe.send((True, result))
    endpoint.close()


class Remote:
    """An endpoint in a process of its own, with `environment` added, in a network namespace."""

    def __init__(self, name, environment: Mapping[str, str] | None = None, *, netns="", **options):
        self._process, self._pipe = processes.child(_serve, name, environment or {}, netns, options)
        self._region = self.finish()

    def region(self) -> Region:
        return self._region

    @property
    def base(self):
        return self._region.base

    def renew(self) -> Remote:
        """A fresh transport and fresh memory in the same process."""
        self._region = self._ask("renew")
        return self

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)
        return lambda *args: self._ask(verb, *args)

    def peek(self, offset, nbytes):
        """Its memory as it is, even while it is stopped."""
        with Path(f"/proc/{self._process.pid}/mem").open("rb", buffering=0) as memory:
            return os.pread(memory.fileno(), nbytes, self.base + offset)

    def _ask(self, verb, *args):
        self._pipe.send((verb, args))
        return self.finish()

    def finish(self):
        assert self._pipe.poll(DEADLINE_S), "the other process does not answer"
        ok, result = self._pipe.recv()
        if not ok:
            raise result
        return result

    def stop(self):
        processes.stop(self._process.pid)

    def resume(self):
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self):
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_):
        self.shut()

    def shut(self):
        self._pipe.close()
        self._process.join(DEADLINE_S)
        if self._process.is_alive():
            self.kill()


def meet(a, b, peer="b", more: Iterable[Region] = ()):
    """`a` may write all of the memory of `b`, and `more` of it."""
    a.connect(peer, b.describe())
    a.prepare(peer, [b.region(), *more])


def described(end, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """What an endpoint says of itself, read as a description of that class."""
    return read_description("it", end.describe(), kind, None)


def altered(end, kind: type[msgspec.Struct], **changes):
    return write_description(msgspec.structs.replace(described(end, kind), **changes))


def until_dead(a, peer="b"):
    """Until `a` has proved that the peer's process has ended."""
    Log(a).until(lambda: a.proved_dead(peer))


def ended(a, *tickets) -> list[Done | PostFailed]:
    """What `a` has said of its posts, once it has of these."""
    log = Log(a)
    log.until(lambda: {event.ticket for event in log.ended(a)} >= set(tickets))
    return log.ended(a)


def arrives(a, b, ticket, tag=b"tag") -> Log:
    """Once `a` knows that its post is done, and `b` has its tag."""
    log = Log(a, b)
    log.until(lambda: ticket in log.done(a) and (not tag or tag in log.tags(b)))
    return log


def sends(a, b, nbytes, tag=b"tag"):
    """Posts the first bytes of `a` to where those of "b" are."""
    return a.post("b", [(0, b.base, nbytes)], tag)


def delivers(a, b, data=b"data", tag=b"tag"):
    """Writes `data` to "b", and waits until both know it."""
    a.fill(0, data)
    arrives(a, b, sends(a, b, len(data), tag), tag)
    assert b.read(0, len(data)) == data


class Saying:
    """An endpoint whose transport carries no tags: once a post is done its tag is said to the peer, as callers do."""

    _by_description: ClassVar[dict[bytes, Saying]] = {}

    def __init__(self, endpoint):
        self._endpoint = endpoint
        self._peers = {}
        self._tags = {}
        self._heard = []

    def __getattr__(self, verb):
        return getattr(self._endpoint, verb)

    def describe(self):
        description = self._endpoint.describe()
        self._by_description[description] = self
        return description

    def connect(self, peer, description):
        self._endpoint.connect(peer, description)
        self._peers[peer] = self._by_description.get(description, self)

    def post(self, peer, spans, tag):
        ticket = self._endpoint.post(peer, spans, tag)
        if tag:
            self._tags[ticket] = (self._peers[peer], tag)
        return ticket

    def poll(self) -> list[object]:
        events = self._endpoint.poll()
        for event in events:
            peer, tag = self._tags.pop(event.ticket, (None, b""))
            if peer is not None and isinstance(event, Done):
                peer._heard.append(Inbound(tag))
        heard, self._heard = self._heard, []
        return events + heard

    poll_and_read = Endpoint.poll_and_read


class Log:
    """Polls endpoints until something holds, and keeps what each has said."""

    def __init__(self, *endpoints):
        self._said = {id(endpoint): (endpoint, []) for endpoint in endpoints}

    def poll(self):
        for endpoint, events in self._said.values():
            events.extend(endpoint.poll())

    def until(self, holds):
        deadline_at = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline_at, f"not in time: {[said for _, said in self._said.values()]}"
            self.poll()

    def tags(self, endpoint) -> list[bytes]:
        return [event.tag for event in self._said[id(endpoint)][1] if isinstance(event, Inbound)]

    def ended(self, endpoint) -> list[Done | PostFailed]:
        return [event for event in self._said[id(endpoint)][1] if not isinstance(event, Inbound)]

    def until_ended(self, endpoint, n):
        self.until(lambda: len(self.ended(endpoint)) == n)

    def done(self, endpoint) -> list[int]:
        return [event.ticket for event in self.ended(endpoint) if isinstance(event, Done)]
