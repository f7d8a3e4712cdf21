"""An observer of nodes' events: traces for Perfetto, and pictures of them.

Read `model` (a trace's content), `tracer` (how a run makes one, in one process or many), `chrome` (the file), `plot`
(the picture) and `steps` (where the time went). Importing this does not import matplotlib.
"""

from pdstage.tools.trace.tracer import Tracer, check, load, merge_files, tracing

__all__ = ["Tracer", "check", "load", "merge_files", "tracing"]
