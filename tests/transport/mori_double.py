"""A double of MORI-IO (`mori.io` of amd-mori 1.2.4) within one process: the real one needs AMD's runtime and RDMA.

It has the calls that pdstage makes, with their arguments in their order. Real bytes move, in steps, whenever somebody
asks for a status, from the source as it is then. A caller that breaks a rule of the library gets an `AssertionError`,
where the real one would crash, corrupt memory or answer with a failed status: so what passes here was never let off.

It proves how pdstage calls MORI-IO as its sources read; it cannot prove that MORI-IO does what they say.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import sys
import types
import weakref
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from unittest import mock

import msgspec

import pdstage.transport

SEND_QUEUE_DEPTH = 4096


def rule(holds, what):
    """A rule of MORI-IO."""
    assert holds, what


def exact(kind: type, **values):
    for name, value in values.items():
        rule(type(value) is kind, f"{name} is {value!r}, not of type {kind.__name__}")


StatusCode = enum.Enum("StatusCode", {"SUCCESS": 0, "IN_PROGRESS": 2, "ERR_RDMA_OP": 13})
BackendType = enum.Enum("BackendType", ["Unknown", "XGMI", "RDMA", "TCP"])
MemoryLocationType = enum.Enum("MemoryLocationType", ["Unknown", "CPU", "GPU"])


class _Packed(msgspec.Struct, frozen=True):
    def pack(self):
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed):
        exact(bytes, packed=packed)
        try:
            return msgspec.msgpack.decode(packed, type=cls)
        except msgspec.DecodeError as error:
            raise RuntimeError(f"msgpack: {error}") from error


class EngineDesc(_Packed, frozen=True):
    key: str
    host: str
    port: int


class MemoryDesc(_Packed, frozen=True):
    engine_key: str
    id: int
    device_id: int
    data: int
    size: int
    loc: MemoryLocationType


@dataclass
class IOEngineConfig:
    host: str = ""
    port: int = 0


@dataclass
class RdmaBackendConfig:
    qp_per_transfer: int = 1
    enable_notification: bool = True


@dataclass(eq=False)
class TransferStatus:
    """What the library writes to by its address: it must outlive the transfer."""

    _fabric: Fabric
    code: StatusCode = StatusCode.IN_PROGRESS
    message: str = ""

    def _now(self) -> StatusCode:
        self._fabric.step()
        return self.code

    def Succeeded(self):  # noqa: N802  (MORI's names)
        return self._now() is StatusCode.SUCCESS

    def Failed(self):  # noqa: N802
        return self._now().name.startswith("ERR_")

    def Code(self) -> StatusCode:  # noqa: N802
        return self.code

    def Message(self):  # noqa: N802
        return self.message


@dataclass
class _Transfer:
    initiator: IOEngine
    target: IOEngine
    runs: list[tuple[int, int, int]]
    status: weakref.ref[TransferStatus]
    n_descriptors: int


class Fabric:
    """What lies between the engines: the engines that are up, and transfers under way."""

    def __init__(self):
        self.up: dict[int, IOEngine] = {}
        self.ports = count(20_000)
        self.transfers: list[_Transfer] = []
        self.held = False
        self.most_in_flight = 0
        self.n_batches = self.n_sessions = 0

    def step(self):
        """Moves half of what is left of the oldest transfer."""
        if self.held or not self.transfers:
            return
        transfer = self.transfers[0]
        if transfer.target.port not in self.up:
            self.end(transfer, StatusCode.ERR_RDMA_OP, "transport retry counter exceeded")
            return
        half = -(-len(transfer.runs) // 2)
        for src, dst, nbytes in transfer.runs[:half]:
            ctypes.memmove(dst, src, nbytes)
        del transfer.runs[:half]
        if not transfer.runs:
            self.end(transfer, StatusCode.SUCCESS, "success")

    def end(self, transfer: _Transfer, code: StatusCode, message):
        self.transfers.remove(transfer)
        status = transfer.status()
        rule(status is not None, "a status was given up while its transfer was under way: the library writes to it")
        status.code, status.message = code, message


@dataclass(eq=False)
class IOEngineSession:
    """One local and one remote memory; it points at its engine, which must outlive it."""

    _engine: IOEngine
    _local: MemoryDesc
    _remote: MemoryDesc
    _target: IOEngine

    def batch_write(
        self, local_offsets: list[int], remote_offsets: list[int], sizes: list[int], transfer_uid
    ) -> TransferStatus:
        engine = self._engine
        for values in (local_offsets, remote_offsets, sizes):
            exact(list, values=values)
            exact(int, **{f"[{i}]": value for i, value in enumerate(values)})
        rule(len(local_offsets) == len(remote_offsets) == len(sizes) > 0, "lists of one length, not empty")
        rule(transfer_uid in engine.uids, f"transfer id {transfer_uid} was not allocated, or used before")
        engine.uids.remove(transfer_uid)
        rule(engine.backend is not None, "a write without a backend")
        rule(self._local.id in engine.memory, f"memory {self._local.id} is registered no more")
        for offsets, memory in ((local_offsets, self._local), (remote_offsets, self._remote)):
            for offset, size in zip(offsets, sizes, strict=True):
                rule(offset >= 0 < size <= memory.size - offset, f"{offset}+{size} outside {memory}")
        fabric = engine.fabric
        status = TransferStatus(fabric)
        runs = [
            (self._local.data + src, self._remote.data + dst, nbytes)
            for src, dst, nbytes in zip(local_offsets, remote_offsets, sizes, strict=True)
        ]
        fabric.n_batches += 1
        between = [one for one in fabric.transfers if one.initiator is engine and one.target is self._target]
        in_flight = sum(one.n_descriptors for one in between) + len(runs)
        fabric.most_in_flight = max(fabric.most_in_flight, in_flight)
        if in_flight > SEND_QUEUE_DEPTH:
            status.code, status.message = StatusCode.ERR_RDMA_OP, "SQ full"
        else:
            fabric.transfers.append(_Transfer(engine, self._target, runs, weakref.ref(status), len(runs)))
        return status


class IOEngine:
    fabric = Fabric()

    def __init__(self, key, config: IOEngineConfig):
        exact(str, key=key, host=config.host)
        exact(int, port=config.port)
        rule(key not in {engine.key for engine in self.fabric.up.values()}, f"two engines with the key {key}")
        rule(config.host, "an engine without an address")
        self.key, self.host, self.port = key, config.host, config.port
        self.backend: RdmaBackendConfig | None = None
        self.memory: dict[int, MemoryDesc] = {}
        self.remotes: dict[str, EngineDesc] = {}
        self.sessions: weakref.WeakSet[IOEngineSession] = weakref.WeakSet()
        self.uids: set[int] = set()
        self._ids, self._uids = count(), count()

    def create_backend(self, type: BackendType, config=None):
        exact(int, qp=config.qp_per_transfer)
        rule(type is BackendType.RDMA and self.backend is None, "one RDMA backend")
        self.backend = config
        self.port = self.port or next(self.fabric.ports)
        self.fabric.up[self.port] = self

    def remove_backend(self, type: BackendType):
        rule(type is BackendType.RDMA and self.backend is not None, "no such backend")
        rule(not self.sessions, "a session outlives its backend")
        rule(not self.memory, "memory outlives its backend")
        for transfer in [t for t in self.fabric.transfers if t.initiator is self]:
            rule(transfer.status() is not None, "a status was given up while the backend's threads could write to it")
            self.fabric.transfers.remove(transfer)
        self.backend = None
        del self.fabric.up[self.port]

    def get_engine_desc(self) -> EngineDesc:
        rule(self.backend is not None, "its port is known only with a backend")
        return EngineDesc(self.key, self.host, self.port)

    def register_remote_engine(self, engine_desc: EngineDesc):
        self.remotes[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc):
        rule(self.remotes.pop(engine_desc.key, None), f"engine {engine_desc.key} is not registered")
        rule(
            not any(t.initiator is self and t.target.key == engine_desc.key for t in self.fabric.transfers),
            "an engine was deregistered with transfers under way",
        )

    def register_memory(self, ptr, size, device_id, mem_loc: MemoryLocationType) -> MemoryDesc:
        exact(int, ptr=ptr, size=size, device_id=device_id)
        rule(ptr > 0 and size > 0, "memory of no bytes")
        rule((device_id == -1) is (mem_loc is MemoryLocationType.CPU), "device -1 is the CPU's")
        for other in self.memory.values():
            rule(ptr + size <= other.data or other.data + other.size <= ptr, "registered twice")
        descriptor = MemoryDesc(self.key, next(self._ids), device_id, ptr, size, mem_loc)
        self.memory[descriptor.id] = descriptor
        return descriptor

    def deregister_memory(self, mem_desc: MemoryDesc):
        rule(self.memory.pop(mem_desc.id, None) == mem_desc, f"{mem_desc} is not registered here")
        rule(
            not any(session._local is mem_desc for session in self.sessions),
            "a session outlives the memory it was made for",
        )

    def allocate_transfer_uid(self):
        uid = next(self._uids)
        self.uids.add(uid)
        return uid

    def create_session(self, local_mem: MemoryDesc, remote_mem: MemoryDesc) -> IOEngineSession | None:
        rule(self.memory.get(local_mem.id) == local_mem, f"{local_mem} is not registered here")
        rule(remote_mem.engine_key in self.remotes, f"engine {remote_mem.engine_key} is not registered")
        target = self.fabric.up.get(self.remotes[remote_mem.engine_key].port)
        if target is None or target.key != remote_mem.engine_key:
            raise RuntimeError("connect: Connection refused")
        if target.memory.get(remote_mem.id) != remote_mem:
            raise RuntimeError(f"remote MR size mismatch: expected={remote_mem.size} got=0")
        session = IOEngineSession(self, local_mem, remote_mem, target)
        self.sessions.add(session)
        self.fabric.n_sessions += 1
        return session


def load() -> types.ModuleType:
    """A second pdstage.transport.mori, over this double; for the first, MORI-IO stays as missing as it is."""
    io = types.ModuleType("mori.io")
    names = (IOEngine, IOEngineConfig, RdmaBackendConfig, BackendType, MemoryLocationType, EngineDesc, MemoryDesc)
    vars(io).update({kind.__name__: kind for kind in names})
    spec = importlib.util.spec_from_file_location(f"{__name__}_user", Path(pdstage.transport.__path__[0], "mori.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and msgspec look for the names in its annotations
    with mock.patch.dict(sys.modules, {"mori": types.ModuleType("mori"), "mori.io": io}):
        spec.loader.exec_module(module)
    return module


module = load()
TRANSPORT = module.TRANSPORT
