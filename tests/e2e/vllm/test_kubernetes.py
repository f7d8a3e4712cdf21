"""The engines' containers of docs/kubernetes, started as written but for fewer ranks and what a CPU needs: each in a
network of its own, in etcd as the page sets it up. All are replaced under load, by their hooks and signals.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdstage import Keys
from pdstage.bench.etcd_servers import ETCD, Host, Servers
from tests.chaos.network import Network, permitted
from tests.control.test_etcd import let_in
from tests.docs.test_kubernetes import ENGINES, container
from tests.e2e import compare, load
from tests.e2e.servers import Server, up
from tests.e2e.vllm.engines import ENV, Engine, decoded, prefilled

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

PODS = {"prefill-0": 2, "decode-a": 1, "decode-b": 1}
"""Their ranks. The name begins with the manifest's."""
MEMBERS = tuple(f"pdstage-etcd-{n}" for n in range(3))
PASSWORD = "of-pdstage"


@dataclass
class Pod(Server):
    """`within` starts a command in its network."""

    address: str = ""
    hook: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.address}:8000"

    def replace(self, grace_s: float) -> None:
        """As a kubelet does: the hook, then SIGTERM, all within the grace period; then the next."""
        subprocess.run(self.hook, check=True, env=os.environ | self.env, timeout=grace_s)
        assert self.stop(grace_s), self.tail()
        self.start().wait()


def pod(network: Network, name: str, model: Path, key: Path, logs: Path) -> Pod:
    engine = container(ENGINES[name.partition("-")[0]])
    known = {"metadata.name": name, "status.podIP": network.address(name)}
    env: dict[str, str] = {}
    for one in engine["env"]:
        source = one.get("valueFrom", {})
        env[one["name"]] = one.get("value") or known.get(source.get("fieldRef", {}).get("fieldPath"), PASSWORD)

    def written(words: list[str]) -> list[str]:
        given = [re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], word) for word in words]
        return [word.replace("/keys/cluster.key", str(key)) for word in given]

    here = Engine("llama", tp=PODS[name]).command(model, 8000)
    del here[: here.index("--served-model-name")]
    at = here.index("--host")
    del here[at : at + 2]
    within = network.command(name)
    assert engine["command"] == ["vllm", "serve", "/model"]  # a command that vLLM's package for the CPU has not
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command = [*within, sys.executable, *server, *written(engine["args"]), *here]
    hook = [*within, *written(engine["lifecycle"]["preStop"]["exec"]["command"])]
    env |= ENV | {"PATH": f"{Path(sys.executable).parents[3] / 'bin'}:{os.environ['PATH']}"}
    return Pod(name, lambda _: command, logs / f"{name}.log", env, address=network.address(name), hook=hook)


@contextlib.contextmanager
def cluster() -> Iterator[Network]:
    """In which the members of etcd are known by their names."""
    with Network(("router", *PODS, *MEMBERS)) as network, contextlib.ExitStack() as ends:
        hosts = "".join(f"{network.address(name)} {name}.pdstage-etcd\n" for name in MEMBERS)
        for name in network.hosts:
            folder = Path("/etc/netns", network.where(name))
            folder.mkdir(parents=True)
            ends.callback(shutil.rmtree, folder)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        yield network


@pytest.mark.full
@pytest.mark.skipif(ETCD is None or not permitted(), reason="it needs etcd, root and iproute2")
def test_all_are_replaced_under_load(fleet, tmp_path: Path):
    asked = load.prompts(150, seed=601)
    reference = Engine("llama", block=128)
    right, model = fleet.right(reference, asked), fleet.folder("llama")
    fleet.stop()
    Keys.make(tmp_path / "cluster.key")
    with contextlib.ExitStack() as ends:
        network = ends.enter_context(cluster())
        ends.enter_context(network.inside("router"))
        members = [Host(network.address(name), 2379, 2380, network.command(name)) for name in MEMBERS]
        let_in(ends.enter_context(Servers(tmp_path, 3, hosts=members)).ready(), "pdstage", PASSWORD)
        pods = [pod(network, name, model, tmp_path / "cluster.key", fleet.place) for name in PODS]
        for one in pods:
            ends.callback(one.stop)
        up(pods)
        prefill, *decodes = pods
        ready, turns = set(PODS), itertools.cycle(decodes)

        async def ask(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
            decode = next(one for one in turns if one.name in ready)
            if prefill.name in ready:
                first = await prefilled(session, prefill.url, prompt)
                if first.is_ok and first.body["kv_transfer_params"]:
                    return await decoded(session, decode.url, prompt, first)
            return await load.post(session, decode.url, prompt, load.body(prompt))

        with ThreadPoolExecutor(1) as beside:  # pods end with the thread that started them
            asking = beside.submit(load.ask_all, ask, asked, 2)
            for one in (*decodes, prefill):
                ready.discard(one.name)
                one.replace(ENGINES[one.name.partition("-")[0]]["spec"]["terminationGracePeriodSeconds"])
                ready.add(one.name)
                fleet.note(f"{one.name} was replaced")
            answers = asking.result()
        fleet.note(f"replaced: {compare.summary(answers, right)}")
        compare.check(answers, right)
        compare.check(load.ask_all(ask, asked[:8], 2), right)
