"""What a scrape tells is what the nodes did, in the forms that Prometheus takes."""

from __future__ import annotations

import gc
import json
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from pdstage import State, Topology, UsageError
from pdstage.watch import Timings, catalogue, expose, register
from pdstage.watch.exporter import collector_of
from tests.manager.engine import TOKENS, Event, Rank, drive
from tests.watch.samples import Samples, get, status_of


def test_a_moved_room_is_told_by_both_sides(watched):
    watched.move(1)
    told, nbytes = watched.scrape(), TOKENS * Rank().layers * 2 * 4 * 16
    for role in ("prefill", "decode"):
        assert told("pdstage_rooms_opened_total", role=role, rank="0") == 1
        assert told("pdstage_rooms_ended_total", role=role, outcome="success") == 1
        assert told("pdstage_rooms_ended_total", role=role, outcome="failed") == 0
        assert told("pdstage_room_seconds_count", role=role, outcome="success") == 1
        assert told("pdstage_sessions", role=role) == 1
        assert told("pdstage_node_info", role=role, transport="local", path="staged", tp="0/1") == 1
        assert told("pdstage_node_draining", role=role) == 0
    assert 0 < told("pdstage_directory_lease_seconds") <= 15
    assert told("pdstage_directory_publications_total", outcome="success") >= 1
    assert told("pdstage_directory_lookups_total", outcome="success") == 1
    assert told("pdstage_directory_watch_age_seconds") == 0
    n_chunks = told("pdstage_chunks_written_total", path="staged")
    assert n_chunks >= 1
    assert told("pdstage_chunks_written_total", path="direct") == 0
    assert told("pdstage_tags_received_total") == n_chunks
    assert told("pdstage_leases_total", role="decode", event="granted") == n_chunks
    for stage in ("lease_wait", "gather", "write", "scatter"):
        assert told("pdstage_stage_seconds_count", stage=stage) == n_chunks, stage
    assert told("pdstage_chunk_latency_seconds_count", path="staged") == n_chunks
    assert told("pdstage_stage_bytes_total", stage="scatter") >= nbytes
    assert told("pdstage_written_bytes_total") == told("pdstage_stage_bytes_total", stage="scatter")
    latency = told("pdstage_chunk_latency_seconds_sum", path="staged")
    assert latency >= told("pdstage_stage_seconds_sum", stage="lease_wait") > 0
    assert told("pdstage_room_seconds_sum", role="prefill", outcome="success") >= latency
    watched.p.drain(0.0)
    told = watched.scrape()
    assert told("pdstage_node_draining", role="prefill") == 1
    assert told("pdstage_node_draining", role="decode") == 0
    address = watched.endpoint.address
    assert (status_of(address, "/healthz"), status_of(address, "/livez")) == (503, 200)
    assert "pdstage_directory_lease_seconds" not in told.names, "it publishes nothing any more, as it was asked"


def test_failed_rooms_are_told_by_their_errors_class(watched):
    room = watched.open("doomed")
    room.sender.abort("the engine changed its mind")
    watched.end(room)
    told = watched.scrape()
    for handle, role in ((room.sender, "prefill"), (room.receiver, "decode")):
        assert handle.state is State.FAILED
        assert told("pdstage_room_failures_total", role=role, error=type(handle.error).__name__) == 1
        assert told("pdstage_room_seconds_count", role=role, outcome="aborted") == 1
        assert told("pdstage_rooms_ended_total", role=role, outcome="aborted") == 1
        assert told("pdstage_rooms_ended_total", role=role, outcome="failed") == 0
    assert told("pdstage_room_transfer_seconds_count", role="prefill", outcome="aborted") == 0, "nothing moved"


def test_open_rooms_are_told_by_state_until_they_are_released(watched):
    room = watched.open("slow")
    drive(watched.nodes, lambda: room.states == (State.WAITING_FOR_INPUT, State.WAITING_FOR_INPUT))
    assert watched.scrape()("pdstage_rooms", role="decode", state="waiting_for_input") == 1
    room.sender.chunk(room.pages, (0, 12))
    drive(watched.nodes, lambda: room.receiver.state is State.TRANSFERRING)
    told = watched.scrape()
    for role in ("prefill", "decode"):
        states = {state: told("pdstage_rooms", role=role, state=state) for state in ("transferring", "success")}
        assert states == {"transferring": 1, "success": 0}
    room.sender.chunk(room.pages, (12, TOKENS))
    room.sender.finish()
    watched.end(room)
    told = watched.scrape()
    assert sum(value for (name, _), value in told.of.items() if name == "pdstage_rooms") == 0


