"""Deliberate bugs in what only a node with an engine shows: binding, readiness, released (DESIGN 8 and 11)."""

from __future__ import annotations

from tests.sim.mutants import Mutant

_TRANSFER = "tests/manager/test_transfer.py"

MUTANTS = [
    Mutant(
        "a chunk is gathered before its data exists",
        "11 ready, I5",
        "Node._take_asked",
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
