"""docs/kubernetes.md, gone through without a cluster: its commands are run, and the containers of its manifests are
started as written but for fewer ranks and what a CPU needs, each in a network namespace with its names, its secrets and
its mounts. What is Kubernetes' own is here: pods are told to a double of the API server, ended as a kubelet does, and
`kubectl` is a shell's function.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from tests.chaos.network import Network
from tests.docs.pages import ROOT
from tests.docs.test_kubernetes import PAGE, PODS, container
from tests.e2e import compare, load
from tests.e2e.servers import Server, wait_until
from tests.kubernetes_api import Api
from tests.watch.samples import Samples, get

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.fleet import Fleet

    OnCpu = Callable[[list[str], int], tuple[list[str], dict[str, str]]]

NAMESPACE = "default"
ENGINES = {"prefill-0": 2, "decode-a": 1, "decode-b": 1}
"""Their ranks. A pod's name begins with its manifest's."""
MEMBERS = tuple(f"pdstage-etcd-{n}" for n in range(3))
ALONE = ("router-a", "fence-pods-a")
EXIT_CODES = {"Succeeded": 0, "Failed": 137}
BIN = Path(sys.executable).parents[3] / "bin"
"""What the checkout's own environment has: `pdstage`."""
KUBECTL = r"""
kubectl() {
    local one name
    [ "$1 $2" != "create secret" ] || set -- create "${@:3}"
    case "$1" in
    create)
        name=$3
        mkdir -p "mounted/$name"
        for one in "${@:4}"; do
            case "$one" in
            --from-literal=*) one=${one#*=}; printf %s "${one#*=}" > "mounted/$name/${one%%=*}" ;;
            --from-file=*) cp "${one#*=}" "mounted/$name/" ;;
            --cert=*) cp "${one#*=}" "mounted/$name/tls.crt" ;;
            --key=*) cp "${one#*=}" "mounted/$name/tls.key" ;;
            esac
        done ;;
    get) base64 "mounted/$3/password" ;;
    exec) shift; [ "$1" != -i ] || shift; [ "$1 $2" = "pdstage-etcd-0 --" ]; $WITHIN "${@:3}" ;;
    apply | rollout) ;;
    esac
}
"""


@dataclass
class Pod(Server):
    """`hook` runs before it is ended; `template` is its manifest's. Kubernetes is told by `api`."""

    address: str = ""
    hook: list[str] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    api: Any = None
    uid: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:8000"

    def up(self) -> None:
        """Starts it, if it does not run, and waits until it serves."""
        if not self.runs:
            self.start()
        self.wait()
        self.uid = str(uuid4())
        self._tell("Running")

    def end(self) -> None:
        """As a kubelet does: the hook, then SIGTERM, all within the grace period."""
        grace_s = self.template["spec"]["terminationGracePeriodSeconds"]
        self._tell("Running", deletionTimestamp="2026-01-01T00:00:00Z")
        subprocess.run(self.hook, check=True, env=os.environ | self.env, timeout=grace_s)
        assert self.stop(grace_s), self.tail()
        self._tell("Succeeded")
        self.api.delete(self.name)

    def die(self) -> None:
        """Its processes are killed, and the kubelet finds that they have ended."""
        self.kill()
        self._tell("Failed")

    def _tell(self, phase: str, **more: str) -> None:
        one = container(self.template)
        state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": EXIT_CODES[phase]}}
        status = {"name": one["name"], "image": "", "imageID": "", "ready": phase == "Running", "restartCount": 0}
        self.api.put({
            "metadata": {"name": self.name, "namespace": NAMESPACE, "uid": self.uid} | self.template["metadata"] | more,
            "spec": {"containers": [{"name": one["name"]}]},
            "status": {
                "phase": phase, "podIP": self.address, "podIPs": [{"ip": self.address}],
                "conditions": [{"type": "Ready", "status": str(phase == "Running")}],
                "containerStatuses": [status | {"state": state}],
            },
        })  # fmt: skip