def test_lanes_are_told_while_leases_are_held(watched):
    """What a chunk holds of a lane: granted as long as its writer waits for data, nothing after it was scattered."""
    room, later = watched.open("held"), Event()
    room.sender.chunk(room.pages, TOKENS, ready=later)
    room.sender.finish()
    drive(watched.nodes, lambda: watched.d.stats()["leases_granted"] > 0)
    told = watched.scrape()
    granted = sum(told("pdstage_lane_leased_bytes", lane=lane, state="granted") for lane in "01")
    lag = sum(told("pdstage_lane_watermark_lag_bytes", lane=lane) for lane in "01")
    assert 0 < granted <= lag
    assert granted <= sum(told("pdstage_lane_capacity_bytes", lane=lane) for lane in "01")
    later.done = True
    watched.end(room)
    told = watched.scrape()
    for (name, _), value in told.of.items():
        if name in ("pdstage_lane_leased_bytes", "pdstage_lane_watermark_lag_bytes", "pdstage_lane_quarantined_bytes"):
            assert value == 0, name
    assert told("pdstage_send_buffers", state="free") == 4


def test_leases_beyond_the_watermark_are_told_apart(make_watched):
    """Granted, landed and quarantined bytes are never more than a lane has; what waits for the watermark is ahead."""
    watched = make_watched(staging_nbytes=32 << 10)
    watched.d.core.leases.max_advances = 0
    rooms, ahead = [watched.begin(number, 16) for number in range(6)], []

    def released() -> bool:
        for lane in watched.d.status().lanes:
            assert lane.granted_nbytes + lane.landed_nbytes + lane.quarantined_nbytes <= lane.capacity_nbytes
            ahead.append(lane.ahead_nbytes)
        return all(room.released for room in rooms)

    drive(watched.nodes, released)
    assert max(ahead) > 0
    assert all(room.receiver.state is State.SUCCESS for room in rooms)


def test_everything_in_the_catalogue_is_exported_and_nothing_else(watched):
    watched.move(1)
    told = watched.scrape()
    suffixes = {"histogram": ("_bucket", "_count", "_sum")}
    wanted = {m.name + end for m in catalogue.METRICS for end in suffixes.get(m.kind, ("",))}
    assert told.names == wanted
    for metric in catalogue.METRICS:
        family = told.families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert family.documentation == metric.text
        assert family.type == {"info": "gauge"}.get(metric.kind, metric.kind)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {*catalogue.NODE_LABELS, *metric.labels}, sample


def test_every_counter_is_exported():
    """A counter that the cores get later must be exported, or this says so."""
    read: set[str] = set()

    class Spy(dict):
        def __getitem__(self, field):
            read.add(field)
            return 0

        def get(self, field):
            return self[field]

    class Asked:
        counters, control, directory, sessions_over, rooms, lanes, info = Spy(), Spy(), Spy(), {}, {}, (), ()

        def __getattr__(self, name):
            return 0

    for metric in catalogue.METRICS:
        list(metric.read(Asked(), None))
    from pdstage.control.zmq import ControlCounters  # noqa: PLC0415
    from pdstage.manager.lookup import DirectoryCounters  # noqa: PLC0415
    from pdstage.metrics import Counters  # noqa: PLC0415

    fields = {name for one in (Counters, ControlCounters, DirectoryCounters) for name in one.__dataclass_fields__}
    assert not fields - read


# Registering.


def test_several_nodes_of_one_registry_are_told_apart(site):
    """By rank and labels, beside an engine's own metrics; two alike are refused until one of them is gone."""
    registry, timings = CollectorRegistry(), Timings()
    Counter("engine_tokens", "Tokens.", registry=registry).inc(3)
    rank = Rank(tp=2, rank=1)
    rank.topology = Topology(tp_size=2, tp_rank=1, dp_size=3, dp_rank=2)
    register(site.decode(rank, observers=[timings]), registry, labels={"engine": "a"})
    register(site.prefill(Rank(), observers=[timings]), registry, labels={"engine": "a"})
    first, second = site.decode(Rank()), site.decode(Rank())
    register(first, registry, labels={"engine": "b"})
    text = generate_latest(registry).decode()
    told = Samples(text)
    assert told("pdstage_node_failed", role="decode", rank="5", engine="a") == 0
    assert told("pdstage_node_failed", role="decode", rank="0", engine="b") == 0
    assert len([1 for name, _ in told.of if name == "pdstage_node_failed"]) == 3
    assert told("pdstage_stage_seconds_count", rank="5", stage="scatter") == 0
    with pytest.raises(AssertionError):
        told("pdstage_stage_seconds_count", engine="b", stage="scatter")  # that node has no timings
    assert told("pdstage_rooms_opened_total", engine="b") == 0
    assert "engine_tokens_total 3.0" in text and text.count("# TYPE pdstage_rooms gauge") == 1
    with pytest.raises(UsageError, match="role='decode', rank='0', engine='b'"):
        register(second, registry, labels={"engine": "b"})
    first.close()
    assert b'engine="b"' not in generate_latest(registry)
    with register(second, registry, labels={"engine": "b"}):
        assert b'engine="b"' in generate_latest(registry)
    assert b'engine="b"' not in generate_latest(registry), "closed registrations are told no more"


