"""What a rank's node does is among SGLang's own metrics, as they are scraped."""

from __future__ import annotations

from tests.engines.sglang.fleet import eventually, shared_fleet

NBYTES = 7 * 16 * 2 * 2 * 4 * 32 * 2  # K and V of two layers with four heads of 32 numbers of two bytes


fleet = shared_fleet(1, 1, "mha", '{"path": "direct", "transport": "local", "metrics_port": 0}')


def until(engine, **wanted):
    """Until the metrics of that name say so. They are told once a second."""
    ask = lambda: {name: engine.ranks[0].call("told", name) for name in wanted}  # noqa: E731
    eventually(ask, lambda said: said == wanted)


def test_a_request_is_seen_while_it_lasts_and_counted_after_it(fleet):
    fleet.open(1)
    for engine in fleet.engines:
        until(engine, rooms=1, rooms_held=0, unfenced_peers=0)
        eventually(lambda engine=engine: engine.ranks[0].call("told", "oldest_room_seconds") > 1)
    fleet.rest(1)
    until(fleet.prefill, rooms=0, rooms_held=0, oldest_room_seconds=0, bytes_total=NBYTES, failed_rooms_total=0)
    until(fleet.decode, rooms=0, rooms_held=0, oldest_room_seconds=0, bytes_total=0)
    for engine in fleet.engines:
        labels = {"engine": "sglang", "role": engine.mode, "rank": "0", "outcome": "success"}
        for name in ("pdstage_rooms_ended_total", "pdstage_room_seconds_count"):
            assert engine.ranks[0].call("exported", name, labels) == 1


def test_memory_that_a_failed_request_holds_is_seen(fleet):
    fleet.prefill.each("hold_writes")
    fleet.open(2)
    fleet.first_chunk(2)
    fleet.decode.each("abort", 2)
    for engine in fleet.engines:
        until(engine, rooms=0, rooms_held=1, failed_rooms_total=1)
    fleet.prefill.each("let_go")
    for engine in fleet.engines:
        until(engine, rooms_held=0)
    fleet.ends_at_decode(2)
    fleet.fails_at_prefill(2)
