"""Targets: the control plane's own input, which is HTTP requests, directories' answers, and messages of any frames."""

from __future__ import annotations

import io
import itertools
import os
import threading
from functools import cache
from typing import Any

import msgspec
import zmq

from pdstage.control.address import Address
from pdstage.control.bootstrap import Advert, BootstrapClient
from pdstage.control.directory import MAX_ADVERTS, Directory
from pdstage.control.directory_api import Adverts
from pdstage.control.directory_http import Handler
from pdstage.control.port import ControlPort, open_port
from pdstage.errors import PdstageError, PeerError, UsageError
from pdstage.layout.topology import Topology
from tests.fuzz.draw import Draw

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
    body = msgspec.json.encode({"advert": _ADVERT, "ttl_s": 15.0})
    put = b"PUT /v1/adverts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    return [
        put + body,
        b"DELETE /v1/adverts/p0/1/%d HTTP/1.1\r\n\r\n" % (1 << 60),
        b"GET /v1/lookup?instance=p0&dp_rank=0 HTTP/1.1\r\n\r\n",
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
    try:
        adverts = client.read_adverts(data)
    except PeerError as error:
        assert len(str(error)) < 4096
        assert str(client.read_refusal(503, data))
        adverts = []
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


# Messages of any number of frames, through both ports.

_MAX_FRAMES = 16


class _Ports:
    """A stranger that says anything, and a ROUTER that hears it through the native and through the Python port."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.strangers, self.routers, self.ports = [], [], []
        for make in (open_port, ControlPort):
            router = self.context.socket(zmq.ROUTER)
            router.setsockopt(zmq.RCVHWM, 4096)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            stranger = self.context.socket(zmq.DEALER)
            stranger.connect(f"tcp://127.0.0.1:{port}")
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self.ports.append(make(router, bell, threading.Lock(), _MAX_FRAMES))
            self.strangers.append(stranger)
            self.routers.append(router)


@cache
def _ports() -> _Ports:
    return _Ports()


def message_seeds() -> list[bytes]:
    return [b"\x01\x00", b"\x02\x05hello\x00", b"\x00", bytes([40]) + bytes(40)]


_END = b"end of input"


def run_message(data: bytes) -> None:
    """Whole messages of 1 to `_MAX_FRAMES` frames come out as they went in; all others are counted, in order."""
    draw, sent = Draw(data), []
    while not draw.empty and len(sent) < 4:
        n_frames = 1 + draw.below(40)
        sent.append([data[: draw.below(256)] * (1 + draw.below(3)) for _ in range(n_frames)])
    ports = _ports()
    for stranger, port in zip(ports.strangers, ports.ports, strict=True):
        for frames in (*sent, [_END]):
            stranger.send_multipart(frames)
        heard: list[list[bytes]] = []
        n_malformed = 0
        while not heard or heard[-1] != [_END]:
            messages, bad = port.recv(64, 1 << 20)
            heard += [frames for _, frames in messages]
            n_malformed += bad
            if not messages:
                port.wait(1.0, ())
        whole = [frames for frames in sent if len(frames) <= _MAX_FRAMES]
        assert heard == [*whole, [_END]]
        assert n_malformed == len(sent) - len(whole)
