"""The router: gives each request a room, sends it to a prefill and a decode server, and streams decode's answer.

Layer 6 (demo). Must not know rooms beyond their names. Nothing is tried again once a server has begun with it: only
where one could not be reached, or said that it takes nothing, another pair is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from starlette.responses import JSONResponse, Response

from pdstage.demo.serve import api, web
from pdstage.demo.serve.options import DECODE, PREFILL, RouterOptions
from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.applications import Starlette
    from starlette.requests import Request

log = logging.getLogger("pdstage.demo.serve")

CONNECT_S, CHECK_TIMEOUT_S = 5.0, 5.0
_TRIES = 3
_MISSED_CHECKS = 3


def run(options: RouterOptions, told: Callable[[str], None]) -> int:
    """Routes until a signal; the exit code."""
    web.serve(Router(options).app, options.listening, told)
    return 0


class Failed(Exception):
    """A request came to nothing, and the client is to be told so."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class NotBegun(Failed):
    """A server took nothing of the request: another one may."""

    def __init__(self, peer: Peer, message: str, code: str) -> None:
        super().__init__(503, message, code)
        self.peer = peer


@dataclass(slots=True, eq=False)
class Peer:
    """A server. `told` is what it says of itself when it is ready; `n_running` the requests it has from here."""

    role: str
    url: str
    is_up: bool = False
    told: dict[str, Any] = field(default_factory=dict)
    n_running: int = 0
    n_missed: int = 0
    why_down: str = ""

    def down(self, why: str) -> None:
        """Left out, until it says that it is ready."""
        if why != self.why_down:
            log.warning("%s server %s is left out: %s", self.role, self.url, why)
        self.is_up, self.why_down = False, why

    def up(self, told: dict[str, Any]) -> None:
        self.told, self.is_up, self.why_down = told, True, ""


class Router(web.Endpoints):
    """Its endpoints, and the servers behind it."""

    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self.peers = [Peer(PREFILL, url) for url in options.prefill] + [Peer(DECODE, url) for url in options.decode]
        self._ending: set[asyncio.Task[Any]] = set()
        self.app = self.application()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # A connection for each request: one that is kept may close under a request, and nobody knows how far that came.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(self._options.listening.timeout_s, connect=CONNECT_S)
        async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as self._client:
            await self._check_all()  # who hears that it has started may send requests at once
            checking = asyncio.create_task(self._check_for_ever())
            app.state.on_started()
            yield
            await web.end(checking, *self._ending)

    # The servers.

    async def _check_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._options.check_s)
            await self._check_all()

    async def _check_all(self) -> None:
        await asyncio.gather(*(self._check(peer) for peer in self.peers))

    async def _check(self, peer: Peer) -> None:
        try:
            said = await self._client.get(f"{peer.url}/ready", timeout=CHECK_TIMEOUT_S)
            told = said.json() if said.status_code == 200 else {}
        except httpx.TimeoutException as late:  # it may be busy: once is no proof
            peer.n_missed += 1
            if peer.n_missed >= _MISSED_CHECKS:
                peer.down(repr(late))
            return
        except (httpx.HTTPError, ValueError) as error:
            peer.down(repr(error))
            return
        peer.n_missed = 0
        if told.get("role") != peer.role:
            peer.down(f"it says {said.text[:200]!r}")
        elif (served := self._served()) is not None and _served(told) != served and not peer.is_up:
            peer.down(f"it serves {_served(told)}, the others {served}")
        else:
            peer.up(told)

    def _served(self) -> tuple[Any, Any] | None:
        return next((_served(peer.told) for peer in self.peers if peer.is_up), None)

    def _pick(self, role: str, but: set[Peer]) -> Peer:
        """The one that has the fewest requests from here."""
        able = [peer for peer in self.peers if peer.role == role and peer.is_up and peer not in but]
        if not able:
            raise Failed(503, f"no {role} server is ready", "unavailable")
        return min(able, key=lambda peer: peer.n_running)

    # What people look at.

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        lacking = [role for role in (PREFILL, DECODE) if not any(p.is_up for p in self.peers if p.role == role)]
        if web.is_leaving(request):
            return web.failure(503, "the router is going", code="draining")
        if lacking:
            return web.failure(503, f"no {' and no '.join(lacking)} server is ready", code="unavailable")
        return JSONResponse({"role": "router", "servers": self._servers()})

    async def _stats(self, request: Request) -> Response:
        return JSONResponse({"servers": self._servers()})

    def _servers(self) -> list[dict[str, Any]]:
        return [{"role": p.role, "url": p.url, "up": p.is_up, "running": p.n_running} for p in self.peers]

    async def _models(self, request: Request) -> Response:
        served = self._served()
        if served is None:
            return web.failure(503, "no server is ready", code="unavailable")
        return JSONResponse(api.models(served[0]))

    # Requests.

    async def _take(self, request: Request) -> Response:
        if web.is_leaving(request):
            return web.failure(503, "the router is going", code="draining")
        try:
            body = await web.body_of(request)
            served = self._served()
            if served is None:
                return web.failure(503, "no server is ready", code="unavailable")
            asked = api.parse(api.PATHS[request.url.path], body, api.Limits(*served))
            return await self._answer(request, body, asked)
        except UsageError as refused:
            return web.refusal(refused)
        except Failed as failed:
            return web.failure(failed.status, str(failed), code=failed.code)
        except web.Gone:
            return Response(status_code=499)

    async def _answer(self, request: Request, body: dict[str, Any], asked: api.Asked) -> Response:
        busy: set[Peer] = set()
        for _ in range(_TRIES - 1):
            try:
                return await self._attempt(request, body, asked, busy)
            except NotBegun as refused:
                busy.add(refused.peer)
        return await self._attempt(request, body, asked, busy)

    async def _attempt(self, request: Request, body: dict[str, Any], asked: api.Asked, busy: set[Peer]) -> Response:
        pair = self._pick(PREFILL, busy), self._pick(DECODE, busy)
        exchange = Exchange(self._client, request.url.path, body, *pair, ending=self._ending)
        good = streams = False
        try:
            async with asyncio.timeout(self._options.listening.timeout_s):
                said = await web.unless_gone(request, exchange.answer())
                if asked.stream and said.status_code == 200:
                    streams = True
                    return web.Events(exchange.relay(said), exchange.close)
                content = await web.unless_gone(request, _read(said))
            good = said.status_code == 200
            return Response(content, said.status_code, media_type="application/json")
        except TimeoutError:
            raise Failed(504, "the answer took too long", "timeout") from None
        finally:
            if not streams:
                exchange.is_good = good
                await exchange.close()


