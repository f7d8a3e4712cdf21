"""The lines of area "network" on rails: which NICs each GPU's memory, and host memory, would use, how near they are and
what they carry, and whether they reach the memory of GPUs.

`pdstage.transport._rails` reads sysfs and chooses, as for `devices="auto"`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.tools.doctor.gpu import devices
from pdstage.tools.doctor.report import Result, ok, warn
from pdstage.transport._rails import Distance, Gpu, Rails, Tree, distance, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdstage.tools.doctor.probe import Site


def checks(root: Path = Path("/")) -> list[tuple[str, str, Callable[[Site], Result | None]]]:
    """A line for each GPU, by its rank in PCI order, one for host memory, and one for what lies between."""
    tree = read(root / "sys")
    return [
        *(("network", f"rails gpu {gpu.number}", partial(of_gpu, tree, gpu)) for gpu in tree.gpus if tree.nics),
        ("network", "rails host", partial(of_host, tree)),
        ("network", "gpudirect", partial(gpudirect, tree, root)),
    ]


def of_gpu(tree: Tree, gpu: Gpu, site: Site) -> Result:
    """The NICs of a GPU's memory."""
    rails, address = tree.of_gpu(gpu), gpu.place.address
    device = next((f"cuda:{i}" for i, one in enumerate(devices(site)) if str(one["address"]).lower() == address), "")
    name = f"GPU {address}{f' ({device})' if device else ''}"
    facts = {
        "address": address, "device": device, "chosen": rails.ports, "gbps": rails.gbps,
        "bound_gbps": rails.bound_gbps,
    }  # fmt: skip
    if rails.distance is None:
        return warn(f"{name}: no NIC has an active port", "bring a link up, see ibstat", **facts)
    says = f"{name}: {_named(rails)} at {rails.distance.name}"
    if rails.bound_gbps:
        says += f"; its PCIe link carries {rails.bound_gbps:.0f} Gb/s"
    problems = list(_problems(tree, gpu, rails))
    if not problems:
        return ok(says, **facts)
    said, remedies = zip(*problems, strict=True)
    return warn("; ".join([says, *said]), "; ".join(dict.fromkeys(remedies)), **facts)


def of_host(tree: Tree, _: Site) -> Result:
    """The NICs of host memory, by NUMA node."""
    nodes = sorted({nic.place.node for nic in tree.nics if nic.active})
    chosen = {node: tree.of_node(node) for node in nodes}
    facts = {str(node): rails.ports for node, rails in chosen.items()}
    where = {-1: "host memory"} if nodes == [-1] else {node: f"memory of node {node}" for node in nodes}
    says = "; ".join(f"{where[node]}: {_named(rails)}" for node, rails in chosen.items())
    return ok(says or "no active RDMA NIC", chosen=facts)


def gpudirect(tree: Tree, root: Path, _: Site) -> Result | None:
    """Whether NICs may reach the memory of NVIDIA's GPUs: by nvidia-peermem or dma-buf, and past an IOMMU."""
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
    if not has_peermem and not is_open:
        says = "no way for NICs to GPU memory: nvidia-peermem is not loaded, and the driver's modules have no dma-buf"
        return warn(says, "modprobe nvidia-peermem, or install NVIDIA's open kernel modules", **facts)
    how = " and ".join(way for way, has in (("nvidia-peermem", has_peermem), ("dma-buf", is_open)) if has)
    if translated := sorted(address for address, kind in kinds.items() if kind.startswith("DMA")):
        says = f"NICs reach GPU memory by {how}, but an IOMMU translates for {', '.join(translated)}"
        remedy = "iommu=pt on the kernel's command line; and see that ACS is off on the switches (lspci -vvv)"
        return warn(says, remedy, **facts)
    return ok(f"NICs reach GPU memory by {how}; ACS on the switches is not asked", **facts)


def _problems(tree: Tree, gpu: Gpu, rails: Rails) -> Iterator[tuple[str, str]]:
    """Sentences and remedies."""
    assert rails.distance is not None
    for nic in tree.nics:
        far = distance(gpu.place, nic.place)
        if not nic.active and far <= min(rails.distance, Distance.PHB):
            states = ", ".join(map(str, nic.ports)) or "no port"
            yield f"{nic.name} at {far.name} is down ({states})", "bring its link up, see ibstat"
    if rails.distance is Distance.SYS:
        yield "no NIC on its NUMA node", "expect the interconnect between sockets to bound it: see lspci -tv"
    fastest = max(nic.gbps for each in tree.gpus for nic in tree.of_gpu(each).nics)
    for nic in rails.nics:
        lanes = f", with {nic.place.width} of {nic.place.max_width} lanes" * (nic.place.width < nic.place.max_width)
        if nic.gbps < fastest or lanes:
            what = f"{nic.name} carries {nic.gbps:.0f} Gb/s{lanes}, where NICs of other GPUs carry {fastest:.0f}"
            yield what, "see its cable, its slot and its port's speed: ibstat, lspci -vv"
    shared = [each.number for each in tree.gpus if each != gpu and set(tree.of_gpu(each).nics) & set(rails.nics)]
    if shared:
        yield f"shared with GPU {', '.join(map(str, shared))}", "expect their sum to be what the NIC carries"


def _named(rails: Rails) -> str:
    """The NICs, and what they carry in all."""
    kinds = sorted({nic.active[0].link for nic in rails.nics})
    return f"{', '.join(nic.name for nic in rails.nics)} ({rails.gbps:.0f} Gb/s, {', '.join(kinds)})"
