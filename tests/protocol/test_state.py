"""The tables themselves: what they say of every state and event, and what becomes of a move that none has."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from pdstage.protocol import state as states
from pdstage.protocol.state import CHUNK, DESTINATION, LEASE, ROOM, WRITER, LeaseEvent, LeasePhase, Machine

MACHINES = {machine.name: machine for machine in (ROOM, DESTINATION, CHUNK, WRITER, LEASE)}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_state_can_be_reached_and_every_way_leads_to_a_state(machine: Machine) -> None:
    start, kind = next(iter(machine.rows)), type(next(iter(machine.rows)))
    reached, new = {start}, [start]
    while new:
        ways = {after for after in machine.rows.get(new.pop(), {}).values() if after is not None} - reached
        reached |= ways
        new += ways
    assert reached == set(kind)


def test_a_move_that_no_table_has_is_an_error_here_and_a_line_of_the_log_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease = SimpleNamespace(phase=LeasePhase.LANDED)
    with pytest.raises(AssertionError, match="lease: QUARANTINE in LANDED"):
        LEASE.move(lease, LeaseEvent.QUARANTINE)
    monkeypatch.setattr(states, "strict", False)
    with caplog.at_level(logging.ERROR, "pdstage.protocol.state"):
        assert not LEASE.move(lease, LeaseEvent.QUARANTINE)
    assert lease.phase is LeasePhase.LANDED
    assert "lease: QUARANTINE in LANDED, which no table has" in caplog.text
