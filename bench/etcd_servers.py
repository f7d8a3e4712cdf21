"""Real etcd servers, each a process with a folder of its own, on loopback or on given hosts: for a bench and tests."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple, Self

import httpx2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ETCD = shutil.which("etcd")
START_S = 60.0


def _free_ports(n: int) -> list[int]:
    """Held together, so that no two are the same; etcd takes them a moment later."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Host(NamedTuple):
    """Where a member listens: for clients at `port`, for the others at `peer_port`; `within` starts its command."""

    address: str
    port: int
    peer_port: int
    within: tuple[str, ...] = ()


class Member:
    """One process; `options` are etcd's own."""

    def __init__(self, folder: Path, name: str, host: Host, cluster: str, options: tuple[str, ...]) -> None:
        self.name, self.host = name, host
        secure = any(option.startswith("--cert-file") for option in options)
        self.url = f"{'https' if secure else 'http'}://{host.address}:{host.port}"
        peers = f"http://{host.address}:{host.peer_port}"
        self._command = [
            *host.within, str(ETCD), "--name", name, "--data-dir", str(folder / name), "--listen-client-urls", self.url,
            "--advertise-client-urls", self.url, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
            "--initial-cluster", cluster, "--log-level", "error", "--logger", "zap", *options,
        ]  # fmt: skip
        self._log = (folder / f"{name}.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """It runs no more until `resume`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None:
            self.kill()
        self._log.close()


class Servers:
    """`n` members of one cluster, on loopback or one on each of `hosts`. A context manager."""

    def __init__(self, folder: Path, n: int = 1, *options: str, hosts: Sequence[Host] = ()) -> None:
        if not hosts:
            ports = _free_ports(2 * n)
            hosts = [Host("127.0.0.1", port, peer) for port, peer in zip(ports[:n], ports[n:], strict=True)]
        cluster = ",".join(f"m{i}=http://{host.address}:{host.peer_port}" for i, host in enumerate(hosts))
        self.members = [Member(folder, f"m{i}", host, cluster, options) for i, host in enumerate(hosts)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()

    def address(self, prefix: str = "pdstage", user: str = "", options: str = "") -> str:
        hosts = ",".join(f"{member.host.address}:{member.host.port}" for member in self.members)
        return f"etcd://{f'{user}@' if user else ''}{hosts}/{prefix}{options}"

    def ask(self, method: str, body: dict[str, object] | None = None, member: int = 0) -> dict[str, object]:
        """A request to one member, as an operator's tool makes it."""
        answer = httpx2.post(f"{self.members[member].url}/v3/{method}", json=body or {}, trust_env=False)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def ready(self) -> Self:
        """Waits until every running member answers a read that needs a majority."""
        end = time.monotonic() + START_S
        for member in self.members:
            while member.process is not None:
                with suppress(httpx2.HTTPError):
                    answer = httpx2.post(f"{member.url}/v3/kv/range", json={"key": "AA=="}, trust_env=False)
                    if answer.status_code in (200, 400, 401):
                        break
                if time.monotonic() > end:
                    raise TimeoutError(f"etcd's {member.name} does not answer in {START_S} s")
                time.sleep(0.05)
        return self
