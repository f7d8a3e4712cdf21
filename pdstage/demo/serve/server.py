"""A prefill or decode server: the HTTP side of its scheduler.

Layer 6 (demo). Must not know how rooms or models work. It takes the requests that the router sends: OpenAI's, with the
room's name in the field `pdstage`. A prefill server answers when all of the room was moved, a decode server with the
completion itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import JSONResponse, Response

from pdstage.demo.serve import api, web
from pdstage.demo.serve.compute import make_ranks
from pdstage.demo.serve.decode import DecodeScheduler
from pdstage.demo.serve.options import PREFILL
from pdstage.demo.serve.prefill import PrefillScheduler
from pdstage.demo.serve.scheduler import Ended, Job, Overloaded, Piece
from pdstage.demo.serve.text import Growing
from pdstage.errors import PdstageError, UsageError
from pdstage.trace import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.applications import Starlette
    from starlette.requests import Request

    from pdstage.demo.serve.options import ServerOptions
    from pdstage.demo.serve.scheduler import Event, Scheduler


class Routed(NamedTuple):
    """The router's part of a request: the room, the directory of the prefill server, and whom it takes this one for."""

    room: str
    prefill: str
    process: str


def run(options: ServerOptions, told: Callable[[str], None]) -> int:
    """Serves until a signal; the exit code. `told` gets the URL once the server is ready."""
    role = PrefillScheduler if options.role == PREFILL else DecodeScheduler
    with tracing(options.trace) as observers:
        scheduler = role(options, make_ranks(options), observers)
        web.serve(Server(options, scheduler).app, options.listening, told)
    return 1 if scheduler.failure is not None else 0


class Server(web.Endpoints):
    """Its endpoints. `process` is another in each process's life, so that nobody takes one for its predecessor."""

    def __init__(self, options: ServerOptions, scheduler: Scheduler) -> None:
        self._options, self._scheduler = options, scheduler
        self._limits = api.Limits(options.model_name, options.max_model_len)
        self.process = secrets.token_hex(8)
        answer = self._prefill if options.role == PREFILL else self._decode
        self._answer = answer
        self.app = self.application()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def failed() -> None:
            loop.call_soon_threadsafe(setattr, app.state.server, "should_exit", True)

        self._scheduler.start(failed)
        app.state.on_started()
        yield
        await asyncio.to_thread(self._scheduler.stop)

    # What people and the router look at.

    async def _health(self, request: Request) -> Response:
        if self._scheduler.failure is not None:
            return web.failure(503, f"the scheduler failed: {self._scheduler.failure!r}", code="failed")
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if web.is_leaving(request):
            return web.failure(503, "the server is going", code="draining")
        told = {"role": self._options.role, "process": self.process, "model": self._options.model_name}
        if isinstance(self._scheduler, PrefillScheduler):
            told["prefill"] = self._scheduler.address
        return JSONResponse({**told, "max_model_len": self._options.max_model_len})

    async def _stats(self, request: Request) -> Response:
        return JSONResponse(self._scheduler.status())

    async def _models(self, request: Request) -> Response:
        return JSONResponse(api.models(self._options.model_name))

    # Requests.

    async def _take(self, request: Request) -> Response:
        try:
            body = await web.body_of(request)
            asked = api.parse(api.PATHS[request.url.path], body, self._limits, also=api.ROUTED)
            routed = _routed(body)
        except UsageError as refused:
            return web.refusal(refused)
        except web.Gone:
            return Response(status_code=499)
        if web.is_leaving(request) or self._scheduler.failure is not None:
            return web.failure(503, "the server is going", code="draining")
        if routed.process != self.process:
            return web.failure(503, "this server started anew", code="restarted")
        heard: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        job = Job(
            routed.room, asked, lambda told: _tell(loop, heard, told), routed.prefill, text=Growing(asked.stop)
        )  # fmt: skip
        self._scheduler.submit(job)
        try:
            return await self._answer(request, job, heard)
        except web.Gone:
            self._scheduler.cancel(job)
            return Response(status_code=499)

    async def _prefill(self, request: Request, job: Job, heard: asyncio.Queue[Event]) -> Response:
        told = await web.unless_gone(request, heard.get())
        if isinstance(told, Ended) and told.error is not None:
            return _failed(told.error)
        return JSONResponse({"room": job.key})

    async def _decode(self, request: Request, job: Job, heard: asyncio.Queue[Event]) -> Response:
        """The status is known with the first token: a room that fails before is an error, not a stream."""
        told = await web.unless_gone(request, heard.get())
        if isinstance(told, Ended) and told.error is not None:
            return _failed(told.error)
        shape = api.Shape(job.asked, job.key, self._options.model_name)
        if job.asked.stream:
            return web.Events(_events(shape, told, heard), self._closed(job))
        text, n_tokens = "", 0
        while isinstance(told, Piece):
            text, n_tokens = text + told.text, n_tokens + told.n_tokens
            told = await web.unless_gone(request, heard.get())
        if told.error is not None:
            return _failed(told.error)
        return JSONResponse(shape.whole(text, told.reason, n_tokens))

    def _closed(self, job: Job) -> Callable[[], Any]:
        async def closed() -> None:
            self._scheduler.cancel(job)  # of a job that ended, this changes nothing

        return closed


def _tell(loop: asyncio.AbstractEventLoop, heard: asyncio.Queue[Event], told: Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(heard.put_nowait, told)


async def _events(shape: api.Shape, told: Event, heard: asyncio.Queue[Event]) -> AsyncIterator[bytes]:
    n_tokens = 0
    for chunk in shape.first():
        yield chunk
    while isinstance(told, Piece):
        n_tokens += told.n_tokens
        if told.text:
            yield shape.more(told.text)
        told = await heard.get()
    if told.error is not None:
        yield api.event(api.error(str(told.error), web.SERVER_ERROR, code="room_failed"))
        return
    for chunk in shape.last(told.reason, n_tokens):
        yield chunk


def _failed(error: PdstageError) -> Response:
    if isinstance(error, Overloaded):
        return web.failure(503, str(error), code="overloaded")
    return web.failure(502, str(error), code="room_failed")


def _routed(body: dict[str, Any]) -> Routed:
    given = body.get(api.ROUTED)
    if not isinstance(given, dict) or not all(isinstance(given.get(name), str) for name in Routed._fields):
        remedy = "send requests to the router"
        raise UsageError("this server does one half of a request only", remedy=remedy, field=api.ROUTED)
    return Routed(*(given[name] for name in Routed._fields))