class Cluster:
    """Of an engine; `on_cpu` makes a command one that this machine can run, given how many ranks the container has, and
    what is to be in its environment. A context manager, in which `pods` are up, by name, and this thread is a client.
    """

    def __init__(self, engine: str, folder: Path, model: Path, on_cpu: OnCpu) -> None:
        self._templates, self._folder, self._model, self._on_cpu = PODS[engine], folder, model, on_cpu
        self.pods: dict[str, Pod] = {}

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as ends:
            self.network = ends.enter_context(Network(("client", "kubernetes", *ENGINES, *MEMBERS, *ALONE)))
            hosts = "".join(f"{self.network.address(name)} {name}.pdstage-etcd\n" for name in MEMBERS)
            for name in self.network.hosts:
                folder = Path("/etc/netns", self.network.where(name))
                folder.mkdir(parents=True)
                ends.callback(shutil.rmtree, folder)
                (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
            with self.network.inside("kubernetes"):
                self.api = ends.enter_context(Api(NAMESPACE, self.network.address("kubernetes")))
            ends.enter_context(self.network.inside("client"))
            (self._folder / "docs").symlink_to(ROOT / "docs")
            blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
            self._run(*blocks[:2])
            for name in MEMBERS:
                ends.callback(self._pod(name).start().stop)
            first = self.pods[MEMBERS[0]]
            health = [*self.network.command(first.name), "etcdctl", "endpoint", "health"]
            env = os.environ | first.env
            assert wait_until(lambda: not subprocess.run(health, check=False, env=env).returncode, 60), first.tail()
            self._run(blocks[2])
            for name in (*ENGINES, *ALONE):
                ends.callback(self._pod(name).stop)
            for name in (*ENGINES, "fence-pods-a"):
                self.pods[name].start()
            for name in ENGINES:
                self.pods[name].up()
            self.pods["router-a"].start().wait()
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _run(self, *blocks: str) -> None:
        """Of the page."""
        first = self.pods.get(MEMBERS[0])
        env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
        if first is not None:
            env |= first.env | {"WITHIN": " ".join(self.network.command(first.name))}
        command = ["bash", "-euo", "pipefail", "-c", KUBECTL + "".join(blocks)]
        subprocess.run(command, check=True, env=env, cwd=self._folder)

    def _pod(self, name: str) -> Pod:
        template = self._templates[next(one for one in self._templates if name.startswith(one))]
        one, mounted = container(template), self._folder / "mounted"
        known = {"metadata.name": name, "metadata.namespace": NAMESPACE, "status.podIP": self.network.address(name)}
        sources = {volume["name"]: volume for volume in template["spec"].get("volumes", ())}
        places = {}
        for mount in one.get("volumeMounts", ()):
            source = sources.get(mount["name"], {})
            held = source.get("secret", {}).get("secretName") or source.get("configMap", {}).get("name")
            if held:
                places[mount["mountPath"]] = mounted / held
            elif mount["name"] == "model":
                places[mount["mountPath"]] = self._model
            elif not source:  # a claim of its own
                places[mount["mountPath"]] = self._folder / name
        env: dict[str, str] = {}

        def written(word: str) -> str:
            word = re.sub(r"\$\((\w+)\)", lambda variable: env[variable[1]], word)
            for path, place in places.items():
                word = re.sub(rf"(?<![\w/.-]){path}(?=/|\W|$)", str(place), word)
            return word

        for variable in one.get("env", ()):
            source = variable.get("valueFrom", {})
            if secret := source.get("secretKeyRef"):
                env[variable["name"]] = (mounted / secret["name"] / secret["key"]).read_text()
            else:
                env[variable["name"]] = written(variable.get("value") or known[source["fieldRef"]["fieldPath"]])
        within = self.network.command(name)
        command = [written(word) for word in one["command"] + one.get("args", [])]
        if name not in MEMBERS:
            command, own = self._on_cpu(command, ENGINES.get(name, 0))
            env |= own | self.api.kubeconfig(self._folder) | {"PATH": f"{BIN}:{os.environ['PATH']}"}
        hook = one.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        self.pods[name] = Pod(
            name, lambda _: [*within, *command], self._folder / f"{name}.log", env, address=self.network.address(name),
            hook=[*within, *map(written, hook)], template=template, api=self.api,
            ready="/readiness" if name.startswith("router") else "/health",
        )  # fmt: skip
        return self.pods[name]


def check_replaced(
    fleet: Fleet, folder: Path, engine: str, reference: Any, on_cpu: OnCpu, *, as_text: bool = False
) -> None:
    """Decode's pods are replaced under load, then prefill's with rooms under way, and one of decode's is killed: no
    request is lost, and who died is fenced.
    """
    asked = load.prompts(140, seed=601, longest=300)
    right, model = fleet.right(reference, asked, as_text=as_text), fleet.folder(reference.model)
    fleet.stop()
    with Cluster(engine, folder, model, on_cpu) as cluster:
        prefill, *decodes = (cluster.pods[name] for name in ENGINES)
        router, program = (cluster.pods[name] for name in ALONE)
        ask = load.to(router.url, as_text=as_text)
        begun = lambda: Samples(get(f"{prefill.address}:9470"))("pdstage_rooms_opened_total")  # noqa: E731
        with ThreadPoolExecutor(1) as beside:  # pods end with the thread that started them
            asking = beside.submit(load.ask_all, ask, asked[:100], 2)
            for one in decodes:
                one.end()
                one.up()
                fleet.note(f"{one.name} was replaced")
            answers = asking.result()
        least = begun() + 16

        def ends() -> None:
            assert wait_until(lambda: begun() >= least, 60.0, every_s=0.02), "nothing begins"
            prefill.end()

        answers += load.ask_all(ask, asked[100:116], 16, while_=asyncio.to_thread(ends))
        prefill.up()
        router.was_up = False
        router.wait()
        fleet.note(f"{prefill.name} was replaced")
        answers += load.ask_all(ask, asked[116:124], 2)
        decodes[1].die()
        assert wait_until(lambda: program.says(f"INFO fenced {decodes[1].name} rank 0"), 60.0), program.tail()
        cluster.api.delete(decodes[1].name)
        answers += load.ask_all(ask, asked[124:], 2)
        fleet.note(f"{engine} in a cluster: {compare.summary(answers, right)}")
        compare.check(answers, right)
