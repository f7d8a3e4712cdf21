"""What a rank's node does is among SGLang's own metrics, as they are scraped."""

from __future__ import annotations

from pdstage.control.bootstrap import BootstrapServer, client_of
from pdstage.control.operate import STATE, ask, members
from tests.engines.sglang.fleet import FAILED, eventually, shared_fleet
from tests.processes import free_port

TOKENS = 7 * 16
NBYTES = TOKENS * 2 * 2 * 4 * 32 * 2  # K and V of two layers with four heads of 32 numbers of two bytes


DIRECTORY = f"127.0.0.1:{free_port()}"
fleet = shared_fleet(
    1, 1, "mha", f'{{"path": "direct", "transport": "local", "metrics_port": 0, "directory": "{DIRECTORY}"}}'
)


def until(engine, **wanted: float) -> None:
    """Until the metrics of that name say so. They are told once a second."""
    ask = lambda: {name: engine.ranks[0].call("told", name) for name in wanted}  # noqa: E731
    eventually(ask, lambda said: said == wanted)


def test_a_request_is_seen_while_it_lasts_and_counted_after_it(fleet):
    fleet.open(1, TOKENS)
    for engine in fleet.engines:
        until(engine, rooms=1, rooms_held=0, unfenced_peers=0)
        eventually(lambda engine=engine: engine.ranks[0].call("told", "oldest_room_seconds") > 1)
    fleet.compute(1, 0, TOKENS, True)
    fleet.finish(1, TOKENS)
    until(fleet.prefill, rooms=0, rooms_held=0, oldest_room_seconds=0, bytes_total=NBYTES, failed_rooms_total=0)
    until(fleet.decode, rooms=0, rooms_held=0, oldest_room_seconds=0, bytes_total=0)
    for engine, role in zip(fleet.engines, ("prefill", "decode"), strict=True):
        labels = {"engine": "sglang", "role": role, "rank": "0", "outcome": "success"}
        for name in ("pdstage_rooms_ended_total", "pdstage_room_seconds_count"):
            assert engine.ranks[0].call("exported", name, labels) == 1


def test_nodes_are_found_in_the_directory_that_they_are_given(fleet):
    """Which begins after them."""
    with BootstrapServer(DIRECTORY):
        client = client_of(DIRECTORY)
        listed = eventually(lambda: [one.advert for one in members(client)], lambda found: len(found) == 2)
        assert {(one.engine, one.role) for one in listed} == {("sglang", "decode"), ("sglang", "prefill")}
        said = ask([one.endpoint for one in listed], STATE)
        assert [state.failed for state in said.values()] == [False, False]


def test_memory_that_a_failed_request_holds_is_seen(fleet):
    fleet.prefill.each("hold_writes")
    fleet.open(2, TOKENS)
    fleet.compute(2, 0, 64, False)
    fleet.decode.each("abort", 2)
    for engine in fleet.engines:
        until(engine, rooms=0, rooms_held=1, failed_rooms_total=1)
    fleet.prefill.each("let_go")
    for engine in fleet.engines:
        until(engine, rooms_held=0)
    fleet.ends_at_decode(2, TOKENS)
    assert fleet.prefill.until(2, FAILED) == FAILED
    fleet.prefill.each("failure", 2)
    fleet.forgets_all()
