"""Spans: one a room and side, linked through the room's name, stages below them, and times of day."""

from __future__ import annotations

import sys
import time

import pytest

from pdstage.errors import UsageError
from pdstage.tools.trace.otel import Spans, room_context
from tests.trace.conftest import Run

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Exported:
    """A provider a side, as in processes, and what they exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, *names):
        return [span for span in self.exporter.get_finished_spans() if span.name.removeprefix("pdstage.") in names]

    def rooms(self):
        return self.named("room prefill", "room decode")


@pytest.fixture
def exported():
    return Exported()


def spanned(site, exported, **how):
    run = Run(site)
    for node in run.nodes:
        node.observed._observers = [Spans(exported.provider, **how)]
    return run


def test_a_rooms_spans_on_both_sides_link_to_the_same(site, exported):
    began_ns = time.time_ns()
    run = spanned(site, exported)
    run.move("one")
    run.move(2)
    ended_ns = time.time_ns()
    prefill, decode = exported.named("room prefill"), exported.named("room decode")
    assert [len(prefill), len(decode)] == [4, 2]
    for room, text in (("one", "one"), (2, "2")):
        mine = [s for s in (*prefill, *decode) if s.attributes["pdstage.room.id"] == text]
        assert len(mine) == 3
        assert {link.context.trace_id for span in mine for link in span.links} == {room_context(room).trace_id}
        assert {span.attributes["pdstage.room.state"] for span in mine} == {"success"}
    stages = exported.named("lease_wait", "gather", "write", "scatter")
    assert len(stages) == 2 * 2 * 3 * 4
    rooms = {span.context.span_id: span for span in (*prefill, *decode)}
    for stage in stages:
        room = rooms[stage.parent.span_id]
        assert stage.context.trace_id == room.context.trace_id
        assert stage.attributes["pdstage.room.id"] == room.attributes["pdstage.room.id"]
        assert room.attributes["pdstage.role"] == ("decode" if stage.name.endswith("scatter") else "prefill")
        assert room.start_time <= stage.start_time <= stage.end_time
    slack_ns = 50_000_000  # the two clocks are read one after the other
    for span in (*rooms.values(), *stages):
        assert began_ns - slack_ns <= span.start_time <= span.end_time <= ended_ns + slack_ns


def test_a_failed_room_is_an_error_with_its_reason_and_nothing_is_kept_of_rooms_that_are_over(site, exported):
    run = spanned(site, exported)
    for _ in range(3):
        run.move("again")
    assert {span.status.status_code for span in exported.rooms()} == {api.StatusCode.UNSET}
    exported.exporter.clear()
    run.fail("gone")
    assert len(exported.rooms()) == 3
    for span in exported.rooms():
        assert span.status.status_code is api.StatusCode.ERROR
        assert "no longer wanted" in span.status.description
        assert span.attributes["error.type"] == "Aborted"
    for node in run.nodes:
        (spans,) = node.observed._observers
        assert spans._spans == {}


def test_an_application_says_below_which_span_rooms_belong(site, exported):
    request = exported.provider.get_tracer("app").start_span("request")
    run = spanned(site, exported, parent=lambda room: api.set_span_in_context(request) if room == "r" else None)
    run.move("r")
    run.move("other")
    for span in exported.rooms():
        mine = span.attributes["pdstage.room.id"] == "r"
        assert (span.parent is not None and span.parent.span_id == request.context.span_id) == mine
        assert (span.context.trace_id == request.context.trace_id) == mine


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(UsageError, match=r"pdstage\[trace\]"):
        Spans()
