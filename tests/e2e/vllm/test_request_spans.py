"""A request through both servers is one trace, with a span of its transfer from each."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e import load
from tests.e2e.servers import wait_until
from tests.e2e.vllm.engines import handed_over, pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

PAIR = pair((1, 128), (1, 128))
TRACE, ROUTER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OURS = {"kv_transfer.send", "kv_transfer.receive"}


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Where spans are exported to, and those that came."""
    came: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told = ExportTraceServiceRequest.FromString(body)
            came.extend(span for of in told.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
        finally:
            server.shutdown()


@pytest.mark.full
def test_one_trace_has_both_ends_of_a_transfer(fleet):
    with collector() as (url, came):
        prefill, decode = fleet.fresh(replace(PAIR.prefill, traces=url), replace(PAIR.decode, traces=url))
        (prompt,) = load.prompts(1, seed=501, shortest=300)

        async def ask() -> load.Answer:
            headers = {"traceparent": f"00-{TRACE}-{ROUTER}-01"}
            limit = aiohttp.ClientTimeout(total=load.DEADLINE_S)
            async with aiohttp.ClientSession(timeout=limit, headers=headers) as session:
                return await handed_over(prefill, decode)(session, prompt)

        answer = asyncio.run(ask())
        assert answer.is_ok, answer.body
        wait_until(lambda: {span.name for span in came} >= OURS, 60)
    spans = {span.name: span for span in came if span.trace_id.hex() == TRACE}
    assert OURS | {"llm_request"} <= spans.keys(), "vLLM's own span of a request is of the same trace"
    assert {spans[name].parent_span_id.hex() for name in OURS} == {ROUTER}
    rooms = {one.value.string_value for name in OURS for one in spans[name].attributes if one.key == "pdstage.room"}
    assert len(rooms) == 1
    assert spans["kv_transfer.send"].start_time_unix_nano < spans["kv_transfer.receive"].end_time_unix_nano
