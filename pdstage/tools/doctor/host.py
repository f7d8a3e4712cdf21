"""Area "host": releases, limits, access between processes, shared memory, and the files that nodes are given.

It reads the kernel's tables (proc(5), getrlimit(2)). Nothing here is slow or can harm this process.
"""

from __future__ import annotations

import inspect
import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

from pdstage import Config, environment
from pdstage.control.keys import Keys
from pdstage.errors import UsageError
from pdstage.manager import DecodeNode, calibration
from pdstage.protocol.wire import OLDEST, VERSION
from pdstage.tools.doctor.found import Result, fail, ok, warn
from pdstage.tools.doctor.network import rdma_ports
from pdstage.tools.doctor.transports import local_pair

if TYPE_CHECKING:
    from pdstage.tools.doctor.site import Site

_FDS_A_PEER = 4
"""Per peer: one connection of the control plane, two descriptors of the data plane (two sockets with UCX over TCP; a
socket and a pidfd with local), and one more for a session that arrives before its predecessor is gone.
"""
_OWN_FDS = 256
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_SHM, _LEAST_SHM = Path("/dev/shm"), 64 << 20
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_SECCOMP = {0: "off", 1: "strict", 2: "filtered"}


def pdstage_version() -> str:
    try:
        return version("pdstage")
    except PackageNotFoundError:
        return "(not installed)"


def versions(site: Site) -> Result:
    """The installed releases, and whether the control plane can be encrypted."""
    del site
    facts = {
        "pdstage": pdstage_version(), "wire": VERSION, "oldest_wire": OLDEST, "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}", "machine": platform.machine(), "numpy": np.__version__,
        "msgspec": msgspec.__version__, "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(),
        "curve": zmq.has("curve"),
    }  # fmt: skip
    says = f"pdstage {facts['pdstage']}, wire {VERSION}, Python {facts['python']}, {facts['system']}"
    if platform.system() != "Linux":
        return fail(f"{says}: pdstage needs Linux", "run it on Linux", **facts)
    if not facts["curve"]:
        remedy = "install pyzmq's wheel: pip install --force-reinstall --only-binary :all: pyzmq"
        return warn(f"{says}; libzmq was built without CURVE, so that no keys can be used", remedy, **facts)
    return ok(says, **facts)


def memlock(site: Site) -> Result:
    """RDMA pins registered memory: staging memory, and pools that are written in place."""
    del site
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    staging = inspect.signature(DecodeNode).parameters["staging_nbytes"].default
    free = limit == resource.RLIM_INFINITY or _has_capability(_CAP_IPC_LOCK)
    has_rdma = bool(rdma_ports())
    facts = {"nbytes": -1 if limit == resource.RLIM_INFINITY else limit, "unbounded": free, "rdma": has_rdma}
    if free:
        return ok("memory can be locked without limit", **facts)
    says = f"{limit >> 10} KiB of memory can be locked"
    if not has_rdma:
        return ok(f"{says}; only RDMA needs more", **facts)
    remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker)"
    if limit < staging:
        return fail(
            f"{says}, and RDMA registers a node's staging memory, {staging >> 20} MiB by default", remedy, **facts
        )
    return warn(f"{says}; RDMA registers staging memory and whole pools", remedy, **facts)


def files(site: Site) -> Result:
    """Descriptors: several per peer, and a node may have `Config.max_peers` peers."""
    del site
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit if limit != resource.RLIM_INFINITY else 1 << 30
    wanted, fitting = Config().max_peers, max(0, limit - _OWN_FDS) // _FDS_A_PEER
    facts = {"limit": limit, "hard": most, "peers": fitting, "max_peers": wanted}
    remedy = "ulimit -n 65536 (LimitNOFILE=65536 in systemd, --ulimit nofile=65536 in docker)"
    says = f"{limit} files may be open, enough for {fitting} peers"
    if fitting < 1:
        return fail(f"{limit} files may be open, which is too few for a node", remedy, **facts)
    return ok(says, **facts) if fitting >= wanted else warn(f"{says}; Config.max_peers is {wanted}", remedy, **facts)


def process_memory(site: Site) -> Result:
    """Whether one process may write another's memory, as transport `local` does, and what forbids it."""
    scope = _YAMA.read_text().strip() if _YAMA.exists() else "absent"
    seccomp = _SECCOMP.get(int(_status("Seccomp") or 0), "unknown")
    outcome = local_pair(site)
    way = outcome.facts.get("way process_vm_writev", {})
    facts = {"ptrace_scope": scope, "seccomp": seccomp, "sys_ptrace": _has_capability(_CAP_SYS_PTRACE)}
    settings = f"ptrace_scope {scope}, seccomp {seccomp}"
    if outcome.good and way and not way["error"]:
        return ok(f"processes may write each other's memory ({settings})", **facts)
    why = way.get("error") or outcome.why
    says = f"processes may not write each other's memory ({settings}): {why}"
    remedy = way.get("remedy") or outcome.remedy or "see transport local"
    return warn(says, f"{remedy}; nixl does without, and so does local for staged chunks", **facts)


def shared_memory(site: Site) -> Result:
    """/dev/shm, where UCX keeps queues between processes of one host; pdstage's own memory is not there."""
    del site
    if not _SHM.is_dir():
        return warn("no /dev/shm: UCX has no shared memory between processes", "mount a tmpfs there")
    held = os.statvfs(_SHM)
    free, size = held.f_bavail * held.f_frsize, held.f_blocks * held.f_frsize
    says = f"/dev/shm has {free >> 20} of {size >> 20} MiB free"
    facts = {"free_nbytes": free, "nbytes": size}
    if not os.access(_SHM, os.W_OK) or free < _LEAST_SHM:
        remedy = "give the container more: --shm-size=1g or --ipc=host in docker, a Memory volume in Kubernetes"
        return warn(says, remedy, **facts)
    return ok(says, **facts)


def keys(site: Site) -> Result | None:
    """The key file and the allow list that were named: valid, and accessible to nobody else."""
    asked = site.asked
    if not asked.keys:
        return None
    try:
        held = Keys.load(asked.keys, asked.allow or None)
    except UsageError as error:
        return fail(error.what, error.remedy, file=asked.keys)
    return ok(f"{asked.keys} holds the key {held.public.hex()}", file=asked.keys, public=held.public.hex())


def prices(site: Site) -> Result | None:
    """The calibration file that the environment names, as nodes will read it."""
    del site
    path = None
    try:
        path = environment.CALIBRATION.read()
        if path is None:
            return None
        held = calibration.read(path)
    except UsageError as error:
        return fail(error.what, error.remedy, file=str(path or ""))
    return ok(f"{path} has prices of {', '.join(held.transports)}, made {held.made_at}", file=str(path))


def _status(name: str) -> str:
    """A field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _has_capability(number: int) -> bool:
    return bool(int(_status("CapEff") or "0", 16) >> number & 1)
