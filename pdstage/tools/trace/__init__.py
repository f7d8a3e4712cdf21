"""Observers of a node's events: traces for Perfetto, pictures of them, spans for OpenTelemetry.

Read `model` (a trace's content), `tracer` (how a run makes one, in one process or many), `chrome` (the file), `plot`
(the picture), `steps` (where the time went) and `otel` (spans). Importing this imports neither matplotlib nor
opentelemetry.
"""

from pdstage.tools.trace.tracer import Tracer, check, load, merge_files, tracing

__all__ = ["Tracer", "check", "load", "merge_files", "tracing"]
