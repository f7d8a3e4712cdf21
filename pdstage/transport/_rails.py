"""Which NICs are near which memory: RDMA devices, GPUs and the PCIe tree between them, as sysfs shows them.

`read` takes the root of a sysfs tree, so that it also reads one that was written down (tests/transport/machines).
`Tree.of_gpu` and `Tree.of_node` choose; `auto` chooses for this process, and is what `devices="auto"` means.

The files are those of sysfs-class-infiniband, sysfs-bus-pci and sysfs-devices-node in the kernel's documentation. The
words for distances are those of NCCL and `nvidia-smi topo -m`; they follow from the paths alone, as in NCCL
(src/graph/topo.cc): two devices are as near as the deepest part of `devices/pci0000:15/0000:15:01.0/...` that they
share. What sysfs does not show: NVLink-C2C, and the switches that a hypervisor hides from its guest.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from pdstage.errors import UsageError
from pdstage.kernels import driver

SYS = Path("/sys")
_DEV = Path("/dev")
_BUS = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA, _AMD = "0x10de", "0x1002"
_GPUS = {_NVIDIA: ("0x0300", "0x0302"), _AMD: ("0x0300", "0x0302", "0x0380", "0x1200")}
"""PCI classes: VGA, 3D and display controllers, and AMD's Instinct as processing accelerators."""
_BELOW_SWITCH = 2
"""A device and the port of the switch above it: all that is not shared by two devices of one switch."""


class Distance(IntEnum):
    """How far a NIC is from a GPU, nearest first."""

    PIX = 0
    """Under one PCIe switch."""
    PXB = 1
    """Under several switches of one root port."""
    PHB = 2
    """Under one host bridge."""
    NODE = 3
    """Under two host bridges of one NUMA node, or of a host that reports no nodes."""
    SYS = 4
    """On two NUMA nodes, or the NIC is not on PCIe."""


