"""A double of Kubernetes' API server, which needs a cluster: the pods of one namespace, listed and watched over HTTP.

Real clients ask it, which find it by a kubeconfig: https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from pathlib import Path

_LATE_S = 300.0
Pod = dict[str, Any]


class Api(ThreadingHTTPServer):
    """Listens at `host`, at a port of its own. A context manager."""

    daemon_threads = True

    def __init__(self, namespace: str, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Request)
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self.asked: list[dict[str, str]] = []
        """The parameters of each request."""
        self.pods: dict[str, Pod] = {}
        self.events: list[dict[str, Any]] = []
        """The one that led to resourceVersion N is at N - 1."""
        self.changed = threading.Condition()
        self.kept_from = 0
        """An earlier resourceVersion is too old to watch from."""

    def put(self, pod: Pod) -> None:
        """It is there, or has changed."""
        name = pod["metadata"]["name"]
        self._tell("MODIFIED" if name in self.pods else "ADDED", pod)
        self.pods[name] = self.events[-1]["object"]

    def delete(self, name: str) -> None:
        """It is marked first, as an API server does: some who watch hear of no other end."""
        pod = self.pods[name]
        self.put(pod | {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"} | pod["metadata"]})
        self._tell("DELETED", self.pods.pop(name))

    def forget(self) -> None:
        """Only what comes from now on can be watched: who watches is told, and lists anew."""
        with self.changed:
            self.events.append({})
            self.kept_from = len(self.events)
            self.changed.notify_all()

    def since(self, version: int, wait_s: float) -> tuple[list[dict[str, Any]], bool]:
        """What followed on that resourceVersion, waited for; and whether it was kept."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.events) > version or version < self.kept_from, wait_s)
            return self.events[version:], version >= self.kept_from

    def _tell(self, kind: str, pod: Pod) -> None:
        with self.changed:
            metadata = pod["metadata"] | {"resourceVersion": str(len(self.events) + 1)}
            pod = {"apiVersion": "v1", "kind": "Pod"} | pod | {"metadata": metadata}
            self.events.append({"type": kind, "object": pod})
            self.changed.notify_all()

    def kubeconfig(self, folder: Path) -> dict[str, str]:
        """The environment of a client."""
        cluster = {"server": "http://{}:{}".format(*self.server_address[:2])}
        made = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "here"}}],
            "clusters": [{"name": "here", "cluster": cluster}], "users": [{"name": "here", "user": {"token": "any"}}],
        }  # fmt: skip
        (folder / "kubeconfig").write_text(json.dumps(made))
        return {"KUBECONFIG": str(folder / "kubeconfig")}

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        url, api = urlsplit(self.path), self.server
        asked = dict(parse_qsl(url.query))
        if url.path != api.path:
            self.send_error(404)
            return
        api.asked.append(asked)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        wanted = dict(one.split("=") for one in asked.get("labelSelector", "").split(",") if one)
        chosen = lambda pod: wanted.items() <= pod["metadata"].get("labels", {}).items()  # noqa: E731
        if "watch" not in asked:
            with api.changed:
                listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": str(len(api.events))}}
                self._say(listed | {"items": [pod for pod in api.pods.values() if chosen(pod)]})
            return
        version, until = int(asked["resourceVersion"]), time.monotonic() + float(asked.get("timeoutSeconds", _LATE_S))
        with contextlib.suppress(OSError):
            while (left_s := until - time.monotonic()) > 0:
                fresh, is_kept = api.since(version, left_s)
                if not is_kept:
                    self._say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
                    return
                for event in fresh:
                    if event and chosen(event["object"]):
                        self._say(event)
                version += len(fresh)

    def _say(self, what: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(what).encode() + b"\n")

    def log_message(self, *_: object) -> None:
        pass
