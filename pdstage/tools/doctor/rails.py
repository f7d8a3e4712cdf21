"""The lines of area "network" on rails: which NICs each GPU's memory, and host memory, would use, how near they are and
what they carry; and which UCX itself takes.

`pdstage.transport._rails` reads sysfs and chooses, as for `devices="auto"`. UCX is asked by a put between two agents of
a child process (`ucx_choice`): it logs the protocol and the devices that it takes (UCX_PROTO_INFO).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdstage.errors import DeadlineExceeded
from pdstage.kernels import driver
from pdstage.layout import Region
from pdstage.tools.doctor import ucx
from pdstage.tools.doctor.found import Result, ok, warn
from pdstage.tools.doctor.network import own_host
from pdstage.tools.doctor.pair import WAIT_S
from pdstage.transport import Done, PostFailed, Spans, open_transport
from pdstage.transport._rails import Distance, Gpu, Nic, Place, Rails, Tree, distance, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdstage.tools.doctor.probes import Say
    from pdstage.tools.doctor.site import Site

_NBYTES = 8 << 20
_ROOT = Path("/")


class Problem(NamedTuple):
    says: str
    remedy: str


def checks(root: Path = _ROOT) -> list[tuple[str, Callable[[Site], Result | None]]]:
    """A line for each GPU, by its rank in PCI order, one for host memory, and one for what lies between."""
    tree = read(root / "sys")
    return [
        *((f"rails gpu {gpu.number}", partial(of_gpu, tree=tree, gpu=gpu)) for gpu in tree.gpus if tree.nics),
        ("rails host", partial(of_host, tree=tree)),
        ("gpudirect", partial(gpudirect, tree=tree, root=root)),
    ]


def of_gpu(site: Site, *, tree: Tree, gpu: Gpu) -> Result:
    """The NICs of a GPU's memory."""
    rails, device = tree.of_gpu(gpu), _cuda_device(site, gpu)
    taken = _asked(site, device) if device else {}
    name = f"GPU {gpu.place.address}{f' ({device})' if device else ''}"
    facts = {
        "gpu": _place(gpu.place), "device": device, "nics": [_facts(nic, gpu) for nic in tree.nics], "ucx": taken,
        "chosen": rails.ports, "gbps": rails.gbps, "bound_gbps": rails.bound_gbps,
    }  # fmt: skip
    if rails.distance is None:
        return warn(f"{name}: no NIC has an active port", "bring a link up, see ibstat", **facts)
    says = f"{name}: {_named(rails)} at {rails.distance.name}"
    if rails.bound_gbps:
        says += f"; its PCIe link carries {rails.bound_gbps:.0f} Gb/s"
    return _result(says, taken, list(_problems(tree, gpu, rails, taken)), facts)


def of_host(site: Site, *, tree: Tree) -> Result:
    """The NICs of host memory, by NUMA node."""
    taken = _asked(site, "cpu")
    usable = [nic for nic in tree.nics if nic.active]
    nodes = sorted({nic.place.node for nic in usable})
    chosen = {node: tree.of_node(node) for node in nodes}
    facts: dict[str, object] = {"nics": [_facts(nic) for nic in tree.nics], "ucx": taken}
    facts["chosen"] = {str(node): rails.ports for node, rails in chosen.items()}
    where = {-1: "host memory"} if nodes == [-1] else {node: f"memory of node {node}" for node in nodes}
    says = "; ".join(f"{where[node]}: {_named(rails)}" for node, rails in chosen.items())
    return _result(says or "no active RDMA NIC", taken, [], facts)


def gpudirect(site: Site, *, tree: Tree, root: Path = _ROOT) -> Result | None:
    """Whether NICs may reach the memory of NVIDIA's GPUs: by nvidia-peermem or dma-buf, and past an IOMMU."""
    del site
    if not tree.gpus or not tree.nics or not (root / "sys/module/nvidia").is_dir():
        return None
    has_peermem = (root / "sys/module/nvidia_peermem").is_dir()
    version = root / "proc/driver/nvidia/version"
    is_open = version.is_file() and "Open Kernel Module" in version.read_text()
    kinds = {}
    for gpu in tree.gpus:
        group = root / "sys/bus/pci/devices" / gpu.place.address / "iommu_group/type"
        kinds[gpu.place.address] = group.read_text().strip() if group.is_file() else "none"
    facts = {"nvidia_peermem": has_peermem, "open_kernel_module": is_open, "iommu": kinds}
    translated = sorted(address for address, kind in kinds.items() if kind.startswith("DMA"))
    if not has_peermem and not is_open:
        says = "no way for NICs to GPU memory: nvidia-peermem is not loaded, and the driver's modules have no dma-buf"
        return warn(says, "modprobe nvidia-peermem, or install NVIDIA's open kernel modules", **facts)
    how = " and ".join(way for way, has in (("nvidia-peermem", has_peermem), ("dma-buf", is_open)) if has)
    if translated:
        says = f"NICs reach GPU memory by {how}, but an IOMMU translates for {', '.join(translated)}"
        remedy = (
            "iommu=pt on the kernel's command line; and see that ACS is off on the switches (lspci -vvv | grep ACSCtl)"
        )
        return warn(says, remedy, **facts)
    return ok(f"NICs reach GPU memory by {how}; ACS on the switches is not asked", **facts)