class Port(NamedTuple):
    """One port of an RDMA device. `state`, `link` and `rate` in the kernel's words, "unknown" where it has none."""

    device: str
    port: str
    state: str
    link: str
    rate: str

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state

    @property
    def gbps(self) -> float:
        """Gb/s; 0 if the rate is unknown."""
        return _number(self.rate)

    @property
    def name(self) -> str:
        """As UCX names it: `mlx5_0:1`."""
        return f"{self.device}:{self.port}"

    def __str__(self) -> str:
        return f"{self.name} {self.state.partition(': ')[2] or self.state} ({self.link}, {self.rate})"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is. `path`: its part of sysfs from the host bridge to its PCI address, empty if it is not on PCIe.

    `node`: its NUMA node, -1 if the kernel names none. `gbps`: what its PCIe link carries each way, in Gb/s, 0 if
    unknown; `width` and `max_width` are lanes.
    """

    path: tuple[str, ...]
    node: int
    gbps: float
    width: int
    max_width: int

    @property
    def address(self) -> str:
        return self.path[-1] if self.path else ""


@dataclass(frozen=True, slots=True)
class Nic:
    """An RDMA device. `netdev`: the interface of its first port, or empty."""

    name: str
    place: Place
    ports: tuple[Port, ...]
    netdev: str

    @property
    def active(self) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if port.active)

    @property
    def gbps(self) -> float:
        """Gb/s of its active ports, or of its PCIe link if that carries less."""
        rate = sum(port.gbps for port in self.active)
        return min(rate, self.place.gbps) if self.place.gbps else rate


@dataclass(frozen=True, slots=True)
class Gpu:
    """`number`: its rank among the GPUs of the host, by PCI address."""

    number: int
    place: Place


@dataclass(frozen=True, slots=True)
class Rails:
    """The NICs chosen for some memory.

    `near`: all at that distance that would do; `nics`: those of them that are this memory's share. `bound_gbps`: what
    the GPU's own PCIe link carries, 0 if unknown or if bytes need not take it.
    """

    nics: tuple[Nic, ...]
    near: tuple[Nic, ...] = ()
    distance: Distance | None = None
    bound_gbps: float = 0.0

    @property
    def gbps(self) -> float:
        return sum(nic.gbps for nic in self.nics)

    @property
    def ports(self) -> list[str]:
        """As UCX names them."""
        return [port.name for nic in self.nics for port in nic.active]


def distance(one: Place, other: Place) -> Distance:
    """Between two devices, by the part of their paths that they share."""
    if not one.path or not other.path:
        return Distance.SYS
    pairs = zip(one.path, other.path, strict=False)
    shared = next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(len(one.path), len(other.path)))
    if shared == 0:
        return Distance.NODE if one.node == other.node else Distance.SYS
    if shared == 1:
        return Distance.PHB
    rest = max(len(one.path), len(other.path)) - shared
    return Distance.PIX if rest <= _BELOW_SWITCH else Distance.PXB


@dataclass(frozen=True, slots=True)
class Tree:
    """The NICs and GPUs of a host, by PCI address. `has_c2c`: its GPUs may reach the host by NVLink-C2C, which sysfs
    does not show, rather than by PCIe.
    """

    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    has_c2c: bool = False

    def of_gpu(self, gpu: Gpu) -> Rails:
        """The nearest NICs with an active port, of one kind of link and one speed, the fastest. GPUs with the same
        ones share them out in the order of their addresses, so that GPUs that are busy at once do not share a NIC where
        there are enough.
        """
        near, found = self._nearest(gpu)
        if found is None:
            return Rails(())
        group = [each for each in self.gpus if self._nearest(each) == (near, found)]
        begin = group.index(gpu) * len(near) // len(group)
        end = (group.index(gpu) + 1) * len(near) // len(group)
        return Rails(near[begin : max(end, begin + 1)], near, found, 0.0 if self.has_c2c else gpu.place.gbps)

    def of_node(self, node: int | None) -> Rails:
        """For host memory: the NICs of a NUMA node with an active port, of one kind of link and one speed, the fastest.
        All NICs, for None or if none is of that node.
        """
        usable = [nic for nic in self.nics if nic.active]
        near = _alike([nic for nic in usable if node is not None and nic.place.node == node] or usable)
        return Rails(near, near)

    def _nearest(self, gpu: Gpu) -> tuple[tuple[Nic, ...], Distance | None]:
        found = {nic: distance(gpu.place, nic.place) for nic in self.nics if nic.active}
        least = min(found.values(), default=None)
        return _alike([nic for nic, far in found.items() if far == least]), least


def _alike(nics: list[Nic]) -> tuple[Nic, ...]:
    """Those with the link layer and the rate of the fastest: a write over unequal rails waits for the slowest, and
    InfiniBand does not reach Ethernet.
    """
    if not nics:
        return ()
    kinds = [(max(port.gbps for port in nic.active), nic.active[0].link) for nic in nics]
    best = max(kinds, key=lambda kind: (kind[0], kinds.count(kind)))
    return tuple(nic for nic, kind in zip(nics, kinds, strict=True) if kind == best)


def read(root: Path | None = None) -> Tree:
    """The tree below `root`, by default of this host. What vanishes meanwhile, or the kernel does not offer, is left
    out.
    """
    root = root or SYS
    nics = [_nic(root, name) for name in _listed(root / "class/infiniband")]
    places = [_place(root, link.resolve()) for link in _entries(root / "bus/pci/devices") if _is_gpu(link)]
    places.sort(key=lambda place: place.address)
    gpus = tuple(Gpu(number, place) for number, place in enumerate(places))
    is_arm = (root / "devices/system/cpu/cpu0/regs/identification/midr_el1").exists()
    return Tree(tuple(sorted(nics, key=lambda nic: (nic.place.address, nic.name))), gpus, has_c2c=is_arm)


def auto(memory: str) -> list[str]:
    """The ports that `devices="auto"` chooses for memory on "cuda:N" or "cpu", as UCX names them. Only devices that
    this process may open count. Empty if there are none: then the choice is the transport's.

    Host memory is of the node that holds all processors of this process, else of none.
    Raises `UsageError` for a GPU that neither driver nor sysfs knows.
    """
    tree, openable = read(), openable_devices()
    tree = Tree(tuple(nic for nic in tree.nics if nic.name in openable), tree.gpus, tree.has_c2c)
    if not any(nic.active for nic in tree.nics):
        return []
    if memory.partition(":")[0] == "cpu":
        return tree.of_node(own_node()).ports
    address = _address_of(memory)
    gpu = next((gpu for gpu in tree.gpus if gpu.place.address == address), None)
    if gpu is None:
        raise UsageError(
            f'devices="auto" does not find {memory} in sysfs{f" at {address}" if address else ""}',
            remedy='name its NICs: devices={"cuda:0": ["mlx5_0"], ...}; `pdstage doctor` lists them',
            field="devices",
        )
    return tree.of_gpu(gpu).ports


def openable_devices() -> set[str]:
    """The RDMA devices that this process may open. UCX complains about others if they are named."""
    found = set()
    for verbs in _listed(SYS / "class/infiniband_verbs"):
        name = _text(SYS / "class/infiniband_verbs" / verbs / "ibdev")
        if name and os.access(_DEV / "infiniband" / verbs, os.R_OK | os.W_OK):
            found.add(name)
    return found


def own_node() -> int | None:
    """The NUMA node that holds every processor that this process may use; None if several do, or none is known."""
    mine = os.sched_getaffinity(0)
    folder = SYS / "devices/system/node"
    nodes = [name for name in _listed(folder) if re.fullmatch(r"node\d+", name)]
    return next((int(name[4:]) for name in nodes if mine <= cpus_of(int(name[4:]))), None)


def cpus_of(node: int) -> set[int]:
    """The processors of a NUMA node, from the kernel's form: 0-3,8. Empty if there is no such node."""
    cpus: set[int] = set()
    for part in filter(None, _text(SYS / f"devices/system/node/node{node}/cpulist").split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _address_of(device: str) -> str:
    """The PCI address of a GPU as this process numbers it; empty if no driver names it."""
    number = int(device.partition(":")[2] or 0)
    for library in (driver.cuda, driver.Hip):
        try:
            return library().pci_address(number).lower()
        except OSError:
            continue
        except driver.DriverError:
            break
    return ""


def _ports(root: Path, name: str) -> tuple[Port, ...]:
    folder = root / "class/infiniband" / name / "ports"
    words = ("state", "link_layer", "rate")
    return tuple(
        Port(name, port, *(_text(folder / port / word) or "unknown" for word in words)) for port in _listed(folder)
    )


def _nic(root: Path, name: str) -> Nic:
    folder = root / "class/infiniband" / name
    place = _place(root, (folder / "device").resolve())
    ports = _ports(root, name)
    beside = [entry.name for entry in _entries(folder / "device/net")]
    first = _text(folder / "ports" / ports[0].port / "gid_attrs/ndevs/0") if ports else ""
    return Nic(name, place, ports, first or next(iter(beside), ""))


def _is_gpu(folder: Path) -> bool:
    return _text(folder / "class").startswith(_GPUS.get(_text(folder / "vendor"), ("none",)))


def _place(root: Path, folder: Path) -> Place:
    try:
        parts = folder.relative_to(root.resolve() / "devices").parts
    except ValueError:
        parts = ()
    path = parts[next((at for at, part in enumerate(parts) if _BUS.fullmatch(part)), len(parts)) :]
    node = _text(folder / "numa_node")
    width, most = (int(_number(_text(folder / f"{which}_link_width"))) for which in ("current", "max"))
    # An idle GPU lowers its link's speed, but not its width.
    speeds = [_number(_text(end / "max_link_speed")) for end in (folder, *([folder.parent] if len(path) > 1 else []))]
    speed = min(filter(None, speeds), default=0.0)
    return Place(path, int(node) if node else -1, _pcie_gbps(speed, width), width, most)


def _pcie_gbps(gigatransfers: float, lanes: int) -> float:
    """Gb/s each way after line coding: 8b/10b up to 5 GT/s, 128b/130b up to 32, flits of 242 in 256 bytes beyond."""
    coding = 8 / 10 if gigatransfers <= 5 else 128 / 130 if gigatransfers <= 32 else 242 / 256
    return gigatransfers * lanes * coding if lanes < 64 else 0.0  # 255 lanes: the kernel's "unknown"


def _number(text: str) -> float:
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found.group()) if found else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # missing, or the kernel refuses: an empty GID has no netdev
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _listed(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder)]
