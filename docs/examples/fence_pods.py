"""Fences pods whose death Kubernetes has proved: `pdstage fence` of each one's address, once, for every decode node.

    python fence_pods.py etcd://10.0.0.1:2379/pdstage --selector app.kubernetes.io/part-of=pdstage

It runs as one small deployment (docs/kubernetes/fencing.yaml) that may get, list and watch pods, and nothing else. The
selector must match every pod that registers in that directory. It needs `pdstage[etcd]`.

A pod is dead where its kubelet said so: a phase that is over, and every container terminated. That its object is gone
proves nothing: a forced deletion, a lost node and the garbage collection of pods remove it without asking the kubelet.
Such pods are named in the log, and a person decides (docs/kubernetes.md).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from pdstage import PdstageError
from pdstage.control.etcd import EtcdClient

log = logging.getLogger("fence_pods")

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WAIT_S = 60.0  # for the leases of a dead pod's processes: 15 s
AGAIN_S = 5.0
WATCH_S = 300  # then the API server ends a watch, and it is taken up again
GONE = 410


class Expired(Exception):
    """The API server knows no more what happened since the last event."""


def is_dead(pod: dict[str, Any]) -> bool:
    """Whether its kubelet says that every process of the pod has ended."""
    status, spec = pod.get("status", {}), pod.get("spec", {})
    reasons = {one.get("reason") for one in status.get("conditions", ()) if one.get("type") == "DisruptionTarget"}
    if status.get("phase") not in {"Succeeded", "Failed"} or "DeletionByPodGC" in reasons:
        return False  # the garbage collector sets the phase of pods whose node is lost
    for kind in ("initContainer", "container", "ephemeralContainer"):
        states = {one["name"]: one.get("state", {}) for one in status.get(f"{kind}Statuses", ())}
        for container in spec.get(f"{kind}s", ()):
            ended = states.get(container["name"], {}).get("terminated")
            if ended is None or ended.get("reason") == "ContainerStatusUnknown":  # the kubelet did not find it
                return False
    return True


def name_of(pod: dict[str, Any]) -> str:
    return f"{pod['metadata'].get('namespace', '')}/{pod['metadata']['name']}"


def addresses_of(pod: dict[str, Any]) -> set[str]:
    """Its IP addresses, of either family."""
    return {one["ip"] for one in pod.get("status", {}).get("podIPs", ())}


class Pods:
    """What the API server tells of the pods: `events` goes on for ever."""

    def __init__(self, api: str, namespace: str, selector: str, account: Path = ACCOUNT) -> None:
        self._token, authorities = account / "token", account / "ca.crt"
        verify = ssl.create_default_context(cafile=str(authorities)) if authorities.exists() else True
        limits = httpx2.Timeout(30.0, read=WATCH_S + 30.0)
        self._client = httpx2.Client(base_url=api, verify=verify, timeout=limits, auth=self._authorized)
        self._url, self._selector = f"/api/v1/namespaces/{namespace}/pods", selector
        self.known: dict[str, dict[str, Any]] = {}
        """By uid, as told last."""

    def _authorized(self, request: httpx2.Request) -> httpx2.Request:
        if self._token.exists():  # read each time: it is replaced before it expires
            request.headers["Authorization"] = f"Bearer {self._token.read_text().strip()}"
        return request

    def read(self) -> tuple[str, list[dict[str, Any]]]:
        """The version of the list, and the pods that are gone since it was read last."""
        answer = self._client.get(self._url, params={"labelSelector": self._selector})
        answer.raise_for_status()
        listed = answer.json()
        before, self.known = self.known, {one["metadata"]["uid"]: one for one in listed["items"]}
        return listed["metadata"]["resourceVersion"], [one for uid, one in before.items() if uid not in self.known]

    def watch(self, version: str) -> Iterator[dict[str, Any]]:
        """Events since `version`, until the server ends the watch. Raises `Expired`."""
        asked = {"labelSelector": self._selector, "resourceVersion": version, "watch": "1"}
        asked |= {"allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        with self._client.stream("GET", self._url, params=asked) as answer:
            if answer.status_code == GONE:
                raise Expired
            answer.raise_for_status()
            for line in answer.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise Expired(event["object"].get("message", "no reason given"))
                yield event

    def events(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Each pod as it changes, and whether its object is gone."""
        version, is_away = "", False
        while True:
            try:
                if not version:
                    version, gone = self.read()
                    yield from ((pod, True) for pod in gone)
                    yield from ((pod, False) for pod in list(self.known.values()))
                is_away = False
                for event in self.watch(version):
                    pod = event["object"]
                    version = pod["metadata"]["resourceVersion"]
                    if event["type"] == "BOOKMARK":
                        continue
                    is_gone, uid = event["type"] == "DELETED", pod["metadata"]["uid"]
                    self.known[uid] = pod
                    if is_gone:
                        del self.known[uid]
                    yield pod, is_gone
            except Expired:
                version = ""
            except (httpx2.HTTPError, OSError, ValueError, KeyError) as error:
                if not is_away:
                    log.warning("the API server is asked again: %r", error)
                is_away, version = True, ""
                threading.Event().wait(AGAIN_S)


