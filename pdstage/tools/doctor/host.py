"""Areas "host" and "network": releases, limits, access between processes, shared memory, the files that nodes are
given, addresses and RDMA devices.

It reads the kernel's tables (proc(5), getrlimit(2), sysfs). Nothing here is slow or can harm this process.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq

import pdstage
from pdstage import Config, environment
from pdstage.control.address import Address
from pdstage.control.keys import Keys
from pdstage.errors import UsageError
from pdstage.manager import calibration
from pdstage.manager.options import DEFAULTS
from pdstage.protocol.wire import OLDEST, VERSION
from pdstage.tools.doctor.report import Result, fail, ok, warn
from pdstage.transport._fabric import rdma_ports

if TYPE_CHECKING:
    from pdstage.tools.doctor.probe import Check, Site

_FDS_A_PEER = 4
"""Per peer: one connection of the control plane, two descriptors of the data plane (two sockets with UCX over TCP; a
socket and a pidfd with local), and one more for a session that arrives before its predecessor is gone.
"""
_OWN_FDS = 256
_CAP_IPC_LOCK = 14
_SHM, _LEAST_SHM = Path("/dev/shm"), 64 << 20


def versions(_: Site) -> Result:
    """The installed releases, and whether the control plane can be encrypted."""
    facts = {
        "pdstage": pdstage.__version__, "wire": VERSION, "oldest_wire": OLDEST, "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}", "machine": platform.machine(), "numpy": np.__version__,
        "msgspec": msgspec.__version__, "pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(),
        "curve": zmq.has("curve"),
    }  # fmt: skip
    says = f"pdstage {pdstage.__version__}, wire {VERSION}, Python {facts['python']}, {facts['system']}"
    if platform.system() != "Linux":
        return fail(f"{says}: pdstage needs Linux", "run it on Linux", **facts)
    if not facts["curve"]:
        return warn(
            f"{says}; libzmq was built without CURVE, so that no keys can be used",
            "install pyzmq's wheel: pip install --force-reinstall --only-binary :all: pyzmq",
            **facts,
        )
    return ok(says, **facts)


def memlock(_: Site) -> Result:
    """RDMA pins registered memory: staging memory, and pools that are written in place."""
    limit, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    staging = DEFAULTS["staging_nbytes"]
    free, has_rdma = limit == resource.RLIM_INFINITY or may_lock(), bool(rdma_ports())
    facts = {"nbytes": limit, "unbounded": free, "rdma": has_rdma}
    if free:
        return ok("memory can be locked without limit", **facts)
    says = f"{limit >> 10} KiB of memory can be locked"
    if not has_rdma:
        return ok(f"{says}; only RDMA needs more", **facts)
    remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in docker)"
    if limit < staging:
        says += f", and RDMA registers a node's staging memory, {staging >> 20} MiB by default"
        return fail(says, remedy, **facts)
    return warn(f"{says}; RDMA registers staging memory and whole pools", remedy, **facts)


def files(_: Site) -> Result:
    """Descriptors: several per peer, and a node may have `Config.max_peers` peers."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit if limit != resource.RLIM_INFINITY else 1 << 30
    wanted, fitting = Config().max_peers, max(0, limit - _OWN_FDS) // _FDS_A_PEER
    facts = {"limit": limit, "hard": most, "peers": fitting, "max_peers": wanted}
    remedy = "ulimit -n 65536 (LimitNOFILE=65536 in systemd, --ulimit nofile=65536 in docker)"
    says = f"{limit} files may be open, enough for {fitting} peers"
    if fitting < 1:
        return fail(f"{limit} files may be open, which is too few for a node", remedy, **facts)
    return ok(says, **facts) if fitting >= wanted else warn(f"{says}; Config.max_peers is {wanted}", remedy, **facts)


def shared_memory(_: Site) -> Result:
    """/dev/shm, where UCX keeps queues between processes of one host; pdstage's own memory is not there."""
    if not _SHM.is_dir():
        return warn("no /dev/shm: UCX has no shared memory between processes", "mount a tmpfs there")
    held = os.statvfs(_SHM)
    free, size = held.f_bavail * held.f_frsize, held.f_blocks * held.f_frsize
    says = f"/dev/shm has {free >> 20} of {size >> 20} MiB free"
    if os.access(_SHM, os.W_OK) and free >= _LEAST_SHM:
        return ok(says, free_nbytes=free, nbytes=size)
    return warn(
        says,
        "give the container more: --shm-size=1g or --ipc=host in docker, a Memory volume in Kubernetes",
        free_nbytes=free,
        nbytes=size,
    )


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


