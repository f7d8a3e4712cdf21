"""Spans for OpenTelemetry: one for each room on each side, and below it one for each stage of a chunk.

The application's provider, which the SDK configures, exports the spans.

Names and attributes follow OpenTelemetry's conventions: dots between words, units in words. Source: the
opentelemetry-api package.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from pdstage import State
from pdstage.errors import UsageError
from pdstage.manager.observer import RoomBound, RoomEnded, RoomOpened, RoomReleased, StageOver
from pdstage.protocol.room import room_key
from pdstage.tools.trace.model import room_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, TracerProvider

    from pdstage.manager.observer import Event, Origin
    from pdstage.protocol.room import RoomId

NAME = "pdstage"


def room_context(room: RoomId) -> SpanContext:
    """The context that both sides' spans of a room link to: an unrecorded span derived from the room's name alone.

    A router may link the request's span to it too; its trace id finds them all.
    """
    from opentelemetry.trace import SpanContext, TraceFlags  # noqa: PLC0415

    digest = hashlib.blake2b(room_key(room), digest_size=24, person=b"pdstage room").digest()
    return SpanContext(
        int.from_bytes(digest[:16]), int.from_bytes(digest[16:]), is_remote=True, trace_flags=TraceFlags(0)
    )  # fmt: skip


class Spans:
    """An `Observer` that makes spans.

    `provider`: None is the application's global one. `parent` returns the context for a room's span, such as the
    request's, which the application knows. If it returns None, or without `parent`, the span starts a new trace. It is
    called on the node's thread. Raises `UsageError` without opentelemetry.
    """

    def __init__(
        self, provider: TracerProvider | None = None, parent: Callable[[RoomId], Context | None] | None = None
    ) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415
        except ModuleNotFoundError as missing:
            raise UsageError(
                f"spans need {missing.name}", remedy="pip install 'pdstage[trace]'", field="opentelemetry"
            ) from missing
        self._api = trace
        self._tracer = trace.get_tracer(NAME, tracer_provider=provider)
        self._parent = parent
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._spans: dict[tuple[int, RoomId], tuple[int, Span]] = {}

    def observe(self, origin: Origin, event: Event) -> None:
        key = origin.incarnation, event.room
        match event:
            case RoomOpened():
                self._spans[key] = event.number, self._opened(origin, event)
            case RoomBound():
                self._of(key, event.number).add_event("bound", timestamp=self._ns(event.at))
            case RoomEnded():
                self._ended(self._of(key, event.number), event)
            case RoomReleased():
                if key in self._spans and self._spans[key][0] == event.number:
                    del self._spans[key]
            case StageOver():
                self._over(self._spans.get(key), event)

    def _ns(self, at: float) -> int:
        return round(at * 1e9) + self._offset_ns

    def _of(self, key: tuple[int, RoomId], number: int) -> Span:
        """The room's span; a non-recording span if its name belongs to another room by now."""
        held = self._spans.get(key)
        return held[1] if held is not None and held[0] == number else self._api.INVALID_SPAN

    def _opened(self, origin: Origin, event: RoomOpened) -> Span:
        attributes: dict[str, Any] = {
            "pdstage.room.id": room_text(event.room), "pdstage.role": origin.role, "pdstage.rank": origin.rank,
            "pdstage.incarnation": f"{origin.incarnation:016x}",
        }  # fmt: skip
        return self._tracer.start_span(
            f"pdstage.room {origin.role}", self._parent(event.room) if self._parent is not None else None,
            attributes=attributes, links=[self._api.Link(room_context(event.room))], start_time=self._ns(event.at),
        )  # fmt: skip

    def _ended(self, span: Span, event: RoomEnded) -> None:
        if event.moved_at is not None:
            span.add_event("first chunk", timestamp=self._ns(event.moved_at))
        span.set_attribute("pdstage.room.state", event.state.name.lower())
        if event.state is State.FAILED:
            span.set_attribute("error.type", event.error)
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, event.reason))
        span.end(self._ns(event.ended_at))

    def _over(self, room: tuple[int, Span] | None, event: StageOver) -> None:
        attributes: dict[str, Any] = {
            "pdstage.room.id": room_text(event.room), "pdstage.chunk": event.chunk, "pdstage.peer": event.peer,
            "pdstage.bytes": event.nbytes,
        }  # fmt: skip
        if event.lane is not None:
            attributes["pdstage.lane"] = event.lane
        context = self._api.set_span_in_context(room[1]) if room is not None else None
        span = self._tracer.start_span(
            f"pdstage.{event.kind}", context, attributes=attributes, start_time=self._ns(event.began_at)
        )
        if event.error:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, event.error))
        span.end(self._ns(event.ended_at))
