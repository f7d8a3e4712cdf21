"""Area "gpu": the driver, the devices, access between their memory, and CUDA IPC between processes.

Loads no CUDA library in this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.tools.doctor.found import Result, fail, ok, warn

if TYPE_CHECKING:
    from pdstage.tools.doctor.site import Site

_NVIDIA = "0x10de"


def driver(site: Site) -> Result:
    """A host without GPUs has its pools in host memory, which is a fault only if a device was asked for."""
    outcome = site.ask("driver")
    wanted = site.asked.device != "cpu"
    if outcome.step == "load" and not outcome.good:
        cards = _cards()
        says = f"{outcome.why}: pools in host memory only"
        if cards:
            return fail(f"{says}, but {cards} NVIDIA cards are on the bus", outcome.remedy, cards=cards)
        if Path("/dev/kfd").exists():
            says += "; AMD's driver is here, see transport mori"
        return fail(says, outcome.remedy) if wanted else warn(says, "nothing, on a node without GPUs")
    if not outcome.good:
        return fail(f"the CUDA driver does not work: {outcome.why}", outcome.remedy or "see nvidia-smi and dmesg")
    version, devices = outcome.facts["version"], outcome.facts["devices"]
    says = f"CUDA driver for {version // 1000}.{version % 1000 // 10}, {len(devices)} devices"
    number = int(site.asked.device.partition(":")[2] or 0) if wanted else 0
    facts = {"version": version, "devices": devices}
    if number >= len(devices):
        remedy = "name one that is here with --device; CUDA_VISIBLE_DEVICES hides others"
        return (
            fail(f"{says}: there is no {site.asked.device}", remedy, **facts)
            if wanted
            else warn(f"{says}: pools in host memory only", remedy, **facts)
        )
    return ok(says, **facts)


def devices(site: Site) -> Result | None:
    found = site.ask("driver").facts.get("devices")
    if not found:
        return None
    lines = [
        f"{i}: {one['name']}, {one['nbytes'] / 2**30:.0f} GiB, sm_{one['capability'].replace('.', '')}"
        for i, one in enumerate(found)
    ]
    return ok("; ".join(lines), devices=found)


def peer_access(site: Site) -> Result | None:
    """Which devices may access each other's memory over NVLink or PCIe."""
    peers = site.ask("driver").facts.get("peers") or []
    if len(peers) < 2:
        return None
    apart = [(i, j) for i, row in enumerate(peers) for j, can in enumerate(row) if not can]
    matrix = " ".join("".join("x" if can else "." for can in row) for row in peers)
    if not apart:
        return ok(f"all {len(peers)} devices reach each other's memory", peers=peers)
    pairs = ", ".join(f"{i} to {j}" for i, j in apart[:8])
    remedy = (
        "between those bytes go through host memory; see nvidia-smi topo -p2p r, and the IOMMU's and ACS's settings"
    )
    return warn(f"not all devices reach each other's memory ({matrix}): not {pairs}", remedy, peers=peers)


def ipc(site: Site) -> Result | None:
    """Tries CUDA IPC on each device."""
    found = site.ask("driver").facts.get("devices")
    if not found:
        return None
    problems = {}
    for number in range(len(found)):
        outcome = site.ask("ipc", device=number)
        if not outcome.good:
            problems[number] = outcome.why
    if problems:
        says = "; ".join(f"device {number}: {why}" for number, why in problems.items())
        remedy = "run ranks in one IPC namespace (docker run --ipc=host) and expose every GPU to each"
        return warn(f"memory is not shared between processes: {says}", remedy, problems=problems)
    return ok(f"memory of {len(found)} devices is shared between processes")


def _cards(root: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's display and 3D controllers on the bus, with or without a driver."""
    found = 0
    for folder in root.glob("*"):
        vendor, kind = folder / "vendor", folder / "class"
        if vendor.is_file() and vendor.read_text().strip() == _NVIDIA and kind.read_text().startswith("0x03"):
            found += 1
    return found
