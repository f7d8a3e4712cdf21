"""Fleets of real processes. Exits 1 if anything was wrong.

python -m tests.fleet upgrade            # this release beside earlier ones, both roles, both ways, while rooms flow
python -m tests.fleet upgrade --quick
python -m tests.fleet cluster --minutes 10   # 60 ranks in network namespaces, etcd, faults of hosts and networks
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pdstage.bench.etcd_servers import Servers
from tests import processes
from tests.fleet import releases, upgrade
from tests.fleet.cluster import N_ETCD, OPERATOR, Cluster, hosts_of
from tests.fleet.switch import Network
from tests.fleet.upgrade import REFUSALS, Site
from tests.rows import usable

_QUICK = (Site("local", "staged", keys=True), Site("local", by_force=True), Site("nixl"))
_ALL = (
    *(Site(name, path) for name in ("local", "nixl", "mooncake") for path in ("staged", "direct")),
    *(Site(name, keys=True) for name in ("local", "nixl", "mooncake")),
    *(Site(name, by_force=True) for name in ("local", "nixl", "mooncake")),
)


def upgrades(versions: list[str], *, quick: bool) -> bool:
    """Whether every room of every site ended as it must; prints a line for each."""
    sites = [site for site in (_QUICK if quick else _ALL) if site.transport in usable(site.transport)]
    ok, new = True, releases.here()
    for version in versions:
        old = releases.python_of(version)
        print(f"{old.version} and {new.version}: engines replaced one by one, and back", flush=True)
        for site in sites:
            ok = _roll(old, new, site, rooms=3 if quick else 20) and ok
        for refusal in REFUSALS:
            for prefill, decode in ((old, new), (new, old)):
                ok = _refuse(prefill, decode, new, refusal) and ok
    return ok


def _roll(old: releases.Python, new: releases.Python, site: Site, *, rooms: int) -> bool:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdstage-fleet-") as folder:
        fleet = upgrade.roll(Path(folder), old, new, site, rooms=rooms)
    ways = {f"{p.split()[0]} to {d.split()[0]}": n for (p, d), n in sorted(fleet.moved.items())}
    lost = fleet.counts["rooms failed"]
    ok = not fleet.wrong and len(fleet.moved) == 4 and (site.by_force or not lost)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"  {site}: {_words(ways)}; {lost} failed; {'all well' if ok else 'WRONG'} ({took})", flush=True)
    for reason, n in fleet.reasons.most_common():
        print(f"    {n} x {reason}")
    for what in fleet.wrong:
        print(f"    WRONG: {what}")
    return ok


def _refuse(prefill: releases.Python, decode: releases.Python, newer: releases.Python, refusal) -> bool:
    with tempfile.TemporaryDirectory(prefix="pdstage-fleet-") as folder:
        reasons = upgrade.refuse(Path(folder), prefill, decode, newer, refusal)
    ok = all(any(word in reason for reason in reasons) for word in refusal.words)
    verdict = "refused" if ok else f"WRONG: not refused in words that have {refusal.words}"
    print(f"  {refusal.name}, {prefill.version} to {decode.version}: {verdict}", flush=True)
    for reason in reasons if not ok else reasons[:1]:
        print(f"    {reason}")
    return ok


def cluster(seconds: float, n_ranks: int, window: int, seed: int) -> bool:
    """Whether everything was right during faults of hosts, networks and etcd, and after them."""
    with tempfile.TemporaryDirectory(prefix="pdstage-fleet-") as folder, Network(4 + 3 * n_ranks // 2) as network:
        processes.enter(network.namespaces[OPERATOR])
        place = Path(folder)
        with Servers(place, N_ETCD, hosts=hosts_of(network)) as servers:
            ran = Cluster(place, network, servers.ready(), low=n_ranks // 2, window=window, seed=seed)
            try:
                ran.run(seconds)
            except (AssertionError, TimeoutError) as error:
                ran.fleet.wrong.append(str(error))
            _report(ran, network)
            if ran.fleet.wrong:
                shutil.copytree(place, Path(tempfile.gettempdir()) / "pdstage-fleet-logs", dirs_exist_ok=True)
        return not ran.fleet.wrong


def _report(ran: Cluster, network: Network) -> None:
    fleet = ran.fleet
    print(f"{ran.fewest} to {ran.most} ranks at once, {len(ran.servers.members)} members of etcd; {network.counts()}")
    for what, n in sorted((ran.events | fleet.counts).items()):
        print(f"  {n:8,} {what}")
    print("rooms failed, by what their ranks said:")
    for reason, n in fleet.reasons.most_common():
        print(f"  {n:8,} {reason}")
    print(f"grown at most, of ranks that lived long: {getattr(ran, 'growth', 'not measured')}")
    print(f"keys left in etcd: {len(getattr(ran, 'keys_left', []))} statements that processes ended")
    for what in fleet.wrong:
        print(f"WRONG: {what}")
    print("nothing was wrong" if not fleet.wrong else f"{len(fleet.wrong)} things were wrong")


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} rooms {way}" for way, n in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("upgrade", help="releases beside each other")
    one.add_argument("--quick", action="store_true", help="three sites, fewer rooms")
    one.add_argument("--release", action="append", help="only this one; default: all that releases.toml lists")
    one = commands.add_parser("cluster", help="a cluster for minutes")
    one.add_argument("--minutes", type=float, default=10.0)
    one.add_argument("--ranks", type=int, default=60, help="at least so many, if no host is down")
    one.add_argument("--window", type=int, default=20, help="rooms at a time")
    one.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and stopped ranks go
    if options.command == "cluster":
        print(f"seed {options.seed}", flush=True)
        return 0 if cluster(options.minutes * 60, options.ranks, options.window, options.seed) else 1
    try:
        return 0 if upgrades(options.release or list(releases.released()), quick=options.quick) else 1
    except releases.NoHistory as error:
        print(f"not run: {error}", file=sys.stderr)
        return 0 if _is_shallow() else 2


def _is_shallow() -> bool:
    """Whether this is no whole checkout, so that an earlier release cannot be had."""
    command = ["git", "-C", str(releases.ROOT), "rev-parse", "--is-shallow-repository"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() != "false"


if __name__ == "__main__":
    sys.exit(main())
