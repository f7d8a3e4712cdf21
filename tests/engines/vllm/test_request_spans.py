"""A request's transfer as a span of its trace, by OpenTelemetry's own SDK."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm import SamplingParams
from vllm.outputs import CompletionOutput  # noqa: F401  (vLLM's lazy modules, loaded before a request is made)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.engines.vllm.test_connector import BLOCKS, N_TOKENS, blocks_of

if TYPE_CHECKING:
    from tests.engines.vllm.caches import Side
TRACE, ROUTER = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{ROUTER:016x}-01"}
DONE = RequestStatus.FINISHED_LENGTH_CAPPED


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


def request(params: dict[str, Any], name: str = "r", *, traced: bool = True) -> Request:
    given = {"trace_headers": HEADERS} if traced else {}
    made = Request(name, list(range(N_TOKENS)), SamplingParams(max_tokens=1), None, **given)
    made.kv_transfer_params = params
    return made


def prefilled(src: Side, status: RequestStatus = DONE, name: str = "r", **params: Any) -> dict[str, Any] | None:
    """What prefill answers to a request that it has computed."""
    done = request({"do_remote_decode": True, **params}, name)
    src.scheduler.on_new_request(done)
    return finished(src, done, status)


def finished(src: Side, done: Request, status: RequestStatus = DONE) -> dict[str, Any] | None:
    done.num_computed_tokens, done.status = done.num_prompt_tokens, status
    _, params = src.scheduler.request_finished_all_groups(done, tuple(BLOCKS))
    return json.loads(json.dumps(params))


def loading(dst: Side, params: dict[str, Any], **given: Any) -> None:
    wanted = request(params, **given)
    dst.scheduler.get_num_new_matched_tokens(wanted, 16)
    dst.scheduler.update_state_after_alloc(wanted, blocks_of([7, 8, 9], n_cached=1), N_TOKENS - 16)


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
    first, second = (request({"do_remote_decode": True, "transfer_id": "early"}, name) for name in ("0", "1"))
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
    prefilled(src, RequestStatus.FINISHED_ABORTED, "aborted", transfer_id="another")
    assert [(span.name, span.status.is_ok) for span in spans.get_finished_spans()] == [
        ("kv_transfer.receive", False),
        ("kv_transfer.send", False),
    ]


def test_an_engine_that_ends_leaves_none_open_and_a_request_without_a_trace_has_none(src, dst, spans):
    loading(dst, prefilled(src), traced=False)
    dst.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert not spans.get_finished_spans()
    src.scheduler.shutdown()
    assert [told(span)[:2] for span in spans.get_finished_spans()] == [("kv_transfer.send", False)]
