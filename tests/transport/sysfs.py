"""Makes a sysfs tree of files and links, as the kernel lays it out, from a machine written down in `machines/NAME.txt`.

None of those was recorded on such a machine: each was written from the public description that its first line names. A
line is a device, below the one it is indented under:

    pci0000:15 node=0                       a host bridge and its NUMA node
      0000:15:01.0 32x16                    a bridge: GT/s and lanes of its link
        0000:18:00.0 32x16 nic mlx5_0 InfiniBand ACTIVE 400 net=ib0
        0000:1b:00.0 32x8/16 gpu            8 lanes of 16; gpu=amd for AMD's
    virtual nic rxe0 Ethernet ACTIVE 10     a device that is not on PCIe
    cpus 0 0-55                             a node's processors
    arm                                     the machine is of that architecture

A NIC has its kind of link, the states of its ports, with commas, and their rate in Gb/s.
"""

from __future__ import annotations

from pathlib import Path

MACHINES = Path(__file__).parent / "machines"
_GPU = {"gpu": ("0x10de", "0x030200"), "gpu=amd": ("0x1002", "0x120000")}
_STATES = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}


def machine(name: str, root: Path) -> Path:
    """The sysfs of a machine below `root`, with the files of /dev/infiniband beside it in `root/dev`."""
    return build((MACHINES / f"{name}.txt").read_text(), root)


def build(text: str, root: Path) -> Path:
    above: list[tuple[int, Path, str]] = []
    _file(root / "class/infiniband_verbs/abi_version", "6")
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] == "#":
            continue
        if words[0] == "cpus":
            _file(root / f"devices/system/node/node{words[1]}/cpulist", words[2])
        elif words == ["arm"]:
            _file(root / "devices/system/cpu/cpu0/regs/identification/midr_el1", "0x00000000410fd4f0")
        elif words[0] == "virtual":
            _nic(root, root / "devices/virtual", words[2:], on_pci=False)
        else:
            depth = len(line) - len(line.lstrip())
            above = [one for one in above if one[0] < depth]
            node = words[1].partition("=")[2] if not above else above[-1][2]
            folder = (above[-1][1] if above else root / "devices") / words[0]
            above.append((depth, folder, node))
            folder.mkdir(parents=True)
            if not words[0].startswith("pci"):
                _device(root, folder, node, words[1:])
    return root


def _device(root: Path, folder: Path, node: str, words: list[str]) -> None:
    speed, _, width = words[0].partition("x")
    width, _, most = width.partition("/")
    _file(folder / "numa_node", node)
    for which, lanes in (("current", width), ("max", most or width)):
        _file(folder / f"{which}_link_width", lanes)
        _file(folder / f"{which}_link_speed", f"{float(speed):.1f} GT/s PCIe")
    vendor, kind = _GPU.get("".join(words[1:2]), ("0x15b3", "0x020700" if "nic" in words else "0x060400"))
    _file(folder / "vendor", vendor)
    _file(folder / "class", kind)
    _link(root / "bus/pci/devices" / folder.name, folder)
    if "nic" in words:
        _nic(root, folder, words[2:])


def _nic(root: Path, folder: Path, words: list[str], *, on_pci: bool = True) -> None:
    name, link, states, rate, *more = words
    device = folder / "infiniband" / name
    for number, state in enumerate(states.split(","), 1):
        _file(device / f"ports/{number}/link_layer", link)
        _file(device / f"ports/{number}/state", f"{_STATES[state]}: {state}")
        _file(device / f"ports/{number}/rate", f"{rate} Gb/sec (4X)")
        for word in more:
            _file(device / f"ports/{number}/gid_attrs/ndevs/0", word.removeprefix("net="))
    if on_pci:
        _link(device / "device", folder)
    _link(root / "class/infiniband" / name, device)
    verbs = f"uverbs{len(list((root / 'class/infiniband_verbs').iterdir())) - 1}"
    _file(root / "class/infiniband_verbs" / verbs / "ibdev", name)
    _file(root / "dev/infiniband" / verbs, "")


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
