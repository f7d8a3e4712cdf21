"""Targets: the control plane's own input, which is HTTP requests and directories' answers."""

from __future__ import annotations

import io
import itertools
from functools import cache
from typing import Any

import msgspec

from pdstage.control.address import Address
from pdstage.control.bootstrap import Advert, BootstrapClient
from pdstage.control.directory import MAX_ADVERTS, Directory
from pdstage.control.directory_api import Adverts, Lookup, Publish, Withdraw
from pdstage.control.directory_http import Handler
from pdstage.errors import PdstageError, UsageError
from pdstage.layout.topology import Topology

_ADVERT = Advert(
    instance="p0", topology=Topology(2, 1), endpoint="tcp://127.0.0.1:9001", incarnation=1 << 60, layout="0f" * 8,
    transports=("nixl", "local"),
)  # fmt: skip


# Requests.


class _Connection:
    """One request and the answer to it, where a handler expects a socket."""

    def __init__(self, request: bytes) -> None:
        self.request, self.answer = request, bytearray()

    def makefile(self, mode: str, *_: object) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self.request)

    def sendall(self, data: bytes) -> None:
        self.answer += data

    def settimeout(self, _: float) -> None:
        pass


class _Server:
    def __init__(self) -> None:
        ticks = itertools.count()
        self.directory = Directory(lambda: float(next(ticks)))


@cache
def _server() -> _Server:
    return _Server()


def request_seeds() -> list[bytes]:
    asked = (
        Publish(_ADVERT, 15.0), Withdraw(_ADVERT), Lookup(0, "p0"),
    )  # fmt: skip
    bodies = [msgspec.json.encode(one) for one in asked]
    puts = [b"PUT /v1/ask HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(one), one) for one in bodies]
    return [
        *puts,
        b"GET /v1/instances HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    ]


def run_request(data: bytes) -> None:
    """Every request has an answer, or none where its first line says too little; the table stays within its cap."""
    server = _server()
    connection: Any = _Connection(data)
    Handler(connection, ("127.0.0.1", 1), server)  # type: ignore[arg-type]
    answer = bytes(connection.answer)
    assert len(answer) < 1 << 20
    assert b" 500 " not in answer.split(b"\r\n")[0]
    assert sum(map(len, server.directory._instances.values())) <= MAX_ADVERTS
    try:
        server.directory.lookup()
    except PdstageError as error:
        assert str(error)


# Answers, and the addresses in them.


def answer_seeds() -> list[bytes]:
    return [msgspec.json.encode(Adverts([_ADVERT])), b'{"error":"incomplete","what":"w","missing":[1]}']


def run_answer(data: bytes) -> None:
    client = BootstrapClient("127.0.0.1:1")
    adverts: list[Advert] = []
    for status in (200, 503):
        client._ask_http = lambda *_, status=status: (status, data)  # type: ignore[method-assign]
        try:
            adverts = client.lookup()
        except PdstageError as error:
            assert 0 < len(str(error)) < 8192
    texts = [advert.endpoint for advert in adverts] or [data.decode("utf-8", "replace")]
    for text in texts:
        for listening in (False, True):
            try:
                address = Address.parse(text, "tcp", listening=listening)
            except UsageError as error:
                assert len(str(error)) < 4096
            else:
                assert 0 <= address.port <= 65535
                assert address.is_loopback in (True, False)
