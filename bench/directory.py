"""Directories beside each other: over HTTP, encrypted, and etcd if its server is installed (one member, on this disk).

A thousand ranks register, in instances of eight, each with a client of its own as in nodes; then all are renewed; then
one node looks instances up. How soon a look-up finds a rank that has just registered is measured one by one.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdstage.control.bootstrap import Advert, DirectoryClient, client_of
from pdstage.control.directory import Incomplete
from pdstage.control.keys import Keys
from pdstage.layout.topology import Topology

from .harness import Measured, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

TP = 8
RANKS, QUICK_RANKS = 1000, 64
LOOKUPS, QUICK_LOOKUPS = 20_000, 200
SEEN, QUICK_SEEN = 50, 5
THREADS = 4
TTL_S = 60.0
START_S = 60.0


class Figures(NamedTuple):
    """Ranks a second as they register and are renewed, look-ups a second, and median seconds until a rank is found."""

    registered: float
    renewed: float
    looked_up: float
    seen_s: float


def run(quick: bool) -> Measured:
    """`registered` and `renewed` by several threads, as from many hosts; look-ups by one."""
    found, left_out = {}, []
    for name, opened in (("HTTP", _http), ("HTTP with keys", _curve), ("etcd", _etcd)):
        if opened is _etcd and not (shutil.which("etcd") and find_spec("httpx2")):
            left_out.append("etcd: its server is not installed (Debian: etcd-server), or httpx2 is not")
            continue
        with opened() as client:
            found[name] = _measured(client, quick)
    return Measured([row for name in found for row in _rows(name, found[name], found["HTTP"])], {}, left_out, [])


def _rows(name: str, own: Figures, base: Figures) -> Iterator[Row]:
    for what, value, baseline in (
        ("ranks registered", own.registered, base.registered),
        ("ranks renewed", own.renewed, base.renewed),
        ("look-ups of 8 ranks by one node", own.looked_up, base.looked_up),
    ):
        yield Row(
            name=f"{name}, {what}", value=value, baseline=baseline, unit="1/s",
            detail="baseline: the directory over HTTP",
        )  # fmt: skip
    yield Row(
        name=f"{name}, until a rank is found, p50", value=own.seen_s * 1e3, baseline=base.seen_s * 1e3, unit="ms",
        better="lower", detail="baseline: the directory over HTTP",
    )  # fmt: skip


def _measured(client: Callable[[], DirectoryClient], quick: bool) -> Figures:
    n_ranks, n_lookups, n_seen = (QUICK_RANKS, QUICK_LOOKUPS, QUICK_SEEN) if quick else (RANKS, LOOKUPS, SEEN)
    ranks = [(client(), _advert(number)) for number in range(n_ranks // TP * TP)]
    registered = len(ranks) / _at_once(ranks)
    renewed = len(ranks) / _at_once(ranks)
    reader = client()
    names = sorted({advert.instance for _, advert in ranks})
    assert len(reader.lookup(instance=names[0])) == TP
    start = time.perf_counter()
    for number in range(n_lookups):
        assert len(reader.lookup(instance=names[number % len(names)])) == TP
    looked_up = n_lookups / (time.perf_counter() - start)
    seen = []
    for number in range(n_seen):
        late = Advert(instance=f"late-{number}", topology=Topology(), endpoint="tcp://h:1", incarnation=1, layout="0")
        start = time.perf_counter()
        ranks[0][0].publish(late, TTL_S)
        while not _is_there(reader, late.instance):
            pass
        seen.append(time.perf_counter() - start)
    for node, _ in ranks:
        node.close()
    reader.close()
    return Figures(registered, renewed, looked_up, statistics.median(seen))


def _advert(number: int) -> Advert:
    place = Topology(tp_size=TP, tp_rank=number % TP)
    return Advert(
        instance=f"engine-{number // TP}", topology=place, endpoint=f"tcp://10.0.0.1:{10_000 + number}",
        incarnation=number + 1, layout="0123456789abcdef", transports=("nixl",),
    )  # fmt: skip


def _at_once(ranks: Sequence[tuple[DirectoryClient, Advert]]) -> float:
    """Seconds until all are published, by several threads."""
    failures: list[BaseException] = []

    def work(some: Sequence[tuple[DirectoryClient, Advert]]) -> None:
        try:
            for client, advert in some:
                client.publish(advert, TTL_S)
        except BaseException as error:  # noqa: BLE001  (raised below)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(ranks[first::THREADS],)) for first in range(THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    if failures:
        raise failures[0]
    return took


def _is_there(reader: DirectoryClient, instance: str) -> bool:
    try:
        return bool(reader.lookup(instance=instance))
    except Incomplete:
        return False


@contextmanager
def _http() -> Iterator[Callable[[], DirectoryClient]]:
    with _served() as address:
        yield lambda: client_of(address, START_S)


@contextmanager
def _curve() -> Iterator[Callable[[], DirectoryClient]]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Keys.make(f"{folder}/key")
        with _served("--keys", f"{folder}/key") as address:
            yield lambda: client_of(address, START_S, keys=keys)


@contextmanager
def _served(*options: str) -> Iterator[str]:
    """The address of a `pdstage bootstrap`, a process of its own as etcd is."""
    command = [sys.executable, "-m", "pdstage", "bootstrap", "--bind", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


@contextmanager
def _etcd() -> Iterator[Callable[[], DirectoryClient]]:
    from .etcd_servers import Servers  # noqa: PLC0415  (of the extra "etcd")

    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
        address = servers.ready().address("bench")
        yield lambda: client_of(address, START_S)
