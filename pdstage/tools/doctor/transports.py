"""Areas "transports" and "peer": whether each known transport moves bytes between two nodes of this host, and whether
this node works with another.

Opens nothing in this process. Knows the shipped transports by name, for their ways, remedies and caveats.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import msgspec

from pdstage.errors import UsageError
from pdstage.tools.calibrate.about import Side
from pdstage.tools.doctor.report import Moved, PeerReport, Result, Stage, Verdict, fail, ok, warn
from pdstage.transport import names
from pdstage.transport._fabric import rdma_ports

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.tools.doctor.probe import Asked, Outcome, Site

EXPECTED = ("nixl",)  # `auto` expects it on every node, so its absence is a warning
CAVEATS = {"mori": "this project has tested it over a double of MORI-IO only, never on hardware"}
_WHEELS = {
    "nixl": 'install it anew, one pair of wheels for your CUDA: pip install --force-reinstall "pdstage[nixl]"',
    "mooncake": 'one of its wheels alone, and its libraries: pip install "pdstage[mooncake]", then '
    "apt-get install -y libibverbs1 libnuma1 libcurl4",
}
_AT_EXIT = {
    "nixl": "without RDMA set UCX_MODULES=^ib; else remove the package ibverbs-providers, or build NIXL on this host"
}
_WRITE_PROCESSES = "allow CAP_SYS_PTRACE, or one user for both (see ptrace_scope and seccomp); nixl does without"
_LOCAL = {"direct": "process_vm_writev", "staged": "shared memory"}
_PEER_DEADLINES = 3  # a conversation may last this many deadlines of a probe
# UCX names the lanes of each endpoint, transport/device: `NAME intra-node cfg#1 rma_am(tcp/lo) am(tcp/lo cma/memory)`.
_LINE = re.compile(r"(\S+) (?:intra|inter)-node cfg#\d+ (.*)")
_LANE = re.compile(r"([a-z0-9]+)\w*/[A-Za-z0-9_.:-]+")
_KINDS = {
    "tcp": {"tcp"}, "shm": {"sysv", "posix", "cma", "xpmem", "knem"}, "rdma": {"rc", "dc", "ud", "ib", "srd"},
    "cuda": {"cuda", "gdr"}, "rocm": {"rocm"},
}  # fmt: skip


def chosen(wanted: tuple[str, ...]) -> list[str]:
    """The transports to check: `wanted`, else all. Raises `UsageError` for an unknown name."""
    known = names()
    for name in wanted:
        if name not in known:
            raise UsageError(f"no transport {name!r}", remedy=f"choose of {', '.join(known)}")
    return list(dict.fromkeys(wanted)) or known


def ask(site: Site, name: str, **environment: str) -> Outcome:
    """Two nodes of this host over that transport, with pools where this run has them."""
    wait_s = site.asked.deadline_s / 2
    return site.ask("talk", environment=environment, transport=name, device=site.asked.device, wait_s=wait_s)


def check(name: str) -> Callable[[Site], Result]:
    """The check of one transport. Its facts hold a `Verdict`."""

    def look(site: Site) -> Result:
        has_rdma = any(port.active for port in rdma_ports())
        probe = ask(site, name)
        others = {}
        if name == "nixl" and probe.good and "UCX_TLS" not in os.environ:
            # Between hosts neither shared memory nor loopback works.
            others["tcp"] = ask(site, name, UCX_TLS="tcp,self")
            if has_rdma:
                others["rdma"] = ask(site, name, UCX_TLS="ib,self")
        return judge(name, probe, others, has_rdma=has_rdma, wanted=site.asked.transports)

    return look


def judge(name: str, probe: Outcome, others: dict[str, Outcome], *, has_rdma: bool, wanted: tuple[str, ...]) -> Result:
    """The result in one line: of what UCX took by itself, and of the `others` that it was told to take."""
    facts = {"ended": probe.end, "step": probe.step, "tried": probe.facts, "printed": probe.printed}

    def told(says: str, *ways: str) -> dict[str, object]:
        return {"verdict": Verdict(usable=bool(ways), ways=list(ways), says=says), **facts}

    if probe.facts.get("installed") is False:
        says = f"not installed{f'; {CAVEATS[name]}' if name in CAVEATS else ''}"
        if name in wanted:
            return fail(says, probe.remedy, **told(says))
        return warn(says, probe.remedy, **told(says)) if name in EXPECTED else ok(says, **told(says))
    problems = {path: _stage(probe, path) for path in _LOCAL if probe.good and f"path {path}" not in probe.facts}
    if not probe.good or len(problems) == len(_LOCAL):
        says = f"installed, but not usable: {probe.why or '; '.join(problems.values())}"
        return fail(says, _remedy(name, probe), **told(says))
    if name == "local":
        by = [way for path, way in _LOCAL.items() if path not in problems]
    else:
        by = [way for way, other in others.items() if other.good]
        by = list(dict.fromkeys([*by, *(ways(probe.ucx) or (["tcp"] if name == "mooncake" else ["its own way"]))]))
    not_over = [f"{_LOCAL[path] if name == 'local' else path}: {why}" for path, why in problems.items()]
    not_over += [f"{way}: {other.why}" for way, other in others.items() if not other.good]
    says = f"usable over {', '.join(by)}"
    if name in ("nixl", "mooncake") and "rdma" not in by:
        says += "; no RDMA"
    caveat = CAVEATS.get(name) or probe.facts.get("caveat", "")
    says += f" ({caveat})" if caveat else ""
    remedy = ""
    if probe.end == "crashed at exit":
        says += f", but {probe.why}"
        remedy = _AT_EXIT.get(name, "exit codes of such processes lie: see what it loads")
    elif not_over:
        says += f"; not over {'; '.join(not_over)}"
        remedy = _WRITE_PROCESSES if name == "local" else "see what its library logs"
        remedy = next((other.remedy for other in others.values() if other.remedy), remedy)
    elif has_rdma and name == "nixl" and "rdma" not in by:
        remedy = "RDMA devices are here: let UCX_TLS and UCX_NET_DEVICES allow them"
    elif caveat:
        remedy = "use it for trials, and tell the project what you see"
    return warn(says, remedy, **told(says, *by)) if remedy else ok(says, **told(says, *by))


def _stage(probe: Outcome, name: str) -> str:
    return str(probe.facts.get(f"stage {name}", {}).get("says", "not tried"))


def _remedy(name: str, probe: Outcome) -> str:
    if probe.step == "import" or (probe.end == "crashed" and probe.step == "start"):
        return _WHEELS.get(name, probe.remedy or "install it anew")
    if probe.end == "hung":
        return "look for what it waits for with NIXL_LOG_LEVEL=INFO and UCX_LOG_LEVEL=info, or use another transport"
    return probe.remedy or _WHEELS.get(name, "see what it prints when it is opened by name")


def ways(log: str) -> list[str]:
    """The kinds of the lanes of the first worker's endpoints to other processes, in a fixed order."""
    lines = _LINE.findall(log)
    lanes = {lane.partition("_")[0] for name, line in lines if name == lines[0][0] for lane in _LANE.findall(line)}
    return [kind for kind, prefixes in _KINDS.items() if lanes & prefixes]


