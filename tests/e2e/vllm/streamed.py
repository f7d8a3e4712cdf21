"""A stand-in for what 0.33's server does and 0.32's does not: `kv_transfer_params` in a stream's last chunk.

`python streamed.py URL --port N` serves `/v1/completions` and asks the server at URL without a stream. Where a stream
was asked for, the answer is streamed as one chunk. There vLLM's disagg_proxy_multiturn.py finds what decode keeps.
"""

from __future__ import annotations

import argparse

import aiohttp
from aiohttp import web

SERVER = web.AppKey("server", aiohttp.ClientSession)


async def completions(request: web.Request) -> web.Response:
    told = await request.json()
    streams = told.pop("stream", False)
    told.pop("stream_options", None)
    async with request.app[SERVER].post("/v1/completions", json=told) as response:
        body = await response.text()
        if not streams or response.status != 200:
            return web.Response(text=body, status=response.status, content_type="application/json")
    return web.Response(text=f"data: {body}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


async def health(_: web.Request) -> web.Response:
    return web.Response()


def app(url: str) -> web.Application:
    made = web.Application()

    async def session(app: web.Application):
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout()) as app[SERVER]:
            yield

    made.cleanup_ctx.append(session)
    made.router.add_post("/v1/completions", completions)
    made.router.add_get("/health", health)
    return made


if __name__ == "__main__":
    told = argparse.ArgumentParser()
    told.add_argument("url")
    told.add_argument("--port", type=int, required=True)
    given = told.parse_args()
    web.run_app(app(given.url), host="127.0.0.1", port=given.port, print=None)
