"""Areas "gpu" and "kernels": the driver and the devices, and what gathers and scatters here; each backend is tried.

The checks load no CUDA library and no compiler: the probes below them do, in other processes.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage import kernels, native
from pdstage.errors import TransportError, UsageError
from pdstage.kernels import driver as drivers
from pdstage.layout import Key
from pdstage.plan import Select
from pdstage.plan.tables import Index
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.doctor.report import Result, fail, ok, warn

if TYPE_CHECKING:
    from pdstage.tools.doctor.probe import Check, Say, Site

_NBYTES, _RUN, _TOKENS = 32 << 20, 1024, 200


def check_driver(site: Site) -> Result:
    """A host without GPUs has its pools in host memory, which is a fault only if a device was asked for."""
    outcome = site.ask("driver")
    wanted = site.asked.device != "cpu"
    if outcome.step == "load" and not outcome.good:
        says = f"{outcome.why}: pools in host memory only"
        return fail(says, outcome.remedy) if wanted else warn(says, "nothing, on a node without GPUs")
    if not outcome.good:
        return fail(f"the CUDA driver does not work: {outcome.why}", "see nvidia-smi and dmesg")
    version, found = outcome.facts["version"], outcome.facts["devices"]
    says = f"CUDA driver for {version // 1000}.{version % 1000 // 10}, {len(found)} devices"
    if int(site.asked.device.partition(":")[2] or 0) < len(found):
        return ok(says, version=version, devices=found)
    remedy = "name one that is here with --device; CUDA_VISIBLE_DEVICES hides others"
    if wanted:
        return fail(f"{says}: there is no {site.asked.device}", remedy, version=version, devices=found)
    return warn(f"{says}: pools in host memory only", remedy, version=version, devices=found)


def check_devices(site: Site) -> Result | None:
    """Each device, and which of them may access each other's memory over NVLink or PCIe."""
    found, peers = devices(site), site.ask("driver").facts.get("peers") or []
    if not found:
        return None
    says = "; ".join(
        f"{i}: {one['name']}, {one['nbytes'] / 2**30:.0f} GiB, sm_{one['capability']}" for i, one in enumerate(found)
    )
    apart = [f"{i} to {j}" for i, row in enumerate(peers) for j, can in enumerate(row) if not can]
    if not apart:
        return ok(says, devices=found, peers=peers)
    says += f"; not all reach each other's memory: not {', '.join(apart[:8])}"
    return warn(
        says,
        "their bytes go through host memory; see nvidia-smi topo -p2p r, the IOMMU and ACS",
        devices=found,
        peers=peers,
    )


def devices(site: Site) -> list[dict[str, Any]]:
    """What the driver says of each: name, nbytes, capability, PCI address."""
    return list(site.ask("driver").facts.get("devices", []))


def check_host(site: Site) -> Result:
    probe = site.ask("copies", device="cpu")
    if not probe.good:
        return fail(
            f"copies in host memory fail: {probe.why}", "build the extension anew: make native", printed=probe.printed
        )
    active = native.active()
    if active == "c++":
        return ok("host memory is copied by the C++ extension", active=active)
    remedy = "install a C++20 compiler and pdstage anew (make native); PDSTAGE_NATIVE=no leaves it out on purpose"
    return warn("host memory is copied by numpy, several times slower than by the C++ extension", remedy, active=active)


def check_copies(site: Site) -> Result | None:
    """Gathers and scatters on a GPU, and compares byte for byte."""
    if not devices(site):
        return None
    if find_spec("torch") is None:
        return warn(
            "torch is not installed: copies are not tried", "install torch for this driver's CUDA (pytorch.org)"
        )
    where = site.asked.device if site.asked.device != "cpu" else "cuda:0"
    probe = site.ask("copies", device=where)
    if not probe.good:
        return fail(f"copies on {where} fail, at {probe.step}: {probe.why}", probe.remedy or "see dmesg", **probe.facts)
    good = [name for name, why in probe.facts.items() if not why]
    if good:
        return ok(f"{' and '.join(good)} copy memory on {where}, byte for byte", **probe.facts)
    whys = "; ".join(f"{name}: {why}" for name, why in probe.facts.items())
    return fail(f"no backend copies memory on {where}: {whys}", "install one: pdstage[cuda13] or pdstage[triton]")


CHECKS: list[Check] = [
    ("gpu", "driver", check_driver),
    ("gpu", "devices", check_devices),
    ("kernels", "host", check_host),
    ("kernels", "device", check_copies),
]


# Probes.


def driver(say: Say) -> None:
    """Reports "version" as in cuda.h (13000 is 13.0), "devices", and "peers": which devices may access which memory."""
    say.step("load")
    try:
        cuda = drivers.cuda()
    except OSError as error:
        raise UsageError(
            f"no CUDA driver here ({error})",
            remedy="install NVIDIA's driver, or give the container the GPUs (docker run --gpus all)",
        ) from error
    say.step("cuInit")
    numbers = range(cuda.n_devices())
    say.found(version=cuda.version())
    say.step("devices")
    found = []
    for number in numbers:
        name, nbytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.call("cuDeviceGetName", name, len(name), number)
        cuda.call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), number)
        words = {"name": name.value.decode(errors="replace"), "nbytes": nbytes.value}
        found.append(words | {"capability": cuda.capability(number), "address": cuda.pci_address(number)})
    say.found(devices=found)
    say.step("peer access")
    say.found(peers=[[one == other or cuda.can_access(one, other) for other in numbers] for one in numbers])


def copies(say: Say, *, device: str) -> None:
    """Copies in host memory, or with each usable GPU backend. Reports it with "", or why it is not used."""
    for name in ("auto",) if device == "cpu" else ("cuda", "triton"):
        say.step(name)
        why = kernels.backends().get(name, "")
        if not why:
            _copy(device, name)
        say.found(**{name: why})


def _copy(device: str, backend: str) -> None:
    src, dst = pools.make(device, _NBYTES), pools.make(device, _NBYTES)
    pools.fill(src, 1)
    name, tokens = pools.component(_RUN), {pools.component(_RUN): (0, _TOKENS)}
    select = [Select(Key(name, role, layer), 0, 1) for role in "kv" for layer in range(pools.LAYERS)]
    order = np.random.default_rng(2).permutation(pools.n_items(_RUN, _NBYTES)).astype(np.int32)
    pages = order[: -(-_TOKENS // pools.PAGE)]
    plan = src.plan(select, backend=backend)
    staging, at = pools.allocate(device, plan.nbytes(tokens))
    plan.gather(at, plan.nbytes(tokens), {name: Index.of(pages)}, tokens)
    _wait(device)
    dst.plan(select, backend=backend).scatter(at, plan.nbytes(tokens), {name: Index.of(pages[::-1].copy())}, tokens)
    _wait(device)
    del staging
    if pools.content(src, _RUN, _TOKENS, pages) != pools.content(dst, _RUN, _TOKENS, pages[::-1]):
        raise TransportError(f"backend {plan.backend} copied other bytes", remedy="do not use it; report it")


def _wait(device: str) -> None:
    if device != "cpu":
        import torch  # noqa: PLC0415

        torch.cuda.synchronize(device)
