"""Fences pods whose death Kubernetes has proved: `pdstage fence` of each one's address, once, for every decode node.

    python fence_pods.py etcd://10.0.0.1:2379/pdstage --selector app.kubernetes.io/part-of=pdstage

It runs as one small deployment (docs/kubernetes/fencing.yaml) that may get, list and watch pods, and nothing else. The
selector must match every pod that registers in that directory. It needs `pdstage[etcd]` and the package `kubernetes`.

A pod is dead where its kubelet said so: a phase that is over, and every container terminated. That its object is gone
proves nothing: a forced deletion, a lost node and the garbage collection of pods remove it without asking the kubelet.
Such pods are named in the log, and a person decides (docs/kubernetes.md).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from typing import Any

from kubernetes import client, config  # type: ignore[import-not-found]

from pdstage import PdstageError
from pdstage.control.etcd import EtcdClient

log = logging.getLogger("fence_pods")

AGAIN_S = 5  # between two looks at those that are not fenced yet; a dead pod's leases last 15 s
Pod = dict[str, Any]


def is_dead(pod: Pod) -> bool:
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


def name_of(pod: Pod) -> str:
    return f"{pod['metadata'].get('namespace', '')}/{pod['metadata']['name']}"


def addresses_of(pod: Pod) -> list[str]:
    """Its IP addresses, of either family."""
    return sorted(one["ip"] for one in pod.get("status", {}).get("podIPs", ()))


class Fencer:
    """The pods as they were told last, by uid, and those of the dead that are not fenced yet."""

    def __init__(self, directory: EtcdClient) -> None:
        self._directory = directory
        self._known: dict[str, Pod] = {}
        self._dead: dict[str, Pod] = {}
        self._done: set[str] = set()

    def listed(self, pods: list[Pod]) -> None:
        for uid in self._known.keys() - {pod["metadata"]["uid"] for pod in pods}:
            self.saw(self._known[uid], is_gone=True)
        for pod in pods:
            self.saw(pod)

    def saw(self, pod: Pod, *, is_gone: bool = False) -> None:
        uid, addresses = pod["metadata"]["uid"], addresses_of(pod)
        self._known[uid] = pod
        if addresses and is_dead(pod) and uid not in self._done:
            self._done.add(uid)
            self._dead[uid] = pod
        elif addresses and is_gone and uid not in self._done:
            log.error(
                "%s is gone, and nothing proves that its processes at %s have ended: it was deleted by force, or its "
                "node is lost. Once they have, as after a power-off, say: pdstage fence %s %s",
                name_of(pod), ", ".join(addresses), self._directory.address, addresses[0],
            )  # fmt: skip
        if is_gone:
            del self._known[uid]
            self._done.discard(uid)

    def fence(self) -> None:
        """Those that can be: not while their leases last, nor where another pod lives at the address."""
        for uid, pod in list(self._dead.items()):
            try:
                for address in addresses_of(pod):
                    self._fence(pod, address)
                del self._dead[uid]
            except PdstageError as error:
                log.warning("%s is not fenced yet: %s", name_of(pod), error)

    def _fence(self, pod: Pod, address: str) -> None:
        for other in self._known.values():
            if address in addresses_of(other) and not is_dead(other):  # of the node's own network, or used again
                log.error(
                    "%s has ended, but %s lives at %s too: it is not fenced", name_of(pod), name_of(other), address
                )
                return
        for process in self._directory.fence(address).values():
            log.info("fenced %s of %s", process, name_of(pod))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fences pods whose death Kubernetes has proved.")
    parser.add_argument("directory", help="etcd://..., as the nodes have it")
    parser.add_argument("--selector", required=True, help="labels of every pod that registers there")
    parser.add_argument("--namespace", default="default")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    config.load_config()  # the pod's own, or a kubeconfig
    list_pods = client.CoreV1Api().list_namespaced_pod
    # As JSON: the package's own objects refuse a pod of which they know too little.
    asked = {"namespace": given.namespace, "label_selector": given.selector, "_preload_content": False}
    with EtcdClient(given.directory, 20.0) as directory:
        fencer, version = Fencer(directory), ""
        while True:
            try:
                if not version:
                    listed = json.loads(list_pods(**asked).data)
                    version = listed["metadata"]["resourceVersion"]
                    fencer.listed(listed["items"])
                since = {"resource_version": version, "timeout_seconds": AGAIN_S, "allow_watch_bookmarks": True}
                for line in list_pods(**asked, **since, watch=True):
                    event = json.loads(line)
                    pod = event["object"]
                    version = pod["metadata"]["resourceVersion"]  # which an error has not
                    if event["type"] != "BOOKMARK":
                        fencer.saw(pod, is_gone=event["type"] == "DELETED")
            except Exception:
                log.exception("the API server is asked anew: it is away, or has forgotten version %r", version)
                version = ""
                time.sleep(AGAIN_S)
            fencer.fence()


if __name__ == "__main__":
    main()
