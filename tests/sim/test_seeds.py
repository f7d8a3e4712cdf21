"""A share of the seeds that `make sim` runs, and that seeds do what they did: in other processes, byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pdstage import cli
from pdstage.protocol.leases import Leases
from tests.rows import rows
from tests.sim.run import main, run
from tests.sim.seeds import one_of_many

N_SEEDS, N_DIGESTS, N_BLOCKS = 320, 200, 8
FROZEN = Path(__file__).with_name("digests.txt")
"""What each of 200 seeds does, as a digest of its trace: a change of structure alone keeps all."""


@pytest.mark.full  # `make sim` runs ten times as many
@pytest.mark.parametrize("block", range(N_BLOCKS))
def test_every_invariant_holds_under_every_fault(block: int) -> None:
    """I1 to I16. A failing seed is explained by `pdstage sim --seed N`."""
    for seed in range(block, N_SEEDS, N_BLOCKS):
        run(seed)


def test_every_kind_of_fault_and_every_end_of_a_room_comes() -> None:
    reports = [run(seed) for seed in range(5000, 5060)]
    counts, outcomes = (
        {name for report in reports for name in getattr(report, what)} for what in ("counts", "outcomes")
    )
    faults = {"drop", "twice", "fail", "alter", "crash", "close", "stall", "resume", "cut", "heal", "abort", "idle"}
    assert faults <= counts
    assert {"Success", "Aborted", "DeadlineExceeded", "PeerError", "TransportError"} <= outcomes


def digest(seed: int) -> str:
    """Of every event, message and change of a room's state, with all faults, in order."""
    return hashlib.sha256("\n".join(run(seed, tracing=True).trace).encode()).hexdigest()[:32]


@pytest.mark.parametrize("block", rows(range(N_BLOCKS), full=range(3, N_BLOCKS)))
def test_seeds_do_what_they_did(block: int) -> None:
    """A change of behaviour writes them anew, in a commit that says why: `python -m tests.sim.test_seeds`."""
    was = FROZEN.read_text().splitlines()
    differ = [seed for seed in range(block, N_DIGESTS, N_BLOCKS) if f"{seed} {digest(seed)}" != was[seed]]
    assert not differ, f"seeds {differ} do something else than before: `pdstage sim --seed {differ[0]}` on both sides"


# What is told of a failure.


def test_a_failure_is_shrunk_and_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Leases, "quarantine", Leases.release)
    seed, what = next(told for seed in range(120) if isinstance(told := one_of_many(run, seed), tuple))
    assert main(seed=seed, shrink_s=4.0) == 1
    told = capsys.readouterr().out
    assert f"{what.partition(':')[0]}: " in told
    assert f"pdstage sim --seed {seed} --replay" in told
    assert "deliver frame" in told


def test_the_command_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "pdstage" / "cli.py"))
    assert cli.main(["sim", "--seed", "1"]) == 2
    assert "in a checkout" in capsys.readouterr().err


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{seed} {digest(seed)}\n" for seed in range(N_DIGESTS)))
