"""Judges a real run by the model: what nodes wrote down, replayed against the state tables and the invariants.

    nodes = [PrefillNode(..., journal=folder), DecodeNode(..., journal=folder)]  # or PDSTAGE_NODE, for an engine's
    verdict = judge([folder])  # or on the command line: pdstage judge FOLDER

Read `read` (the files), `replay` (one node's lines, in their order), `arrivals` (what a room needs, and what came),
`lane` (which leases share bytes) and `across` (both ends of a session). The rules are written anew here, and share no
code with the cores they judge but the state tables.
"""

from pdstage.tools.judge.verdict import Verdict, judge

__all__ = ["Verdict", "judge"]
