"""What the HTTP side of every process needs: a server that drains, answers in OpenAI's shapes, clients that go away.

Layer 6 (demo). Must not know rooms or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pdstage.demo.serve import api
from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from contextlib import AbstractAsyncContextManager
    from types import FrameType

    from starlette.types import Receive, Scope, Send

    from pdstage.demo.serve.options import Listening

Result = TypeVar("Result")

SERVER_ERROR = "server_error"
MOST_NBYTES = 1 << 20
LINGER_TICKS = 10  # a second: twice as long as between two of the router's looks


class Endpoints(ABC):
    """What every process answers, at the same paths."""

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/stats", self._stats),
                Route("/v1/models", self._models),
                *(Route(path, self._take, methods=["POST"]) for path in api.PATHS),
            ],
            lifespan=self._lifespan,
        )

    @abstractmethod
    def _lifespan(self, app: Starlette) -> AbstractAsyncContextManager[None]: ...

    @abstractmethod
    async def _health(self, request: Request) -> Response: ...

    @abstractmethod
    async def _ready(self, request: Request) -> Response: ...

    @abstractmethod
    async def _stats(self, request: Request) -> Response: ...

    @abstractmethod
    async def _models(self, request: Request) -> Response: ...

    @abstractmethod
    async def _take(self, request: Request) -> Response:
        """A request for a completion."""


class Gone(Exception):
    """The client closed its connection: nobody will read an answer."""


class Draining(uvicorn.Server):
    """On SIGTERM or SIGINT it takes no new request, lets the running ones end, and returns; a second signal hurries.

    For a moment it goes on listening, to refuse in words: whoever connects while a socket closes cannot know whether
    its request was begun.
    """

    is_leaving = False
    _n_ticks = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would send the signal again at the end, so that the process would not exit with 0."""
        self.force_exit = self.should_exit = self.is_leaving
        self.is_leaving = True

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second; true ends the server."""
        self._n_ticks += self.is_leaving
        self.should_exit |= self._n_ticks > LINGER_TICKS
        return await super().on_tick(counter)


def serve(app: Starlette, listening: Listening, told: Callable[[str], None]) -> Draining:
    """Serves until a signal; `told` gets the URL once requests are taken. Raises `UsageError` for a bad address."""
    try:
        taken = socket.create_server((listening.host, listening.port), backlog=2048)
    except OSError as error:
        where = f"{listening.host}:{listening.port}"
        raise UsageError(f"cannot listen at {where}: {error}", remedy="choose another --host or --port") from error
    host, port = taken.getsockname()[:2]
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=round(listening.drain_s), lifespan="on",
        http="h11", loop="asyncio", ws="none", timeout_keep_alive=30,
    )  # fmt: skip
    server = Draining(config)
    app.state.server = server
    app.state.on_started = lambda: told(f"http://{host}:{port}")
    if listening.with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    with taken:
        server.run(sockets=[taken])
    return server


def _end_with_parent() -> None:
    """Whoever started this process holds the other end of its standard input, and lets go of it when it ends."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1024):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def is_leaving(request: Request) -> bool:
    """Whether the process was told to go."""
    server: Draining = request.app.state.server
    return server.is_leaving


def failure(status: int, message: str, *, code: str) -> Response:
    return JSONResponse(api.error(message, SERVER_ERROR, code=code), status_code=status)


def refusal(refused: UsageError) -> Response:
    status = 404 if refused.fields.get("code") == "model_not_found" else 400
    return JSONResponse(api.bad_request(refused), status_code=status)


async def body_of(request: Request) -> Any:  # noqa: ANN401  (whatever JSON holds)
    """Raises `UsageError` for what is no JSON, or too long, `Gone` for a client that went away meanwhile."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_NBYTES:
                raise UsageError("the request's body is too long", remedy=f"send at most {MOST_NBYTES} bytes")
    except ClientDisconnect as error:
        raise Gone from error
    try:
        return json.loads(body)
    except ValueError as error:
        raise UsageError(f"the request's body is no JSON: {error}", remedy="send JSON") from error


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled where the client goes away first: then raises `Gone`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        await end(working, leaving)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels those still running, and waits for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """Server-sent events. `closed` is called in the end, whoever ended it."""

    def __init__(self, events: AsyncIterator[bytes], closed: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._closed()
