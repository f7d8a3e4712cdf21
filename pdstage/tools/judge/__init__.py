"""Judges a real run: replays the nodes' journals against the state tables and the invariants.

    nodes = [PrefillNode(..., journal=folder), DecodeNode(..., journal=folder)]  # or PDSTAGE_NODE, for an engine's
    verdict = judge([folder])  # or on the command line: pdstage judge FOLDER

Read `read` (the files), `replay` (one node's lines, in order), `arrivals` (what a room needs, and what arrived), `lane`
(which leases share bytes), `across` (both ends of a session) and `verdict` (the result). The rules are written
independently here: only the state tables are shared with the cores.
"""

from pdstage.tools.judge.verdict import Verdict, judge

__all__ = ["Verdict", "judge"]
