"""A span of each request's transfer, in the trace that the request belongs to.

A router sends `traceparent` (W3C Trace Context) to both engines, and vLLM exports spans to its
`--otlp-traces-endpoint`. One trace then has the router's span, vLLM's `llm_request` of each engine, and these. A
request without a trace has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from opentelemetry.trace import StatusCode, get_tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Collection

    from opentelemetry.trace import Span
    from vllm.v1.request import Request

    Transfer = Literal["kv_transfer.send", "kv_transfer.receive"]

_TRACER = get_tracer("pdstage")
_CONTEXT = TraceContextTextMapPropagator()


class RequestSpans:
    """The open spans of one scheduler."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Transfer, str], Span] = {}

    def begin(self, transfer: Transfer, request: Request, room: str, n_tokens: int | None = None) -> None:
        """Begins the span of `request`, which is sent, or which receives `n_tokens`."""
        if not request.trace_headers:
            return
        attributes: dict[str, str | int] = {"gen_ai.request.id": request.request_id, "pdstage.room": room}
        if n_tokens is not None:
            attributes["pdstage.tokens"] = n_tokens
        parent = _CONTEXT.extract(request.trace_headers)
        self._begun[transfer, request.request_id] = _TRACER.start_span(transfer, parent, attributes=attributes)

    def computed(self, request_id: str, n_tokens: int) -> None:
        """Prefill has computed all that it sends: from now on decode waits only for the transfer."""
        span = self._begun.get(("kv_transfer.send", request_id))
        if span is not None:
            span.add_event("computed", {"pdstage.tokens": n_tokens})

    def end(self, transfer: Transfer, request_ids: Collection[str], failed: Collection[str] = ()) -> None:
        """Ends the spans of `request_ids`; the transfers of `failed` failed."""
        for request_id in request_ids if self._begun else ():
            span = self._begun.pop((transfer, request_id), None)
            if span is not None:
                if request_id in failed:
                    span.set_status(StatusCode.ERROR)
                span.end()

    def close(self) -> None:
        """Ends all open spans, since the engine ends."""
        for transfer, request_id in [*self._begun]:
            self.end(transfer, {request_id}, {request_id})
