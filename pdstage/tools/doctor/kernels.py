"""Area "kernels": what gathers and scatters here; each backend is tried.

Imports no compiler and no GPU library: `try_kernels` does, in other processes.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pdstage.tools.doctor.found import Result, fail, ok, warn

if TYPE_CHECKING:
    from pdstage.tools.doctor.site import Site

_SOME_ARCHITECTURE = "sm_90"  # if no device says which


def host(site: Site) -> Result:
    probe = site.ask("host_copy")
    if not probe.good:
        return fail(
            f"copies in host memory fail: {probe.why}",
            "build the extension anew: make native",
            printed=probe.printed,
        )
    active = probe.facts["active"]
    if active != "c++":
        remedy = "install a C++20 compiler and pdstage anew (make native); PDSTAGE_NATIVE=no leaves it out on purpose"
        return warn(
            "host memory is copied by numpy, several times slower than by the C++ extension", remedy, active=active
        )
    return ok("host memory is copied by the C++ extension", active=active)


def nvrtc(site: Site) -> Result:
    """Whether CuPy and NVRTC compile one of our kernels, which needs no GPU."""
    needed = _has_devices(site)
    if find_spec("cupy") is None:
        says, remedy = (
            "CuPy is not installed: no CUDA kernels",
            'pip install "pdstage[cuda13]", or [cuda12] for CUDA 12',
        )
        return fail(says, remedy) if needed else ok(says)
    probe = site.ask("nvrtc", architecture=_architecture(site))
    if not probe.good:
        remedy = probe.remedy or 'install CuPy and NVRTC of one CUDA: pip install "pdstage[cuda13]"'
        return fail(f"the copy kernel does not compile: {probe.why}", remedy, **probe.facts, printed=probe.printed)
    facts = probe.facts
    says = f"CuPy {facts['cupy']} with NVRTC {facts['nvrtc']} compiles the copy kernel for {_architecture(site)}"
    return ok(says, **facts)


def triton(site: Site) -> Result:
    needed = _has_devices(site)
    if find_spec("triton") is None:
        says = "Triton is not installed"
        return warn(says, 'pip install "pdstage[triton]"') if needed else ok(says)
    probe = site.ask("triton")
    if not probe.good:
        return fail(f"Triton does not import: {probe.why}", 'install it anew: pip install "pdstage[triton]"')
    why = probe.facts["why_not"]
    says = f"Triton {probe.facts['version']}"
    return (
        warn(f"{says}: {why}", 'install a torch for this GPU, and "pdstage[triton]"')
        if why and needed
        else ok(f"{says}, but {why}: not used" if why else says, **probe.facts)
    )


def torch(site: Site) -> Result:
    if find_spec("torch") is None:
        return ok("torch is not installed: pools are numpy arrays, or memory by address")
    probe = site.ask("torch")
    if not probe.good:
        return fail(f"torch does not import: {probe.why}", "install it anew")
    facts = probe.facts
    built = f"for CUDA {facts['cuda']}" if facts["cuda"] else "without CUDA"
    if _has_devices(site) and not facts["gpus"]:
        remedy = "install torch's wheel for this driver's CUDA (pytorch.org), or use CuPy's memory"
        return warn(f"torch {facts['version']}, built {built}, finds no GPU", remedy, **facts)
    return ok(f"torch {facts['version']}, built {built}", **facts)


def device(site: Site) -> Result | None:
    """Gathers and scatters on a GPU, and compares byte for byte."""
    if not _has_devices(site) or find_spec("torch") is None or not site.ask("torch").facts.get("gpus"):
        return None
    where = site.asked.device if site.asked.device != "cpu" else "cuda:0"
    probe = site.ask("device_copy", device=where)
    found = {key[8:]: why for key, why in probe.facts.items() if key.startswith("backend ")}
    if not probe.good:
        return fail(f"copies on {where} fail, at {probe.step}: {probe.why}", probe.remedy or "see dmesg", **probe.facts)
    good = [name for name, why in found.items() if not why]
    if not good:
        whys = "; ".join(f"{name}: {why}" for name, why in found.items())
        return fail(f"no backend copies memory on {where}: {whys}", "install one: pdstage[cuda13] or pdstage[triton]")
    return ok(f"{' and '.join(good)} copy memory on {where}, byte for byte", **probe.facts)


def _has_devices(site: Site) -> bool:
    return bool(site.ask("driver").facts.get("devices")) or site.asked.device != "cpu"


def _architecture(site: Site) -> str:
    devices = site.ask("driver").facts.get("devices")
    return f"sm_{devices[0]['capability'].replace('.', '')}" if devices else _SOME_ARCHITECTURE
