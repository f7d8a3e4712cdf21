"""What an operator does with a pair of real servers that a directory in etcd lists: under load it is found, watched,
drained without a lost request, and fenced once it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from pdstage.bench.etcd_servers import Host, Servers
from pdstage.control.bootstrap import client_of
from pdstage.control.operate import members
from tests import promtool
from tests.e2e import compare, load
from tests.e2e.servers import wait_until
from tests.processes import free_port, python
from tests.watch.samples import Samples, get

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdstage.control.directory import Advert
    from tests.e2e.fleet import Fleet
    from tests.e2e.servers import Server

ETCD = Host("127.0.0.1", free_port(), free_port())
DIRECTORY = f"etcd://{ETCD.address}:{ETCD.port}/pdstage"


def options(instance: str) -> dict[str, Any]:
    """Of an engine that is listed by this name and serves metrics; the directory need not be there yet."""
    return {"directory": DIRECTORY, "instance": instance, "metrics_port": 0} if instance else {}


def pdstage(*words: str) -> str:
    """A command as an operator gives it, which must end well, and what it says."""
    return python("-m", "pdstage.cli", *words, check=True).stdout


@contextlib.contextmanager
def listed(folder: Path, n: int) -> Iterator[list[Advert]]:
    """The directory, and what so many nodes are listed as."""
    with Servers(folder, hosts=[ETCD]) as servers:
        servers.ready()
        client = client_of(DIRECTORY)
        with contextlib.closing(client):
            found = lambda: [one.advert for one in members(client)]  # noqa: E731
            assert wait_until(lambda: len(found()) == n, 60), f"not {n} are listed: {found()}"
            yield found()


def check(
    fleet: Fleet, pair: Any, adverts: list[Advert], ask: load.Ask, prefill: Server, folder: Path, *, n: int, begun: int
) -> None:
    """Prefill is drained under a load of `n` prompts, once so many have begun, and has ended afterwards."""
    history, answers, asked = promtool.History(), [], load.prompts(16 + n, seed=401)
    right = fleet.right(pair.reference, asked)
    for some in (asked[:8], asked[8:16]):
        answers += load.ask_all(ask, some, 8)
        history.add({one.metrics: get(one.metrics) for one in adverts}, minutes=5)
    history.expect(promtool.asked())
    history.expect([promtool.firing(".*")], value=False)
    history.check(folder)
    fleet.note(f"{len(promtool.asked())} queries of the board and the alerts: none without data")
    told = pdstage("instances", DIRECTORY)
    for one in adverts:
        assert one.instance in told and one.endpoint in told, told
        assert "serves" in pdstage("doctor", "--node", one.endpoint)
    assert pdstage("top", "--once", "prefill", "--directory", DIRECTORY)
    drained = [one for one in adverts if one.role == "prefill"]
    opened = lambda: min(Samples(get(one.metrics))("pdstage_rooms_opened_total") for one in drained)  # noqa: E731
    least = opened() + begun

    async def drains() -> None:
        assert await asyncio.to_thread(wait_until, lambda: opened() >= least, 60.0, every_s=0.02), "nothing begins"
        said = await asyncio.to_thread(pdstage, "drain", "prefill", "--directory", DIRECTORY, "--wait", "120")
        assert said.count("is drained") == len(drained), said

    answers += load.ask_all(ask, asked[16:], 16, while_=drains())
    fleet.note(f"prefill drained under load: {compare.summary(answers, right)}")
    compare.check(answers, right)
    assert all(Samples(get(one.metrics))("pdstage_node_draining") == 1 for one in drained)
    prefill.kill()
    pdstage("fence", DIRECTORY, "prefill")
    told = pdstage("instances", DIRECTORY)
    assert not any(one.endpoint in told for one in drained), told