@pytest.mark.parametrize("name", ["role", "le", "lane", "9lives", "__own", "a-b", ""])
def test_labels_that_cannot_be_are_refused(site, name):
    with pytest.raises(UsageError, match="label"):
        register(site.decode(Rank()), CollectorRegistry(), labels={name: "x"})


def test_the_exporter_keeps_no_node():
    class Node:
        closed = False

    node = Node()
    registration = collector_of(CollectorRegistry()).add(node, {"role": "decode", "rank": "0"})
    del node
    gc.collect()
    assert registration.node is None


# The endpoint.


def test_rooms_names_the_oldest_first(watched):
    ids = ["first", 7, b"\xff\x00"]
    opened = [watched.open(room, 8) for room in ids]
    told = json.loads(get(watched.endpoint.address, "/rooms?n=2"))
    assert [[room["room"] for room in one["rooms"]] for one in told] == [["first", "7"]] * 2
    assert told[0]["labels"] == {"role": "prefill", "rank": "0"}
    ages = [room["age_s"] for room in told[1]["rooms"]]
    assert ages == sorted(ages, reverse=True)
    everything = json.loads(get(watched.endpoint.address, "/rooms?n=nonsense"))
    assert [room["room"] for room in everything[1]["rooms"]] == ["first", "7", "ff00"]
    for room in opened:
        room.sender.abort()
    watched.end(*opened)


def test_what_else_is_answered(watched):
    """Prometheus's newer format where it is asked for; a client that says nothing delays nobody."""
    address = watched.endpoint.address
    asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with socket.create_connection(address.split(":")) as silent:
        silent.sendall(b"GET /met")
        with urllib.request.urlopen(asked, timeout=240) as answer:
            names = {family.name for family in parse_openmetrics(answer.read().decode())}
    assert {"pdstage_chunk_latency_seconds", "pdstage_node"} <= names
    assert status_of(address, "/") == status_of(address, "/rooms/../../etc/passwd") == 404
    assert get(address, "/healthz") == get(address, "/livez") == "ok\n"
    watched.d.driver.fail(RuntimeError("a bug"))
    assert status_of(address, "/healthz") == status_of(address, "/livez") == 503
    # Names of rooms are told on loopback only unless asked.
    for host, rooms, status in (("0.0.0.0", None, 403), ("*", None, 403), ("0.0.0.0", True, 200)):
        with expose(port=0, host=host, registry=CollectorRegistry(), rooms=rooms) as wide:
            assert status_of(f"127.0.0.1:{wide.port}", "/rooms") == status
    for port in (watched.endpoint.port, 70000):
        with pytest.raises(UsageError, match=str(port)):
            expose(port=port, registry=CollectorRegistry())


def test_scrapes_beside_working_nodes_always_parse_and_never_fall(make_watched):
    """Scrapes from several threads while rooms move: no error, no counter that falls, all rooms Success."""
    watched = make_watched(progress="thread")
    over = threading.Event()

    def scrape() -> None:
        last = 0.0
        while not over.is_set():
            now = watched.scrape()("pdstage_rooms_ended_total", role="decode", outcome="success")
            assert now >= last
            last = now

    with ThreadPoolExecutor() as threads:
        scrapes = [threads.submit(scrape) for _ in range(3)]
        try:
            for room in range(60):
                moved = watched.begin(room, 8)
                moved.receiver.wait_released(60)
                moved.sender.wait_released(60)
                watched.src.free(moved.pages)
                watched.dst.free(moved.into)
        finally:
            over.set()
        for one in scrapes:
            one.result()
    assert watched.scrape()("pdstage_rooms_ended_total", role="decode", outcome="success") == 60
