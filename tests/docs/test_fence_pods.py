"""docs/examples/fence_pods.py as a process, beside a real etcd and a double of Kubernetes' API server, over HTTP."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import threading
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
    """A double: it gives the next of `answers`, a list of pods or a watch's events, to each question."""

    daemon_threads = True

    def __init__(self, *answers: list[dict]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = iter(answers)
        self.asked: list[dict[str, list[str]]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        assert url.path == "/api/v1/namespaces/serving/pods" and query["labelSelector"] == ["app=engine"]
        self.server.asked.append(query)
        answer = next(self.server.answers, None)
        self.send_response(503 if answer is None else 200)
        self.end_headers()
        self.wfile.writelines(json.dumps(one).encode() + b"\n" for one in answer or ())

    def log_message(self, *_: object) -> None:
        pass


def event(kind: str, one: dict) -> dict:
    return {"type": kind, "object": one}


def listed(*pods: dict) -> list[dict]:
    return [{"metadata": {"resourceVersion": "5"}, "items": pods}]


@pytest.mark.skipif(ETCD is None, reason="there is no etcd (apt-get install etcd-server)")
def test_pods_that_died_are_fenced_and_others_are_named(tmp_path):
    names = ("stopped", "forced", "collected", "shared", "missed", "listed", "lost")
    ips = {name: f"10.1.0.{number}" for number, name in enumerate(names, 1)}
    stopped, shared = pod("stopped", ips["stopped"], "Failed", KILLED), pod("neighbour", ips["shared"])
    collected = pod("collected", ips["collected"], "Failed", RUNNING, BY_GC)
    lost = pod("lost", ips["lost"], "Failed", LOST)
    api = Api(
        listed(*(pod(name, ips[name]) for name in names if name != "listed"), shared),
        [
            event("MODIFIED", stopped), event("DELETED", stopped), event("DELETED", pod("forced", ips["forced"])),
            event("MODIFIED", collected), event("DELETED", collected), event("DELETED", lost),
            event("MODIFIED", pod("shared", ips["shared"], "Succeeded", ENDED)),
            event("BOOKMARK", {"metadata": {"resourceVersion": "99"}}),
        ],  # and the server ends the watch, as it does every few minutes
        [event("ERROR", {"code": 410, "message": "too old resource version"})],
        listed(pod("listed", ips["listed"], "Failed", ENDED), shared),
    )  # fmt: skip
    serving = threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    log, env = tmp_path / "log", os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with Servers(tmp_path) as servers, EtcdClient(servers.ready().address()) as client, log.open("w") as out:
        for number, name in enumerate(names, 1):
            one = at(f"tcp://{ips[name]}:7470", tp=1, incarnation=number, instance=name)
            client.publish(one, ttl_s=1.0)  # its lease ends as the process does not renew it
        given = ["--api", f"http://127.0.0.1:{api.server_port}", "--namespace", "serving", "--selector", "app=engine"]
        process = subprocess.Popen([sys.executable, PROGRAM, client.given, *given], stdout=out, env=env)
        try:
            for words in (
                "INFO fenced stopped rank 0 tcp://10.1.0.1:7470 of default/stopped",
                "ERROR default/forced is gone.*pdstage fence .* 10.1.0.2",
                "ERROR default/collected is gone",
                "ERROR default/lost is gone",
                "ERROR default/shared has ended, but default/neighbour lives at 10.1.0.4 too",
                "INFO fenced listed rank 0",
                "ERROR default/missed is gone",
            ):
                until(lambda words=words: re.search(words, log.read_text()), f"{words} in {log}")
        finally:
            process.kill()
            process.wait()
            api.shutdown()
            serving.join()
            api.server_close()
        ended = {name for number, name in enumerate(names, 1) if number not in client._read().processes()}
    assert api.asked[2]["resourceVersion"] == ["99"], "it goes on from there"
    assert ended == {"stopped", "listed"} and log.read_text().count("INFO fenced ") == 2
