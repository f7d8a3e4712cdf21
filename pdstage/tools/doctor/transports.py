"""Area "transports": for each known transport, whether it moves bytes between two processes of this host.

Opens nothing in this process. Knows the shipped transports by name, for their ways, remedies and caveats.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.control.address import Address
from pdstage.errors import UsageError
from pdstage.tools.doctor import ucx
from pdstage.tools.doctor.found import Result, Verdict, fail, ok, warn
from pdstage.tools.doctor.network import own_host, rdma_ports
from pdstage.transport import names, plugins
from pdstage.transport._fabric import interface_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.tools.doctor.child import Outcome
    from pdstage.tools.doctor.site import Site

EXPECTED = ("nixl",)  # `auto` expects it on every node, so its absence is a warning
CAVEATS = {"mori": "this project has tested it over a double of MORI-IO only, never on hardware"}
_WHEELS = {
    "nixl": 'install it anew, one pair of wheels for your CUDA: pip install --force-reinstall "pdstage[nixl]"',
    "mooncake": 'one of its wheels alone, and its libraries: pip install "pdstage[mooncake]", then '
    "apt-get install -y libibverbs1 libnuma1 libcurl4",
}
_LIBNL = "without RDMA set UCX_MODULES=^ib; else remove the package ibverbs-providers, or use NIXL built on this host"
_DRIVERS = "/etc/libibverbs.d"


def chosen(wanted: tuple[str, ...]) -> list[str]:
    """The transports to check: `wanted`, else all. Raises `UsageError` for an unknown name."""
    known = names()
    for name in wanted:
        if name not in known:
            raise UsageError(f"no transport {name!r}", remedy=f"choose of {', '.join(known)}", field="transport")
    return list(dict.fromkeys(wanted)) or known


def check(name: str) -> Callable[[Site], Result]:
    """The check of one transport. Its facts hold a `Verdict`."""

    def look(site: Site) -> Result:
        has_rdma = any(port.active for port in rdma_ports())
        with tempfile.TemporaryDirectory(prefix="pdstage-doctor-") as folder:
            log = str(Path(folder, "ucx.%p"))
            environment = {**ucx.LOG, "UCX_LOG_FILE": log} if name == "nixl" else None
            probe = site.ask("pair", environment=environment, transport=name, ways=_ways(name, has_rdma=has_rdma))
            logs = [path.read_text(errors="replace") for path in sorted(Path(folder).glob("ucx.*"))]
        return judge(name, probe, lanes=ucx.lanes("".join(logs[:1])), has_rdma=has_rdma, wanted=site.asked.transports)

    return look


def local_pair(site: Site) -> Outcome:
    """The probe of transport `local` between two processes."""
    return site.ask("pair", transport="local", ways=_ways("local", has_rdma=False))


def _ways(name: str, *, has_rdma: bool) -> list[dict[str, object]]:
    if name == "local":
        return [{"name": "process_vm_writev"}, {"name": "shared memory", "shared": True}]
    found: list[dict[str, object]] = [{"name": "default"}]
    if name == "nixl" and "UCX_TLS" not in os.environ:  # between hosts neither shared memory nor loopback works
        found.append({"name": "tcp", "environment": {"UCX_TLS": "tcp,self"}})
        if has_rdma:
            found.append({"name": "rdma", "environment": {"UCX_TLS": "ib,self"}})
    return found


def judge(name: str, probe: Outcome, *, lanes: list[str], has_rdma: bool, wanted: tuple[str, ...]) -> Result:
    """The result of its probe in one line."""
    if probe.facts.get("installed") is False:
        return _absent(name, probe, wanted)
    tried = {key[4:]: way for key, way in probe.facts.items() if key.startswith("way ")}
    worked = [way for way, held in tried.items() if not held["error"]]
    by = [way for way in worked if way != "default"]
    if "default" in worked:
        by = list(dict.fromkeys([*by, *(ucx.ways(lanes) or (["tcp"] if name == "mooncake" else ["its own way"]))]))
    failed = {way: held for way, held in tried.items() if held["error"]}
    peer_ended = probe.facts.get("peer_ended", "")
    problems = [f"{way}: {held['error']}" for way, held in failed.items()]
    remedy = next((held["remedy"] for held in failed.values()), "")
    if not probe.good or not worked:
        why = probe.why or "; ".join(problems)
        how = f"installed, but not usable: {why}"
        return fail(how, _remedy(name, probe, remedy), **_facts(usable=False, ways=[], says=how, probe=probe))
    says = f"usable over {', '.join(by)}"
    if name in ("nixl", "mooncake") and "rdma" not in by:
        says += "; no RDMA"
    caveat = CAVEATS.get(name) or probe.facts.get("caveat", "")
    says += f" ({caveat})" if caveat else ""
    facts = _facts(usable=True, ways=by, says=says, probe=probe)
    if probe.end == "crashed at exit" or peer_ended:
        at_exit = _LIBNL if name == "nixl" else "exit codes of such processes lie: see what it loads"
        return warn(f"{says}, but {probe.why or f'its process {peer_ended}'}", at_exit, **facts)
    if problems:
        return warn(f"{says}; not over {'; '.join(problems)}", remedy, **facts)
    if has_rdma and name == "nixl" and "rdma" not in by:
        return warn(says, "RDMA devices are here: let UCX_TLS and UCX_NET_DEVICES allow them", **facts)
    return warn(says, "use it for trials, and tell the project what you see", **facts) if caveat else ok(says, **facts)


def _absent(name: str, probe: Outcome, wanted: tuple[str, ...]) -> Result:
    caveat = f"; {CAVEATS[name]}" if name in CAVEATS else ""
    says = f"not installed{caveat}"
    facts = _facts(usable=False, ways=[], says=says, probe=probe)
    if name in wanted:
        return fail(says, probe.remedy, **facts)
    return warn(says, probe.remedy, **facts) if name in EXPECTED else ok(says, **facts)


def _remedy(name: str, probe: Outcome, from_way: str) -> str:
    if probe.step == "import" or (probe.end == "crashed" and probe.step.startswith("start")):
        return _WHEELS.get(name, probe.remedy or "install it anew")
    if probe.end == "hung":
        return "look for what it waits for with NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=info, or use another transport"
    return from_way or probe.remedy or _WHEELS.get(name, "see what it prints when it is opened by name")


def _facts(*, usable: bool, ways: list[str], says: str, probe: Outcome) -> dict[str, object]:
    verdict = Verdict(usable=usable, ways=ways, says=says)
    return {
        "verdict": verdict,
        "ended": probe.end,
        "step": probe.step,
        "tried": probe.facts,
        "printed": probe.printed,
    }


def nixl_plugins(site: Site) -> Result | None:
    """Which of NIXL's plugins start. One that crashes its process is left out of the next try."""
    if find_spec("nixl") is None:
        return None
    found: dict[str, str] = {}
    lost: dict[str, str] = {}
    probe = site.ask("plugins", leave_out=[])
    while not probe.good and probe.step in probe.facts.get("listed", []):
        found |= _plugins_of(probe)
        lost[probe.step] = probe.why
        probe = site.ask("plugins", leave_out=[*found, *lost])
    found |= _plugins_of(probe)
    if not probe.good:
        remedy = _WHEELS["nixl"]
        return fail(f"NIXL's plugins cannot be asked for: {probe.why}", remedy, printed=probe.printed)
    loaded = [name for name, why in found.items() if not why]
    idle = [name for name, why in found.items() if why]
    says = f"{', '.join(loaded) or 'none'} start; listed, but not here: {', '.join(idle) or 'none'}"
    facts = {"loaded": loaded, "not_loaded": {name: found[name] for name in idle}, "crashed": lost}
    if "UCX" not in loaded:
        return fail(
            f"{says}; UCX is not among them", f"check UCX_TLS and UCX_NET_DEVICES, or {_WHEELS['nixl']}", **facts
        )
    if lost:
        names_ = ", ".join(lost)
        return warn(f"{says}; {names_} took the process down", f"do not name {names_} to NIXL here", **facts)
    return ok(says, **facts)


