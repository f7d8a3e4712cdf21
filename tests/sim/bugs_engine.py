"""Deliberate bugs in what only a node with an engine shows: binding, readiness, released (DESIGN 8 and 11)."""

from __future__ import annotations

from tests.sim.mutants import Mutant

_TRANSFER = "tests/manager/test_transfer.py"

MUTANTS = [
    Mutant(
        "a room is opened before its pages are free",
        "11 after, I2",
        "_take_given",
        "            if not done:\n",
        "            if False:\n",
        f"{_TRANSFER}::test_nothing_is_opened_before_after",
    ),
    Mutant(
        "a chunk is gathered before its data exists",
        "11 ready, I5",
        "PrefillNode._take_asked",
        "            elif done:\n",
        "            elif True:\n",
        f"{_TRANSFER}::test_data_is_gathered_only_when_ready",
    ),
    Mutant(
        "poll_many says released at Success",
        "11 released, I2",
        "statuses",
        "return (polled.statuses & 0x7F).view(np.int8), polled.statuses >> np.uint8(7)",
        "return (polled.statuses & 0x7F).view(np.int8), ((polled.statuses & 0x7F) == State.SUCCESS).view(np.uint8)",
        "tests/manager/test_handle.py",
    ),
]
