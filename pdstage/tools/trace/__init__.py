"""An observer of nodes' events: traces for Perfetto, and where their rooms' time went.

Read `model` (what a trace holds), `tracer` (how a run makes one, in one process or many), `chrome` (the file) and
`steps` (where the time went).
"""

from pdstage.tools.trace.tracer import Tracer, check, load, merge_files, tracing

__all__ = ["Tracer", "check", "load", "merge_files", "tracing"]
