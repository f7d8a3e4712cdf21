"""docs/examples/fence_pods.py as a process, beside a real etcd and a double of Kubernetes' API server, over HTTP."""

from __future__ import annotations

import json
import os
import queue
import runpy
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control.etcd import EtcdClient
from tests.control.test_etcd import at, until
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


class Api(ThreadingHTTPServer):
    """A double: it lists `pods`, and a watch of it tells what is put to `events`, until None."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pods: list[dict] = []
        self.events: queue.Queue[dict | None] = queue.Queue()
        self.asked: list[dict[str, list[str]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def tell(self, kind: str, one: dict) -> None:
        self.events.put({"type": kind, "object": one})


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.server.asked.append(query)
        assert url.path == "/api/v1/namespaces/serving/pods"
        assert query["labelSelector"] == ["app=engine"]
        self.send_response(200)
        self.end_headers()
        if "watch" not in query:
            listed = {"metadata": {"resourceVersion": "5"}, "items": self.server.pods}
            self.wfile.write(json.dumps(listed).encode())
            return
        while (event := self.server.events.get()) is not None:
            self.wfile.write(json.dumps(event).encode() + b"\n")
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def program(api: Api, directory: str):
    """Its lines, as they come."""
    serving = threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    given = ["--api", api.url, "--namespace", "serving", "--selector", "app=engine"]
    command = [sys.executable, PROGRAM, directory, *given]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    )
    said: list[str] = []

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)

    listening = threading.Thread(target=listen)
    listening.start()
    try:
        yield said
    finally:
        process.kill()
        process.wait()
        listening.join()
        api.events.put(None)
        api.shutdown()
        serving.join()
        api.server_close()


@pytest.mark.skipif(ETCD is None, reason="there is no etcd (apt-get install etcd-server)")
def test_pods_that_died_are_fenced_and_others_are_named(tmp_path):
    names = {"stopped": 1, "forced": 2, "collected": 3, "shared": 4, "missed": 5, "listed": 6, "lost": 7}
    ips = {name: f"10.1.0.{number}" for name, number in names.items()}
    with Servers(tmp_path) as servers, EtcdClient(servers.ready().address()) as client:
        for name, number in names.items():
            one = at(f"tcp://{ips[name]}:7470", tp=1, incarnation=number, instance=name)
            client.publish(one, ttl_s=1.0)  # its lease ends as the process does not renew it
        api = Api()
        first = ("stopped", "forced", "collected", "shared", "missed", "lost")
        api.pods = [pod(name, ips[name]) for name in first] + [pod("neighbour", ips["shared"])]
        with program(api, client.given) as said:

            def heard(*words: str) -> None:
                until(lambda: any(all(word in line for word in words) for line in said), f"{words} of {said}")

            api.tell("MODIFIED", pod("stopped", ips["stopped"], "Failed", KILLED))
            api.tell("DELETED", pod("stopped", ips["stopped"], "Failed", KILLED))
            heard("fenced stopped rank 0 tcp://10.1.0.1:7470 of default/stopped")
            api.tell("DELETED", pod("forced", ips["forced"]))
            heard("ERROR", "default/forced is gone", f"pdstage fence {client.given} 10.1.0.2")
            api.tell("MODIFIED", pod("collected", ips["collected"], "Failed", RUNNING, BY_GC))
            api.tell("DELETED", pod("collected", ips["collected"], "Failed", RUNNING, BY_GC))
            heard("ERROR", "default/collected is gone")
            api.tell("MODIFIED", pod("lost", ips["lost"], "Failed", LOST))
            api.tell("DELETED", pod("lost", ips["lost"], "Failed", LOST))
            heard("ERROR", "default/lost is gone")
            api.tell("MODIFIED", pod("shared", ips["shared"], "Succeeded", ENDED))
            heard("ERROR", "default/shared has ended, but default/neighbour lives at 10.1.0.4 too")
            api.tell("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
            api.events.put(None)  # the server ends the watch, as it does every few minutes
            until(lambda: any(one.get("resourceVersion") == ["99"] for one in api.asked), "it goes on from there")
            api.pods = [pod("listed", ips["listed"], "Failed", ENDED), pod("neighbour", ips["shared"])]
            api.tell("ERROR", {"code": 410, "message": "too old resource version"})
            heard("fenced listed rank 0")
            heard("ERROR", "default/missed is gone")
            api.events.put(None)
        ended = {number for number in names.values() if number not in client._read().processes()}
        assert ended == {names["stopped"], names["listed"]}
        assert sum("fenced " in line and "INFO" in line for line in said) == len(ended)
