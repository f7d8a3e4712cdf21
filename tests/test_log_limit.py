"""What of many warnings of peers reaches the log."""

from __future__ import annotations

from pdstage.log_limit import AGAIN_S, MAX_A_PEER, LogLimit


def test_the_same_is_said_once_a_minute() -> None:
    said = LogLimit()
    assert said.due("a", "malformed", 0.0) == "malformed"
    assert said.due("a", "malformed", AGAIN_S - 1) == ""
    assert said.due("b", "malformed", AGAIN_S - 1) == "malformed"
    assert said.due("a", "malformed", AGAIN_S) == "malformed"
    assert said.due("a", "malformed", AGAIN_S + 1) == ""


def test_a_peer_with_ever_new_faults_is_said_to_have_more() -> None:
    said = LogLimit()
    texts = [said.due("a", f"fault {n}", 0.0) for n in range(1000)]
    assert texts[: MAX_A_PEER - 1] == [f"fault {n}" for n in range(MAX_A_PEER - 1)]
    assert texts[MAX_A_PEER - 1] == f"fault {MAX_A_PEER - 1}; more about it is left out for 60 s"
    assert not any(texts[MAX_A_PEER:])
    assert said.due("b", "fault", 0.0) == "fault"
    assert said.due("a", "fault 0", AGAIN_S) == "fault 0"


def test_it_remembers_so_many_peers_only() -> None:
    said = LogLimit()
    for n in range(5000):
        said.due(f"10.0.{n // 256}.{n % 256}", "refused", float(n) / 1000)
    assert len(said._windows) <= 1024
