"""A request's transfer as a span of its trace, by OpenTelemetry's own SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.engines.vllm.test_connector import N_TOKENS, allocate, finished, request

if TYPE_CHECKING:
    from tests.engines.vllm.caches import Side
TRACE, ROUTER = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{ROUTER:016x}-01"}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What a process exports: it has one provider, for good."""
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def prefilled(
    src: Side, name: str = "r", status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED, **params: Any
) -> Any:
    done = request({"do_remote_decode": True, **params}, name=name, headers=HEADERS)
    src.scheduler.on_new_request(done)
    return finished(src, done, status)


def loading(dst: Side, params: dict[str, Any], headers: Any = HEADERS) -> None:
    wanted = request(params, name="r", headers=headers)
    dst.scheduler.get_num_new_matched_tokens(wanted, 16)
    allocate(dst, wanted, N_TOKENS - 16, n_cached=1)


def told(span: ReadableSpan) -> tuple[str, bool, dict[str, Any]]:
    """Its name, whether all was well, its attributes; it is of the router's trace."""
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (TRACE, ROUTER)
    return span.name, span.status.is_ok, dict(span.attributes or {})


def test_both_engines_are_in_the_router_s_trace(src, dst, spans):
    params = prefilled(src)
    loading(dst, params)
    assert not spans.get_finished_spans()
    dst.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    src.scheduler.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    received, sent = spans.get_finished_spans()
    of = {"gen_ai.request.id": "r", "pdstage.room": params["remote_room"]}
    assert told(received) == ("kv_transfer.receive", True, of | {"pdstage.tokens": N_TOKENS - 16})
    assert told(sent) == ("kv_transfer.send", True, of)
    assert [(one.name, dict(one.attributes)) for one in sent.events] == [("computed", {"pdstage.tokens": N_TOKENS})]


def test_a_transfer_while_prefill_works_begins_with_its_request(src, spans):
    """One span of all samples, as there is one transfer; `computed` says from when on decode waits for it alone."""
    first, second = (
        request({"do_remote_decode": True, "transfer_id": "early"}, name=name, headers=HEADERS) for name in ("0", "1")
    )
    for one in (first, second):
        src.scheduler.on_new_request(one)
    for one in (first, second):
        finished(src, one)
    src.scheduler.update_connector_output(KVConnectorOutput(finished_sending={"0", "1"}))
    (sent,) = spans.get_finished_spans()
    assert told(sent) == ("kv_transfer.send", True, {"gen_ai.request.id": "0", "pdstage.room": "early"})
    assert sent.start_time <= sent.events[0].timestamp <= sent.end_time


def test_what_failed_is_an_error(src, dst, spans):
    loading(dst, prefilled(src))
    dst.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    prefilled(src, "aborted", RequestStatus.FINISHED_ABORTED, transfer_id="another")
    assert [(span.name, span.status.is_ok) for span in spans.get_finished_spans()] == [
        ("kv_transfer.receive", False),
        ("kv_transfer.send", False),
    ]


def test_an_engine_that_ends_leaves_none_open_and_a_request_without_a_trace_has_none(src, dst, spans):
    loading(dst, prefilled(src), headers=None)
    dst.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert not spans.get_finished_spans()
    src.scheduler.shutdown()
    assert [told(span)[:2] for span in spans.get_finished_spans()] == [("kv_transfer.send", False)]