def prices(_: Site) -> Result | None:
    """The calibration file that the environment names, as nodes will read it."""
    try:
        path = environment.CALIBRATION.read()
        if path is None:
            return None
        held = calibration.read(path)
    except UsageError as error:
        return fail(error.what, error.remedy)
    return ok(f"{path} has prices of {', '.join(held.transports)}, made {held.made_at}", file=str(path))


def may_lock() -> bool:
    """Whether this process has CAP_IPC_LOCK."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next((line.partition(":")[2] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) >> _CAP_IPC_LOCK & 1)


def rdma(_: Site, root: Path = Path("/")) -> Result:
    """RDMA ports, and whether this process may open their devices."""
    found = rdma_ports(root / "sys")
    facts = {"ports": [port._asdict() for port in found]}
    if not found:
        return warn(
            "no RDMA device: between hosts bytes go over TCP",
            "nothing, where that is fast enough; in a container pass /dev/infiniband and the host's network",
            **facts,
        )
    says = ", ".join(map(str, found))
    if not any(port.active for port in found):
        return fail(f"no RDMA port is active: {says}", "bring the link and its subnet manager up, see ibstat", **facts)
    nodes = (root / "dev/infiniband").glob("uverbs*")
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return fail(
            f"{says}, but no /dev/infiniband/uverbs* can be opened here",
            "pass /dev/infiniband into the container, and let this user open it",
            **facts,
        )
    if not all(port.active for port in found):
        return warn(says, "name the active ones to the transport: devices=[...], or UCX_NET_DEVICES", **facts)
    return ok(says, **facts)


def gpudirect(_: Site, root: Path = Path("/")) -> Result | None:
    """Whether NICs may reach the memory of NVIDIA's GPUs: by nvidia-peermem or dma-buf, and past an IOMMU."""
    gpus = [
        one
        for one in sorted((root / "sys/bus/pci/devices").glob("*"))
        # One of NVIDIA's display or 3D controllers.
        if (one / "vendor").read_text().strip() == "0x10de" and (one / "class").read_text().startswith("0x03")
    ]
    if not gpus or not rdma_ports(root / "sys") or not (root / "sys/module/nvidia").is_dir():
        return None
    has_peermem = (root / "sys/module/nvidia_peermem").is_dir()
    driver = root / "proc/driver/nvidia/version"
    is_open = driver.is_file() and "Open Kernel Module" in driver.read_text()
    kinds = {}
    for gpu in gpus:
        group = gpu / "iommu_group/type"
        kinds[gpu.name] = group.read_text().strip() if group.is_file() else "none"
    facts = {"nvidia_peermem": has_peermem, "open_kernel_module": is_open, "iommu": kinds}
    if not has_peermem and not is_open:
        return warn(
            "no way for NICs to GPU memory: nvidia-peermem is not loaded, and the driver's modules have no dma-buf",
            "modprobe nvidia-peermem, or install NVIDIA's open kernel modules",
            **facts,
        )
    how = " and ".join(way for way, has in (("nvidia-peermem", has_peermem), ("dma-buf", is_open)) if has)
    if translated := sorted(address for address, kind in kinds.items() if kind.startswith("DMA")):
        says = f"NICs reach GPU memory by {how}, but an IOMMU translates for {', '.join(translated)}"
        return warn(
            says, "iommu=pt on the kernel's command line; and see that ACS is off on the switches (lspci -vvv)", **facts
        )
    return ok(f"NICs reach GPU memory by {how}; ACS on the switches is not asked", **facts)


def address(_: Site) -> Result:
    """The address that peers would get, and whether this host's name resolves to it."""
    own, name = Address("", 1).reachable().host, socket.gethostname()
    try:
        named = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        leads = f"its name leads to {', '.join(named)}"
    except OSError as error:
        named, leads = [], f"its name does not resolve ({error})"
    facts = {"host": name, "address": own, "named": named, "interfaces": [held for _, held in socket.if_nameindex()]}
    if Address(own, 1).is_loopback:
        return warn(
            f"no route to other hosts: {name} is reached at {own} only",
            "fine for one host; to reach others give this one a route, or share the host's network",
            **facts,
        )
    if own not in named:
        return warn(
            f"{name} is reached at {own}, but {leads}", f"name addresses rather than hosts: bind=tcp://{own}:0", **facts
        )
    return ok(f"{name} is reached at {own}", **facts)


CHECKS: list[Check] = [
    ("host", "versions", versions),
    ("host", "memlock", memlock),
    ("host", "files", files),
    ("host", "shared memory", shared_memory),
    ("host", "keys", keys),
    ("host", "calibration", prices),
    ("network", "address", address),
    ("network", "rdma", rdma),
    ("network", "gpudirect", gpudirect),
]
