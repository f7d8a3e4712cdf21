"""What a node's observers can make of its events: traces for Perfetto, pictures of them, spans for OpenTelemetry.

Read `model` (what a trace holds), `tracer` (how a run makes one, in one process or many), `chrome` (the file), `plot`
(the picture) and `otel` (spans). Importing this imports neither matplotlib nor opentelemetry.
"""

from pdstage.tools.trace.tracer import Tracer, check, load, merge_files, tracing

__all__ = ["Tracer", "check", "load", "merge_files", "tracing"]