def _problems(tree: Tree, gpu: Gpu, rails: Rails, taken: dict[str, int]) -> Iterator[Problem]:
    assert rails.distance is not None
    for nic in tree.nics:
        far = distance(gpu.place, nic.place)
        if not nic.active and far <= min(rails.distance, Distance.PHB):
            states = ", ".join(map(str, nic.ports)) or "no port"
            yield Problem(f"{nic.name} at {far.name} is down ({states})", "bring its link up, see ibstat")
    if rails.distance is Distance.SYS:
        yield Problem("no NIC on its NUMA node", "expect the interconnect between sockets to bound it: see lspci -tv")
    fastest = max(nic.gbps for each in tree.gpus for nic in tree.of_gpu(each).nics)
    for nic in rails.nics:
        lanes = f", with {nic.place.width} of {nic.place.max_width} lanes" * (nic.place.width < nic.place.max_width)
        if nic.gbps < fastest or lanes:
            what = f"{nic.name} carries {nic.gbps:.0f} Gb/s{lanes}, where NICs of other GPUs carry {fastest:.0f}"
            yield Problem(what, "see its cable, its slot and its port's speed: ibstat, lspci -vv")
    shared = [each.number for each in tree.gpus if each != gpu and set(tree.of_gpu(each).nics) & set(rails.nics)]
    if shared:
        yield Problem(f"shared with GPU {', '.join(map(str, shared))}", "expect their sum to be what the NIC carries")
    mine, used = {nic.name for nic in rails.nics}, _rdma(taken, tree)
    if used and used < mine:
        remedy = f"give nixl rails={len(mine)}, or UCX_MAX_RMA_RAILS, and measure both: pdstage calibrate --rails"
        yield Problem(f"UCX spreads a write over {len(used)} of its {len(mine)} NICs", remedy)
    if used - mine:
        yield Problem(f"UCX itself takes {', '.join(sorted(used - mine))}", 'choose with devices="auto", or by name')


def _result(says: str, taken: dict[str, int], problems: list[Problem], facts: dict[str, object]) -> Result:
    if taken:
        says += f"; UCX writes over {', '.join(f'{device} ({share} %)' for device, share in taken.items())}"
    if not problems:
        return ok(says, **facts)
    says = "; ".join([says, *(problem.says for problem in problems)])
    return warn(says, "; ".join(dict.fromkeys(problem.remedy for problem in problems)), **facts)


def _named(rails: Rails) -> str:
    """The NICs, and what they carry in all."""
    kinds = sorted({nic.active[0].link for nic in rails.nics})
    return f"{', '.join(nic.name for nic in rails.nics)} ({rails.gbps:.0f} Gb/s, {', '.join(kinds)})"


def _rdma(taken: dict[str, int], tree: Tree) -> set[str]:
    """The RDMA devices among those that UCX takes."""
    names = {device.partition("/")[2].partition(":")[0] for device in taken}
    return names & {nic.name for nic in tree.nics}


def _facts(nic: Nic, gpu: Gpu | None = None) -> dict[str, object]:
    far = {} if gpu is None else {"distance": distance(gpu.place, nic.place).name}
    ports = [port._asdict() for port in nic.ports]
    return {"name": nic.name, "netdev": nic.netdev, "ports": ports, "gbps": nic.gbps, **_place(nic.place), **far}


def _place(place: Place) -> dict[str, object]:
    lanes = [place.width, place.max_width]
    return {"path": list(place.path), "numa_node": place.node, "pcie_gbps": place.gbps, "lanes": lanes}


def _cuda_device(site: Site, gpu: Gpu) -> str:
    """The name by which a process here has the GPU; empty if CUDA does not show it."""
    found = site.ask("driver").facts.get("devices", [])
    address = gpu.place.address
    return next((f"cuda:{i}" for i, one in enumerate(found) if one.get("address", "").lower() == address), "")


def _asked(site: Site, memory: str) -> dict[str, int]:
    """The devices over which UCX writes such memory in a node at this host's address, each with its percentage; empty
    if NIXL is missing, not wanted, or fails: then area "transports" says why.
    """
    wanted = site.asked.transports
    if find_spec("nixl") is None or (wanted and "nixl" not in wanted):
        return {}
    with tempfile.TemporaryDirectory(prefix="pdstage-doctor-") as folder:
        log = Path(folder, "ucx")
        environment = {**ucx.LOG, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)}
        if "UCX_TLS" not in os.environ:
            environment["UCX_TLS"] = ucx.NETWORK_ONLY
        site.ask("ucx_choice", environment=environment, memory=memory, host=own_host())
        return ucx.puts(log.read_text(errors="replace")) if log.is_file() else {}


def ucx_choice(say: Say, *, memory: str, host: str) -> None:
    """A put between two agents of this process, of memory on "cpu" or "cuda:N", so that UCX logs its protocol."""
    kind, _, number = memory.partition(":")
    device = int(number or 0)
    say.step("memory")
    if kind == "cpu":
        held = np.ones(2 * _NBYTES, np.uint8)
        base = held.ctypes.data
    else:
        library = driver.cuda()
        library.bind(library.primary(device))
        base = library.allocate(2 * _NBYTES)
    source, target = (Region(at, _NBYTES, kind=kind, device=device) for at in (base, base + _NBYTES))
    say.step("start")
    with (
        contextlib.closing(open_transport("nixl", host=host)) as writer,
        contextlib.closing(open_transport("nixl", host=host)) as reader,
    ):
        writer.register([source])
        reader.register([target])
        say.step("write")
        writer.connect("reader", reader.describe())
        writer.prepare("reader", [target])
        spans = Spans(*(np.array([value], np.int64) for value in (source.base, target.base, _NBYTES)))
        ticket = writer.post("reader", spans, b"")
        until = time.monotonic() + WAIT_S
        while not any(isinstance(event, Done | PostFailed) and event.ticket == ticket for event in writer.poll()):
            reader.poll()
            if time.monotonic() > until:
                raise DeadlineExceeded(f"a write did not end in {WAIT_S:g} s", remedy="see what UCX logs")
    say.step("exit")