class Fencer:
    """Fences each dead pod once, in a thread of its own, since leases are waited for."""

    def __init__(self, directory: EtcdClient, pods: Pods) -> None:
        self._directory, self._pods = directory, pods
        self._done: set[str] = set()
        self._threads = ThreadPoolExecutor(16)

    def run(self) -> None:
        for pod, is_gone in self._pods.events():
            self.take(pod, is_gone=is_gone)

    def take(self, pod: dict[str, Any], *, is_gone: bool) -> None:
        uid, addresses = pod["metadata"]["uid"], addresses_of(pod)
        if uid not in self._done and addresses and is_dead(pod):
            self._done.add(uid)
            for address in addresses:
                self._threads.submit(self._fence, pod, address)
        elif is_gone and uid not in self._done and addresses:
            log.error(
                "%s is gone, and nothing proves that its processes at %s have ended: it was deleted by force, or its "
                "node is lost. Once they have, as after a power-off, say: pdstage fence %s %s",
                name_of(pod), ", ".join(sorted(addresses)), self._directory.address, min(addresses),
            )  # fmt: skip
        if is_gone:
            self._done.discard(uid)

    def _fence(self, pod: dict[str, Any], address: str) -> None:
        while True:
            others = [one for one in list(self._pods.known.values()) if address in addresses_of(one)]
            heirs = [name_of(one) for one in others if not is_dead(one)]
            if heirs:  # of the node's own network, or an address used again
                log.error("%s has ended, but %s lives at %s too: it is not fenced", name_of(pod), heirs[0], address)
                return
            try:
                fenced = self._directory.fence(address, wait_s=WAIT_S)
            except PdstageError as error:
                log.warning("%s is not fenced yet: %s", name_of(pod), error)
                threading.Event().wait(AGAIN_S)
                continue
            except Exception:
                log.exception("%s is not fenced", name_of(pod))
                return
            for process in fenced.values():
                log.info("fenced %s of %s", process, name_of(pod))
            return


def main() -> None:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    inside = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    own = ACCOUNT / "namespace"
    parser = argparse.ArgumentParser(description="Fences pods whose death Kubernetes has proved.")
    parser.add_argument("directory", help="etcd://..., as the nodes have it")
    parser.add_argument("--selector", required=True, help="labels of every pod that registers there")
    parser.add_argument("--namespace", default=own.read_text() if own.exists() else "default")
    parser.add_argument("--api", default=inside if host else "http://127.0.0.1:8001", help="default: of this cluster")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    with EtcdClient(given.directory, 20.0) as directory:
        Fencer(directory, Pods(given.api, given.namespace, given.selector)).run()


if __name__ == "__main__":
    main()