def peer(site: Site) -> Result:
    """Whether this node works with another, by the first transport asked for, else "auto"."""
    asked = site.asked
    transport = asked.transports[0] if asked.transports else "auto"
    outcome = site.ask(
        "talk", deadlines=_PEER_DEADLINES, peer=asked.peer, bind=asked.bind, transport=transport, device=asked.device,
        keys=asked.keys, allow=asked.allow, insecure=asked.insecure, wait_s=asked.deadline_s / 2,
    )  # fmt: skip
    return judge_peer(asked, outcome)


def judge_peer(asked: Asked, outcome: Outcome) -> Result:
    """The result of the conversation in one line, whose facts hold a `PeerReport`."""
    facts = outcome.facts
    stages = [msgspec.convert(held, Stage) for key, held in facts.items() if key.startswith("stage ")]
    failed_at, remedy = "" if outcome.end == "done" else outcome.step, outcome.remedy
    if outcome.end in ("crashed", "hung"):  # the probe could not report it
        remedy = f"run `pdstage doctor` on both sides: it says which transport is broken; at {failed_at} try another"
        stages = [stage for stage in stages if stage.name != failed_at]
        stages.append(Stage(name=failed_at, level="fail", seconds=0.0, says=outcome.why))
    here, there = (msgspec.convert(facts[key], Side) if key in facts else None for key in ("here", "there"))
    report = PeerReport(
        endpoint=asked.peer, failed_at=failed_at, remedy=remedy if failed_at else "", over=facts.get("over", ""),
        round_trip_s=facts.get("round_trip_s", 0.0), stages=stages, here=here, there=there,
        paths={key[5:]: msgspec.convert(held, Moved) for key, held in facts.items() if key.startswith("path ")},
    )  # fmt: skip
    if failed_at:
        return fail(f"{asked.peer}: failed at {failed_at}: {outcome.why}", remedy, peer=report)
    speeds = ", ".join(f"{name} {moved.bytes_per_s / 1e9:.2f} GB/s" for name, moved in report.paths.items())
    return ok(f"{asked.peer}: works over {report.over}: {speeds}", peer=report)
