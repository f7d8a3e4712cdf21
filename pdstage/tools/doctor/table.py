"""The table of checks, and the report of their results.

A check is a function of the `Site`. A check that does not apply to this host returns None and has no line.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdstage.errors import UsageError
from pdstage.tools.doctor import AREAS, found, gpu, host, kernels, network, peer, rails, transports
from pdstage.tools.doctor.found import Found, PeerReport, Report, Result, Verdict
from pdstage.tools.doctor.site import Asked, Site

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_S = 600
_AT_ONCE = 3  # each mostly waits for its processes


class Check(NamedTuple):
    area: str
    name: str
    look: Callable[[Site], Result | None]


CHECKS = (
    Check("host", "versions", host.versions),
    Check("host", "memlock", host.memlock),
    Check("host", "files", host.files),
    Check("host", "process memory", host.process_memory),
    Check("host", "shared memory", host.shared_memory),
    Check("host", "keys", host.keys),
    Check("host", "calibration", host.prices),
    Check("gpu", "driver", gpu.driver),
    Check("gpu", "devices", gpu.devices),
    Check("gpu", "peer access", gpu.peer_access),
    Check("gpu", "ipc", gpu.ipc),
    Check("kernels", "host", kernels.host),
    Check("kernels", "nvrtc", kernels.nvrtc),
    Check("kernels", "triton", kernels.triton),
    Check("kernels", "torch", kernels.torch),
    Check("kernels", "device", kernels.device),
    Check("transports", "nixl plugins", transports.nixl_plugins),
    Check("transports", "nixl reach", transports.nixl_reach),
    Check("transports", "libnl", transports.two_libnl),
    Check("transports", "entry points", transports.from_outside),
    Check("network", "address", network.address),
    Check("network", "ports", network.ports),
    Check("network", "rdma", network.rdma),
)


def checks(asked: Asked) -> list[Check]:
    """The checks of the areas asked for; one per transport, one for the rails of each GPU, and one for the peer."""
    unknown = [area for area in asked.areas if area not in AREAS]
    if unknown:
        raise UsageError(f"no area {unknown[0]!r}", remedy=f"choose of {', '.join(AREAS)}", field="only")
    if not 1 <= asked.deadline_s <= _MAX_S:
        raise UsageError(f"a deadline of {asked.deadline_s:g} s", remedy=f"give 1 to {_MAX_S}", field="deadline")
    if "peer" in asked.areas and asked.areas != AREAS and not asked.peer:
        raise UsageError("area 'peer' without a peer", remedy="name it with --peer HOST:PORT", field="peer")
    every = [
        *CHECKS,
        *(Check("network", name, look) for name, look in rails.checks()),
        *(Check("transports", name, transports.check(name)) for name in transports.chosen(asked.transports)),
    ]
    if asked.transports and "nixl" not in asked.transports:
        every = [check for check in every if check.name not in ("nixl plugins", "nixl reach", "libnl")]
    if asked.peer:
        every.append(Check("peer", "peer", peer.check))
    return [check for area in AREAS if area in asked.areas for check in every if check.area == area]


def examine(asked: Asked, tell: Callable[[Found], None] = lambda found: None) -> Report:
    """Runs the checks, several at a time, and reports each line in the table's order. Raises `UsageError`."""
    lines: list[Found] = []
    with Site(asked) as site, ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            wanted = checks(asked)
            # The peer's check is last, and alone, since it also measures this host.
            running = [pool.submit(check.look, site) for check in wanted if check.area != "peer"]
            for check, answer in zip(wanted, running, strict=False):
                _add(lines, check, answer.result(), tell)
            for check in wanted[len(running) :]:
                _add(lines, check, check.look(site), tell)
        except BaseException:
            site.close()
            pool.shutdown(cancel_futures=True)
            raise
    verdicts = {
        line.name: line.facts.pop("verdict") for line in lines if isinstance(line.facts.get("verdict"), Verdict)
    }
    reports = [line.facts.pop("peer") for line in lines if isinstance(line.facts.get("peer"), PeerReport)]
    return Report(
        version=found.VERSION, made_at=datetime.now(UTC).isoformat(timespec="seconds"), host=socket.gethostname(),
        pdstage=host.pdstage_version(), verdict=found.worst([line.level for line in lines]), checks=lines,
        transports=verdicts, peer=reports[0] if reports else None,
    )  # fmt: skip


def _add(lines: list[Found], check: Check, result: Result | None, tell: Callable[[Found], None]) -> None:
    if result is not None:
        lines.append(Found(area=check.area, name=check.name, **msgspec.structs.asdict(result)))
        tell(lines[-1])