class Exchange:
    """One request with both servers. `is_good`: decode's answer came to its end, so prefill may end in peace."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        path: str,
        body: dict[str, Any],
        prefill: Peer,
        decode: Peer,
        *,
        ending: set[asyncio.Task[Any]],
    ) -> None:
        self._client, self._path, self._body = client, path, body
        self._room = {"room": secrets.token_hex(12), "prefill": prefill.told.get("prefill", "")}
        self._prefill, self._decode = prefill, decode
        self._ending = ending
        self.is_good = False
        prefill.n_running += 1
        decode.n_running += 1
        self._opening = asyncio.create_task(self._send(decode))
        self._prefilling = asyncio.create_task(self._send_prefill())

    async def answer(self) -> httpx.Response:
        """Decode's, of which the body is still to come. Raises `Failed` if prefill fails before."""
        await asyncio.wait((self._opening, self._prefilling), return_when=asyncio.FIRST_COMPLETED)
        if not self._opening.done():
            self._prefilling.result()
        return await self._opening

    async def relay(self, said: httpx.Response) -> AsyncIterator[bytes]:
        """Decode's events, whole ones only; where they break off, an error is the last one."""
        held, why = b"", "the decode server's answer broke off"
        try:
            async for part in said.aiter_raw():
                *events, held = (held + part).split(b"\n\n")
                for one in events:
                    self.is_good = one + b"\n\n" == api.DONE
                    if one.startswith(b'data: {"error"'):
                        why = ""
                    yield one + b"\n\n"
        except httpx.HTTPError as error:
            why = f"the decode server failed: {error!r}"
        if not self.is_good and why:
            yield api.event(api.error(why, web.SERVER_ERROR, code="room_failed"))

    async def close(self) -> None:
        """Ends what still runs: closed connections tell the servers to give the room up."""
        if self.is_good:
            self._ending.add(self._prefilling)
            self._prefilling.add_done_callback(_ended(self._ending))
        else:
            await web.end(self._prefilling)
        if self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None:
            await self._opening.result().aclose()
        await web.end(self._opening)
        self._decode.n_running -= 1

    async def _send_prefill(self) -> None:
        try:
            said = await self._send(self._prefill)
            try:
                content = await _read(said)
            finally:
                await said.aclose()
            if said.status_code != 200:
                raise Failed(502, f"the prefill server failed: {content[:500].decode(errors='replace')}", "room_failed")
        finally:
            self._prefill.n_running -= 1

    async def _send(self, peer: Peer) -> httpx.Response:
        body = {**self._body, api.ROUTED: {**self._room, "process": peer.told.get("process", "")}}
        request = self._client.build_request("POST", peer.url + self._path, json=body)
        try:
            said = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            peer.down(repr(error))
            raise NotBegun(peer, f"the {peer.role} server cannot be reached", "unavailable") from error
        except httpx.HTTPError as error:
            peer.down(repr(error))
            raise Failed(502, f"the {peer.role} server failed: {error!r}", "room_failed") from error
        if said.status_code == 503:
            content = await _read(said)
            await said.aclose()
            raise NotBegun(peer, content[:500].decode(errors="replace"), "unavailable")
        return said


async def _read(said: httpx.Response) -> bytes:
    try:
        return await said.aread()
    except httpx.HTTPError as error:
        raise Failed(502, f"the server's answer broke off: {error!r}", "room_failed") from error


def _ended(ending: set[asyncio.Task[Any]]) -> Callable[[asyncio.Task[Any]], None]:
    def ended(task: asyncio.Task[Any]) -> None:
        ending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.info("prefill ended after its answer: %s", task.exception())

    return ended


def _served(told: dict[str, Any]) -> tuple[Any, Any]:
    return told.get("model"), told.get("max_model_len")