def _plugins_of(probe: Outcome) -> dict[str, str]:
    return {key[7:]: why for key, why in probe.facts.items() if key.startswith("plugin ")}


def nixl_reach(site: Site) -> Result | None:
    """Where UCX listens in a node of this host, and whether a peer's writes are limited to registered memory."""
    if find_spec("nixl") is None:
        return None
    named = Address.parse(site.asked.bind, "tcp", listening=True).ip if site.asked.bind else ""
    host = named or own_host()
    ways = _ways("nixl", has_rdma=any(port.active for port in rdma_ports()))
    probe = site.ask("reach", host=host, ways=ways)
    listens = probe.facts.get("listens", [])
    landed = {key[4:]: value for key, value in probe.facts.items() if key.startswith("way ")}
    kept, open_ = ([way for way, value in landed.items() if value is wanted] for wanted in (False, True))
    beyond = [one for one in listens if not _is_of(one, host)]
    says = f"a node at {host} has UCX listen on {', '.join(listens) or 'no address'}"
    if beyond:
        says += f" ({', '.join(beyond)}: beyond its network)"
    if open_:
        says += f"; a forged write ({', '.join(open_)}) changes memory that was never registered"
    if kept:
        says += f"; a forged write ({', '.join(kept)}) is refused"
    facts = {"host": host, "listens": listens, "beyond": beyond, "enforced": kept, "not_enforced": open_}
    if not probe.good:
        return warn(f"{says}; then it {probe.end}: {probe.why}", _WHEELS["nixl"], **facts)
    if beyond:
        return warn(
            says,
            "unset UCX_NET_DEVICES, or name there, or as devices=[...], the devices of the network between the nodes",
            **facts,
        )
    return ok(says, **facts)


def _is_of(address: str, host: str) -> bool:
    """Whether both are addresses of one interface, or the first is a loopback address."""
    return Address(address, 1).is_loopback or interface_of(address) == interface_of(host)


def two_libnl(site: Site, root: Path = Path("/")) -> Result | None:
    """Whether NIXL's own libibverbs would load the host's RDMA providers, and with them a second libnl."""
    del site
    spec = find_spec("nixl")
    if spec is None or not spec.submodule_search_locations:
        return None
    packages = Path(next(iter(spec.submodule_search_locations))).parent
    own = sorted(path.name for path in packages.glob("nixl_cu*.libs/libibverbs*"))
    drivers = sorted(path.name for path in (root / _DRIVERS.lstrip("/")).glob("*.driver"))
    providers = sorted(str(path) for path in root.glob("usr/lib/*/libibverbs/*.so"))
    facts = {"wheel": own, "drivers": drivers, "providers": providers[:20]}
    if not (own and drivers and providers):
        return ok("NIXL's wheel and the host's RDMA providers do not meet", **facts)
    if "^ib" in os.environ.get("UCX_MODULES", ""):
        return ok("NIXL's wheel and the host's RDMA providers are both here; UCX_MODULES keeps them apart", **facts)
    return warn(
        "NIXL's wheel brings a libibverbs, which loads the host's RDMA providers and a second libnl: processes may "
        "crash at their very end",
        _LIBNL,
        **facts,
    )


def from_outside(site: Site) -> Result | None:
    """The transports that other packages provide by entry points."""
    del site
    points = {name: point.value for name, point in plugins().items()}
    return ok(f"brought by other packages: {', '.join(sorted(points))}", points=points) if points else None
