"""docs/examples/fence_pods.py beside a real etcd and a double of Kubernetes' API server."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys

import pytest

from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control.etcd import EtcdClient
from tests.control.test_etcd import WAIT_S, at
from tests.docs.pages import ROOT
from tests.e2e.servers import wait_until
from tests.kubernetes_api import Api

PROGRAM = ROOT / "docs" / "examples" / "fence_pods.py"
ENDED = {"terminated": {"exitCode": 0, "reason": "Completed"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "Error"}}
LOST = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
RUNNING = {"running": {}}
BY_GC = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]
BY_EVICTION = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]


def pod(name: str, ip: str = "10.1.0.1", phase: str = "Running", state: object = RUNNING, conditions=()) -> dict:
    return {
        "metadata": {"name": name, "namespace": "serving", "uid": f"uid of {name}", "labels": {"app": "engine"}},
        "spec": {"initContainers": [{"name": "prepare"}], "containers": [{"name": "engine"}]},
        "status": {
            "phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": list(conditions),
            "initContainerStatuses": [{"name": "prepare", "state": ENDED}],
            "containerStatuses": [{"name": "engine", "state": state}],
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "dead"),
    [
        (pod("a", phase="Succeeded", state=ENDED), True),
        (pod("a", phase="Failed", state=KILLED), True),
        (pod("a", phase="Failed", state=KILLED, conditions=BY_EVICTION), True),
        (pod("a"), False),
        (pod("a", state=KILLED), False),  # about to be started again
        (pod("a", phase="Failed"), False),
        (pod("a", phase="Failed", state=LOST), False),
        (pod("a", phase="Failed", state=KILLED, conditions=BY_GC), False),
        (pod("a", phase="Failed", state={"waiting": {}}), False),
        ({"metadata": {}, "spec": {"containers": [{"name": "engine"}]}, "status": {"phase": "Failed"}}, False),
    ],
)
def test_which_pod_is_dead(one, dead):
    assert runpy.run_path(str(PROGRAM))["is_dead"](one) is dead


@pytest.mark.skipif(ETCD is None, reason="there is no etcd (apt-get install etcd-server)")
def test_pods_that_died_are_fenced_and_others_are_named(tmp_path):
    ips = {name: f"10.1.0.{n}" for n, name in enumerate(("stopped", "forced", "shared", "missed", "listed"), 1)}
    with contextlib.ExitStack() as ends:
        servers = ends.enter_context(Servers(tmp_path)).ready()
        directory = ends.enter_context(EtcdClient(servers.address()))
        api = ends.enter_context(Api("serving"))
        for n, name in enumerate(ips):
            one = at(f"tcp://{ips[name]}:7470", tp=1, incarnation=n, instance=name)
            directory.publish(one, ttl_s=1.0)  # its lease ends as the process does not renew it
        for name, ip in ips.items():
            api.put(pod(name, ip))
        api.put(pod("neighbour", ips["shared"]))
        command = [sys.executable, PROGRAM, directory.given, "--namespace=serving", "--selector=app=engine"]
        running = ends.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | api.kubeconfig(tmp_path))
        )
        ends.callback(running.kill)
        log: list[str] = []

        def says(words: str) -> None:
            while not re.search(words, "".join(log)):
                log.append(running.stdout.readline())
                assert log[-1], "".join(log)

        assert wait_until(lambda: len(api.asked) >= 2, WAIT_S), "it lists, and watches"
        api.put(pod("stopped", ips["stopped"], "Failed", KILLED))
        api.delete("stopped")
        api.delete("forced")
        api.put(pod("shared", ips["shared"], "Succeeded", ENDED))
        says("INFO fenced stopped rank 0 tcp://10.1.0.1:7470 of serving/stopped")
        says("ERROR serving/forced is gone.*pdstage fence .* 10.1.0.2")
        says("ERROR serving/shared has ended, but serving/neighbour lives at 10.1.0.3 too")
        api.forget()
        says("ERROR the API server is asked anew")
        api.delete("missed")
        api.put(pod("listed", ips["listed"], "Failed", ENDED))
        api.forget()
        says("INFO fenced listed rank 0")
        says("ERROR serving/missed is gone")
        ended = {name for n, name in enumerate(ips) if n not in directory._read().processes}
        assert {one["labelSelector"] for one in api.asked} == {"app=engine"}
    assert ended == {"stopped", "listed"} and "".join(log).count("INFO fenced ") == 2
