"""SGLang's bootstrap server with pdstage's directory in it: one address for both.

Ranks register with SGLang as with any backend, and publish their adverts for pdstage peers at the same port.
"""

from __future__ import annotations

import time

from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from pdstage.control import directory_api
from pdstage.control.directory import Directory


class PdStageKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Paths below /v1/ are pdstage's (`pdstage.control.directory_api`); all others are SGLang's."""

    def __init__(self, host: str, port: int) -> None:
        self.directory = Directory(time.monotonic)
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_route("*", "/v1/{rest:.*}", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        target, data = str(request.rel_url), await request.read()
        status, body = directory_api.answer(self.directory, request.method, target, data)
        return web.Response(status=status, body=body, content_type="application/json")
