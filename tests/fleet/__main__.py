"""A fleet of real processes. Exits 1 if anything was wrong.

python -m tests.fleet --minutes 10   # 60 ranks in network namespaces, etcd, faults of hosts and networks
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from pdstage.bench.etcd_servers import Servers
from tests import processes
from tests.fleet.cluster import N_ETCD, OPERATOR, Cluster, hosts_of
from tests.fleet.switch import Network


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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=60, help="at least so many, if no host is down")
    parser.add_argument("--window", type=int, default=20, help="rooms at a time")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and stopped ranks go
    print(f"seed {options.seed}", flush=True)
    return 0 if cluster(options.minutes * 60, options.ranks, options.window, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
