"""docs/examples/fence_pods.py beside a real etcd and a double of the package `kubernetes`."""

from __future__ import annotations

import json
import logging
import re
import runpy
import sys
import time
from types import SimpleNamespace

import pytest

from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control.etcd import EtcdClient
from tests.control.test_etcd import WAIT_S, at
from tests.docs.pages import ROOT

PROGRAM = ROOT / "docs" / "examples" / "fence_pods.py"
ENDED = {"terminated": {"exitCode": 0, "reason": "Completed"}}
KILLED = {"terminated": {"exitCode": 137, "reason": "Error"}}
LOST = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
RUNNING = {"running": {}}
BY_GC = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]
BY_EVICTION = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]


def pod(name: str, ip: str = "10.1.0.1", phase: str = "Running", state: object = RUNNING, conditions=()) -> dict:
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid of {name}", "resourceVersion": "7"},
        "spec": {"initContainers": [{"name": "prepare"}], "containers": [{"name": "engine"}]},
        "status": {
            "phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": list(conditions),
            "initContainerStatuses": [{"name": "prepare", "state": ENDED}],
            "containerStatuses": [{"name": "engine", "state": state}],
        },
    }  # fmt: skip


def program(monkeypatch, api, **constants) -> dict:
    """Its names, where `api` is the package `kubernetes`."""
    monkeypatch.setitem(sys.modules, "kubernetes", api)
    names = runpy.run_path(str(PROGRAM))
    names["main"].__globals__.update(constants)
    return names


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
def test_which_pod_is_dead(monkeypatch, one, dead):
    assert program(monkeypatch, Kubernetes([], lambda: True))["is_dead"](one) is dead


def event(kind: str, one: dict) -> dict:
    return {"type": kind, "object": one}


def listed(*pods: dict) -> dict:
    return {"metadata": {"resourceVersion": "5"}, "items": pods}


class Kubernetes:
    """What the program uses of that package: a list, or a watch's events, is the next of `answers`. Then nothing
    happens until it is `over`, and a Ctrl-C comes.
    """

    def __init__(self, answers, over) -> None:
        self._answers, self._over = iter(answers), over
        self.asked: list[dict] = []
        self.client = self.config = self.watch = self
        self.CoreV1Api = self.Watch = lambda: self

    def load_incluster_config(self) -> None:
        pass

    def list_namespaced_pod(self, *, _preload_content, **asked):
        assert not _preload_content
        return SimpleNamespace(data=json.dumps(self._next(asked)).encode())

    def stream(self, list_pods, **asked):
        assert list_pods == self.list_namespaced_pod
        for one in self._next(asked):
            if one["type"] == "ERROR":
                raise OSError(one["object"]["message"])
            yield one | {"raw_object": one["object"]}

    def _next(self, asked):
        assert (asked["namespace"], asked["label_selector"]) == ("serving", "app=engine")
        self.asked.append(asked)
        answer = next(self._answers, None)
        if answer is None and self._over():
            raise KeyboardInterrupt
        return answer or []


@pytest.mark.skipif(ETCD is None, reason="there is no etcd (apt-get install etcd-server)")
def test_pods_that_died_are_fenced_and_others_are_named(tmp_path, monkeypatch, caplog):
    ips = {name: f"10.1.0.{n}" for n, name in enumerate(("stopped", "forced", "shared", "missed", "listed"), 1)}
    stopped, neighbour = pod("stopped", ips["stopped"], "Failed", KILLED), pod("neighbour", ips["shared"])
    answers = [
        listed(*(pod(name, ip) for name, ip in ips.items() if name != "listed"), neighbour),
        [
            event("MODIFIED", stopped), event("DELETED", stopped), event("DELETED", pod("forced", ips["forced"])),
            event("MODIFIED", pod("shared", ips["shared"], "Succeeded", ENDED)),
            event("BOOKMARK", {"metadata": {"resourceVersion": "99"}}),
        ],  # and the watch ends, as it does every few seconds
        [event("ERROR", {"message": "too old resource version"})],
        listed(pod("listed", ips["listed"], "Failed", ENDED), neighbour),
    ]  # fmt: skip
    words = (
        "INFO fenced stopped rank 0 tcp://10.1.0.1:7470 of default/stopped",
        "ERROR default/forced is gone.*pdstage fence .* 10.1.0.2",
        "ERROR default/shared has ended, but default/neighbour lives at 10.1.0.3 too",
        "INFO fenced listed rank 0",
        "ERROR default/missed is gone",
    )
    log = lambda: "\n".join(f"{one.levelname} {one.getMessage()}" for one in caplog.records)  # noqa: E731
    end = time.monotonic() + WAIT_S
    api = Kubernetes(answers, lambda: all(re.search(one, log()) for one in words) or time.monotonic() > end)
    caplog.set_level(logging.INFO, "fence_pods")
    with Servers(tmp_path) as servers, EtcdClient(servers.ready().address()) as directory:
        for n, name in enumerate(ips):
            one = at(f"tcp://{ips[name]}:7470", tp=1, incarnation=n, instance=name)
            directory.publish(one, ttl_s=1.0)  # its lease ends as the process does not renew it
        monkeypatch.setattr(
            sys, "argv", ["fence_pods", directory.given, "--namespace=serving", "--selector=app=engine"]
        )
        with pytest.raises(KeyboardInterrupt):
            program(monkeypatch, api, AGAIN_S=0)["main"]()
        ended = {name for n, name in enumerate(ips) if n not in directory._read().processes}
    assert not [one for one in words if not re.search(one, log())]
    assert api.asked[2]["resource_version"] == "99", "it goes on from there"
    assert ended == {"stopped", "listed"} and log().count("INFO fenced ") == 2
